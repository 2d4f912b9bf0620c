"""Inner optimizers, one file each: ``Config`` (an :class:`~islands.config.OptimizerSection`) and
``build(config, parameters) -> torch.optim.Optimizer``. The learning rate is set at every step from ``learning_rate.py``."""
