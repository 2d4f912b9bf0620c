"""The learning rate of each inner step: a pure function, so a restart needs nothing but the step."""

import math

from islands.config import OptimizerSection


def learning_rate(config: OptimizerSection, step: int, steps: int) -> float:
    """The rate of inner step ``step`` (from 0) of ``steps``: a linear warmup, then the schedule down to its last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    floor = config.lr * config.final_lr_ratio
    return floor + (config.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
