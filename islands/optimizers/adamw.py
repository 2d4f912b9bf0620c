"""AdamW. Weight decay on matrices only: norm weights keep their scale."""

from typing import Iterable, Literal

import torch
from pydantic import Field
from torch import nn

from islands.config import OptimizerSection


class Config(OptimizerSection):
    """``optimizer.type: adamw``"""

    type: Literal["adamw"] = "adamw"
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)


def build(config: Config, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """Two groups: tensors of two and more dims are decayed, the others are not.

    On a CPU in one pass over memory, 6 to 9 times as fast as an operation after another on distributed tensors, which torch would take
    there; on a GPU torch's own choice is good.
    """
    parameters = list(parameters)
    fused = True if all(parameter.device.type == "cpu" for parameter in parameters) else None
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)
