"""What a run came to: ``summary.json``, ``report.png`` and a few lines for people."""

import io
import json
import math
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from diloco.run_files import Row, island_dirs, read_rows, write_atomically
from islands.config_file import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Summary = dict[str, Any]

GRADIENT_BYTES = 4  # data-parallel training is taken to reduce fp32 gradients
SMOOTHING_WINDOW = 1 / 40  # share of the steps that the smoothed loss averages on either side
ISLANDS_IN_LEGEND = 10


@dataclass(frozen=True)
class IslandRecord:
    """What one island recorded, by kind, in the order in which it was written."""

    island: int
    rows: list[Row]
    steps: list[Row]
    rounds: list[Row]
    evals: list[Row]

    @property
    def parameters(self) -> int | None:
        """Parameters of the model, if the island came as far as to tell."""
        return self._start.get("parameters")

    @property
    def ended(self) -> bool:
        """Whether the island came to the end of its run."""
        return bool(self._events("end"))

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this island, in rounds that came to nothing too."""
        return sum(row.get("bytes_sent", 0) for row in self.rounds)

    def count(self, outcome: str) -> int:
        """Rounds that ended like that."""
        return sum(row.get("outcome") == outcome for row in self.rounds)

    @property
    def _start(self) -> dict[str, Any]:
        details = [row.get("detail") for row in self._events("start")]
        return next((detail for detail in details if isinstance(detail, dict)), {})

    def _events(self, what: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == "event" and row.get("what") == what]


def read_run(run_dir: Path) -> list[IslandRecord]:
    """What all islands of a run recorded.

    Raises:
        ConfigError: there is no run in ``run_dir``.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"RUN_DIR={run_dir}: no such folder. Give the run.dir of a run, such as runs/quickstart")
    found = island_dirs(run_dir)
    if not found:
        raise ConfigError(f"RUN_DIR={run_dir} holds no folder island-<i>. Give the run.dir of a run")
    return [_record(island, read_rows(path / "metrics.jsonl")) for island, path in found.items()]


def summarize(run_dir: Path) -> Summary:
    """The figures of ``summary.json``. None stands for what was not measured, never for zero."""
    records = read_run(run_dir)
    parameters = next((record.parameters for record in records if record.parameters), None)
    measured = any(record.rows for record in records)
    times = [row["time"] for record in records for row in record.rows if "time" in row]
    return {
        "tokens": sum(row.get("tokens", 0) for record in records for row in record.steps),
        "final_loss": _mean_where_furthest([record.steps for record in records]),
        "eval_loss": _mean_where_furthest([record.evals for record in records]),
        "eval_loss_start": _mean([record.evals[0].get("loss") for record in records if _starts_at_zero(record.evals)]),
        "wall_seconds": max(times) - min(times) if times else None,
        "compute_utilization": _mean([_compute_utilization(record) for record in records]),
        "bytes_sent": sum(record.bytes_sent for record in records) if measured else None,
        "data_parallel_bytes": _data_parallel_bytes(records, parameters),
        "bits_per_parameter_per_round": _mean([_bits_per_parameter(record, parameters) for record in records]),
        "rounds_committed": max(record.count("committed") for record in records) if measured else None,
        "rounds_skipped": max(record.count("skipped") for record in records) if measured else None,
        "digests_agree": _digests_agree(records),
        "islands": len(records),
    }


def write_report(run_dir: str | Path) -> Summary:
    """Write ``summary.json`` and ``report.png`` into ``run_dir``. Returns the summary.

    Raises:
        ConfigError: there is no run in ``run_dir``.
    """
    run_dir = Path(run_dir)
    summary = summarize(run_dir)
    write_atomically(run_dir / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    picture = io.BytesIO()
    _draw(_headline(run_dir.resolve().name, summary), read_run(run_dir)).savefig(picture, format="png", dpi=150)
    write_atomically(run_dir / "report.png", picture.getvalue())
    return summary


def _record(island: int, rows: list[Row]) -> IslandRecord:
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    return IslandRecord(island, rows, by_kind["step"], by_kind["round"], by_kind["eval"])


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    mean = fmean(known) if known else None
    return mean if mean is not None and math.isfinite(mean) else None  # a loss that is not a number is no figure


def _mean_where_furthest(rows_of_islands: list[list[Row]]) -> float | None:
    """Mean of the last losses, over the islands that came furthest: an island that died early does not blur the end."""
    last = [rows[-1] for rows in rows_of_islands if rows]
    furthest = max((row.get("step", 0) for row in last), default=0)
    losses = [row.get("loss") for row in last if row.get("step", 0) == furthest]
    return None if None in losses else _mean(losses)  # one that is not a number makes the mean none


def _starts_at_zero(evals: list[Row]) -> bool:
    return bool(evals) and evals[0].get("step") == 0


def _compute_utilization(record: IslandRecord) -> float | None:
    """Share of the time after the first step in which inner steps did not wait for the exchange."""
    if len(record.steps) < 2:
        return None
    seconds = record.rows[-1]["time"] - record.steps[0]["time"]
    stalled = sum(row.get("stall_seconds", 0.0) for row in record.steps[1:])
    return 1.0 - stalled / seconds if seconds > 0 else None


def _data_parallel_bytes(records: list[IslandRecord], parameters: int | None) -> int | None:
    """What the same steps would have sent between islands with a ring all-reduce of fp32 gradients at each of them."""
    if parameters is None:
        return None
    num_islands, steps = len(records), sum(len(record.steps) for record in records)
    return steps * 2 * (num_islands - 1) * GRADIENT_BYTES * parameters // num_islands


def _bits_per_parameter(record: IslandRecord, parameters: int | None) -> float | None:
    """Of one island, over committed rounds of the whole model: one round of each fragment."""
    fragments = {row.get("fragment") for row in record.rounds}
    if not parameters or not record.count("committed"):
        return None
    return 8 * record.bytes_sent * len(fragments) / record.count("committed") / parameters


def _digests_agree(records: list[IslandRecord]) -> bool | None:
    digests: dict[tuple[int, int], set[str]] = defaultdict(set)
    for record in records:
        for row in record.rounds:
            if row.get("outcome") in ("committed", "left_out") and row.get("digest"):
                digests[row["fragment"], row["round"]].add(row["digest"])
    return all(len(found) == 1 for found in digests.values()) if digests else None


def print_summary(run_dir: Path, summary: Summary, console: Console | None = None) -> None:
    """The summary for people: short, and loud if islands disagree."""
    console = console or Console()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, told in _summary_lines(run_dir, summary):
        table.add_row(name, told)
    console.print()
    console.print(table)
    for record in read_run(run_dir):
        if not record.ended:
            reached = record.steps[-1]["step"] if record.steps else 0
            console.print(f"[yellow]island {record.island} has not come to its end: its last step is {reached}[/]")


def _summary_lines(run_dir: Path, summary: Summary) -> list[tuple[str, str]]:
    sent, data_parallel = summary["bytes_sent"], summary["data_parallel_bytes"]
    bits, utilization = summary["bits_per_parameter_per_round"], summary["compute_utilization"]
    traffic = _bytes(sent)
    if sent and data_parallel:
        traffic += (
            f", {data_parallel / sent:.1f}x less than data-parallel training of the same steps: "
            f"{_bytes(data_parallel)} (ring all-reduce of fp32 gradients)"
        )
    rounds = f"{_count(summary['rounds_committed'])} committed, {_count(summary['rounds_skipped'])} skipped"
    if bits is not None:
        rounds += f", {bits:.1f} bits per parameter and round"
    agree = {True: "[green]equal on all islands after every round[/]", None: "none were exchanged"}
    speed = f" ({summary['tokens'] / summary['wall_seconds']:,.0f} tokens/s)" if summary["wall_seconds"] else ""
    return [
        ("eval loss", f"{_loss(summary['eval_loss_start'])} → {_loss(summary['eval_loss'])} nats per token"),
        ("trained", f"{summary['tokens']:,} tokens in {_seconds(summary['wall_seconds'])}{speed}, {_islands(summary)}"),
        ("computing", "unknown" if utilization is None else f"{utilization:.1%} of the time, else waiting for others"),
        ("sent", traffic),
        ("rounds", rounds),
        ("digests", agree.get(summary["digests_agree"], "[bold white on red] DIFFERENT: the islands do not agree [/]")),
        ("files", f"summary.json, report.png and a folder for each island in {run_dir}"),
    ]


def _islands(summary: Summary) -> str:
    return f"{summary['islands']} island{'' if summary['islands'] == 1 else 's'}"


def _loss(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.3f}"


def _count(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def _seconds(seconds: float | None) -> str:
    return "unknown time" if seconds is None else f"{seconds:.0f} s"


def _bytes(number: int | None) -> str:
    if number is None:
        return "unknown"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"


def _draw(headline: str, records: list[IslandRecord]) -> "Figure":
    """Loss over tokens with the rounds, and below it how fast each island was."""
    from matplotlib.figure import Figure  # takes a second to import, and every rank of an island imports this file
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(9, 6), layout="constrained")
    losses, speeds = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for record in records:
        color = f"C{record.island % 10}"
        _draw_losses(losses, record, color, f"island {record.island}" if len(records) <= ISLANDS_IN_LEGEND else None)
        speeds.plot(*_over_tokens(record, record.steps, "tokens_per_second"), color=color, linewidth=0.8)
    for record in records:
        _draw_evals(losses, record, f"C{record.island % 10}")
    if timeline := next((record for record in records if record.rounds), None):
        _draw_rounds((losses, speeds), timeline)
    losses.set_title(headline, loc="left", fontweight="bold", fontsize="medium")
    losses.set_ylabel("loss (nats per token)")
    speeds.set_ylabel("tokens/s")
    speeds.set_xlabel("tokens trained on by each island")
    speeds.set_ylim(bottom=0)
    speeds.xaxis.set_major_formatter(EngFormatter(sep=""))
    speeds.yaxis.set_major_formatter(EngFormatter(sep=""))
    for panel in (losses, speeds):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
        panel.margins(x=0.01)
    if handles := losses.get_legend_handles_labels()[0]:
        losses.legend(handles=handles, framealpha=1.0, edgecolor="none", loc="upper right")
    return figure


def _headline(name: str, summary: Summary) -> str:
    parts = [name, _islands(summary)]
    if summary["eval_loss"] is not None:
        parts.append(f"held-out loss {_loss(summary['eval_loss_start'])} → {_loss(summary['eval_loss'])}")
    if summary["rounds_committed"]:
        parts.append(f"{summary['rounds_committed']} rounds")
    return " · ".join(parts)


def _over_tokens(record: IslandRecord, rows: list[Row], key: str) -> tuple[list[int], list[float]]:
    """``key`` of each row that has a finite one, over the tokens that the island had trained on by then."""
    tokens, total = {0: 0}, 0
    for row in record.steps:
        total += row.get("tokens", 0)
        tokens[row["step"]] = total
    known = [row for row in rows if row.get("step") in tokens and row.get(key) is not None]
    return [tokens[row["step"]] for row in known], [row[key] for row in known]


def _draw_losses(panel: "Axes", record: IslandRecord, color: str, label: str | None) -> None:
    positions, losses = _over_tokens(record, record.steps, "loss")
    panel.plot(positions, losses, color=color, linewidth=0.6, alpha=0.3)
    panel.plot(positions, _smooth(losses), color=color, linewidth=1.6, label=label)


def _smooth(values: list[float]) -> list[float]:
    """Means of a window around each value: unlike a running mean, it does not lag behind a falling curve."""
    sums, most = list(accumulate(values, initial=0.0)), round(len(values) * SMOOTHING_WINDOW)
    reaches = [min(most, i, len(values) - 1 - i) for i in range(len(values))]  # equal on both sides, up to the ends
    return [(sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1) for i, reach in enumerate(reaches)]


def _draw_evals(panel: "Axes", record: IslandRecord, color: str) -> None:
    """Loss on held-out text, which training never sees."""
    panel.plot(
        *_over_tokens(record, record.evals, "loss"),
        linestyle="none",
        marker="o",
        markersize=6,
        markerfacecolor="white",
        markeredgecolor=color,
        zorder=3,
        label="held-out text" if record.evals and record.island == 0 else None,
    )


def _draw_rounds(panels: tuple["Axes", "Axes"], record: IslandRecord) -> None:
    committed = {"color": "0.8", "linewidth": 0.8, "linestyle": "-"}
    missed = {"color": "crimson", "linewidth": 1.2, "linestyle": ":"}
    for name, style, outcomes in (
        ("round committed", committed, ("committed",)),
        ("round skipped or left out", missed, ("skipped", "left_out")),
    ):
        rows = [row for row in record.rounds if row.get("outcome") in outcomes]
        for panel in panels:
            for number, position in enumerate(_over_tokens(record, rows, "step")[0]):
                panel.axvline(position, zorder=0, label=None if number else name, **style)
