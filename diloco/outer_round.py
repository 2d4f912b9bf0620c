"""The hook that makes an island one of many: gather, exchange, outer step, scatter.

All ranks of the island call it alike. Rank 0 holds the outer state and talks to the exchange; the others learn from it what happens
between two inner steps, so that all of them move the same fragments in the same order.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Callable

from torch import Tensor

from diloco.adaptation import Pace
from diloco.agenda import Agenda
from diloco.config import OuterSection
from diloco.course import Course
from diloco.eager import EagerStart
from diloco.exchange.base import Exchange, RoundOutcome, Seat
from diloco.flight import Flight, Logbook, What
from diloco.outer_checkpoint import Copying, OuterCopy
from diloco.outer_state import FragmentState, OuterState
from diloco.pace import Pacing
from diloco.round_rows import write_round
from diloco.schedule import Schedule
from diloco.uncounted import fate_of
from islands.checkpoint_part import Saved
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


class OuterRound:
    """A :class:`~islands.train_loop.StepHook` that runs the outer rounds.

    Args:
        coordinator: on rank 0; None on the others.
        round_seconds: the longest that a round may take, which ranks then wait for rank 0.
        hurries: see :class:`~diloco.agenda.Agenda`.
        clock: by which all is measured, and rounds by the clock are due.
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
        hurries: Callable[[], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule, self._section, self._mover = schedule, section, mover
        self._coordinator, self._metrics = coordinator, metrics
        self._say = FirstRankSays(process, "rounds that begin or end")
        self._several_ranks = process.world_size > 1
        self._course = Course(schedule)
        self._round_seconds, self._hurries, self._clock = round_seconds, hurries, clock
        self._stepping_since = 0.0  # when the inner step that comes next could begin
        self._log = Logbook.begin(schedule.num_fragments, Seat(slot=0))
        self._pacing: Pacing | None = None
        self._agenda: Agenda | None = None
        self._eager: list[EagerStart] = []
        self._copying: Copying | None = None

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
        progress, self._log = Progress(slot=seat.slot, position=seat.position), Logbook.begin(count, seat)
        self._course.join(seat, progress)
        if self._coordinator:
            self._begin(self._coordinator)
        self._stepping_since = self._clock()
        return progress

    def go_on(self, log: Logbook, progress: Progress) -> Progress:
        """Begin where an earlier process left off: outer state, parameters and all else are as they were then.

        Args:
            log: its flights without an outcome are launched again.

        Returns:
            ``progress``, where in the run that is.
        """
        self._log = log
        if self._coordinator:
            self._begin(self._coordinator)
            for flight in log.flights.values():
                if flight.outcome is None:
                    self._coordinator.exchange.launch(flight.fragment, flight.work)
        self._stepping_since = self._clock()
        return progress

    @property
    def steps(self) -> int:
        """Of the run."""
        return self._schedule.steps

    def make_eager_starts(self) -> list[EagerStart]:
        """On rank 0, where rounds overlap eagerly: one for each fragment, kept, and returned to be filled."""
        if self._coordinator and self._section.overlap == "eager":
            self._eager = [EagerStart(fragment) for fragment in self._coordinator.state.fragments]
        return self._eager

    def snapshot(self) -> Callable[[], Saved]:
        """See :class:`~islands.checkpoint_part.CheckpointPart`."""
        if not self._coordinator:
            return Saved
        fragments, coordinator = self._mover.fragments, self._coordinator
        copy = OuterCopy(self._log, fragments, coordinator.state, coordinator.exchange, self._eager)
        self._copying = copy.copying
        return copy.collect

    def _begin(self, coordinator: Coordinator) -> None:
        """What rank 0 does alone at the start."""
        exchange, state = coordinator.exchange, coordinator.state
        self._pacing = Pacing(self._section, state)
        early, waits = self._several_ranks, (self._hurries, self._round_seconds, self._clock)
        self._agenda = Agenda(self._schedule, self._section, exchange, self._pacing, early, *waits)
        self._eager = self._eager or self.make_eager_starts()
        exchange.started()

    def after_step(self, progress: Progress, tokens: int) -> float:
        """See :class:`~islands.train_loop.StepHook`."""
        started = self._clock()
        self._log.inner_step += 1
        for work in self._log.work:
            work.tokens += tokens
        self._course.step(progress)
        if self._coordinator:
            self._coordinator.exchange.progress(progress.step, tokens / (started - self._stepping_since))
            self._pacing.stepped(started - self._stepping_since)
        while self._acts(progress):
            pass
        if self._course.ends(progress):
            self._end_together(progress)
        if self._coordinator:
            for event in self._coordinator.exchange.events():
                self._metrics.write("event", what=event.what, detail=event.detail)
        self._stepping_since = self._clock()
        return self._stepping_since - started

    def _acts(self, progress: Progress) -> bool:
        """Do what rank 0 says. Returns whether that may have given rise to more."""
        began = self._clock()
        boundary = self._say(self._agenda and self._agenda.next(progress, self._log), self._round_seconds + _GRACE_SECONDS)
        for outcome in boundary.landing:
            self._log.flights[outcome.fragment].stall_seconds += self._clock() - began
            self._land(outcome, progress)
            began = self._clock()
        for fragment in boundary.launching:
            self._launch(fragment, progress)
        for outcome in boundary.arriving:
            self._begin_to_bring(outcome)
        return bool(boundary.landing or boundary.launching)

    # -- launch --------------------------------------------------------------------------------------------------------

    def _launch(self, fragment: int, progress: Progress) -> None:
        pace = self._pacing.take(fragment) if self._pacing else Pace()
        work = self._log.work[fragment].offer(progress.position, progress.step, pace, self._log.lease)
        height = self._coordinator.state.fragments[fragment].height if self._coordinator else 0
        flight = Flight(fragment, self._mover.numel(fragment), work, self._log.inner_step, progress.slot, height, clock=self._clock)
        self._log.flights[fragment], self._log.launched_at[fragment] = flight, self._log.inner_step
        state = self._state(fragment)
        if state:
            if self._copying:
                self._copying.wait(fragment)
            state.takes_parameters()

        def offer() -> None:
            flight.gather_seconds = flight.age
            if self._coordinator:
                self._coordinator.exchange.launch(fragment, flight.work)

        eager = self._section.overlap == "eager"
        flight.gathered = self._mover.gather(fragment, _OWNER, state and state.local, *(() if eager else (offer,)))
        if eager:
            flight.gathered.result()
            self._go_on_eagerly(fragment, ends=self._course.ends(progress))
            offer()
        flight.stall_seconds += flight.age

    def _go_on_eagerly(self, fragment: int, ends: bool) -> None:
        """Offer what was done in the period that ends here, and begin the next where the anchor will probably be."""
        share, self._log.shares[fragment] = self._log.shares[fragment], 0.0
        if self._eager:
            self._eager[fragment].offer(share)
        if share and not ends:
            source = self._eager[fragment].base if self._eager else None
            self._mover.scatter(fragment, _OWNER, source).apply()

    # -- landing -------------------------------------------------------------------------------------------------------

    def _land(self, outcome: RoundOutcome, progress: Progress) -> None:
        """Let progress and parameters follow an outcome."""
        began, flight, taken = self._clock(), self._log.flights.pop(outcome.fragment), progress.position
        flight.outcome = outcome
        if flight.void:
            self._over(flight, outcome, progress)
            return
        self._course.follow(outcome, flight, progress, self._log)
        last = self._course.ends(progress) and self._course.is_last(flight, self._log)
        fate = fate_of(flight.work, outcome, self._section.left_out, last)
        if outcome.seat:
            for other in self._log.flights.values():
                other.void = True
            for index in range(self._schedule.num_fragments):
                self._take_anchor(index, progress)
        elif fate.kind == "counted":
            self._log.work[flight.fragment].counted(flight.work)
            if outcome.rejected:
                self._tell_dropped(flight.fragment, progress, "done since the launch, on parameters that lack a round")
                self._take_anchor(flight.fragment, progress)
            else:
                self._merge(flight, outcome, last)
        elif fate.kind == "dropped":
            self._take_anchor(flight.fragment, progress)
        elif outcome.kind == "left_out":  # the others moved on: move as far, and keep what this island added to it
            self._bring(flight, "movement")
            flight.incoming[1].apply(Tensor.add_)
            self._restart_eagerly(flight.fragment, EagerStart.left_out)
        else:
            self._restart_eagerly(flight.fragment, EagerStart.skipped)
        flight.scatter_seconds += self._clock() - began
        flight.stall_seconds += self._clock() - began
        if self._pacing and (told := self._pacing.landed(flight, outcome)):
            self._metrics.write("event", what="adapted", detail=told)
        self._over(flight, outcome, progress)
        lost = fate.reason
        if last and self._course.by_steps and (outcome.kind, fate.kind) == ("skipped", "kept"):  # nothing replaces these parameters
            lost = f"the last round was skipped ({outcome.reason})"
        if lost:
            self._metrics.write("event", what="dropped", detail=f"{taken - flight.work.start} sequences: {lost}")

    def _over(self, flight: Flight, outcome: RoundOutcome, progress: Progress) -> None:
        if self._agenda:
            self._agenda.landed(flight)
        write_round(self._metrics, flight, outcome, progress.step, self._schedule.num_fragments)

    def _merge(self, flight: Flight, outcome: RoundOutcome, last: bool) -> None:
        """The island's work has counted: let its parameters meet the anchor."""
        if self._section.overlap == "eager" and not last:
            self._log.shares[flight.fragment] = outcome.share(flight.slot)
            return
        self._bring(flight, "anchor")
        alpha = 0.0 if last else self._section.merge_alpha
        flight.incoming[1].apply(partial(Tensor.lerp_, weight=1 - alpha) if alpha else Tensor.copy_)

    def _end_together(self, progress: Progress) -> None:
        """No round follows. By the clock there is no last one of every fragment; nor where the others had it without this island."""
        for index, work in enumerate(self._log.work):
            if not self._course.by_steps or work.tokens and index in self._log.finished:
                self._tell_dropped(index, progress, "the run has ended")
                self._take_anchor(index, progress)

    def _tell_dropped(self, fragment: int, progress: Progress, why: str) -> None:
        work = self._log.work[fragment]
        if work.tokens:
            lost = f"{progress.position - work.start} sequences of fragment {fragment}"
            self._metrics.write("event", what="dropped", detail=f"{lost}: {why}")

    def _take_anchor(self, fragment: int, progress: Progress) -> None:
        """Nothing that was done since can count."""
        self._scatter(fragment, "anchor").apply()
        self._log.work[fragment].forget(progress.position)
        self._restart_eagerly(fragment, EagerStart.restart)

    def _restart_eagerly(self, fragment: int, how: Callable[[EagerStart], None]) -> None:
        self._log.shares[fragment] = 0.0
        if self._eager:
            how(self._eager[fragment])

    def _begin_to_bring(self, outcome: RoundOutcome) -> None:
        """The outcome is known before its time: what it lands with, probably, moves while training goes on."""
        flight = self._log.flights[outcome.fragment]
        flight.outcome = outcome
        kind = "" if flight.void else fate_of(flight.work, outcome, self._section.left_out, last=False).kind
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
