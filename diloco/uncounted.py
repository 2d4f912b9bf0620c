"""What an island has done and no committed round has counted yet: what it offers, and what becomes of it."""

from dataclasses import dataclass
from typing import Literal

from diloco.adaptation import Pace
from diloco.exchange.base import RoundOutcome, Work


class Uncounted:
    """The uncounted work of one island on one fragment: sequences :attr:`start` up to where the island is."""

    def __init__(self, start: int) -> None:
        self.start, self.tokens = start, 0

    def offer(self, position: int, step: int, pace: Pace = Pace(), lease: tuple[int, int] | None = None) -> Work:
        """All of it, for a round that begins at ``position``."""
        return Work(self.tokens, self.start, position, step, pace, lease)

    def counted(self, work: Work) -> None:
        """A round has counted ``work``; what was done since stays."""
        self.tokens -= work.tokens
        self.start = work.position

    def forget(self, position: int) -> None:
        """None of it can count; what comes next starts at ``position``."""
        self.start, self.tokens = position, 0


@dataclass(frozen=True)
class Fate:
    """What became of offered work: it was ``counted``, is ``kept`` for the next round, or ``dropped``, with the reason."""

    kind: Literal["counted", "kept", "dropped"]
    reason: str = ""


def fate_of(work: Work, outcome: RoundOutcome, left_out: Literal["carry", "drop"], last: bool) -> Fate:
    """What the outcome of its round makes of ``work``.

    Args:
        left_out: what becomes of work that a round went on without, where there is a choice.
        last: no round follows.
    """
    if outcome.kind == "committed":
        return Fate("counted")
    if outcome.seat:
        return Fate("dropped", f"it was done in a slot that the island has lost; now it has slot {outcome.seat.slot}")
    if not outcome.finite:  # nothing can be kept of such parameters, and no gradient would ever mend them
        return Fate("dropped", f"the parameters were not finite at step {work.step}")
    if outcome.kind == "skipped":
        return Fate("kept")
    if outcome.rejected:  # by the others, or by this island itself, and not for being late
        return Fate("dropped", outcome.reason)
    if outcome.position == work.position:  # the round committed with it after all, and the island did not hear of that
        return Fate("counted")
    if outcome.position > work.start:
        return Fate("dropped", f"sequences up to {outcome.position} of the slot count already, and would count twice")
    if left_out == "drop":
        return Fate("dropped", f"left out of a round, and outer.left_out is drop ({outcome.reason})")
    return Fate("dropped", f"left out of the last round ({outcome.reason})") if last else Fate("kept")
