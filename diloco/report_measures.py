"""What one run came to, as one row of a table and as curves: a simulation, a real run or a data-parallel one."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, mean, median
from typing import Any, Iterable

from diloco.link_model import data_parallel_bytes
from diloco.report import Summary, is_simulated, summarize
from diloco.report_drift import Drift, drift_of_rounds
from diloco.report_traffic import decode_seconds, traffic_of, wire_of
from diloco.run_files import Row, look_up, read_config
from diloco.run_record import IslandRecord, read_run

ISLANDS, DATA_PARALLEL = "islands", "data-parallel"
FINISHED, UNFINISHED = "finished", "unfinished"
MOST_POINTS = 200  # of one curve

#: Keys that every row has, and what its column is called.
COMMON_KEYS = {
    "outer.sync_every": "sync_every",
    "outer.codec.type": "codec",
    "outer.fragments": "fragments",
    "outer.overlap": "overlap",
    "outer.optimizer.lr": "outer_lr",
    "exchange.type": "exchange",
    "run.seed": "seed",
    "train.global_batch_size": "global_batch_size",
    "data.seq_len": "seq_len",
}

Measures = dict[str, Any]


@dataclass(frozen=True)
class Curves:
    """Of one run, over the tokens that all its islands together had trained on.

    Attributes:
        losses: (tokens, mean training loss of the islands), averaged over neighbouring steps.
        evals: (tokens, held-out loss).
        rounds: (tokens, drift of the whole model).
    """

    losses: list[tuple[float, float]] = field(default_factory=list)
    evals: list[tuple[float, float]] = field(default_factory=list)
    rounds: list[tuple[float, Drift]] = field(default_factory=list)

    def rows(self, name: str) -> Iterable[Row]:
        """As lines of ``curves.jsonl``."""
        for kind, points in (("loss", self.losses), ("eval", self.evals)):
            yield from (dict(cell=name, kind=kind, tokens=tokens, loss=loss) for tokens, loss in points)
        for tokens, drift in self.rounds:
            yield dict(cell=name, kind="round", tokens=tokens, norm=drift.norm, distance=drift.distance, cosine=drift.cosine)


@dataclass(frozen=True)
class Measured:
    """A run that was read."""

    row: Measures
    curves: Curves
    raw: dict[str, Any] = field(default_factory=dict)


def measure(run_dir: Path, name: str, workers: int | None = None) -> Measured:
    """Read a run.

    Args:
        workers: replicas that a data-parallel run stands for; default: the islands that were there, or replicas of one.

    Raises:
        ConfigError: there is no run in ``run_dir``.
    """
    raw, records, summary = read_config(run_dir), read_run(run_dir), summarize(run_dir)
    kind = ISLANDS if "outer" in raw else DATA_PARALLEL
    workers = workers or len(records) * max((each.replicas for record in records for each in record.incarnations), default=1)
    ended = any(record.ended for record in records)  # from whose end others may be gone
    row: Measures = dict(cell=name, status=FINISHED if ended else UNFINISHED, kind=kind, islands=workers)
    row |= {column: look_up(raw, key) for key, column in COMMON_KEYS.items()}
    row |= dict(
        parameters=next((record.parameters for record in records if record.parameters), None),
        steps=mean(len(record.steps) for record in records),  # not those of the file: the run may go on, or have ended early
        tokens=summary["tokens"],
        eval_loss=summary["eval_loss"],
        eval_loss_start=summary["eval_loss_start"],
        train_loss=summary["final_loss"],
        step_seconds=_median([row["step_seconds"] for record in records for row in record.steps[1:] if "step_seconds" in row]),
    )
    row |= _of_rounds(records, raw, workers) if kind == ISLANDS else _of_gradients(row, workers)
    row |= _of_summary(summary)
    curves = _curves(records)
    row |= {f"mean_{key}": _mean([getattr(drift, key) for _, drift in curves.rounds]) for key in ("norm", "distance", "cosine")}
    return Measured(row, curves, raw)


def _of_summary(summary: Summary) -> Measures:
    return dict(measured_utilization=summary["compute_utilization"], wall_seconds=summary["wall_seconds"])


def _of_rounds(records: list[IslandRecord], raw: dict[str, Any], islands: int) -> Measures:
    rounds, wire = [row for record in records for row in record.rounds], wire_of(raw)
    traffic = [traffic_of(row, wire, islands) for row in rounds] if wire else []
    simulated = is_simulated(raw, islands)
    if simulated and wire:
        rounds = [row | {"decode_seconds": decode_seconds(row, wire, islands)} for row in rounds]
    sent = sum(each.sent for each in traffic) or sum(record.bytes_sent for record in records)  # replicas of one island have no rounds
    return dict(
        rounds=max((record.count("committed") for record in records), default=0),
        bits_per_parameter=_mean([row.get("bits_per_parameter") for row in rounds]),
        bytes_each_way_per_round=_mean([each.each_way for each in traffic]),
        bytes_per_island=sent / islands if rounds or sent else None,
        bytes_are="computed" if simulated else "counted",
        encode_seconds=_mean([row.get("encode_seconds") for row in rounds]),
        decode_seconds=_once_a_round(rounds, "decode_seconds"),
        outer_step_seconds=_once_a_round(rounds, "step_seconds"),
        copy_seconds=_mean([row.get("gather_seconds", 0.0) + row.get("scatter_seconds", 0.0) for row in rounds]),
    )


def _once_a_round(rounds: list[Row], key: str) -> float | None:
    """The mean over rounds of the island to which it took longest: where several share a process, one of them computes for all."""
    longest: dict[tuple[int, int], float] = defaultdict(float)
    for row in (row for row in rounds if row.get(key) is not None):
        place = row.get("fragment", 0), row.get("round", 0)
        longest[place] = max(longest[place], row[key])
    return fmean(longest.values()) if longest else None


def _of_gradients(row: Measures, workers: int) -> Measures:
    known = row["parameters"] and row["steps"] and workers > 1
    total = data_parallel_bytes(row["parameters"], workers, row["steps"]) if known else None
    found = dict.fromkeys(
        ("bits_per_parameter", "encode_seconds", "decode_seconds", "outer_step_seconds", "copy_seconds", "bytes_each_way_per_round")
    )
    if total is not None:
        found |= dict(bits_per_parameter=32.0, bytes_each_way_per_round=total / row["steps"])
    return found | dict(rounds=row["steps"], bytes_per_island=total, bytes_are="computed")


def _curves(records: list[IslandRecord]) -> Curves:
    losses: dict[int, list[float]] = defaultdict(list)
    tokens: dict[int, int] = defaultdict(int)
    for row in (row for record in records for row in record.steps):
        place = row.get("lr_step", row["step"])
        tokens[place] += row.get("tokens", 0)
        if row.get("loss") is not None:
            losses[place].append(row["loss"])
    reached, total = {0: 0}, 0
    for place in sorted(tokens):
        total += tokens[place]
        reached[place] = total
    points = [(float(reached[place]), fmean(losses[place])) for place in sorted(losses)]
    return Curves(_thinned(points), _evals(records, reached), _thinned_rounds(_rounds(records, reached)))


def _evals(records: list[IslandRecord], reached: dict[int, int]) -> list[tuple[float, float]]:
    found: dict[int, list[float]] = defaultdict(list)
    for row in (row for record in records for row in record.evals):
        if row.get("loss") is not None and row["step"] in reached:
            found[row["step"]].append(row["loss"])
    return [(float(reached[step]), fmean(losses)) for step, losses in sorted(found.items())]


def _rounds(records: list[IslandRecord], reached: dict[int, int]) -> list[tuple[float, Drift]]:
    """Rounds of the same number of all fragments are one point: norms and distances of parts add up in squares."""
    rows = [row for record in records for row in record.rounds]
    tokens = {(row.get("fragment", 0), row.get("round", 0)): reached.get(row.get("step"), 0) for row in rows}
    parts: dict[int, list[tuple[float, Drift]]] = defaultdict(list)
    for place, drift in drift_of_rounds(rows).items():
        parts[place[1]].append((float(tokens[place]), drift))
    return [(max(tokens for tokens, _ in found), _whole([drift for _, drift in found])) for _, found in sorted(parts.items())]


def _whole(parts: list[Drift]) -> Drift:
    weighed = [(part.norm**2, part.cosine) for part in parts if part.cosine is not None]
    total = sum(weight for weight, _ in weighed)
    cosine = sum(weight * cosine for weight, cosine in weighed) / total if total else None
    return Drift(math.hypot(*(part.norm for part in parts)), math.hypot(*(part.distance for part in parts)), cosine)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most :data:`MOST_POINTS`, each the mean of equally many neighbours, at the place of the last."""
    size = max(1, math.ceil(len(points) / MOST_POINTS))
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [(group[-1][0], fmean(value for _, value in group)) for group in groups]


def _thinned_rounds(points: list[tuple[float, Drift]]) -> list[tuple[float, Drift]]:
    return points[:: max(1, math.ceil(len(points) / MOST_POINTS))]


def _median(values: list[float]) -> float | None:
    """What is typical of steps: some wait for whatever else the machine does."""
    return median(values) if values else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
