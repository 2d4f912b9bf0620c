"""What an exchange is: the means by which islands agree."""

import math
from dataclasses import dataclass, field
from typing import Callable, Literal, Protocol

from diloco.adaptation import Pace


@dataclass(frozen=True)
class Seat:
    """An island's place in the swarm.

    Attributes:
        slot: fixes which samples this island trains on.
        address: what other islands give as ``swarm.initial_peers`` to join; empty where nothing listens.
        epoch: how many islands had the slot before; fixes, with the slot, whose work a share counts.
        position: sequences of the slot that are done, by this island or by those that had the slot before.
        step: inner steps that the swarm has done: where the learning rate goes on.
        tokens: what all committed rounds have counted.
        late: the run was in progress: the outer state is the swarm's, and the parameters have to become its anchor.
    """

    slot: int
    address: str = ""
    epoch: int = 0
    position: int = 0
    step: int = 0
    tokens: int = 0
    late: bool = False

    @property
    def lease(self) -> tuple[int, int]:
        """Slot and epoch."""
        return self.slot, self.epoch


@dataclass(frozen=True)
class Work:
    """What an island has done since its work last counted: sequences ``start`` up to ``position`` of its slot.

    Attributes:
        tokens: that it trained on meanwhile; more than the sequences hold is possible where work was carried over.
        step: the inner step that it has reached.
        pace: what was measured meanwhile, where period and codec adapt to it.
        lease: slot and epoch in which it was done: a round never counts it in another. None: not told.
        resumed: it was offered before, by a process that is gone: ``local`` holds the contribution, and not parameters.
    """

    tokens: int
    start: int
    position: int
    step: int
    pace: Pace = Pace()
    lease: tuple[int, int] | None = field(default=None, compare=False)  # whose it is, not what it is
    resumed: bool = field(default=False, compare=False)


@dataclass(frozen=True)
class RoundOutcome:
    """How one round ended for this island.

    Attributes:
        kind: ``committed``: the agreed state was swapped, and holds exactly the named members' contributions, this
            island's too. ``skipped``: nothing changed. ``left_out``: the others committed without this island, and their
            state was taken over and swapped in.
        height: rounds of this fragment committed so far, this one included.
        members: slots that took part, in the order in which they were added up; ``weights`` beside them (tokens, capped).
        reason: why it was skipped or left out; empty when committed.
        digest: of the agreed anchor, outer-optimizer state and ledger after the round (hex).
        pseudo_gradient_norm: L2 norm of this island's own contribution.
        cosine: between this island's contribution as others decode it and the mean of all; 0 where it did not count.
        rejected: this island's parameters are not to be built upon, but to be replaced by the anchor: it was left out for what
            it contributed, or because its own state was damaged; or, where its contribution counted, the anchor has moved
            by more than that one round, and the parameters lack the rest.
        position: sequences of this island's slot that committed rounds have counted, as the agreed state says.
        step: the inner step that the swarm had reached.
        tokens: what all committed rounds have counted.
        waiting_seconds: until all were there that the round names.
        transfer_seconds: from there to the outcome.
        recovering_seconds: in which state was taken over from another island.
        encoded_bytes: of this island's own contribution.
        encode_seconds, decode_seconds, step_seconds: of the exchange's computing: the own contribution; all that came, up to the
            mean; the outer optimizer, with the digest. Most of it while bytes are on the wire.
        seat: a new one, where this island lost the one that it had; its work until now can't count any more.
    """

    kind: Literal["committed", "skipped", "left_out"]
    fragment: int
    height: int
    members: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    reason: str = ""
    digest: str = ""
    bytes_sent: int = 0
    bytes_received: int = 0
    exchange_seconds: float = 0.0
    pseudo_gradient_norm: float = 0.0
    cosine: float = 0.0
    rejected: bool = False
    position: int = 0
    step: int = 0
    tokens: int = 0
    waiting_seconds: float = 0.0
    transfer_seconds: float = 0.0
    recovering_seconds: float = 0.0
    encoded_bytes: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    step_seconds: float = 0.0
    seat: Seat | None = None

    def share(self, slot: int) -> float:
        """Of the island in ``slot`` in the mean; 0 where it took no part."""
        return self.weights[self.members.index(slot)] / sum(self.weights) if slot in self.members else 0.0

    @property
    def finite(self) -> bool:
        """Whether this island's own parameters were numbers, all of them; else it took no part."""
        return math.isfinite(self.pseudo_gradient_norm)


@dataclass(frozen=True)
class ExchangeEvent:
    """Something that happened to the swarm: an island lost, a process started again. ``what`` is one word."""

    what: str
    detail: str = field(default="")


class JoinError(RuntimeError):
    """This island can't take part; the message says why and what to do. Programs exit with code 2."""


class Exchange(Protocol):
    """How the trainer's rank 0 talks to the other islands. Only ``join`` and ``outcome`` wait, and both have a limit.

    One round per fragment may be in flight, and those of several fragments side by side. Before ``launch``, which may come
    from another thread, the island's parameters are written into ``state.fragments[i].local``, which is the exchange's until
    the outcome is taken.
    """

    def join(self, waiting: Callable[[], None] = lambda: None) -> Seat:
        """Wait until all islands of ``swarm.islands`` are there, or, where the run is in progress, for a place in it.

        Args:
            waiting: called about every second meanwhile: to take over a large state on a slow link takes long.

        Raises:
            JoinError: refused, or not all of them came in time.
        """

    def started(self) -> None:
        """The trainer's first anchor is in the outer state (or the swarm's in the trainer): others may rely on it."""

    def progress(self, step: int, tokens_per_second: float) -> None:
        """Tell how far this island is; others see it."""

    def called(self, fragment: int) -> bool:
        """Whether another island waits for this one to launch its next round of ``fragment``."""

    def is_late(self, fragment: int) -> bool:
        """Whether the others went on without this island, or have waited for it as long as they would for one that is gone.

        It then launches at once, whatever its schedule says, so that it holds nobody up any longer.
        """

    def launch(self, fragment: int, work: Work) -> None:
        """Offer this island's parameters to the next round of ``fragment``, weighted by ``work.tokens``. Returns at once."""

    def arrived(self, fragment: int) -> bool:
        """Whether :meth:`outcome` of the launched round would not wait."""

    def peek(self, fragment: int) -> RoundOutcome | None:
        """The outcome, if it is there and was not taken; from any thread."""

    def outcome(self, fragment: int) -> RoundOutcome:
        """Wait for the launched round to end; an exchange that can't finish it in time says ``skipped``."""

    def events(self) -> list[ExchangeEvent]:
        """What happened since the last call."""

    def close(self, hurry: bool = False) -> None:
        """Tell the others that this island leaves, and end every process that was started. May be called twice.

        Args:
            hurry: within seconds; else an exchange may wait for members that need something of this island.
        """
