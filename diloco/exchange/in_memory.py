"""Islands that are threads of one process: for tests and for runs with one island."""

import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Literal, Sequence

import torch
from torch import Tensor

from diloco.config import ExchangeSection, RunConfig
from diloco.contributions import Measured
from diloco.encoding import Encoded, encode_contribution
from diloco.from_config import make_wire
from diloco.exchange.base import ExchangeEvent, JoinError, RoundOutcome, Seat, Work
from diloco.ledger import Counted
from diloco.outer_state import FragmentState, OuterState
from diloco.pseudo_gradient import agreeable
from diloco.reduction import Seen, Wire, chunk_slice, num_chunks, reduce_chunk, sends_whole, through

_NOT_FINITE = "own pseudo-gradient is not finite"


class Config(ExchangeSection):
    """``exchange.type: in_memory``"""

    type: Literal["in_memory"] = "in_memory"


@dataclass
class _Round:
    """One attempt at a round: what islands answer; once it is decided, the mean or the reason why there is none."""

    offers: dict[int, tuple[list[Tensor], Counted]] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    withdrawn: set[int] = field(default_factory=set)
    decided: bool = False
    counted: tuple[Counted, ...] = ()
    mean: Tensor | None = None
    cosines: dict[int, float] = field(default_factory=dict)  # of each slot that counts, with the mean
    decode_seconds: float = 0.0
    reason: str = ""

    @property
    def answered(self) -> set[int]:
        """Slots that offered something, or said that they won't."""
        return self.offers.keys() | self.passed

    def withdraw(self, slot: int) -> None:
        """Take back what ``slot`` said: it waits no longer."""
        self.withdrawn.add(slot)
        self.offers.pop(slot, None)
        self.passed.discard(slot)


class Hub:
    """Where the islands of one process meet. Thread-safe; tensors are shared, never copied."""

    def __init__(self, num_islands: int) -> None:
        self.condition = threading.Condition()
        self.expected = set(range(num_islands))
        self._open: dict[tuple[int, int], _Round] = {}

    def open_round(self, fragment: int, height: int) -> _Round:
        """The round that is not decided yet; a new one if there is none. Called with the condition held."""
        if self._open.get((fragment, height), _DECIDED).decided:
            self._open = {key: other for key, other in self._open.items() if not other.decided}
            self._open[fragment, height] = _Round()
        return self._open[fragment, height]

    def is_open(self, fragment: int, height: int) -> bool:
        """Whether an island waits in that round. Called with the condition held."""
        meeting = self._open.get((fragment, height), _DECIDED)
        return not meeting.decided and bool(meeting.offers)


_DECIDED = _Round(decided=True)


@dataclass(frozen=True)
class _Launched:
    """What an island keeps from launch to outcome."""

    round: _Round
    own: Encoded
    started: float
    encode_seconds: float


class InMemoryExchange:
    """One island's end of a :class:`Hub`. The same encoding, order and reduction as between machines."""

    def __init__(
        self,
        hub: Hub,
        slot: int,
        state: OuterState,
        wire: Wire,
        round_deadline: float,
        min_islands: int = 1,
        residual_decay: float = 1.0,
    ) -> None:
        self._hub, self._slot, self._state, self._wire = hub, slot, state, wire
        self._deadline, self._min_islands, self._decay = round_deadline, min_islands, residual_decay
        self._launched: dict[int, _Launched] = {}

    def join(self, waiting: Callable[[], None] = lambda: None) -> Seat:
        """See :class:`diloco.exchange.base.Exchange`."""
        return Seat(self._slot)

    def started(self) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""

    def progress(self, step: int, tokens_per_second: float) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""

    def called(self, fragment: int) -> bool:
        """See :class:`diloco.exchange.base.Exchange`."""
        with self._hub.condition:
            return self._hub.is_open(fragment, self._state.fragments[fragment].height)

    def is_late(self, fragment: int) -> bool:
        """See :class:`diloco.exchange.base.Exchange`. Nobody goes on without an island that is a thread."""
        return False

    def launch(self, fragment: int, work: Work) -> None:
        """See :class:`diloco.exchange.base.Exchange`. Says at once if there is nothing finite to offer."""
        started, state = time.monotonic(), self._state.fragments[fragment]
        codec = self._wire.choose(state.codec).contribution
        own = encode_contribution(state, codec, work.position, self._decay, work.resumed)
        seconds = time.monotonic() - started
        with self._hub.condition:
            meeting = self._hub.open_round(fragment, state.height)
            self._launched[fragment] = _Launched(meeting, own, started, seconds)
            if own.finite:
                counted = Counted(self._slot, work.tokens, work.position, work.step, agreeable(own.sent_norm), work.pace)
                meeting.offers[self._slot] = own.chunks, counted
            else:
                meeting.passed.add(self._slot)
            self._hub.condition.notify_all()

    def arrived(self, fragment: int) -> bool:
        """See :class:`diloco.exchange.base.Exchange`."""
        with self._hub.condition:
            return self._is_complete(self._launched[fragment].round)

    def peek(self, fragment: int) -> RoundOutcome | None:
        """See :class:`diloco.exchange.base.Exchange`. A round ends here when its outcome is taken."""
        return None

    def outcome(self, fragment: int) -> RoundOutcome:
        """See :class:`diloco.exchange.base.Exchange`."""
        state, launched = self._state.fragments[fragment], self._launched.pop(fragment)
        meeting, own = launched.round, launched.own
        reason = self._wait_for_decision(meeting, state) or meeting.reason
        similarity, digest, stepping = 0.0, "", time.monotonic()
        if not reason:
            similarity = meeting.cosines.get(self._slot, 0.0)
            digest = state.stage(meeting.mean, meeting.counted)
            state.commit(self._slot)
        ledger = state.ledger
        return RoundOutcome(
            "skipped" if reason else "committed" if own.finite else "left_out",
            fragment,
            state.height,
            () if reason else tuple(one.slot for one in meeting.counted),
            () if reason else tuple(float(one.tokens) for one in meeting.counted),
            reason=reason if reason or own.finite else _NOT_FINITE,
            digest=digest,
            exchange_seconds=time.monotonic() - launched.started,
            pseudo_gradient_norm=own.norm,
            cosine=similarity,
            encoded_bytes=own.num_bytes,
            encode_seconds=launched.encode_seconds,
            decode_seconds=meeting.decode_seconds,
            step_seconds=time.monotonic() - stepping,
            position=ledger.positions[self._slot],
            step=ledger.step,
            tokens=ledger.tokens,
        )

    def events(self) -> list[ExchangeEvent]:
        """See :class:`diloco.exchange.base.Exchange`."""
        return []

    def close(self, hurry: bool = False) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""
        with self._hub.condition:
            self._hub.expected.discard(self._slot)
            self._hub.condition.notify_all()

    def _wait_for_decision(self, meeting: _Round, state: FragmentState) -> str:
        """Wait until all have answered; whoever sees it first decides for all. Returns why it gave up, or nothing."""
        with self._hub.condition:
            if not self._hub.condition.wait_for(lambda: self._is_complete(meeting), self._deadline):
                missing = sorted(self._hub.expected - meeting.answered - meeting.withdrawn)
                meeting.withdraw(self._slot)
                return f"islands {missing} offered nothing within {self._deadline:g} s"
            if not meeting.decided:
                self._decide(meeting, state)
                self._hub.condition.notify_all()  # one of them may have waited for an island that left
            return ""

    def _is_complete(self, meeting: _Round) -> bool:
        return meeting.decided or meeting.answered >= self._hub.expected

    def _decide(self, meeting: _Round, state: FragmentState) -> None:
        meeting.decided, members = True, sorted(meeting.offers)
        if not members:
            meeting.reason = _NOT_FINITE
        elif len(members) < self._min_islands:
            meeting.reason = f"only islands {members} offered something; exchange.min_islands={self._min_islands}"
        else:
            started, encoded = time.monotonic(), [meeting.offers[slot][0] for slot in members]
            meeting.counted = tuple(meeting.offers[slot][1] for slot in members)
            weights = [float(one.tokens) for one in meeting.counted]
            wire, meeting.mean = self._wire.choose(state.codec), state.local.new_empty(state.numel)
            seen = Seen(len(members))
            for piece, chunk in zip(_chunks(state.numel), zip(*encoded, strict=True), strict=True):
                meeting.mean[piece] = _reduce(wire, chunk, weights, piece.stop - piece.start, state.dtype, seen)
            pairs = zip(members, seen.squares, seen.alongs, strict=True)
            meeting.cosines = {slot: Measured(square, along).cosine(seen.mean_square) for slot, square, along in pairs}
            meeting.decode_seconds = time.monotonic() - started


def _reduce(
    wire: Wire, chunk: Sequence[Tensor], weights: list[float], numel: int, dtype: torch.dtype, seen: Seen
) -> Tensor:
    """The mean as all apply it: as it is, or as a reducer would have sent it on."""
    mean = reduce_chunk(wire.contribution, chunk, weights, numel, dtype, seen)
    return mean if sends_whole(wire, len(weights)) else through(wire.mean, mean)


def _chunks(numel: int) -> list[slice]:
    return [chunk_slice(numel, index) for index in range(num_chunks(numel))]


def build(config: RunConfig, state: OuterState, schema: str, prefers: int = -1) -> InMemoryExchange:
    """An exchange for a run with one island: every round is its own mean.

    Raises:
        JoinError: the run has more islands, which in memory can't be reached from here.
    """
    if config.swarm.islands != 1:
        raise JoinError(
            f"exchange.type=in_memory joins the islands of one process, and swarm.islands={config.swarm.islands}; "
            "use exchange.type=hivemind between processes"
        )
    slot, exchange = config.swarm.slot if config.swarm.slot >= 0 else max(prefers, 0), config.exchange
    hub = Hub(1)
    hub.expected = {slot}
    decay = config.outer.residual_decay
    return InMemoryExchange(hub, slot, state, make_wire(config), exchange.round_deadline, exchange.min_islands, decay)
