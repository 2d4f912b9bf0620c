"""Anchor and outer-optimizer state of each fragment, twice: what is agreed, and what a round is about to agree on.

All of it lies in shared memory that the trainer owns. During a round only the exchange writes, and only
beside the agreed copy; a commit is the swap of one integer. So no one ever sees half a round, and when the exchange
process dies, what was agreed is still there. What is agreed and what is an island's own are two blocks: islands of one
process share the first. torch only.
"""

import hashlib
from dataclasses import dataclass
from functools import partial
from typing import Sequence

import torch
from torch import Tensor

from diloco.adaptation import Adaptation
from diloco.ledger import Counted, Ledger
from diloco.outer_lr import OuterLr
from diloco.outer_optimizers.base import OuterOptimizer
from diloco.pseudo_gradient import blocks
from diloco.reduction import chunk_slice, num_chunks
from diloco.shared_memory import Arena, SharedMemory
from diloco.staging import Staging, chunk_digest, chunk_digests, state_digest

_HASH_BYTES = 32
#: What ``OuterState.called`` says of a fragment: nobody waits; others wait in its next round; they went on without this
#: island, or have waited as long as they would for one that is gone.
NOT_CALLED, CALLED, LATE = range(3)


@dataclass(frozen=True)
class Staged:
    """A state that is written and not yet agreed."""

    height: int
    digest: str
    lineage: str
    ledger: Ledger


@dataclass(frozen=True)
class Layout:
    """What an outer state has room for.

    Attributes:
        error_feedback: what is lost in encoding contributions is kept for the next.
        keeps_mean: the last mean is kept, for eager merging.
        outer_lr: None: that of the optimizer in every round.
        adaptation: None: period and codec stay as they are.
    """

    sizes: Sequence[int]
    optimizer: OuterOptimizer
    dtype: torch.dtype = torch.float32
    max_slots: int = 8
    error_feedback: bool = False
    keeps_mean: bool = False
    outer_lr: OuterLr | None = None
    adaptation: Adaptation | None = None


class FragmentState:
    """One fragment's share of the outer state. Every tensor is flat, of ``numel`` elements.

    Attributes:
        local: the island's own parameters, written by the trainer at launch; the exchange turns them into what it
            contributes in place.
        mean: what the last step was made with, or is being made with; None unless :attr:`Layout.keeps_mean`.
    """

    def __init__(self, index: int, numel: int, layout: Layout, own: Arena, agreed: Arena) -> None:
        optimizer, dtype, max_slots = layout.optimizer, layout.dtype, layout.max_slots
        self.index, self.numel, self.dtype, self._optimizer = index, numel, dtype, optimizer
        self._outer_lr, self._adaptation = layout.outer_lr or OuterLr(optimizer.lr), layout.adaptation
        self._staged = False  # known to the process that stages
        self._staging: Staging | None = None
        self._active = own.take(1, torch.int64)  # bit 0: the agreed copy of the state; bit 1: that of the residual
        self._offered = own.take(1, torch.int64)
        self._contribution = own.take(2, torch.float64)  # whether local holds one; its norm
        self._heights = agreed.take(2, torch.int64)
        self._digests = [agreed.take(_HASH_BYTES, torch.uint8) for _ in range(2)]
        self._lineages = [agreed.take(_HASH_BYTES, torch.uint8) for _ in range(2)]
        self._ledgers = [agreed.take(len(Ledger((0,) * max_slots).to_bytes()), torch.uint8) for _ in range(2)]
        self.local = own.take(numel, dtype)
        self._anchors = [agreed.take(numel, dtype) for _ in range(2)]
        self._states = [{name: agreed.take(numel, dtype) for name in optimizer.state_names} for _ in range(2)]
        self._residuals = [own.take(numel, dtype) for _ in range(2)] if layout.error_feedback else []
        self.mean = agreed.take(numel, dtype) if layout.keeps_mean else None

    @property
    def _now(self) -> int:
        return int(self._active) & 1

    @property
    def _lr(self) -> float:
        """Of the round that comes next, by what is agreed."""
        ledger = self.ledger
        return self._outer_lr.at(self.height, ledger.step, ledger.tokens)

    @property
    def anchor(self) -> Tensor:
        """The parameters that all islands last agreed on."""
        return self._anchors[self._now]

    @property
    def previous_anchor(self) -> Tensor:
        """The anchor before the last commit; valid until the next round begins to stage its result."""
        return self._anchors[1 - self._now]

    @property
    def residual(self) -> Tensor | None:
        """What was lost in encoding this island's contributions, of those that counted; None without error feedback."""
        return self._residuals[int(self._active) >> 1] if self._residuals else None

    @property
    def next_residual(self) -> Tensor | None:
        """What :attr:`residual` becomes if the contribution that is offered counts."""
        return self._residuals[1 - (int(self._active) >> 1)] if self._residuals else None

    @property
    def codec(self) -> int:
        """Which of the run's codecs encodes the next contribution."""
        return self.codec_of(self.ledger)

    def codec_of(self, ledger: Ledger) -> int:
        """Which one does where this is the agreed ledger."""
        return self._adaptation.codec(ledger.rung) if self._adaptation else 0

    @property
    def period(self) -> int | None:
        """Inner steps between two rounds, where the members adapt that; else None."""
        return self._adaptation.period(self.ledger.rung) if self._adaptation else None

    def offers(self, position: int) -> None:
        """This island's contribution up to ``position`` of its data is being encoded; one that was before can't count."""
        self._offered.fill_(position)

    @property
    def offered(self) -> int:
        """The position that :meth:`offers` was last told; 0 where nothing was offered since the slot was taken."""
        return int(self._offered)

    def contributes(self, norm: float) -> None:
        """:attr:`local` holds a contribution now, and no parameters."""
        self._contribution[1] = norm
        self._contribution[0] = 1

    def takes_parameters(self) -> None:
        """:attr:`local` is about to be written by the trainer."""
        self._contribution[0] = 0

    @property
    def contribution_norm(self) -> float | None:
        """Of the pseudo-gradient in :attr:`local`; not finite where that can't be sent; None while there is none."""
        return float(self._contribution[1]) if self._contribution[0] else None

    def forget_residual(self) -> None:
        """The island's contributions until now are none of the agreed state's: it has another slot, or a new run."""
        for residual in self._residuals:
            residual.zero_()
        self._offered.zero_()

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
        """Of the agreed anchor, outer-optimizer state and ledger: :func:`~diloco.staging.state_digest` (hex)."""
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
        self._seal_step(self._now, 0, b"", chunk_digests(self._tensors(self._now)))

    def is_intact(self) -> bool:
        """Whether the agreed state still has its digest: memory that went bad is told from a wrong result by it."""
        return self._hash(self._now, chunk_digests(self._tensors(self._now))).hex() == self.digest

    def begin_staging(self, counted: Sequence[Counted] = ()) -> Staging:
        """A step of the outer optimizer by a mean that comes chunk by chunk, beside the agreed state.

        From now on nothing can be committed until it is sealed: what was staged before is being written over.

        Args:
            counted: what the mean is made of, in its order.
        """
        now, then, height = self._now, 1 - self._now, self.height
        ledger = self.ledger.after(counted, self._adaptation)
        self._unseal()
        self._ledgers[then].copy_(_to_tensor(ledger.to_bytes()))
        write = partial(self._step, now, height, self._lr)
        seal = partial(self._seal_step, then, height + 1, bytes.fromhex(self.lineage))
        self._staging = Staging(self.numel, write, seal)
        return self._staging

    def stage(self, mean: Tensor, counted: Sequence[Counted] = ()) -> str:
        """All of :meth:`begin_staging` by a mean that is there.

        Returns:
            The digest of the staged anchor, optimizer state and ledger (hex), which members compare before they commit.
        """
        staging = self.begin_staging(counted)
        for chunk in range(num_chunks(self.numel)):
            staging.apply(chunk, mean[chunk_slice(self.numel, chunk)])
        return staging.seal()

    def look_ahead(self, pseudo_gradient: Tensor, out: Tensor) -> None:
        """Write into ``out`` what the anchor would be after a step by ``pseudo_gradient``; nothing else changes."""
        lr = self._lr
        for piece in blocks(self.numel):
            state = {name: tensor[piece] for name, tensor in self.optimizer_state.items()}
            scratch = {name: torch.empty_like(tensor) for name, tensor in state.items()}
            self._optimizer.step(self.anchor[piece], pseudo_gradient[piece], state, self.height, lr, out[piece], scratch)

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
        """Finish a state written into :meth:`staged_tensors`; returns its digest (hex) for the caller to check."""
        self._unseal()
        return self._seal_as(1 - self._now, height, lineage, ledger)

    def resume(self, height: int, lineage: str, ledger: Ledger, offered: int) -> str:
        """Make what was written into :attr:`anchor` and :attr:`optimizer_state` the agreed state; returns its digest (hex)."""
        self._offered.fill_(offered)
        return self._seal_as(self._now, height, lineage, ledger)

    def adopt(self) -> str | None:
        """Make what another island that shares the agreed memory has staged what the next commit swaps in here.

        Returns:
            Its digest (hex); None where nobody has staged what follows on this state.
        """
        staged = self.staged
        if staged.height != self.height + 1:
            return None
        self._staged = True
        return staged.digest

    def follow(self, other: "FragmentState") -> None:
        """Take what ``other``, which shares the agreed memory, has agreed on; this island has contributed nothing to it."""
        self._active.fill_(other._now)

    @property
    def version(self) -> tuple[int, int, str]:
        """Another one after every commit: what was copied meanwhile may be of two states."""
        return int(self._active), self.height, self.digest

    def commit(self, slot: int) -> None:
        """Swap: the staged state becomes the agreed one, and with it the residual of what it counts.

        Args:
            slot: of this island; the staged ledger tells whether its contribution counted.

        Raises:
            RuntimeError: nothing was staged since the last commit; a swap would go back to what was agreed before.
        """
        if not self._staged:
            raise RuntimeError(f"fragment {self.index}: nothing was staged at height {self.height}, so nothing can be committed")
        settled = self._settle_residual(slot)
        self._end_staging()
        self._active.bitwise_xor_(1 | (settled << 1))  # one store: nobody sees half of it

    def _settle_residual(self, slot: int) -> bool:
        """Whether the next residual takes the place of this one."""
        before, after = self.ledger.positions[slot], self.staged.ledger.positions[slot]
        if not self._residuals or after == before:
            return False
        if after != self.offered:  # what counts, or counts no more, is none that this island has the loss of
            self.next_residual.zero_()
        return True

    def _tensors(self, copy: int) -> list[Tensor]:
        return [self._anchors[copy], *self._states[copy].values()]

    def _step(self, now: int, height: int, lr: float, piece: slice, mean: Tensor) -> bytes:
        """Stage some elements, by their mean; returns their digest."""
        then = 1 - now
        if self.mean is not None:
            self.mean[piece] = mean
        state, out_state = ({name: tensor[piece] for name, tensor in self._states[copy].items()} for copy in (now, then))
        self._optimizer.step(self._anchors[now][piece], mean, state, height, lr, self._anchors[then][piece], out_state)
        return chunk_digest(self._tensors(then), piece)

    def _unseal(self) -> None:
        """What is beside the agreed state is being written over, and is nobody's until it is sealed."""
        self._end_staging()
        for tensor in (self._digests[1 - self._now], self._lineages[1 - self._now]):
            tensor.zero_()

    def _end_staging(self) -> None:
        """The step that was begun last writes no more, and what was staged can't be committed (again)."""
        if self._staging:
            self._staging.void = True
        self._staging, self._staged = None, False

    def _seal_step(self, copy: int, height: int, parent: bytes, chunks: Sequence[bytes]) -> str:
        digest = self._hash(copy, chunks)
        return self._seal(copy, height, digest, lineage=hashlib.sha256(parent + digest).digest())

    def _seal_as(self, copy: int, height: int, lineage: str, ledger: Ledger) -> str:
        self._ledgers[copy].copy_(_to_tensor(ledger.to_bytes()))
        digest = self._hash(copy, chunk_digests(self._tensors(copy)))
        return self._seal(copy, height, digest, bytes.fromhex(lineage))

    def _seal(self, copy: int, height: int, digest: bytes, lineage: bytes) -> str:
        self._digests[copy].copy_(_to_tensor(digest))
        self._lineages[copy].copy_(_to_tensor(lineage))
        self._heights[copy] = height
        self._staged = copy != self._now
        return digest.hex()

    def _hash(self, copy: int, chunks: Sequence[bytes]) -> bytes:
        return state_digest(chunks, bytes(self._ledgers[copy].tolist()))


class OuterState:
    """The outer state of a whole island, fragment by fragment.

    Attributes:
        called: for each fragment whether others wait for this island to launch (:data:`CALLED`); written by the exchange.
        step, tokens_per_second: how far this island is; written by the trainer.
        beat: grows as long as the trainer's process is not stopped.

    Pickled while a process is spawned, it arrives there as a view of the same memory.

    Args:
        memory: the island's own, and that of what is agreed; by default new.
    """

    def __init__(self, layout: Layout, memory: tuple[SharedMemory, SharedMemory] | None = None) -> None:
        self.layout = layout
        if memory is None:
            measures = Arena(None), Arena(None)
            self._lay_out(*measures)
            memory = SharedMemory(measures[0].used), SharedMemory(measures[1].used)
        self._memory = memory
        self._lay_out(Arena(memory[0]), Arena(memory[1]))

    def _lay_out(self, own: Arena, agreed: Arena) -> None:
        sizes = self.layout.sizes
        self.called = own.take(len(sizes), torch.uint8)
        self.step, self.tokens_per_second = own.take(1, torch.int64), own.take(1, torch.float64)
        self.beat = own.take(1, torch.int64)
        self.fragments = [FragmentState(index, numel, self.layout, own, agreed) for index, numel in enumerate(sizes)]

    def twin(self) -> "OuterState":
        """Of another island in this process, which shares all that is agreed and stands where this one does."""
        own, agreed = self._memory
        twin = OuterState(self.layout, (SharedMemory(own.num_bytes), agreed))
        for fragment, mine in zip(twin.fragments, self.fragments, strict=True):
            fragment.follow(mine)
        return twin

    def __reduce__(self) -> tuple:
        return OuterState, (self.layout, self._memory)


def _to_tensor(raw: bytes) -> Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)
