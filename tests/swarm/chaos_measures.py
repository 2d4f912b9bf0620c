"""What a swarm lost to the faults that it lived through, from the rows that its islands wrote. Pure functions."""

import statistics
from typing import Iterator, Sequence

from fault_player import Strike
from island_process import Life

from diloco.run_files import Row

#: Of an island, one for each time that it was started.
Lives = Sequence[Life]

#: From which end of these faults recovery is counted; a killed island's is counted from its restart.
_FROM_BEGIN = ("restart", "nan", "kill exchange", "kill daemon")
_FROM_END = ("freeze", "cut", "slow")


_OWN_FAULT_SECONDS = 60.0  # work that an island drops within so long of being the victim was lost by that
_HOOK_SECONDS = 0.01  # what it takes after each step to find that there is nothing to wait for


def steps_lost(islands: Sequence[Lives], strikes: Sequence[Strike]) -> int:
    """Inner steps of islands that were not the victim then: missing among the rows, done twice, or dropped from the model.

    Told by the data, of which every step takes a batch: a step's number may jump, to where the swarm is.
    """
    lost = 0
    for slot, lives in enumerate(islands):
        own = [strike.began for strike in strikes if slot in strike.fault.islands and strike.began]
        for life in lives:
            rows = life.of_kind("step")
            taken = [after["position"] - before["position"] for before, after in zip(rows, rows[1:])]
            batch = min((count for count in taken if count > 0), default=1)
            lost += sum(abs(count // batch - 1) for count in taken)
            for row in life.of_kind("event"):
                if row["what"] == "dropped" and not any(0 <= row["time"] - began < _OWN_FAULT_SECONDS for began in own):
                    lost += int(row["detail"].split()[0]) // batch
    return lost


def step_seconds(islands: Sequence[Lives]) -> float:
    """Median time from step to step where nobody waited."""
    gaps = []
    for life in (life for lives in islands for life in lives):
        steps = life.of_kind("step")
        pairs = zip(steps, steps[1:])
        gaps += [after["time"] - before["time"] for before, after in pairs if after["stall_seconds"] < _HOOK_SECONDS]
    return statistics.median(gaps)


def throughput_ratio(islands: Sequence[Lives], strikes: Sequence[Strike], step: float) -> float:
    """Steps done, of those that all islands could have done in the time in which they were able to.

    An island is able from the first step of a life to the end of it, but while it is frozen; of the time in which its
    trainer is slowed ``x`` times only ``1 / x`` counts.
    """
    done, able = 0, 0.0
    for slot, lives in enumerate(islands):
        for life in (life for life in lives if life.of_kind("step")):
            first = life.of_kind("step")[0]["time"]
            done += len(life.of_kind("step")) - 1
            able += life.ended - first - _held_up(slot, strikes, first, life.ended)
    return done * step / able


def _held_up(slot: int, strikes: Sequence[Strike], began: float, ended: float) -> float:
    seconds = 0.0
    for strike in strikes:
        if strike.fault.islands == (slot,) and strike.proof and strike.stops_trainer:
            overlap = min(ended, strike.ended) - max(began, strike.began)
            seconds += max(0.0, overlap) * strike.stops_trainer
    return seconds


def stalls(islands: Sequence[Lives], strikes: Sequence[Strike]) -> list[tuple[float, float, int]]:
    """Where steps waited, longest first: (seconds, until when, island). What a victim itself waits for does not count."""
    found = []
    for slot, lives in enumerate(islands):
        own = [strike for strike in strikes if slot in strike.fault.islands and strike.began]
        for began, ended in (wait for life in lives for wait in _waits(life)):
            if not any(strike.began < ended and began < (strike.ended or ended) + 1 for strike in own):
                found.append((ended - began, ended, slot))
    return sorted(found, reverse=True)


def _waits(life: Life) -> Iterator[tuple[float, float]]:
    """When its steps waited; a wait that its end cut short counts too."""
    steps = life.of_kind("step")
    yield from ((row["time"] - row["stall_seconds"], row["time"]) for row in steps)
    if steps:
        yield steps[-1]["time"] + steps[-1]["step_seconds"], max(life.ended, steps[-1]["time"] + steps[-1]["step_seconds"])


def recovery_seconds(islands: Sequence[Lives], strike: Strike) -> float | None:
    """From when the victim could go on (started again, thawed, healed) to its next committed round that counts it.

    None where there is nothing to recover from; infinity where it did not.
    """
    if strike.fault.kind not in _FROM_BEGIN + _FROM_END or not strike.began:
        return None
    start = strike.began if strike.fault.kind in _FROM_BEGIN else strike.ended
    slot = strike.fault.islands[0]
    first: dict[tuple[int, int], float] = {}  # a round that others had ended before is not a sign of recovery
    for row in _committed(islands):
        key = (row["fragment"], row["round"])
        first[key] = min(row["time"], first.get(key, row["time"]))
    own = (row for row in _committed([islands[slot]]) if slot in row["members"])
    back = (row["time"] for row in own if first[row["fragment"], row["round"]] > start)
    return next(back, float("inf")) - start


def _committed(islands: Sequence[Lives]) -> Iterator[Row]:
    rows = (row for lives in islands for life in lives for row in life.of_kind("round"))
    return (row for row in rows if row["outcome"] == "committed")


def digests(islands: Sequence[Lives]) -> dict[tuple[int, int], set[str]]:
    """What the islands held after each (fragment, round)."""
    found: dict[tuple[int, int], set[str]] = {}
    for row in (row for lives in islands for life in lives for row in life.of_kind("round")):
        if row["digest"]:
            found.setdefault((row["fragment"], row["round"]), set()).add(row["digest"])
    return found


def rounds_committed(islands: Sequence[Lives]) -> int:
    """Rounds that anyone committed."""
    return len({(row["fragment"], row["round"]) for row in _committed(islands)})
