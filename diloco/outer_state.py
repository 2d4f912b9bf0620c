"""Anchor and outer-optimizer state of each fragment, twice: what is agreed, and what a round is about to agree on.

All of it lies in one block of shared memory that the trainer owns. During a round only the exchange writes, and only
beside the agreed copy; a commit is the swap of one integer. So no one ever sees half a round, and when the exchange
process dies, what was agreed is still there. torch only.
"""

import hashlib
from typing import Sequence

import torch
from torch import Tensor

from diloco.outer_optimizers.base import OuterOptimizer
from diloco.pseudo_gradient import BLOCK
from diloco.shared_memory import SharedMemory

_ALIGN = 64
_HASH_BYTES = 32


class FragmentState:
    """One fragment's share of the outer state. Every tensor is flat, of ``numel`` elements.

    Attributes:
        local: the island's own parameters, written by the trainer at launch; the exchange turns them into the
            pseudo-gradient in place.
    """

    def __init__(self, index: int, numel: int, dtype: torch.dtype, optimizer: OuterOptimizer, memory: "_Arena") -> None:
        self.index, self.numel, self.dtype, self._optimizer = index, numel, dtype, optimizer
        self._staged = False  # known to the process that stages
        self._active = memory.take(1, torch.int64)
        self._heights = memory.take(2, torch.int64)
        self._digests = [memory.take(_HASH_BYTES, torch.uint8) for _ in range(2)]
        self._lineages = [memory.take(_HASH_BYTES, torch.uint8) for _ in range(2)]
        self.local = memory.take(numel, dtype)
        self._anchors = [memory.take(numel, dtype) for _ in range(2)]
        self._states = [{name: memory.take(numel, dtype) for name in optimizer.state_names} for _ in range(2)]

    @property
    def _now(self) -> int:
        return int(self._active)

    @property
    def anchor(self) -> Tensor:
        """The parameters that all islands last agreed on."""
        return self._anchors[self._now]

    @property
    def previous_anchor(self) -> Tensor:
        """The anchor before the last commit; valid until the next round stages its result."""
        return self._anchors[1 - self._now]

    @property
    def optimizer_state(self) -> dict[str, Tensor]:
        """The agreed state of the outer optimizer."""
        return self._states[self._now]

    @property
    def height(self) -> int:
        """Rounds committed so far: the length of the lineage."""
        return int(self._heights[self._now])

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the agreed anchor and outer-optimizer state."""
        return bytes(self._digests[self._now].tolist()).hex()

    @property
    def lineage(self) -> str:
        """Hash (hex) over the chain of committed rounds that led here."""
        return bytes(self._lineages[self._now].tolist()).hex()

    def initialize(self) -> None:
        """Make what was written into :attr:`anchor` the start of the lineage: height 0, state zero."""
        for tensor in self.optimizer_state.values():
            tensor.zero_()
        self._seal(self._now, height=0, parent=b"")

    def stage(self, mean: Tensor) -> str:
        """Apply the outer optimizer to the mean pseudo-gradient, beside the agreed state.

        Returns:
            The SHA-256 (hex) of the staged anchor and state, which members compare before they commit.
        """
        now, then = self._now, 1 - self._now
        for start in range(0, self.numel, BLOCK):
            piece = slice(start, min(start + BLOCK, self.numel))
            self._optimizer.step(
                self._anchors[now][piece],
                mean[piece],
                {name: tensor[piece] for name, tensor in self._states[now].items()},
                self.height,
                self._anchors[then][piece],
                {name: tensor[piece] for name, tensor in self._states[then].items()},
            )
        return self._seal(then, height=self.height + 1, parent=bytes.fromhex(self.lineage))

    def staged_tensors(self) -> list[Tensor]:
        """Where a state received from another member is written: anchor first, then the optimizer's state in order."""
        return self._tensors(1 - self._now)

    def agreed_tensors(self) -> list[Tensor]:
        """What is sent to a member that needs the state, in the order of :meth:`staged_tensors`."""
        return self._tensors(self._now)

    def seal_received(self, height: int, lineage: str) -> str:
        """Finish a state written into :meth:`staged_tensors`; returns its SHA-256 (hex) for the caller to check."""
        digest = self._seal(1 - self._now, height, parent=b"")
        self._lineages[1 - self._now].copy_(_to_tensor(bytes.fromhex(lineage)))
        return digest

    def commit(self) -> None:
        """Swap: the staged state becomes the agreed one.

        Raises:
            RuntimeError: nothing was staged since the last commit; a swap would go back to what was agreed before.
        """
        if not self._staged:
            raise RuntimeError(f"fragment {self.index}: nothing was staged at height {self.height}, so nothing can be committed")
        self._active.fill_(1 - self._now)
        self._staged = False

    def _tensors(self, copy: int) -> list[Tensor]:
        return [self._anchors[copy], *self._states[copy].values()]

    def _seal(self, copy: int, height: int, parent: bytes) -> str:
        digest = hashlib.sha256()
        for tensor in self._tensors(copy):
            digest.update(memoryview(tensor.view(torch.uint8).numpy()))
        self._digests[copy].copy_(_to_tensor(digest.digest()))
        self._lineages[copy].copy_(_to_tensor(hashlib.sha256(parent + digest.digest()).digest()))
        self._heights[copy] = height
        self._staged = copy != self._now
        return digest.hexdigest()


class OuterState:
    """The outer state of a whole island, fragment by fragment.

    Pickled while a process is spawned, it arrives there as a view of the same memory.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        optimizer: OuterOptimizer,
        dtype: torch.dtype = torch.float32,
        memory: SharedMemory | None = None,
    ) -> None:
        self._arguments = (tuple(sizes), optimizer, dtype)
        if memory is None:
            measure = _Arena(None)
            for index, numel in enumerate(sizes):
                FragmentState(index, numel, dtype, optimizer, measure)
            memory = SharedMemory(measure.used)
        self._memory, arena = memory, _Arena(memory)
        self.fragments = [FragmentState(index, numel, dtype, optimizer, arena) for index, numel in enumerate(sizes)]

    def __reduce__(self) -> tuple:
        return OuterState, (*self._arguments, self._memory)


class _Arena:
    """Hands out aligned tensors from a block of memory, or only measures when there is none yet."""

    def __init__(self, memory: SharedMemory | None) -> None:
        self.used, self._memory = 0, memory

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next ``numel`` elements."""
        start, self.used = self.used, self.used + -(-numel * dtype.itemsize // _ALIGN) * _ALIGN
        if self._memory is None:
            return torch.empty(0, dtype=dtype)
        return self._memory.bytes[start : start + numel * dtype.itemsize].view(dtype)


def _to_tensor(raw: bytes) -> Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)
