"""What a run lost: samples that were trained on and never counted, or counted twice; and seconds."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from statistics import fmean

from diloco.run_files import Row
from diloco.run_record import Incarnation, IslandRecord

#: From ``first`` up to ``last``: sequences of a slot.
Interval = tuple[int, int]

CAUSES = ("waiting", "transferring", "recovering", "skipped")


def samples_trained(records: list[IslandRecord]) -> int | None:
    """Samples of the inner steps that were built on, those that were lost in other ways too; None where an island did not tell its
    batch size."""
    return _samples(records, lambda incarnation: len(incarnation.steps))


def samples_lost(records: list[IslandRecord]) -> int | None:
    """Samples that were trained on without ever counting in a round that the swarm kept; of several fragments, in the one that
    lost most. What a crash threw away is lost, also where it was trained on again. None where nothing was exchanged."""
    trained, fragments = _samples(records, lambda incarnation: len(incarnation.of("step"))), _fragments(records)
    if trained is None or not fragments:
        return None
    return max(0, trained - min(_samples_counted(records, fragment) for fragment in fragments))


def _samples(records: list[IslandRecord], num_steps: Callable[[Incarnation], int]) -> int | None:
    total = 0
    for incarnation in (each for record in records for each in record.incarnations):
        steps, size = num_steps(incarnation), incarnation.start.get("global_batch_size")
        if steps and size is None:
            return None
        total += steps * (size or 0) * incarnation.replicas
    return total


def samples_repeated(records: list[IslandRecord]) -> int | None:
    """Samples that counted twice. None where nothing was exchanged."""
    fragments = _fragments(records)
    repeated = [
        sum(_length(found) - _length(_union(found)) for found in _committed(records, fragment).values()) for fragment in fragments
    ]
    return max(repeated) if fragments else None


def wall_seconds(records: list[IslandRecord]) -> float | None:
    """Seconds in which any process of the run was at work: the time between stopping and going on is not its own."""
    spans = []
    for incarnation in (each for record in records for each in record.incarnations):
        if times := [row["time"] for row in incarnation.rows if "time" in row]:
            spans.append((min(times), max(times)))
    return _length(_union(spans)) if spans else None


def seconds_lost(records: list[IslandRecord]) -> dict[str, object]:
    """For each cause the mean over islands of their seconds, which add up over rounds; and each island's own."""
    by_island = {str(record.island): _seconds(record) for record in records}
    means = {cause: fmean(each[cause] for each in by_island.values()) for cause in CAUSES}
    return {**means, "by_island": by_island}


def _seconds(record: IslandRecord) -> dict[str, float]:
    """A skipped round has cost all the time that training stood still for it; any other as much of what the exchange measured
    as was not beside the training."""
    lost = dict.fromkeys(CAUSES, 0.0)
    for row in record.rounds:
        if row.get("outcome") == "skipped":
            lost["skipped"] += row.get("stall_seconds", 0.0)
        else:
            seconds, stall = row.get("exchange_seconds", 0.0), row.get("stall_seconds", 0.0)
            felt = min(1.0, stall / seconds) if seconds else 1.0
            lost["waiting"] += felt * row.get("waiting_seconds", 0.0)
            lost["transferring"] += felt * row.get("transfer_seconds", 0.0)
            lost["recovering"] += felt * row.get("recovering_seconds", 0.0)
    return lost


def _fragments(records: list[IslandRecord]) -> list[int]:
    """Fragments of which rounds tell what they count."""
    return sorted({row["fragment"] for record in records for row in record.rounds if "start" in row})


def _samples_counted(records: list[IslandRecord], fragment: int) -> int:
    """In committed rounds; and in those whose outcome an island did not hear, where it was told later that its work counts."""
    committed, told = _committed(records, fragment), _intervals(records, fragment, _is_told_later)
    counted = sum(map(_length, committed.values()))
    for slot, intervals in told.items():
        known = _union(committed.get(slot, []))
        counted += _length(_union([*known, *intervals])) - _length(known)
    return counted


def _committed(records: list[IslandRecord], fragment: int) -> dict[int, list[Interval]]:
    return _intervals(records, fragment, lambda row: row["outcome"] == "committed")


def _is_told_later(row: Row) -> bool:
    return row["outcome"] == "left_out" and row.get("counted") == row["position"]


def _intervals(records: list[IslandRecord], fragment: int, wanted: Callable[[Row], bool]) -> dict[int, list[Interval]]:
    """Offered sequences by slot, of the rounds that were kept."""
    found: dict[int, list[Interval]] = defaultdict(list)
    for record in records:
        for row in record.kept_rounds:
            if row.get("fragment") == fragment and "start" in row and wanted(row):
                found[row["slot"]].append((row["start"], row["position"]))
    return found


def _length(intervals: Iterable[Interval]) -> int:
    return sum(last - first for first, last in intervals)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same sequences, each in one interval only."""
    joined: list[Interval] = []
    for first, last in sorted(intervals):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined
