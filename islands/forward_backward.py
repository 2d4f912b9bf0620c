"""How a batch goes through the model of a rank, and comes back as gradients."""

import contextlib
from typing import Callable, ContextManager, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from islands.strategies.base import DataParallel

#: Targets of this value don't count: padding.
IGNORED = -100


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats of logits (B, T, V), which may be cut along V, against targets (B, T)."""
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss


class ForwardBackward(Protocol):
    """Runs micro-batches of this rank's share of the batch: inputs and targets (share, seq)."""

    def train(self, inputs: Tensor, targets: Tensor, scale: float) -> Tensor:
        """Add the gradient of ``scale`` times the summed loss, averaged over the data ranks.

        Returns:
            The summed loss of this data rank, not scaled; a scalar, known to all of its stages.
        """

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The summed loss without gradients; call :meth:`after_evaluation` after the last."""

    def after_evaluation(self) -> None:
        """Leave the parameters as training expects them."""

    def measurements(self) -> dict[str, float]:
        """Figures of the last call of :meth:`train`, for its row in the metrics; called on all ranks alike."""


class WholeModel:
    """All layers on this rank.

    Args:
        micro_batch_size: sequences in one forward pass.
        loss_context: entered around loss and backward; tensor parallelism cuts the loss by vocabulary in it.
    """

    def __init__(
        self,
        model: DataParallel,
        micro_batch_size: int,
        loss_context: Callable[[], ContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._model, self._micro_batch_size, self._loss_context = model, micro_batch_size, loss_context

    def train(self, inputs: Tensor, targets: Tensor, scale: float) -> Tensor:
        """See :class:`ForwardBackward`."""
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        batches = list(zip(inputs.split(self._micro_batch_size), targets.split(self._micro_batch_size), strict=True))
        for index, (x, y) in enumerate(batches):
            with self._model.micro_batch(is_last=index == len(batches) - 1), self._loss_context():
                loss = cross_entropy_sum(self._model.module(x), y)
                (loss * scale).backward()
            total += loss.detach()
        return total

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See :class:`ForwardBackward`."""
        total = torch.zeros((), dtype=torch.float64, device=inputs.device)
        with torch.no_grad(), self._model.evaluating(), self._loss_context():
            for x, y in zip(inputs.split(self._micro_batch_size), targets.split(self._micro_batch_size), strict=True):
                total += cross_entropy_sum(self._model.module(x), y)
        return total

    def after_evaluation(self) -> None:
        """See :class:`ForwardBackward`."""
        self._model.after_evaluation()

    def measurements(self) -> dict[str, float]:
        """See :class:`ForwardBackward`; there are none."""
        return {}
