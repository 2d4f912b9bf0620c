"""Delayed Nesterov momentum: arXiv 2401.09135, algorithm 3, made for pseudo-gradients that are stale."""

from typing import Literal, Mapping

import torch
from pydantic import Field, model_validator
from torch import Tensor

from diloco.config import OuterOptimizerSection


class Config(OuterOptimizerSection):
    """``outer.optimizer.type: delayed_nesterov``"""

    type: Literal["delayed_nesterov"] = "delayed_nesterov"
    momentum: float = Field(0.9, ge=0, lt=1, description="beta: share of the last direction that is kept")
    buffer_rounds: int = Field(4, ge=1, description="N: rounds from one step of the momentum to the next")
    activation: float = Field(0.0, ge=0, description="c: share of the momentum that rounds in between take; up to 1/N")

    @model_validator(mode="after")
    def _all_of_the_momentum_at_most(self) -> "Config":
        if self.activation * self.buffer_rounds > 1 + 1e-9:  # 1/N itself may be rounded up
            raise ValueError(
                f"outer.optimizer.activation={self.activation} in each of buffer_rounds={self.buffer_rounds} is more than "
                f"all of the momentum; give at most {1 / self.buffer_rounds:g}"
            )
        return self


class DelayedNesterov:
    """Each round takes ``g / N``; the momentum moves in every N-th alone, by the mean of the N pseudo-gradients until then.

    ``buffer += g``. In every N-th round ``m = beta m + buffer / N``, ``buffer = 0`` and
    ``anchor -= lr ((1 - c N + c) beta m + g / N)``; in the others ``anchor -= lr (c beta m + g / N)``. So N rounds together
    move the anchor as far as one round of Nesterov at this ``lr`` (exactly so with N = 1).
    """

    state_names = ("momentum", "buffer")

    def __init__(self, config: Config) -> None:
        self.lr, self.momentum = config.lr, config.momentum
        self.rounds, self.activation = config.buffer_rounds, config.activation

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
        momentum, buffer, share = out_state["momentum"], out_state["buffer"], self.activation
        torch.add(state["buffer"], pseudo_gradient, out=buffer)
        if (height + 1) % self.rounds:
            momentum.copy_(state["momentum"])
        else:
            torch.mul(state["momentum"], self.momentum, out=momentum)
            momentum.add_(buffer * (1 / self.rounds))
            buffer.zero_()
            share = 1 - self.activation * self.rounds + self.activation
        direction = pseudo_gradient * (1 / self.rounds)
        if share:
            direction.add_(momentum * (share * self.momentum))
        torch.sub(anchor, direction.mul_(lr), out=out_anchor)


def build(config: Config) -> DelayedNesterov:
    """The optimizer that ``config`` describes."""
    return DelayedNesterov(config)
