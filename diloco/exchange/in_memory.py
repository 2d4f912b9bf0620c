"""Islands that are threads of one process: for simulations, for tests, and for runs with one island."""

import time
from dataclasses import dataclass
from typing import Callable, Literal

from pydantic import Field

from diloco.config import ExchangeSection, RunConfig
from diloco.encoding import Encoded, encode_contribution
from diloco.exchange.base import ExchangeEvent, JoinError, RoundOutcome, Seat, Work
from diloco.from_config import make_wire
from diloco.ledger import Counted
from diloco.meeting import NOT_FINITE, Hub, Limits, Meeting
from diloco.outer_state import FragmentState, OuterState
from diloco.pseudo_gradient import agreeable
from diloco.reduction import Wire
from diloco.script import IslandScript
from islands.config_file import ConfigError

_BEGAN_BEFORE = "the round had begun before this island was there"


class Config(ExchangeSection):
    """``exchange.type: in_memory``. With several islands it is a simulation, whose keys those without a match in other types are."""

    type: Literal["in_memory"] = "in_memory"
    step_seconds: float = Field(1.0, gt=0, description="simulated seconds that an inner step takes at speed 1")
    script: list[IslandScript] = Field([], description="islands that are slower, leave or join: [{island: 1, speed: 0.5}]")
    idle_on_cpu: bool = Field(
        False, description="parameters and optimizer state of an island are on the CPU while others train on the accelerator"
    )


@dataclass(frozen=True)
class _Launched:
    """What an island keeps from launch to outcome."""

    meeting: Meeting
    own: Encoded
    started: float
    encode_seconds: float


class InMemoryExchange:
    """One island's end of a :class:`Hub`. The same encoding, order and reduction as between machines.

    Args:
        state: where it shares what is agreed with others of the hub, whoever is first makes the outer step for all of them.
        clock: by which ``exchange_seconds`` are measured.
    """

    def __init__(
        self,
        hub: Hub,
        slot: int,
        state: OuterState,
        wire: Wire,
        round_deadline: float,
        min_islands: int = 1,
        residual_decay: float = 1.0,
        max_weight_ratio: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hub, self._slot, self._state, self._wire = hub, slot, state, wire
        self._limits, self._decay = Limits(round_deadline, min_islands, max_weight_ratio), residual_decay
        self._clock = clock
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
        height = self._state.fragments[fragment].height
        with self._hub.condition:
            return self._hub.is_open(fragment, height) or self._hub.is_past(fragment, height)

    def is_late(self, fragment: int) -> bool:
        """See :class:`diloco.exchange.base.Exchange`. Only of an island that came while a round was on, which did not wait for it."""
        with self._hub.condition:
            return self._hub.is_past(fragment, self._state.fragments[fragment].height)

    def launch(self, fragment: int, work: Work) -> None:
        """See :class:`diloco.exchange.base.Exchange`. Says at once if there is nothing finite to offer."""
        started, state, began = self._clock(), self._state.fragments[fragment], time.monotonic()
        codec = self._wire.choose(state.codec).contribution
        own = encode_contribution(state, codec, work.position, self._decay, work.resumed)
        seconds = time.monotonic() - began
        with self._hub.condition:
            meeting = self._hub.meeting(fragment, state.height)
            self._launched[fragment] = _Launched(meeting, own, started, seconds)
            if own.finite and self._slot in meeting.expected:
                counted = Counted(self._slot, work.tokens, work.position, work.step, agreeable(own.sent_norm), work.pace)
                meeting.offers[self._slot] = own.chunks, counted
            else:
                meeting.passed.add(self._slot)
            self._hub.condition.notify_all()

    def arrived(self, fragment: int) -> bool:
        """See :class:`diloco.exchange.base.Exchange`."""
        with self._hub.condition:
            return not self._launched[fragment].meeting.missing

    def peek(self, fragment: int) -> RoundOutcome | None:
        """See :class:`diloco.exchange.base.Exchange`. A round ends here when its outcome is taken."""
        return None

    def outcome(self, fragment: int) -> RoundOutcome:
        """See :class:`diloco.exchange.base.Exchange`."""
        state, launched = self._state.fragments[fragment], self._launched.pop(fragment)
        meeting, own = launched.meeting, launched.own
        given_up = self._wait_for_decision(meeting, state)
        reason = given_up or meeting.reason
        digest = "" if reason else self._step(meeting, state)
        members = () if reason else meeting.members
        ledger = state.ledger
        return RoundOutcome(
            "skipped" if reason else "committed" if self._slot in members else "left_out",
            fragment,
            state.height,
            members,
            () if reason else meeting.weights,
            reason=reason or self._why_left_out(meeting, own),
            digest=digest,
            exchange_seconds=self._clock() - launched.started,
            pseudo_gradient_norm=own.norm,
            cosine=0.0 if reason else meeting.cosines.get(self._slot, 0.0),
            rejected=not reason and self._slot in meeting.excluded,
            encoded_bytes=own.num_bytes,
            encode_seconds=launched.encode_seconds,
            decode_seconds=meeting.decode_seconds,
            step_seconds=meeting.step_seconds,
            position=ledger.positions[self._slot],
            step=ledger.step,
            tokens=ledger.tokens,
        )

    def events(self) -> list[ExchangeEvent]:
        """See :class:`diloco.exchange.base.Exchange`."""
        return []

    def close(self, hurry: bool = False) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""
        self._hub.leave(self._slot)

    def _wait_for_decision(self, meeting: Meeting, state: FragmentState) -> str:
        """Wait until all have answered; whoever sees it first decides for all. Returns why it gave up, or nothing."""
        with self._hub.condition:
            if not self._hub.condition.wait_for(lambda: not meeting.missing, self._limits.seconds):
                missing = sorted(meeting.missing - meeting.withdrawn)
                meeting.withdraw(self._slot)
                return f"islands {missing} offered nothing within {self._limits.seconds:g} s"
            if not meeting.decided:
                meeting.decide(state, self._wire.choose(state.codec), self._limits)
                self._hub.condition.notify_all()  # one of them may have waited for an island that left
            return ""

    def _step(self, meeting: Meeting, state: FragmentState) -> str:
        """Make the outer step, unless that was done in the same memory, and swap it in. Returns its digest (hex)."""
        digest = state.adopt()
        if digest is None:
            began = time.monotonic()
            digest = state.stage(meeting.mean, meeting.counted)
            meeting.step_seconds = time.monotonic() - began
        state.commit(self._slot)
        return digest

    def _why_left_out(self, meeting: Meeting, own: Encoded) -> str:
        if not own.finite:
            return NOT_FINITE
        if self._slot in meeting.excluded:
            return meeting.excluded[self._slot]
        return "" if self._slot in meeting.members else _BEGAN_BEFORE


def build(config: RunConfig, state: OuterState, schema: str, prefers: int = -1) -> InMemoryExchange:
    """An exchange for a run with one island: every round is its own mean.

    Raises:
        JoinError: the run has more islands, which in memory can't be reached from here.
        ConfigError: it has a script, which is for several islands.
    """
    if config.swarm.islands != 1:
        raise JoinError(
            f"exchange.type=in_memory joins the islands of one process, and swarm.islands={config.swarm.islands}; "
            "use exchange.type=hivemind between processes"
        )
    slot, exchange = config.swarm.slot if config.swarm.slot >= 0 else max(prefers, 0), config.exchange
    if exchange.script or exchange.idle_on_cpu:
        raise ConfigError(
            "exchange.script and exchange.idle_on_cpu are for simulations of several islands, and swarm.islands=1; "
            "give more islands, or leave them out"
        )
    hub = Hub(1)
    hub.expected = {slot}
    decay = config.outer.residual_decay
    return InMemoryExchange(hub, slot, state, make_wire(config), exchange.round_deadline, exchange.min_islands, decay)
