"""Plain SGD: for comparisons in which one outer step must equal one data-parallel step."""

from typing import Iterable, Literal

import torch
from pydantic import Field
from torch import nn

from islands.config import OptimizerSection


class Config(OptimizerSection):
    """``optimizer.type: sgd``"""

    type: Literal["sgd"] = "sgd"
    momentum: float = Field(0.0, ge=0, lt=1)


def build(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """Without weight decay."""
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum)
