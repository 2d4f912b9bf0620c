"""A small language for what goes wrong in a swarm, so that a test or a benchmark reads as its plan of disasters.

    kill 2 @ round 3 during transfer      SIGKILL of the island's trainer, in the middle of sending its contribution
    kill exchange 2 @ 12s                 of its exchange process alone;  kill daemon 2  of its libp2p daemon
    restart 2 @ 40s                       the same command line again
    freeze 1 for 10s @ round 2            SIGSTOP of all its processes
    cut 0 for 20s @ 30s                   its link to everyone;  cut 0-1  to one other;  cut 0,1-2,3  two halves
    slow 10x 3 for 20s                    its link at a tenth of the rate; without a link its trainer
    nan 1 @ round 4                       a weight that is not a number
    corrupt 2 @ round 4                   the mean that it applies differs from what the others apply
    stranger @ round 2                    someone without a place in the run throws garbage at it

``@ 12s`` counts from when the plan is started, ``@ round 3`` is when the (first) victim has round 2 behind it; without
either it is at once. Nothing here touches a process: :mod:`fault_player` does.
"""

import re
from dataclasses import dataclass
from typing import Callable, Iterable

PHASES = ("transfer", "vote")

_LASTING = ("freeze", "cut", "slow")
_WITH_PHASE = ("kill", "kill exchange", "kill daemon", "freeze", "cut")
_SHAPE = re.compile(
    r"(?P<head>.*?)"
    r"(?:\s+for\s+(?P<lasts>\S+))?"
    r"(?:\s*@\s*(?P<when>round\s+\S+|\S+)(?:\s+during\s+(?P<during>\S+))?)?"
    r"\s*"
)


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        text: the line it was written as.
        islands: the victims; ``others``: the far side of a cut, empty for everyone else.
        seconds: how long it lasts; 0 where it is over at once.
        at_seconds: since the plan was started; not counted where ``at_round`` is given.
        at_round: the round that is to suffer it; 0: none in particular.
        during: the phase of that round: ``transfer``, ``vote`` or empty.
        factor: by which it is slower.
    """

    text: str
    kind: str
    islands: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    seconds: float = 0.0
    at_seconds: float = 0.0
    at_round: int = 0
    during: str = ""
    factor: float = 1.0

    def __str__(self) -> str:
        return self.text


class FaultError(ValueError):
    """A line that is no fault; says what is wrong with it and how it should look."""


def parse_plan(lines: str | Iterable[str]) -> list[Fault]:
    """The faults of a plan, one a line; empty lines and what follows a # don't count. Raises FaultError."""
    lines = lines.splitlines() if isinstance(lines, str) else lines
    bare = (line.partition("#")[0].strip() for line in lines)
    return [parse_fault(line) for line in bare if line]


def parse_fault(text: str) -> Fault:
    """One fault. Raises FaultError."""
    shape = _SHAPE.fullmatch(text.strip())
    kind, victims = _kind_and_rest(text, shape["head"])
    fault = {"text": text, "kind": kind, **_VICTIMS[kind](text, victims)}
    if bool(shape["lasts"]) != (kind in _LASTING):
        example = _EXAMPLES[kind]
        raise FaultError(
            f"{text!r}: {kind} lasts for a while; say how long, as in {example!r}"
            if kind in _LASTING
            else f"{text!r}: {kind} is over at once and takes no 'for', as in {example!r}"
        )
    if shape["lasts"]:
        fault["seconds"] = _seconds(text, shape["lasts"])
    if shape["when"]:
        fault |= _when(text, shape["when"])
    if shape["during"]:
        fault["during"] = _phase(text, kind, shape["during"], "at_round" in fault)
    return Fault(**fault)


def _kind_and_rest(text: str, head: str) -> tuple[str, str]:
    for kind in sorted(_VICTIMS, key=len, reverse=True):  # "kill exchange" before "kill"
        if head == kind or head.startswith(f"{kind} "):
            return kind, head.removeprefix(kind).strip()
    raise FaultError(f"{text!r}: no such fault; there are {', '.join(_VICTIMS)}")


def _when(text: str, when: str) -> dict[str, float]:
    if not when.startswith("round"):
        return {"at_seconds": _seconds(text, when)}
    number = when.removeprefix("round").strip()
    if not number.isdecimal() or int(number) < 1:
        raise FaultError(f"{text!r}: {number!r} is no round; they are counted from 1, as in '@ round 3'")
    return {"at_round": int(number)}


def _phase(text: str, kind: str, phase: str, has_round: bool) -> str:
    if phase not in PHASES:
        raise FaultError(f"{text!r}: a round has no phase {phase!r}; there are {' and '.join(PHASES)}")
    if kind not in _WITH_PHASE:
        raise FaultError(f"{text!r}: only {', '.join(_WITH_PHASE)} can be timed to a phase")
    if not has_round:
        raise FaultError(f"{text!r}: 'during' needs a round, as in '@ round 3 during {phase}'")
    return phase


def _seconds(text: str, value: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?s", value):
        raise FaultError(f"{text!r}: {value!r} is no time; write seconds, such as 12s or 0.5s")
    return float(value[:-1])


# -- who suffers, by kind ----------------------------------------------------------------------------------------------


def _islands(text: str, value: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(,\d+)*", value):
        raise FaultError(f"{text!r}: {value!r} is no island; write its number, such as 2")
    return tuple(int(number) for number in value.split(","))


def _one_island(text: str, value: str) -> dict[str, tuple[int, ...]]:
    islands = _islands(text, value)
    if len(islands) > 1:
        raise FaultError(f"{text!r}: one island a line here; write a second line for another one")
    return {"islands": islands}


def _two_sides(text: str, value: str) -> dict[str, tuple[int, ...]]:
    near, dash, far = value.partition("-")
    sides = {"islands": _islands(text, near), "others": _islands(text, far) if dash else ()}
    if both := set(sides["islands"]) & set(sides["others"]):
        raise FaultError(f"{text!r}: island {min(both)} can't be on both sides of a cut")
    return sides


def _slower(text: str, value: str) -> dict[str, object]:
    factor, _, island = value.partition(" ")
    if not re.fullmatch(r"\d+(\.\d+)?x", factor) or float(factor[:-1]) <= 1:
        raise FaultError(f"{text!r}: how much slower? Write a factor above 1, as in {_EXAMPLES['slow']!r}")
    return {"factor": float(factor[:-1]), **_one_island(text, island.strip())}


def _nobody(text: str, value: str) -> dict[str, object]:
    if value:
        raise FaultError(f"{text!r}: a stranger comes to whoever is there; leave {value!r} out")
    return {}


_VICTIMS: dict[str, Callable[[str, str], dict]] = {
    "kill": _one_island,
    "kill exchange": _one_island,
    "kill daemon": _one_island,
    "restart": _one_island,
    "freeze": _one_island,
    "cut": _two_sides,
    "slow": _slower,
    "nan": _one_island,
    "corrupt": _one_island,
    "stranger": _nobody,
}

_EXAMPLES = {
    **{kind: f"{kind} 2 @ 12s" for kind in _VICTIMS},
    "freeze": "freeze 1 for 10s @ round 2",
    "cut": "cut 0 for 20s @ 30s",
    "slow": "slow 10x 3 for 20s",
    "stranger": "stranger @ round 2",
}
