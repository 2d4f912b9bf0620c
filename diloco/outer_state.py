"""Anchor and outer-optimizer state of each fragment, twice: what is agreed, and what a round is about to agree on.

All of it lies in one block of shared memory that the trainer owns. During a round only the exchange writes, and only
beside the agreed copy; a commit is the swap of one integer. So no one ever sees half a round, and when the exchange
process dies, what was agreed is still there. torch only.
"""

import hashlib
import struct
from dataclasses import dataclass
from statistics import median
from typing import Sequence

import torch
from torch import Tensor

from diloco.outer_optimizers.base import OuterOptimizer
from diloco.pseudo_gradient import BLOCK
from diloco.shared_memory import SharedMemory

_ALIGN = 64
_HASH_BYTES = 32
#: What ``OuterState.called`` says of a fragment: nobody waits; others wait in its next round; they went on without this
#: island, or have waited as long as they would for one that is gone.
NOT_CALLED, CALLED, LATE = range(3)

_NEW_SHARE = 0.25  # of the last round's norm in what counts as typical


@dataclass(frozen=True)
class Counted:
    """What a committed round counts of one member."""

    slot: int
    tokens: int
    position: int
    step: int
    norm: float


@dataclass(frozen=True)
class Ledger:
    """What the committed rounds of a fragment have counted; agreed on like the anchor.

    Attributes:
        positions: sequences of each slot, up to which its work counted.
        tokens: of all members and rounds.
        step: the furthest inner step of a member.
        typical_norm: of a member's pseudo-gradient, averaged over the last rounds; 0 before the first.
    """

    positions: tuple[int, ...]
    tokens: int = 0
    step: int = 0
    typical_norm: float = 0.0

    def after(self, counted: Sequence[Counted]) -> "Ledger":
        """The ledger after one more round. Plain arithmetic in a fixed order: the same bits on every machine."""
        if not counted:
            return self
        positions = list(self.positions)
        for one in counted:
            positions[one.slot] = one.position
        norm = median(one.norm for one in counted)
        typical = norm if self.typical_norm == 0 else self.typical_norm + _NEW_SHARE * (norm - self.typical_norm)
        tokens = self.tokens + sum(one.tokens for one in counted)
        return Ledger(tuple(positions), tokens, max(self.step, *[one.step for one in counted]), typical)

    def to_bytes(self) -> bytes:
        """For hashing, and for sending."""
        return struct.pack(f"<{len(self.positions)}qqqd", *self.positions, self.tokens, self.step, self.typical_norm)

    @staticmethod
    def from_bytes(raw: bytes) -> "Ledger":
        """The inverse of :meth:`to_bytes`. Raises struct.error where the size is wrong."""
        *positions, tokens, step, norm = struct.unpack(f"<{len(raw) // 8 - 3}qqqd", raw)
        return Ledger(tuple(positions), tokens, step, norm)


@dataclass(frozen=True)
class Staged:
    """A state that is written and not yet agreed."""

    height: int
    digest: str
    lineage: str
    ledger: Ledger


class FragmentState:
    """One fragment's share of the outer state. Every tensor is flat, of ``numel`` elements.

    Attributes:
        local: the island's own parameters, written by the trainer at launch; the exchange turns them into the
            pseudo-gradient in place.
    """

    def __init__(
        self, index: int, numel: int, dtype: torch.dtype, optimizer: OuterOptimizer, max_slots: int, memory: "_Arena"
    ) -> None:
        self.index, self.numel, self.dtype, self._optimizer = index, numel, dtype, optimizer
        self._staged = False  # known to the process that stages
        self._active = memory.take(1, torch.int64)
        self._heights = memory.take(2, torch.int64)
        self._digests = [memory.take(_HASH_BYTES, torch.uint8) for _ in range(2)]
        self._lineages = [memory.take(_HASH_BYTES, torch.uint8) for _ in range(2)]
        self._ledgers = [memory.take(len(Ledger((0,) * max_slots).to_bytes()), torch.uint8) for _ in range(2)]
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

    @property
    def staged(self) -> "Staged":
        """What a commit would make the agreed state."""
        then = 1 - self._now
        return Staged(
            int(self._heights[then]),
            bytes(self._digests[then].tolist()).hex(),
            bytes(self._lineages[then].tolist()).hex(),
            Ledger.from_bytes(bytes(self._ledgers[then].tolist())),
        )

    @property
    def ledger(self) -> Ledger:
        """What the committed rounds have counted."""
        return Ledger.from_bytes(bytes(self._ledgers[self._now].tolist()))

    def initialize(self) -> None:
        """Make what was written into :attr:`anchor` the start of the lineage: height 0, state and ledger zero."""
        for tensor in (*self.optimizer_state.values(), self._ledgers[self._now]):
            tensor.zero_()
        self._seal(self._now, height=0, parent=b"")

    def is_intact(self) -> bool:
        """Whether the agreed state still has its digest: memory that went bad is told from a wrong result by it."""
        return self._hash(self._now).hexdigest() == self.digest

    def stage(self, mean: Tensor, counted: Sequence[Counted] = ()) -> str:
        """Apply the outer optimizer to the mean pseudo-gradient, beside the agreed state.

        Args:
            counted: what the mean is made of, in its order.

        Returns:
            The SHA-256 (hex) of the staged anchor, optimizer state and ledger, which members compare before they commit.
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
        self._ledgers[then].copy_(_to_tensor(self.ledger.after(counted).to_bytes()))
        return self._seal(then, height=self.height + 1, parent=bytes.fromhex(self.lineage))

    def staged_tensors(self) -> list[Tensor]:
        """Where a state received from another member is written: anchor first, then the optimizer's state in order."""
        return self._tensors(1 - self._now)

    @property
    def staged_bytes(self) -> list[Tensor]:
        """:meth:`staged_tensors` as they are on the wire: flat uint8."""
        return [tensor.view(torch.uint8) for tensor in self.staged_tensors()]

    def agreed_tensors(self) -> list[Tensor]:
        """What is sent to a member that needs the state, in the order of :meth:`staged_tensors`."""
        return self._tensors(self._now)

    def seal_received(self, height: int, lineage: str, ledger: Ledger) -> str:
        """Finish a state written into :meth:`staged_tensors`; returns its SHA-256 (hex) for the caller to check."""
        self._ledgers[1 - self._now].copy_(_to_tensor(ledger.to_bytes()))
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
        digest = self._hash(copy)
        self._digests[copy].copy_(_to_tensor(digest.digest()))
        self._lineages[copy].copy_(_to_tensor(hashlib.sha256(parent + digest.digest()).digest()))
        self._heights[copy] = height
        self._staged = copy != self._now
        return digest.hexdigest()

    def _hash(self, copy: int) -> "hashlib._Hash":
        digest = hashlib.sha256()
        for tensor in (*self._tensors(copy), self._ledgers[copy]):
            digest.update(memoryview(tensor.view(torch.uint8).numpy()))
        return digest


class OuterState:
    """The outer state of a whole island, fragment by fragment.

    Attributes:
        called: for each fragment whether others wait for this island to launch (:data:`CALLED`); written by the exchange.
        step, tokens_per_second: how far this island is; written by the trainer.
        beat: grows as long as the trainer's process is not stopped.

    Pickled while a process is spawned, it arrives there as a view of the same memory.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        optimizer: OuterOptimizer,
        dtype: torch.dtype = torch.float32,
        max_slots: int = 8,
        memory: SharedMemory | None = None,
    ) -> None:
        self._arguments = (tuple(sizes), optimizer, dtype, max_slots)
        if memory is None:
            measure = _Arena(None)
            self._lay_out(measure)
            memory = SharedMemory(measure.used)
        self._memory = memory
        self._lay_out(_Arena(memory))

    def _lay_out(self, arena: "_Arena") -> None:
        sizes, optimizer, dtype, max_slots = self._arguments
        self.called = arena.take(len(sizes), torch.uint8)
        self.step, self.tokens_per_second = arena.take(1, torch.int64), arena.take(1, torch.float64)
        self.beat = arena.take(1, torch.int64)
        self.fragments = [
            FragmentState(index, numel, dtype, optimizer, max_slots, arena) for index, numel in enumerate(sizes)
        ]

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
