"""A rank's shards of the anchor and of the outer optimizer's state, where the parameters are or in the CPU's memory. torch only."""

from typing import Iterator

import torch
from torch import Tensor

from diloco.outer_lr import OuterLr
from diloco.outer_optimizers.base import OuterOptimizer
from diloco.pseudo_gradient import BLOCK

_DEVICE_BLOCK = 1 << 24  # elements: few launches of kernels, and little memory for what is made on the way


class ShardState:
    """Of one fragment. Every tensor is flat, of ``numel`` elements.

    Args:
        offload: keep it in memory of the CPU, pinned, from which an accelerator gets a block at a time.

    Attributes:
        device: of the parameters.
        height: rounds that have counted.
        step: the inner step at which the last of them was launched.
        tokens: that they have counted, of all islands.
    """

    def __init__(
        self, numel: int, optimizer: OuterOptimizer, outer_lr: OuterLr, dtype: torch.dtype, device: torch.device, offload: bool
    ) -> None:
        self.numel, self._optimizer, self._outer_lr, self.device = numel, optimizer, outer_lr, device
        self._offloaded = offload and device.type != "cpu"
        memory = dict(dtype=dtype, device="cpu" if self._offloaded else device, pin_memory=self._offloaded)
        self.anchor = torch.zeros(numel, **memory)
        self.optimizer_state = {name: torch.zeros(numel, **memory) for name in optimizer.state_names}
        self.height = self.step = self.tokens = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What a checkpoint holds: names and flat tensors."""
        yield "anchor", self.anchor
        yield from ((f"optimizer.{name}", tensor) for name, tensor in self.optimizer_state.items())

    def anchor_at(self, piece: slice) -> Tensor:
        """Some elements of the anchor, on the parameters' device."""
        return self.anchor[piece].to(self.device, non_blocking=True)

    def advance(self, mean: Tensor, step: int, tokens: int) -> None:
        """Step the anchor, in place, by the mean pseudo-gradient of a round that was launched at inner step ``step``, with ``tokens``."""
        lr = self._outer_lr.at(self.height, self.step, self.tokens)
        for piece in self._blocks():
            anchor = self.anchor_at(piece)
            state = {name: tensor[piece].to(self.device, non_blocking=True) for name, tensor in self.optimizer_state.items()}
            self._optimizer.step(anchor, mean[piece], state, self.height, lr, anchor, state)
            if self._offloaded:
                self.anchor[piece].copy_(anchor, non_blocking=True)
                for name, tensor in state.items():
                    self.optimizer_state[name][piece].copy_(tensor, non_blocking=True)
        if self._offloaded:
            torch.accelerator.synchronize(self.device)
        self.height, self.step, self.tokens = self.height + 1, step, self.tokens + tokens

    def checksum(self) -> Tensor:
        """Of anchor and optimizer state, to the last bit: an int64 scalar on the parameters' device, without a copy of them anywhere else.

        A sum of all words, each times an odd number that depends on its place. It finds copies that have drifted apart, not malice.
        """
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        for number, (_, tensor) in enumerate(self.tensors()):
            for piece in self._blocks():
                words = tensor[piece].to(self.device).view(torch.int64 if tensor.dtype == torch.float64 else torch.int32)
                places = torch.arange(piece.start, piece.stop, device=self.device)
                total += (words * (places * 2 + 1)).sum() * (2 * number + 1)
        return total

    def _blocks(self) -> Iterator[slice]:
        size = BLOCK if self.device.type == "cpu" else _DEVICE_BLOCK
        return (slice(start, min(start + size, self.numel)) for start in range(0, self.numel, size))
