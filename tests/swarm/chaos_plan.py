"""A plan of faults made by dice: every kind comes up equally often, and one island at a time suffers."""

import random
from typing import Iterator, Sequence

KINDS = ("kill", "freeze", "cut", "slow", "nan", "kill exchange", "kill daemon", "stranger")

_LASTS_SECONDS = 12  # longer than it takes to count an island as gone
_AWAY_SECONDS = 3  # from a kill until the island is started again
_FIRST_SECONDS = 10


def random_plan(
    seed: int, seconds: float, islands: int, every: float, recovery: float, kinds: Sequence[str] = KINDS
) -> list[str]:
    """Lines in the language of :mod:`faults`: a fault at every ``every`` seconds, each of ``kinds`` before any comes again.

    The founder (island 0) is killed too, as soon as anyone is killed a second time, or else instead of the other one.

    Args:
        seconds: of the whole; the last ``recovery`` of them are left for getting over the last fault.
    """
    dice = random.Random(seed)
    moments = [_FIRST_SECONDS + number * every for number in range(int((seconds - recovery - _FIRST_SECONDS) // every) + 1)]
    drawn = [(kind, dice.randrange(islands)) for kind, _ in zip(_bag(dice, kinds), moments)]
    kills = [index for index, (kind, _) in enumerate(drawn) if kind == "kill"]
    if kills:
        drawn[kills[min(1, len(kills) - 1)]] = ("kill", 0)
    return [line for moment, (kind, victim) in zip(moments, drawn) for line in _lines(kind, victim, moment)]


def _bag(dice: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    while True:
        yield from dice.sample(kinds, len(kinds))


def _lines(kind: str, victim: int, moment: float) -> list[str]:
    match kind:
        case "kill":
            return [f"kill {victim} @ {moment:g}s", f"restart {victim} @ {moment + _AWAY_SECONDS:g}s"]
        case "slow":
            return [f"slow 10x {victim} for {_LASTS_SECONDS}s @ {moment:g}s"]
        case "freeze" | "cut":
            return [f"{kind} {victim} for {_LASTS_SECONDS}s @ {moment:g}s"]
        case "stranger":
            return [f"stranger @ {moment:g}s"]
    return [f"{kind} {victim} @ {moment:g}s"]
