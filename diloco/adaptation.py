"""Holding a target utilization: cheaper codecs and rarer rounds as links get slower. Pure arithmetic on what members agreed on.

What may be chosen lies on a ladder: the codecs of the run at its shortest period, from the richest to the cheapest, then the
cheapest at longer and longer periods. Each committed round tells where the next one of its fragment stands on it.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Sequence

_LONGER = 1.5  # periods grow by this factor
_MARGIN = 0.25  # of the waiting that the target allows; a step back to more bytes needs so much less
_LEAST, _MOST = 1e-9, 1e9  # seconds: what a member says outside of this is none that its clock has shown


class Pace(NamedTuple):
    """What an island measured since the last round of a fragment; zeros where there was none.

    Attributes:
        step_seconds: of an inner step.
        round_seconds: that the last round took once all were there.
        free_seconds: that a round may take before training waits for it.
    """

    step_seconds: float = 0.0
    round_seconds: float = 0.0
    free_seconds: float = 0.0


@dataclass(frozen=True)
class Adaptation:
    """The ladder of a run.

    Attributes:
        target: share of the time in which the islands are to compute.
        shortest, longest: inner steps between two rounds of a fragment.
        bits: of each codec that may be used, from the richest.
        fragments: that share a period.
    """

    target: float
    shortest: int
    longest: int
    bits: tuple[float, ...]
    fragments: int = 1

    @property
    def rungs(self) -> int:
        """How many there are."""
        return len(self._ladder)

    def period(self, rung: int) -> int:
        """Inner steps between two rounds of a fragment."""
        return self._at(rung)[0]

    def codec(self, rung: int) -> int:
        """Index of the codec."""
        return self._at(rung)[1]

    def after(self, rung: int, paces: Sequence[Pace]) -> int:
        """Where the next round stands: on the first rung that is predicted to hold the target.

        Down at once, as training waits; up by one rung, and only if that holds the target with room to spare.
        """
        if not paces or any(pace.step_seconds <= 0 or pace.round_seconds <= 0 for pace in paces):
            return rung
        rung = min(rung, self.rungs - 1)
        paces = [Pace(*(min(max(seconds, _LEAST), _MOST) for seconds in pace)) for pace in paces]
        good = (index for index in range(self.rungs) if self._utilization(rung, index, paces) >= self.target)
        wanted = next(good, self.rungs - 1)
        if wanted >= rung:
            return wanted
        eased = self.target + _MARGIN * (1 - self.target)
        return rung - 1 if self._utilization(rung, rung - 1, paces) >= eased else rung

    def _at(self, rung: int) -> tuple[int, int]:
        """A run that went on with other settings may come from beyond the end of this ladder."""
        return self._ladder[min(rung, self.rungs - 1)]

    def _utilization(self, now: int, then: int, paces: Sequence[Pace]) -> float:
        """Mean over the members, if a round takes time in proportion to its bytes."""
        ratio = self.bits[self.codec(then)] / self.bits[self.codec(now)]
        shares = []
        for pace in paces:
            computing = self.period(then) * pace.step_seconds / self.fragments
            waiting = max(0.0, pace.round_seconds * ratio - pace.free_seconds)
            shares.append(computing / (computing + waiting))
        return sum(shares) / len(shares)  # in the order of the members, and so the same on all of them

    @cached_property
    def _ladder(self) -> list[tuple[int, int]]:
        last = len(self.bits) - 1
        rungs, period = [(self.shortest, codec) for codec in range(len(self.bits))], float(self.shortest)
        while rungs[-1][0] < self.longest:
            period = min(period * _LONGER, float(self.longest))
            rungs.append((max(int(period), rungs[-1][0] + 1), last))
        return rungs
