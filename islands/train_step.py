"""One inner step: micro-batches, a loss normalized by tokens, clipping, a finite check, the optimizer."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

#: Targets of this value don't count: padding.
IGNORED = -100


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
        micro_batch_size: sequences in one forward pass; 0 for all at once.
        clip_norm: largest gradient norm; 0 to leave gradients as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_group: dist.ProcessGroup,
        micro_batch_size: int,
        clip_norm: float,
    ) -> None:
        self._model, self._optimizer, self._group = model, optimizer, data_group
        self._micro_batch_size, self._clip_norm = micro_batch_size, clip_norm

    def __call__(self, inputs: Tensor, targets: Tensor, lr: float) -> StepResult:
        """Train on this rank's share of the batch: inputs and targets (share, seq)."""
        tokens = int(self._sum((targets != IGNORED).sum()))
        scale = self._group.size() / tokens  # gradients are averaged over the group; the loss is per token of all
        loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
        size = self._micro_batch_size or len(inputs)
        for x, y in zip(inputs.split(size), targets.split(size), strict=True):
            micro_loss = cross_entropy_sum(self._model(x), y)
            (micro_loss * scale).backward()
            loss += micro_loss.detach()
        grad_norm = self._clip()
        applied = math.isfinite(grad_norm)
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad()
        return StepResult(float(self._sum(loss)) / tokens, grad_norm, tokens, applied)

    def _sum(self, value: Tensor) -> Tensor:
        dist.all_reduce(value, group=self._group)
        return value

    def _clip(self) -> float:
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self._clip_norm and torch.isfinite(norm):
            torch.nn.utils.clip_grads_with_norm_(self._model.parameters(), self._clip_norm, norm)
        return float(norm)


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats of logits (B, T, V) against targets (B, T)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
