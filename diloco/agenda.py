"""What an island does between two inner steps, as its rank 0 knows: which rounds land, which are launched."""

import time
from typing import Callable

from diloco.config import OuterSection
from diloco.exchange.base import Exchange, RoundOutcome
from diloco.flight import Boundary, Flight, Logbook
from diloco.pace import Pacing
from diloco.schedule import RoundTimer, Schedule, StepSchedule
from islands.train_loop import Progress

_LOOK_SECONDS = 0.002


class Agenda:
    """On rank 0.

    Args:
        brings_early: what has arrived before its time is moved to the other ranks meanwhile, if there are any.
        hurries: whether someone wants training to stop: then it waits for no outcome. What is in flight goes into the last checkpoint.
        patience: seconds from a launch until an outcome is waited for all the same, which the exchange then gives or ends.
        clock: by which rounds are due, where they go by the clock.
    """

    def __init__(
        self,
        schedule: Schedule,
        section: OuterSection,
        exchange: Exchange,
        pacing: Pacing,
        brings_early: bool,
        hurries: Callable[[], bool] | None = None,
        patience: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._schedule, self._section, self._exchange = schedule, section, exchange
        self._pacing, self._brings_early = pacing, brings_early
        self._hurries, self._patience, self._clock = hurries, patience, clock
        self._agreed_at: dict[int, int] = {}  # by fragment, the step of the last round that the islands agreed on
        self._timer = None if isinstance(schedule, StepSchedule) else RoundTimer(schedule, clock())

    def next(self, progress: Progress, log: Logbook) -> Boundary:
        """What to do now; asked again until nothing lands and nothing is launched. Waits for outcomes that are due."""
        due = {index for index in self._due(progress, log) if log.launched_at[index] < log.inner_step} - log.finished
        landing = [flight for flight in log.flights.values() if self._lands(flight, flight.fragment in due, progress, log)]
        if landing and (self._ends(progress) or self._wait_for(landing)):
            return Boundary(landing=tuple(self._outcome(flight) for flight in landing))
        if self._timer is None:
            log.missed |= due & log.flights.keys()
        if landing:
            return Boundary()
        if launching := [index for index in sorted(due - log.flights.keys()) if log.work[index].tokens]:
            log.missed.difference_update(launching)
            return Boundary(launching=tuple(launching))
        early = [each for each in log.flights.values() if self._brings_early and not each.outcome and self._arrived(each)]
        return Boundary(arriving=tuple(self._outcome(flight) for flight in early))

    def landed(self, flight: Flight) -> None:
        """By the clock, the next round of its fragment is due when the island has trained so long since."""
        if flight.outcome and flight.outcome.kind != "skipped":
            self._agreed_at[flight.fragment] = flight.outcome.step
        if self._timer:
            self._timer.landed(flight.fragment, flight.launched + flight.stall_seconds)

    def _due(self, progress: Progress, log: Logbook) -> set[int]:
        """Fragments whose round begins now: by schedule, or because the others are waiting.

        Not for one in flight, of which the exchange may know nothing yet: its parameters are on their way to it.
        """
        everything = range(self._schedule.num_fragments)
        if self._timer is None:
            late = {index for index in everything if index not in log.flights and self._exchange.is_late(index)}
            scheduled = self._schedule.launches(progress.step, self._pacing.periods)
            return {*(index for index in scheduled if self._comes_next(index, progress)), *late, *log.missed}
        if self._ends(progress):
            return {index for index in everything if self._exchange.called(index)}
        return set(self._timer.due(self._clock(), self._exchange.called))

    def _comes_next(self, fragment: int, progress: Progress) -> bool:
        """Not the round of a step which the others had without this island, and to which it has come only by taking that over: it would
        wait for them in the next round of this fragment, and they for it in that of another."""
        return self._agreed_at.get(fragment, -1) < progress.step

    def _lands(self, flight: Flight, is_due: bool, progress: Progress, log: Logbook) -> bool:
        if not self._ends(progress):
            overlap = self._section.overlap
            if not (is_due if overlap == "eager" else log.inner_step >= flight.inner_step + overlap):
                return False
            if self._section.late == "land_late":
                return self._arrived(flight)
        return True

    def _wait_for(self, flights: list[Flight]) -> bool:
        """Returns whether their outcomes may be taken now; not so where someone wants to stop before."""
        while self._hurries and not all(self._arrived(flight) or flight.age > self._patience for flight in flights):
            if self._hurries():
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def _arrived(self, flight: Flight) -> bool:
        if flight.outcome or not flight.gathered.done():
            return bool(flight.outcome)
        return bool(flight.gathered.exception()) or self._exchange.arrived(flight.fragment)  # an error, which to land raises

    def _outcome(self, flight: Flight) -> RoundOutcome:
        flight.gathered.result()
        return flight.outcome or self._exchange.outcome(flight.fragment)

    def _ends(self, progress: Progress) -> bool:
        return progress.lr_step >= self._schedule.steps
