"""Where the islands of one process meet, and how a round among them is decided: by the rules, order and arithmetic of a real one."""

import threading
import time
from dataclasses import dataclass, field
from typing import Sequence

from torch import Tensor

from diloco.contributions import (
    RULES,
    Measured,
    Size,
    capped_weights,
    independent_values,
    most_opposite,
    too_large,
    understated,
)
from diloco.ledger import Counted
from diloco.outer_state import FragmentState
from diloco.reduction import Seen, Wire, chunk_slice, reduce_chunk, sends_whole, through

NOT_FINITE = "own pseudo-gradient is not finite"


@dataclass(frozen=True)
class Limits:
    """What a round allows: ``seconds`` until it is given up, members that it needs, and how much one may weigh."""

    seconds: float
    min_islands: int = 1
    max_weight_ratio: float = float("inf")


@dataclass
class Meeting:
    """One attempt at a round: what islands answer; once it is decided, the mean or the reason why there is none.

    Attributes:
        expected: slots that it waits for: those that were there when it began, and have not left since.
        counted: what it counts, in the order of slots, with the ``weights``.
        excluded: why a rule left out what was offered, by slot.
        cosines: of each slot that counts, with the mean.
        decode_seconds, step_seconds: that the mean, and the step of the outer optimizer, took whoever did it for all.
    """

    expected: set[int]
    offers: dict[int, tuple[list[Tensor], Counted]] = field(default_factory=dict)
    passed: set[int] = field(default_factory=set)
    withdrawn: set[int] = field(default_factory=set)
    decided: bool = False
    counted: tuple[Counted, ...] = ()
    weights: tuple[float, ...] = ()
    excluded: dict[int, str] = field(default_factory=dict)
    mean: Tensor | None = None
    cosines: dict[int, float] = field(default_factory=dict)
    decode_seconds: float = 0.0
    step_seconds: float = 0.0
    reason: str = ""

    @property
    def missing(self) -> set[int]:
        """Slots that it waits for."""
        return set() if self.decided else self.expected - self.offers.keys() - self.passed

    @property
    def committed(self) -> bool:
        """Whether it was decided, and not skipped."""
        return self.decided and not self.reason

    @property
    def members(self) -> tuple[int, ...]:
        """Slots whose contributions count."""
        return tuple(one.slot for one in self.counted)

    def withdraw(self, slot: int) -> None:
        """Take back what ``slot`` said: it waits no longer."""
        self.withdrawn.add(slot)
        self.offers.pop(slot, None)
        self.passed.discard(slot)

    def decide(self, state: FragmentState, wire: Wire, limits: Limits) -> None:
        """Choose who counts, and take the mean; ``state`` is that of any island. What was offered is let go."""
        started, convicted = time.monotonic(), {}
        while (rule := self._try(state, wire, limits, convicted)) is not None:
            convicted |= rule
        self.decided, self.decode_seconds = True, time.monotonic() - started
        self.offers.clear()

    def _try(self, state: FragmentState, wire: Wire, limits: Limits, convicted: dict[int, str]) -> dict[int, str] | None:
        """One attempt. Returns whom it found out, by which rule; None where it holds."""
        offers = {slot: offer for slot, offer in self.offers.items() if slot not in convicted}
        sizes = {slot: Size(counted.tokens, counted.norm) for slot, (_, counted) in offers.items()}
        rules = convicted | {slot: "norm" for slot in too_large(sizes, state.ledger.typical_norm)}
        self.excluded = {slot: RULES[rule].format(norm=self.offers[slot][1].norm) for slot, rule in rules.items()}
        members = sorted(offers.keys() - rules.keys())
        if len(members) < max(1, limits.min_islands):
            few = f"only islands {members} offered something; exchange.min_islands={limits.min_islands}"
            self.reason = few if self.offers else NOT_FINITE
            return None
        self.counted = tuple(offers[slot][1] for slot in members)
        self.weights = capped_weights([one.tokens for one in self.counted], limits.max_weight_ratio)
        seen = Seen(len(members))
        self.mean = _mean(state, wire, [offers[slot][0] for slot in members], self.weights, seen)
        measured = [Measured(square, along) for square, along in zip(seen.squares, seen.alongs, strict=True)]
        self.cosines = {slot: one.cosine(seen.mean_square) for slot, one in zip(members, measured, strict=True)}
        worst = understated([one.norm for one in self.counted], measured)
        if worst is not None:
            return {members[worst]: "claim"}
        worst = most_opposite(self.weights, measured, seen.mean_square, independent_values(wire.contribution.bits, state.numel))
        return None if worst is None else {members[worst]: "opposite"}


class Hub:
    """Where the islands of one process meet. Thread-safe; tensors are shared, never copied.

    Args:
        condition: what islands wait on; by default one for threads that run side by side.

    Attributes:
        expected: slots that a round which begins now waits for.
    """

    def __init__(self, num_islands: int, condition: threading.Condition | None = None) -> None:
        self.condition = condition or threading.Condition()
        self.expected = set(range(num_islands))
        self._meetings: dict[tuple[int, int], Meeting] = {}

    def meeting(self, fragment: int, height: int) -> Meeting:
        """The round that follows on that height; a new one if there is none, or it was skipped. Called with the condition held."""
        key, found = (fragment, height), self._meetings.get((fragment, height))
        if found is None or found.decided and not found.committed:
            self._meetings = {other: each for other, each in self._meetings.items() if other[0] != fragment or not each.decided}
            found = self._meetings[key] = Meeting(set(self.expected))
        return found

    def is_open(self, fragment: int, height: int) -> bool:
        """Whether an island waits in that round. Called with the condition held."""
        found = self._meetings.get((fragment, height))
        return found is not None and not found.decided and bool(found.offers)

    def is_past(self, fragment: int, height: int) -> bool:
        """Whether that round was committed. Called with the condition held."""
        found = self._meetings.get((fragment, height))
        return found is not None and found.committed

    def join(self, slot: int) -> int:
        """From now on rounds that begin wait for ``slot``. Returns up to which of its sequences open rounds may still count."""
        with self.condition:
            self.expected.add(slot)
            open_offers = [each.offers[slot][1] for each in self._meetings.values() if slot in each.offers]
            return max((one.position for one in open_offers), default=0)

    def leave(self, slot: int) -> None:
        """No round waits for ``slot`` any more; what it has offered counts."""
        with self.condition:
            for waiting in (self.expected, *(each.expected for each in self._meetings.values())):
                waiting.discard(slot)
            self.condition.notify_all()


def _mean(state: FragmentState, wire: Wire, encoded: list[list[Tensor]], weights: Sequence[float], seen: Seen) -> Tensor:
    """As all apply it: as it is, or as a reducer would have sent it on."""
    mean = state.local.new_empty(state.numel)
    for index, chunk in enumerate(zip(*encoded, strict=True)):
        piece = chunk_slice(state.numel, index)
        part = reduce_chunk(wire.contribution, chunk, weights, piece.stop - piece.start, state.dtype, seen)
        mean[piece] = part if sends_whole(wire, len(weights)) else through(wire.mean, part)
    return mean
