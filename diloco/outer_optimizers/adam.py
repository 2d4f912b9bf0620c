"""Adam (arXiv 1412.6980) as the outer optimizer, as in FedOpt (arXiv 2003.00295)."""

import math
from typing import Literal, Mapping

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from diloco.config import OuterOptimizerSection


class Config(OuterOptimizerSection):
    """``outer.optimizer.type: adam``"""

    type: Literal["adam"] = "adam"
    lr: float = Field(0.3, gt=0, description="outer learning rate")
    beta1: float = Field(0.9, ge=0, lt=1, description="share of the mean of pseudo-gradients that is kept")
    beta2: float = Field(0.95, ge=0, lt=1, description="share of the mean of their squares that is kept")
    eps: float = Field(0.1, gt=0, description="added to the root of that mean; DiLoCo found small ones unstable")


class Adam:
    """``m = b1 m + (1 - b1) g``, ``v = b2 v + (1 - b2) g^2``, each divided by what it has seen, as torch.optim.Adam; then
    ``anchor -= lr m / (sqrt(v) + eps)``.
    """

    state_names = ("mean", "square")

    def __init__(self, config: Config) -> None:
        self.lr, self.beta1, self.beta2, self.eps = config.lr, config.beta1, config.beta2, config.eps

    def step(
        self,
        anchor: Tensor,
        pseudo_gradient: Tensor,
        state: Mapping[str, Tensor],
        height: int,
        lr: float,
        out_anchor: Tensor,
        out_state: Mapping[str, Tensor],
    ) -> None:
        """See :class:`diloco.outer_optimizers.base.OuterOptimizer`."""
        mean, square = out_state["mean"], out_state["square"]
        torch.mul(state["mean"], self.beta1, out=mean)
        mean.add_(pseudo_gradient * (1 - self.beta1))
        torch.mul(state["square"], self.beta2, out=square)
        square.add_((pseudo_gradient * pseudo_gradient).mul_(1 - self.beta2))
        seen_mean, seen_square = 1 - power(self.beta1, height + 1), 1 - power(self.beta2, height + 1)
        # Correctly rounded, which torch's own is not on every CPU.
        root = torch.from_numpy(np.sqrt(square.numpy())) if square.device.type == "cpu" else square.sqrt()
        divisor = root.mul_(1 / math.sqrt(seen_square)).add_(self.eps)
        torch.sub(anchor, (mean * (lr / seen_mean)).div_(divisor), out=out_anchor)


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` by multiplying alone: the last bit of a machine's own power is its own affair."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def build(config: Config) -> Adam:
    """The optimizer that ``config`` describes."""
    return Adam(config)
