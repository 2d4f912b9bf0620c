"""What a checkpoint tells of the outer loop beside tensors: plain values, of which an island that starts again makes its logbook."""

import math
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from diloco.exchange.base import RoundOutcome, Work
from diloco.flight import Flight, Logbook
from diloco.ledger import Ledger
from diloco.uncounted import Uncounted


@dataclass(frozen=True)
class FragmentFacts:
    """The agreed state of a fragment, without its tensors."""

    height: int
    lineage: str
    digest: str
    ledger: Ledger
    offered: int


@dataclass(frozen=True)
class FlightFacts:
    """A round in flight.

    Attributes:
        outcome: where it had one; else what was offered is among the tensors, and is offered again.
        norm: of what was offered.
    """

    fragment: int
    numel: int
    work: Work
    inner_step: int
    slot: int
    outcome: RoundOutcome | None = None
    norm: float | None = None


@dataclass(frozen=True)
class LogFacts:
    """A :class:`~diloco.flight.Logbook` between two inner steps."""

    lease: tuple[int, int]
    work: tuple[tuple[int, int], ...]
    launched_at: tuple[int, ...]
    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    finished: tuple[int, ...]
    missed: tuple[int, ...]
    inner_step: int

    @staticmethod
    def of(log: Logbook) -> "LogFacts":
        """As it is now."""
        return LogFacts(
            log.lease,
            tuple((work.start, work.tokens) for work in log.work),
            tuple(log.launched_at),
            tuple(log.tokens),
            tuple(log.shares),
            tuple(sorted(log.finished)),
            tuple(sorted(log.missed)),
            log.inner_step,
        )


@dataclass(frozen=True)
class OuterFacts:
    """All of it; ``fragments`` in their order."""

    log: LogFacts
    fragments: tuple[FragmentFacts, ...]
    flights: tuple[FlightFacts, ...]

    @property
    def slot(self) -> int:
        """In which the island was."""
        return self.log.lease[0]

    def to_json(self) -> dict[str, Any]:
        """Values that JSON holds exactly; numbers that are not finite as text."""
        return _finite(asdict(self))

    @staticmethod
    def from_json(values: dict[str, Any]) -> "OuterFacts":
        """The inverse of :meth:`to_json`. Raises ``pydantic.ValidationError``."""
        return TypeAdapter(OuterFacts).validate_python(values)

    def logbook(self, lease: tuple[int, int], steps: int) -> Logbook:
        """For an island that goes on from here, in the same slot; its lease may have another epoch, and its run more ``steps``: what was
        the last round of a fragment is then none."""
        log = self.log
        finished = {index for index in log.finished if self.fragments[index].ledger.step >= steps}
        flights = {facts.fragment: _flight(facts, lease, self.fragments[facts.fragment].height) for facts in self.flights}
        return Logbook(
            [_uncounted(*work) for work in log.work],
            list(log.launched_at),
            list(log.tokens),
            list(log.shares),
            flights,
            finished,
            set(log.missed),
            log.inner_step,
            lease,
        )


def _flight(facts: FlightFacts, lease: tuple[int, int], height: int) -> Flight:
    gathered: Future[None] = Future()
    gathered.set_result(None)
    work = replace(facts.work, lease=lease, resumed=True)
    return Flight(facts.fragment, facts.numel, work, facts.inner_step, facts.slot, height, gathered, outcome=facts.outcome)


def _uncounted(start: int, tokens: int) -> Uncounted:
    work = Uncounted(start)
    work.tokens = tokens
    return work


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
