"""Several runs side by side: one row a run, one row a setting (runs that differ in their seed only), and what follows from them."""

import csv
import io
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.link_model import data_parallel_bytes
from diloco.report_measures import DATA_PARALLEL, FINISHED, ISLANDS, Curves, Measured, Measures
from diloco.report_predictions import add_predictions
from diloco.run_files import look_up, write_atomically
from diloco.sweep_cells import SEED, label

CLOSE_PERCENT = 2.0  # of loss, as seeds make in small studies: a setting this close to the best is as good, and may be much cheaper

#: Of a setting: means over its runs.
_MEANS = (
    "islands",
    "parameters",
    "steps",
    "tokens",
    "eval_loss",
    "loss_above_baseline_percent",
    "rounds",
    "bits_per_parameter",
    "bytes_per_island",
    "times_fewer_bytes",
    "step_seconds",
    "encode_seconds",
    "decode_seconds",
    "mean_norm",
    "mean_distance",
    "mean_cosine",
)
_SPREADS = ("eval_loss", "loss_above_baseline_percent")


@dataclass
class Setting:
    """Runs that differ in their seed only.

    Attributes:
        keys: in which settings differ, and their values.
        row: of ``settings.csv``.
        runs: of ``results.csv``, those that have something to tell.
    """

    label: str
    keys: dict[str, Any]
    row: Measures
    runs: list[Measures]
    curves: list[Curves]

    @property
    def is_baseline(self) -> bool:
        """Whether it is data-parallel training."""
        return self.row["kind"] == DATA_PARALLEL

    @property
    def is_finished(self) -> bool:
        """Whether all its runs came to their end."""
        return all(run["status"] == FINISHED for run in self.runs)


@dataclass
class Study:
    """All that a page tells.

    Attributes:
        rows: of ``results.csv``, one a run.
        keys: in which runs differ, other than their seed.
        simulated: whether islands shared a process, so that bytes are computed and not counted.
    """

    title: str
    rows: list[Measures]
    curves: dict[str, Curves]
    keys: list[str]
    settings: list[Setting] = field(default_factory=list)
    simulated: bool = True

    @property
    def unlike_tokens(self) -> bool:
        """Whether some runs trained on more than others, so that their losses say little."""
        return len({row["tokens"] for row in self.rows if row.get("tokens")}) > 1

    @property
    def baselines(self) -> list[Setting]:
        """Settings that are data-parallel training."""
        return [setting for setting in self.settings if setting.is_baseline]

    @property
    def islands(self) -> list[Setting]:
        """All others."""
        return [setting for setting in self.settings if not setting.is_baseline]


def make_study(
    title: str, runs: Sequence[Measured], swept: Sequence[str], unfinished: Sequence[Measures] = (), one_machine: bool = False
) -> Study:
    """Put runs together.

    Args:
        swept: configuration keys in which they may differ.
        unfinished: rows of runs that came to nothing, with at least ``cell``, ``kind`` and ``status``.
        one_machine: see :func:`~diloco.report_predictions.add_predictions`.
    """
    keys = [key for key in swept if key != SEED]
    rows = []
    for run in runs:
        values = {key: look_up(run.raw, key) for key in keys}
        rows.append({"cell": run.row["cell"], "status": run.row["status"], **values, **run.row, "baseline": run.row.get("baseline")})
    add_predictions(rows, keys, one_machine)
    _compare(rows)
    simulated = any(row.get("bytes_are") == "computed" for row in rows if row["kind"] == ISLANDS)
    curves = {run.row["cell"]: run.curves for run in runs}
    study = Study(title, [*rows, *unfinished], curves, keys, simulated=simulated)
    study.settings = _settings(rows, keys, study.curves)
    _mark_frontier(study.settings)
    return study


def _compare(rows: list[Measures]) -> None:
    """Each run with its data-parallel one, where both have an outcome."""
    by_name = {row["cell"]: row for row in rows}
    for row in rows:
        other = by_name.get(row["baseline"]) if row["baseline"] else None
        row["loss_above_baseline_percent"] = row["times_fewer_bytes"] = None
        if other and row["eval_loss"] and other["eval_loss"]:
            row["loss_above_baseline_percent"] = 100 * (row["eval_loss"] / other["eval_loss"] - 1)
        if row["kind"] == ISLANDS and row["islands"] > 1 and row["parameters"] and row["steps"] and row["bytes_per_island"]:
            row["times_fewer_bytes"] = data_parallel_bytes(row["parameters"], row["islands"], row["steps"]) / row["bytes_per_island"]


def _settings(rows: list[Measures], keys: list[str], curves: dict[str, Curves]) -> list[Setting]:
    groups: dict[str, list[Measures]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row["kind"], *(row[key] for key in keys)], default=str), []).append(row)
    return [_setting(group, keys, curves) for group in groups.values()]


def _setting(runs: list[Measures], keys: list[str], curves: dict[str, Curves]) -> Setting:
    first = runs[0]
    is_baseline = first["kind"] == DATA_PARALLEL
    own = {key: first[key] for key in keys if first[key] is not None}
    name = " ".join(["data-parallel"] * is_baseline + [label(own)] * bool(own)) or first["cell"]
    row: Measures = dict(setting=name, kind=first["kind"], runs=len(runs), **{key: first[key] for key in keys})
    row |= {key: _mean([run.get(key) for run in runs]) for key in _MEANS}
    row |= {f"{key}_spread": _spread([run.get(key) for run in runs]) for key in _SPREADS}
    row |= {key: _mean([run.get(key) for run in runs]) for key in first if key.startswith("predicted_")}
    return Setting(name, own, row, runs, [curves[run["cell"]] for run in runs])


def _mark_frontier(settings: list[Setting]) -> None:
    """On the frontier is what no other setting beats in both loss and bytes."""
    for setting in settings:
        loss, sent = setting.row["eval_loss"], setting.row["bytes_per_island"]
        setting.row["on_frontier"] = loss is not None and sent is not None and not any(
            other.row["eval_loss"] <= loss and other.row["bytes_per_island"] <= sent and other is not setting
            for other in settings
            if other.row["eval_loss"] is not None and other.row["bytes_per_island"] is not None
        )


def choose(study: Study) -> Setting | None:
    """Of the finished settings whose loss is within :data:`CLOSE_PERCENT` of the lowest among them, the one that sends the fewest bytes."""
    known = [each for each in study.islands if each.is_finished and each.row["eval_loss"] is not None and each.row["bytes_per_island"]]
    if not known:
        return None
    limit = min(each.row["eval_loss"] for each in known) * (1 + CLOSE_PERCENT / 100)
    return min((each for each in known if each.row["eval_loss"] <= limit), key=lambda each: each.row["bytes_per_island"])


def write_tables(study: Study, folder: Path) -> None:
    """Write ``results.csv``, ``settings.csv`` and ``curves.jsonl``."""
    write_atomically(folder / "results.csv", _csv(study.rows))
    write_atomically(folder / "settings.csv", _csv([setting.row for setting in study.settings]))
    lines = [json.dumps(row) for name, curves in study.curves.items() for row in curves.rows(name)]
    write_atomically(folder / "curves.jsonl", "".join(f"{line}\n" for line in lines).encode())


def _csv(rows: Sequence[Measures]) -> bytes:
    """Numbers with all their digits; what is not known is an empty field."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _mean(values: Sequence[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _spread(values: Sequence[Any]) -> float | None:
    """Standard deviation between runs; None where there are not two."""
    known = [value for value in values if value is not None]
    return statistics.stdev(known) if len(known) > 1 else None
