"""A round of one fragment between launch and landing, as the trainer sees it."""

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Callable, Literal

from diloco.exchange.base import RoundOutcome, Seat, Work
from diloco.uncounted import Uncounted
from islands.parameter_mover import Incoming

#: The anchor as it is; or by how much it moved.
What = Literal["anchor", "movement"]


@dataclass
class Flight:
    """What an island keeps of a launched round.

    Attributes:
        inner_step: the island's own count when it was launched.
        clock: by which it ages.
        slot: that the work was done in.
        height: of the agreed state when it was launched; known to rank 0.
        gathered: done when the parameters are with rank 0, and there offered to the exchange.
        outcome: once it is known here.
        incoming: the state that it lands with, on its way to this rank, and which one that is.
        void: the island has another slot since, and all its anchors: the outcome changes nothing any more.
        stall_seconds: for which training stood still because of it.
        gather_seconds, scatter_seconds: of moving it, most of that beside the training.
    """

    fragment: int
    numel: int
    work: Work
    inner_step: int
    slot: int
    height: int = 0
    gathered: "Future[None]" = field(default_factory=Future)
    clock: Callable[[], float] = time.monotonic
    launched: float = field(init=False)
    outcome: RoundOutcome | None = None
    incoming: tuple[What, Incoming] | None = None
    void: bool = False
    stall_seconds: float = 0.0
    gather_seconds: float = 0.0
    scatter_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.launched = self.clock()

    @property
    def age(self) -> float:
        """Seconds since it was launched."""
        return self.clock() - self.launched


@dataclass
class Logbook:
    """What all ranks of an island know alike of their rounds.

    Attributes:
        work: of each fragment, what no round has counted.
        launched_at: of each fragment, at which inner step that was last.
        tokens: of each fragment, what all committed rounds have counted.
        shares: of this island in the mean that an eager start goes by, by fragment; 0: there is none.
        flights: rounds under way, by fragment.
        finished: fragments whose last round has counted.
        missed: those that were due while their round before was in flight; known to rank 0.
        inner_step: that this island has done, wherever in the run that is.
        lease: the slot and epoch in which the next inner step is done.
    """

    work: list[Uncounted]
    launched_at: list[int]
    tokens: list[int]
    shares: list[float]
    flights: dict[int, Flight] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    missed: set[int] = field(default_factory=set)
    inner_step: int = 0
    lease: tuple[int, int] = (0, 0)

    @classmethod
    def begin(cls, fragments: int, seat: Seat) -> "Logbook":
        """Of an island that takes its place."""
        work = [Uncounted(seat.position) for _ in range(fragments)]
        return cls(work, [0] * fragments, [seat.tokens] * fragments, [0.0] * fragments, lease=seat.lease)


@dataclass(frozen=True)
class Boundary:
    """What rank 0 has all ranks do between two inner steps: land, launch, or begin to move what has arrived early."""

    landing: tuple[RoundOutcome, ...] = ()
    launching: tuple[int, ...] = ()
    arriving: tuple[RoundOutcome, ...] = ()
