"""One inner step: a loss normalized by tokens, clipping, a finite check, the optimizer."""

import math
from dataclasses import dataclass
from typing import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from islands.forward_backward import IGNORED
from islands.gradients import clip_gradient, gradient_norm
from islands.parallelize import ParallelModel


@dataclass(frozen=True)
class StepResult:
    """Of the whole global batch of the island, equal on all its ranks.

    Attributes:
        loss: mean cross-entropy a token, in nats.
        grad_norm: L2 norm of the whole gradient before clipping.
        tokens: tokens that counted.
        applied: False when the gradient was not finite and the optimizer left everything as it was.
    """

    loss: float
    grad_norm: float
    tokens: int
    applied: bool


class TrainStep:
    """Runs one optimizer step on a batch. It knows no strategy.

    Args:
        data_group: the ranks that split the batch, whose gradients the model averages.
        clip_norm: largest gradient norm; 0 to leave gradients as they are.
        enter_phase: told the name of each part of the step as it begins.

    Attributes:
        optimizer: as given.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        data_group: dist.ProcessGroup,
        clip_norm: float,
        enter_phase: Callable[[str], None],
    ) -> None:
        self._model, self.optimizer = model, optimizer
        self._group, self._clip_norm, self._enter_phase = data_group, clip_norm, enter_phase

    def __call__(self, inputs: Tensor, targets: Tensor, lr: float) -> StepResult:
        """Train on this rank's share of the batch: inputs and targets (share, seq)."""
        self._enter_phase("forward_backward")
        tokens = int(self._sum((targets != IGNORED).sum()))
        scale = self._group.size() / tokens  # gradients are averaged over the group; the loss is per token of all
        loss = self._model.forward_backward.train(inputs, targets, scale)
        self._enter_phase("clip")
        grad_norm = self._clip()
        self._enter_phase("optimizer")
        applied = math.isfinite(grad_norm)
        if applied:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad()
        return StepResult(float(self._sum(loss)) / tokens, grad_norm, tokens, applied)

    def _sum(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self._group)
        return value

    def _clip(self) -> float:
        model = self._model
        parameters = [parameter for part in model.parts for parameter in part.parameters()]
        norm = gradient_norm(parameters, model.pipeline_group, model.counted_elsewhere)
        if self._clip_norm and torch.isfinite(norm):
            clip_gradient(parameters, norm, self._clip_norm)
        return float(norm)
