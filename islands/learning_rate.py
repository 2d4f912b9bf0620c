"""The learning rate of each inner step: a pure function, so a restart needs nothing but the step."""

import math

from islands.config import OptimizerSection


def peak_learning_rate(config: OptimizerSection, batch_size: int) -> float:
    """``lr``, grown with the batch: in proportion (arXiv 1706.02677), or with its square root (arXiv 1404.5997)."""
    if config.batch_scaling == "none":
        return config.lr
    ratio = batch_size / config.reference_batch_size
    return config.lr * (ratio if config.batch_scaling == "linear" else math.sqrt(ratio))


def learning_rate(config: OptimizerSection, step: int, steps: int, batch_size: int) -> float:
    """The rate of inner step ``step`` (from 0) of ``steps``: a linear warmup, then the schedule down to its last step."""
    peak = peak_learning_rate(config, batch_size)
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return peak
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    floor = peak * config.final_lr_ratio
    return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
