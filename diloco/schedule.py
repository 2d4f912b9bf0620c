"""Which fragments launch after which inner step, and where the learning rate stands. Pure: clocks and what others did
come in as numbers.
"""

from dataclasses import dataclass
from typing import Callable, Mapping, NamedTuple


class Standing(NamedTuple):
    """Inner steps done, and how many of them the learning rate counts."""

    step: int
    lr_step: int


@dataclass(frozen=True)
class StepSchedule:
    """Every fragment once in ``sync_every`` inner steps, evenly staggered, and all of them after the last step.

    Steps count from 1. All islands count alike, so one that fell behind goes on from the step that the others reached:
    its learning rate is theirs again, and its next round begins with theirs.
    """

    steps: int
    sync_every: int
    num_fragments: int = 1

    def launches(self, step: int, periods: Mapping[int, int] = {}) -> list[int]:
        """Fragments whose round begins after inner step ``step``: the same answer on every rank of an island.

        Args:
            periods: of fragments whose members have agreed on another one than ``sync_every``.
        """
        if step == self.steps:
            return list(range(self.num_fragments))
        return [index for index in range(self.num_fragments) if self._is_due(index, step, periods.get(index, self.sync_every))]

    def meeting_after(self, step: int, overlap: int) -> int:
        """The first step that no island can be done with before all have done one after ``step``: the next launch must have landed."""
        launch = next(later for later in range(step + 1, self.steps + self.sync_every + 1) if self.launches(later))
        return min(launch + overlap, max(self.steps, launch))

    def joined(self, step: int, tokens: int) -> Standing:
        """Where an island begins, or begins again, in a swarm that has reached ``step`` and counted ``tokens``."""
        return Standing(step, step)

    def stepped(self, standing: Standing) -> Standing:
        """After one more inner step, which ``standing`` has counted."""
        return standing

    def landed(self, standing: Standing, step: int, tokens: int, finished: bool = True) -> Standing:
        """After a round that found the swarm at ``step``, with ``tokens`` counted. After a partition that may be back.

        Args:
            finished: no fragment's last round is missing. Where one is, an island that falls behind jumps to the step before
                the last, after which those rounds come.
        """
        reached = min(step, self.steps) if finished else min(step, max(standing.step, self.steps - 1))
        return Standing(reached, reached) if step else standing

    def _is_due(self, fragment: int, step: int, period: int) -> bool:
        return (step + fragment * period // self.num_fragments) % period == 0


@dataclass(frozen=True)
class TimedSchedule:
    """Every fragment once in ``seconds``, evenly staggered, whatever number of inner steps an island does meanwhile.

    Steps of unlike islands then say little, so the learning rate and the end of the run follow the tokens that the
    committed rounds have counted, of ``total_tokens``. Between rounds the learning rate goes on with the island's own
    steps, as if all islands were as fast; it never reaches the end by that.
    """

    steps: int
    seconds: float
    total_tokens: int
    num_fragments: int = 1

    def joined(self, step: int, tokens: int) -> Standing:
        """See :class:`StepSchedule`."""
        return Standing(step, self._lr_step(tokens))

    def stepped(self, standing: Standing) -> Standing:
        """See :class:`StepSchedule`."""
        return Standing(standing.step, min(standing.lr_step, self.steps - 1))

    def landed(self, standing: Standing, step: int, tokens: int, finished: bool = True) -> Standing:
        """See :class:`StepSchedule`. The island's own count of steps goes on."""
        return Standing(standing.step, self._lr_step(tokens))

    def _lr_step(self, tokens: int) -> int:
        return min(self.steps, tokens * self.steps // self.total_tokens)


Schedule = StepSchedule | TimedSchedule


class RoundTimer:
    """When rounds of a :class:`TimedSchedule` begin; one clock for the island, that of rank 0.

    A round is due when its time is over, or others already wait for it: islands need no common clock, as the first to be
    ready calls the rest. Asked once after each inner step, so there is always something to offer.
    """

    def __init__(self, schedule: TimedSchedule, now: float) -> None:
        self._seconds, count = schedule.seconds, schedule.num_fragments
        self._since = [now - index * self._seconds / count for index in range(count)]

    def due(self, now: float, called: Callable[[int], bool]) -> list[int]:
        """An inner step is done: the fragments whose round begins now."""
        return [index for index, since in enumerate(self._since) if now - since >= self._seconds or called(index)]

    def landed(self, fragment: int, since: float) -> None:
        """The round has ended, however it did. What the island trained since ``since`` is not in it."""
        self._since[fragment] = since
