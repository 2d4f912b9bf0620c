"""The hook that makes an island one of many: gather, exchange, outer step, scatter.

All ranks of the island call it alike. Rank 0 holds the outer state and talks to the exchange; the others learn from it what happens
between two inner steps, so that all of them move the same fragments in the same order.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Callable

from torch import Tensor

from diloco.config import OuterSection, RunConfig
from diloco.eager import EagerStart
from diloco.exchange.base import Exchange, RoundOutcome, Seat
from diloco.flight import Boundary, Flight, What
from diloco.outer_state import FragmentState, OuterState
from diloco.round_rows import write_round
from diloco.schedule import RoundTimer, Schedule, Standing, StepSchedule, TimedSchedule
from diloco.uncounted import Uncounted, fate_of
from islands.metrics import Metrics
from islands.parameter_mover import Incoming, ParameterMover
from islands.process import Process
from islands.sharing import FirstRankSays
from islands.train_loop import Progress

_OWNER = 0
_GRACE_SECONDS = 60.0  # on top of what an exchange allows itself


@dataclass(frozen=True)
class Coordinator:
    """What rank 0 has and the other ranks don't."""

    exchange: Exchange
    state: OuterState


def make_schedule(config: RunConfig, num_fragments: int) -> Schedule:
    """When the rounds of a run begin, and when the run ends."""
    train, seconds = config.train, config.outer.sync_seconds
    if seconds is None:
        return StepSchedule(train.steps, int(config.outer.sync_every), num_fragments)
    total = train.steps * train.global_batch_size * config.data.seq_len * config.swarm.islands
    return TimedSchedule(train.steps, seconds, total, num_fragments)


class OuterRound:
    """A :class:`~islands.train_loop.StepHook` that runs the outer rounds.

    Args:
        coordinator: on rank 0; None on the others.
        round_seconds: the longest that a round may take, which ranks then wait for rank 0.
    """

    def __init__(
        self,
        schedule: Schedule,
        section: OuterSection,
        mover: ParameterMover,
        coordinator: Coordinator | None,
        metrics: Metrics,
        process: Process,
        round_seconds: float,
    ) -> None:
        self._schedule, self._section, self._mover = schedule, section, mover
        self._coordinator, self._metrics = coordinator, metrics
        self._say = FirstRankSays(process, "rounds that begin or end")
        self._by_steps = isinstance(schedule, StepSchedule)
        self._several_ranks = process.world_size > 1
        self._wait_seconds = round_seconds + _GRACE_SECONDS
        self._timer: RoundTimer | None = None
        self._eager: list[EagerStart] = []
        self._resumed = 0.0  # when the inner step that comes next could begin
        self._inner_step = 0  # that this island has done, wherever in the run that is
        count = schedule.num_fragments
        self._work = [Uncounted(0) for _ in range(count)]
        self._flights: dict[int, Flight] = {}
        self._launched_at = [0] * count
        self._missed: set[int] = set()  # due while the round before was in flight
        self._finished: set[int] = set()  # fragments whose last round has counted
        self._swarm_tokens = [0] * count
        self._shares = [0.0] * count  # of this island in the mean that an eager start goes by; 0: there is none

    def start(self, seat: Seat) -> Progress:
        """Make the model's parameters the first anchor, or, where the run is in progress, the anchor the parameters.

        Returns:
            Where in the run this island begins.
        """
        count = self._schedule.num_fragments
        for index in range(count):
            state = self._state(index)
            if seat.late:
                self._scatter(index, "anchor").apply()
                continue
            self._mover.gather(index, _OWNER, state and state.anchor).result()
            if state:
                state.initialize()
        progress = Progress(slot=seat.slot, position=seat.position)
        self._swarm_tokens = [seat.tokens] * count
        self._work = [Uncounted(seat.position) for _ in range(count)]
        _stand(progress, self._schedule.joined(seat.step, seat.tokens))
        self._resumed = time.monotonic()
        if self._coordinator:
            if self._section.overlap == "eager":
                self._eager = [EagerStart(state) for state in self._coordinator.state.fragments]
            if not self._by_steps:
                self._timer = RoundTimer(self._schedule, self._resumed)
            self._coordinator.exchange.started()
        return progress

    def after_step(self, progress: Progress, tokens: int) -> float:
        """See :class:`~islands.train_loop.StepHook`."""
        started = time.monotonic()
        self._inner_step += 1
        for work in self._work:
            work.tokens += tokens
        _stand(progress, self._schedule.stepped(_standing(progress)))
        if self._coordinator:
            self._coordinator.exchange.progress(progress.step, tokens / (started - self._resumed))
        while self._acts(progress):
            pass
        if self._coordinator:
            for event in self._coordinator.exchange.events():
                self._metrics.write("event", what=event.what, detail=event.detail)
        self._resumed = time.monotonic()
        return self._resumed - started

    def _acts(self, progress: Progress) -> bool:
        """Do what rank 0 says. Returns whether that may have given rise to more."""
        began = time.monotonic()
        boundary = self._say(self._coordinator and self._next(progress), self._wait_seconds)
        for outcome in boundary.landing:
            self._flights[outcome.fragment].stall_seconds += time.monotonic() - began
            self._land(outcome, progress)
            began = time.monotonic()
        for fragment in boundary.launching:
            self._launch(fragment, progress)
        for outcome in boundary.arriving:
            self._begin_to_bring(outcome)
        return bool(boundary.landing or boundary.launching)

    # -- what happens next, as rank 0 knows ----------------------------------------------------------------------------

    def _next(self, progress: Progress) -> Boundary:
        due = {index for index in self._due(progress) if self._launched_at[index] < self._inner_step}
        landing = [flight for flight in self._flights.values() if self._lands(flight, flight.fragment in due, progress)]
        if landing:
            return Boundary(landing=tuple(self._outcome(flight) for flight in landing))
        self._missed |= due & self._flights.keys()
        if launching := [index for index in sorted(due - self._flights.keys()) if self._work[index].tokens]:
            self._missed.difference_update(launching)
            return Boundary(launching=tuple(launching))
        early = [each for each in self._flights.values() if self._several_ranks and not each.outcome and self._arrived(each)]
        return Boundary(arriving=tuple(self._outcome(flight) for flight in early))

    def _due(self, progress: Progress) -> set[int]:
        """Fragments whose round begins now: by schedule, or because the others are waiting."""
        exchange, everything = self._coordinator.exchange, range(self._schedule.num_fragments)
        if self._by_steps:
            scheduled = self._schedule.launches(progress.step)
            due = {index for index in everything if index in scheduled or exchange.is_late(index)}
        elif self._ends(progress):
            return {index for index in everything if exchange.called(index)}
        else:
            due = set(self._timer.due(time.monotonic(), exchange.called))
        return (due | self._missed) - self._finished

    def _lands(self, flight: Flight, is_due: bool, progress: Progress) -> bool:
        if not self._ends(progress):
            overlap = self._section.overlap
            if not (is_due if overlap == "eager" else self._inner_step >= flight.inner_step + overlap):
                return False
            if self._section.late == "land_late":
                return self._arrived(flight)
        return True

    def _arrived(self, flight: Flight) -> bool:
        return bool(flight.outcome) or flight.gathered.done() and self._coordinator.exchange.arrived(flight.fragment)

    def _outcome(self, flight: Flight) -> RoundOutcome:
        flight.gathered.result()
        return flight.outcome or self._coordinator.exchange.outcome(flight.fragment)

    def _ends(self, progress: Progress) -> bool:
        return progress.lr_step >= self._schedule.steps

    # -- launch --------------------------------------------------------------------------------------------------------

    def _launch(self, fragment: int, progress: Progress) -> None:
        work, numel = self._work[fragment].offer(progress.position, progress.step), self._mover.numel(fragment)
        flight = Flight(fragment, numel, work, self._inner_step, progress.slot)
        self._flights[fragment], self._launched_at[fragment] = flight, self._inner_step
        state = self._state(fragment)

        def offer() -> None:
            flight.gather_seconds = flight.age
            if self._coordinator:
                self._coordinator.exchange.launch(fragment, flight.work)

        eager = self._section.overlap == "eager"
        flight.gathered = self._mover.gather(fragment, _OWNER, state and state.local, *(() if eager else (offer,)))
        if eager:
            flight.gathered.result()
            self._go_on_eagerly(fragment, ends=self._ends(progress))
            offer()
        flight.stall_seconds += flight.age

    def _go_on_eagerly(self, fragment: int, ends: bool) -> None:
        """Offer what was done in the period that ends here, and begin the next where the anchor will probably be."""
        share, self._shares[fragment] = self._shares[fragment], 0.0
        if self._eager:
            self._eager[fragment].offer(share)
        if share and not ends:
            source = self._eager[fragment].start if self._eager else None
            self._mover.scatter(fragment, _OWNER, source).apply()

    # -- landing -------------------------------------------------------------------------------------------------------

    def _land(self, outcome: RoundOutcome, progress: Progress) -> None:
        """Let progress and parameters follow an outcome."""
        began, flight, taken = time.monotonic(), self._flights.pop(outcome.fragment), progress.position
        self._follow(outcome, flight, progress)
        last = self._ends(progress) and self._no_other_follows(flight)
        fate = fate_of(flight.work, outcome, self._section.left_out, last)
        if outcome.seat:
            for index in range(self._schedule.num_fragments):
                self._take_anchor(index, progress)
        elif fate.kind == "counted":
            self._work[flight.fragment].counted(flight.work)
            self._merge(flight, outcome, last)
        elif fate.kind == "dropped":
            self._take_anchor(flight.fragment, progress)
        elif outcome.kind == "left_out":  # the others moved on: move as far, and keep what this island added to it
            self._bring(flight, "movement")
            flight.incoming[1].apply(Tensor.add_)
            self._restart_eagerly(flight.fragment, EagerStart.left_out)
        else:
            self._restart_eagerly(flight.fragment, EagerStart.skipped)
        flight.scatter_seconds += time.monotonic() - began
        flight.stall_seconds += time.monotonic() - began
        if self._timer:
            self._timer.landed(flight.fragment, flight.launched + flight.stall_seconds)
        write_round(self._metrics, flight, outcome, progress.step, self._schedule.num_fragments)
        lost = fate.reason
        if last and outcome.kind == "skipped" and fate.kind == "kept":  # nothing replaced these parameters, so they stay
            lost = f"the last round was skipped ({outcome.reason})"
        if lost:
            self._metrics.write("event", what="dropped", detail=f"{taken - flight.work.start} sequences: {lost}")

    def _follow(self, outcome: RoundOutcome, flight: Flight, progress: Progress) -> None:
        """Go on where the swarm is: in time, and in the slot's data."""
        if seat := outcome.seat:
            progress.slot, progress.position = seat.slot, seat.position
            self._swarm_tokens = [seat.tokens] * len(self._swarm_tokens)
            self._finished.clear()
            _stand(progress, self._schedule.joined(seat.step, seat.tokens))
        elif outcome.kind != "skipped":
            progress.position = max(progress.position, outcome.position)
            self._swarm_tokens[outcome.fragment] = outcome.tokens
            if self._by_steps and outcome.step >= self._schedule.steps:
                self._finished.add(outcome.fragment)
            step = outcome.step
            if outcome.kind == "committed" and step:  # the members were there when they launched, and went on like this one
                step = max(progress.step, step + self._inner_step - flight.inner_step)
            finished = not self._by_steps or len(self._finished) == self._schedule.num_fragments
            _stand(progress, self._schedule.landed(_standing(progress), step, min(self._swarm_tokens), finished))

    def _no_other_follows(self, flight: Flight) -> bool:
        return not self._by_steps or flight.fragment in self._finished or flight.inner_step == self._inner_step

    def _merge(self, flight: Flight, outcome: RoundOutcome, last: bool) -> None:
        """The island's work has counted: let its parameters meet the anchor."""
        if self._section.overlap == "eager" and not last:
            self._shares[flight.fragment] = outcome.share(flight.slot)
            return
        self._bring(flight, "anchor")
        alpha = 0.0 if last else self._section.merge_alpha
        flight.incoming[1].apply(partial(Tensor.lerp_, weight=1 - alpha) if alpha else Tensor.copy_)

    def _take_anchor(self, fragment: int, progress: Progress) -> None:
        """Nothing that was done since can count."""
        self._scatter(fragment, "anchor").apply()
        self._work[fragment].forget(progress.position)
        self._restart_eagerly(fragment, EagerStart.restart)

    def _restart_eagerly(self, fragment: int, how: Callable[[EagerStart], None]) -> None:
        self._shares[fragment] = 0.0
        if self._eager:
            how(self._eager[fragment])

    def _begin_to_bring(self, outcome: RoundOutcome) -> None:
        """The outcome is known before its time: what it lands with, probably, moves while training goes on."""
        flight = self._flights[outcome.fragment]
        flight.outcome = outcome
        kind = fate_of(flight.work, outcome, self._section.left_out, last=False).kind
        if kind == "counted" and self._section.overlap != "eager":
            self._bring(flight, "anchor")
        elif kind == "kept" and outcome.kind == "left_out":
            self._bring(flight, "movement")

    def _bring(self, flight: Flight, what: What) -> None:
        if flight.incoming is None or flight.incoming[0] != what:
            flight.incoming = what, self._scatter(flight.fragment, what)

    def _scatter(self, fragment: int, what: What) -> Incoming:
        state, source = self._state(fragment), None
        if state:
            source = state.anchor if what == "anchor" else state.anchor - state.previous_anchor
        return self._mover.scatter(fragment, _OWNER, source)

    def _state(self, fragment: int) -> FragmentState | None:
        return self._coordinator.state.fragments[fragment] if self._coordinator else None


def _standing(progress: Progress) -> Standing:
    return Standing(progress.step, progress.lr_step)


def _stand(progress: Progress, standing: Standing) -> None:
    progress.step, progress.lr_step = standing
