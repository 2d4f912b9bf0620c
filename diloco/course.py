"""Where in the run an island is, and how that follows the swarm: all ranks of the island reckon alike."""

from diloco.exchange.base import RoundOutcome, Seat
from diloco.flight import Flight, Logbook
from diloco.schedule import Schedule, Standing, StepSchedule
from islands.progress import Progress


class Course:
    """Moves an island's progress by the schedule.

    Attributes:
        by_steps: rounds come after so many inner steps, and not by the clock.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.by_steps = isinstance(schedule, StepSchedule)

    def join(self, seat: Seat, progress: Progress) -> None:
        """The island has taken its place."""
        _stand(progress, self._schedule.joined(seat.step, seat.tokens))

    def step(self, progress: Progress) -> None:
        """One more inner step is done."""
        _stand(progress, self._schedule.stepped(_standing(progress)))

    def ends(self, progress: Progress) -> bool:
        """Whether the run is over."""
        return progress.lr_step >= self._schedule.steps

    def follow(self, outcome: RoundOutcome, flight: Flight, progress: Progress, log: Logbook) -> None:
        """Go on where the swarm is: in time, and in the slot's data."""
        if seat := outcome.seat:
            progress.slot, progress.position, log.lease = seat.slot, seat.position, seat.lease
            log.tokens = [seat.tokens] * len(log.tokens)
            log.finished.clear()
            self.join(seat, progress)
        elif outcome.kind != "skipped":
            progress.position = max(progress.position, outcome.position)
            log.tokens[outcome.fragment] = outcome.tokens
            if self.by_steps and outcome.step >= self._schedule.steps:
                log.finished.add(outcome.fragment)
            step = outcome.step
            if outcome.kind == "committed" and step:  # the members were there when they launched, and went on like this one
                step = max(progress.step, step + log.inner_step - flight.inner_step)
            finished = not self.by_steps or len(log.finished) == self._schedule.num_fragments
            _stand(progress, self._schedule.landed(_standing(progress), step, min(log.tokens), finished))

    def is_last(self, flight: Flight, log: Logbook) -> bool:
        """Where the run is over: whether no other round of the fragment follows this one."""
        return not self.by_steps or flight.fragment in log.finished or flight.inner_step == log.inner_step


def _standing(progress: Progress) -> Standing:
    return Standing(progress.step, progress.lr_step)


def _stand(progress: Progress, standing: Standing) -> None:
    progress.step, progress.lr_step = standing
