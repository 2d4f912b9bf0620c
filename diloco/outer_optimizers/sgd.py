"""SGD, by default with Nesterov momentum: the outer optimizer of DiLoCo (arXiv 2311.08105, section 3.3)."""

from typing import Literal, Mapping

import torch
from pydantic import Field
from torch import Tensor

from diloco.config import OuterOptimizerSection


class Config(OuterOptimizerSection):
    """``outer.optimizer.type: sgd``"""

    type: Literal["sgd"] = "sgd"
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the last direction that is kept")
    nesterov: bool = Field(True, description="look ahead along the momentum")


class Sgd:
    """``m = momentum m + g``, then ``anchor -= lr (g + momentum m)`` (Nesterov) or ``lr m``, as torch.optim.SGD."""

    def __init__(self, config: Config) -> None:
        self.lr, self.momentum, self.nesterov = config.lr, config.momentum, config.nesterov
        self.state_names = ("momentum",) if config.momentum else ()

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
        direction = pseudo_gradient
        if self.momentum:
            momentum = out_state["momentum"]
            torch.mul(state["momentum"], self.momentum, out=momentum)
            momentum.add_(pseudo_gradient)
            direction = (momentum * self.momentum).add_(pseudo_gradient) if self.nesterov else momentum
        torch.sub(anchor, direction * lr, out=out_anchor)


def build(config: Config) -> Sgd:
    """The optimizer that ``config`` describes."""
    return Sgd(config)
