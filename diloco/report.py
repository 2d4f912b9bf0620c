"""What a run came to: ``summary.json``, ``report.png`` and a few lines for people."""

import io
import json
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, Callable

from rich.console import Console
from rich.table import Table

from diloco.accounting import CAUSES, samples_lost, samples_repeated, samples_trained, seconds_lost, wall_seconds
from diloco.link_model import data_parallel_bytes
from diloco.report_figure import draw_report
from diloco.run_files import Row, look_up, read_config, write_atomically
from diloco.run_record import IslandRecord, read_run

Summary = dict[str, Any]

LEAST_SECONDS_TOLD = 0.1

_CHECKPOINT_EVENTS = {
    "written": "checkpoint",
    "failed": "checkpoint_failed",
    "skipped": "checkpoint_skipped",
    "resumes": "resumed",
}


def summarize(run_dir: Path) -> Summary:
    """The figures of ``summary.json``. None stands for what was not measured, never for zero."""
    records = read_run(run_dir)
    parameters = next((record.parameters for record in records if record.parameters), None)
    measured = any(record.rows for record in records)
    on_links = measured and not is_simulated(read_config(run_dir), len(records))
    return {
        "tokens": sum(row.get("tokens", 0) for record in records for row in record.steps),
        "final_loss": _mean_where_furthest(records, lambda record: record.steps),
        "eval_loss": _mean_where_furthest(records, lambda record: record.evals),
        "eval_loss_start": _mean([record.evals[0].get("loss") for record in records if _starts_at_zero(record.evals)]),
        "wall_seconds": wall_seconds(records),
        "compute_utilization": _mean([_compute_utilization(record) for record in records]) if on_links else None,
        "bytes_sent": sum(record.bytes_sent for record in records) if on_links else None,
        "data_parallel_bytes": _data_parallel_bytes(records, parameters),
        "bits_per_parameter_per_round": _mean([_bits_per_parameter(record, parameters) for record in records]) if on_links else None,
        "rounds_committed": _rounds_committed(records) if measured else None,
        "rounds_skipped": max(record.count("skipped") for record in records) if measured else None,
        "digests_agree": _digests_agree(records),
        "islands": len(records),
        "samples_trained": samples_trained(records) if measured else None,
        "samples_lost": samples_lost(records),
        "samples_repeated": samples_repeated(records),
        "seconds_lost": seconds_lost(records) if on_links else None,
        "steps_lost_to_crashes": sum(record.num_lost_steps for record in records) if measured else None,
        "checkpoints": _checkpoints(records) if measured else None,
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
    draw_report(_headline(run_dir.resolve().name, summary), read_run(run_dir)).savefig(picture, format="png", dpi=150)
    write_atomically(run_dir / "report.png", picture.getvalue())
    return summary


def is_simulated(raw: dict[str, Any], islands: int) -> bool:
    """Whether so many islands with the resolved configuration ``raw`` were one process, which sent nothing, and where one that waits lets
    others compute."""
    return islands > 1 and look_up(raw, "exchange.type") == "in_memory"


def _checkpoints(records: list[IslandRecord]) -> dict[str, Any]:
    """Of all islands together; the seconds for which training stood still are a mean over islands."""
    counts = {name: sum(len(record.events(what)) for record in records) for name, what in _CHECKPOINT_EVENTS.items()}
    stalls = [sum(_stall_seconds(row) for row in record.events("checkpoint")) for record in records]
    return {**counts, "stall_seconds": fmean(stalls)}


def _stall_seconds(row: Row) -> float:
    detail = row.get("detail")
    return detail.get("stall_seconds", 0.0) if isinstance(detail, dict) else 0.0


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    mean = fmean(known) if known else None
    return mean if mean is not None and math.isfinite(mean) else None  # a loss that is not a number is no figure


def _mean_where_furthest(records: list[IslandRecord], kind: Callable[[IslandRecord], list[Row]]) -> float | None:
    """Mean of the last losses, over the islands that came to the end, whatever their count of steps; if none did, over those that
    came furthest. An island that died early does not blur the end."""
    last = [(record.ended, kind(record)[-1]) for record in records if kind(record)]
    furthest = max(((ended, 0 if ended else row.get("step", 0)) for ended, row in last), default=(False, 0))
    losses = [row.get("loss") for ended, row in last if (ended, 0 if ended else row.get("step", 0)) == furthest]
    return None if None in losses else _mean(losses)  # one that is not a number makes the mean none


def _rounds_committed(records: list[IslandRecord]) -> int:
    """Of all islands together: none of them need have been there for all rounds."""
    rounds = [row for record in records for row in record.kept_rounds if row["outcome"] == "committed"]
    return len({(row.get("fragment"), row.get("round")) for row in rounds})


def _starts_at_zero(evals: list[Row]) -> bool:
    return bool(evals) and evals[0].get("step") == 0


def _compute_utilization(record: IslandRecord) -> float | None:
    """Share of the time after the first step in which inner steps did not wait for the exchange. While an island is down it
    neither computes nor waits."""
    seconds = stalled = 0.0
    for incarnation in record.incarnations:
        if steps := incarnation.of("step"):
            seconds += incarnation.rows[-1]["time"] - steps[0]["time"]
            stalled += sum(row.get("stall_seconds", 0.0) for row in steps[1:])
    return 1.0 - stalled / seconds if len(record.steps) >= 2 and seconds > 0 else None


def _data_parallel_bytes(records: list[IslandRecord], parameters: int | None) -> int | None:
    """What the same steps would have sent between islands with a ring all-reduce of fp32 gradients at each of them."""
    if parameters is None:
        return None
    return int(data_parallel_bytes(parameters, len(records), sum(len(record.steps) for record in records)))


def _bits_per_parameter(record: IslandRecord, parameters: int | None) -> float | None:
    """Of one island, over committed rounds of the whole model: one round of each fragment."""
    fragments = {row.get("fragment") for row in record.rounds}
    if not parameters or not record.count("committed"):
        return None
    return 8 * record.bytes_sent * len(fragments) / record.count("committed") / parameters


def _digests_agree(records: list[IslandRecord]) -> bool | None:
    digests: dict[tuple[int, int], set[str]] = defaultdict(set)
    for record in records:
        for row in record.kept_rounds:
            if row.get("digest"):
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
        *_loss_lines(summary),
        *_checkpoint_lines(summary),
        ("digests", agree.get(summary["digests_agree"], "[bold white on red] DIFFERENT: the islands do not agree [/]")),
        ("files", f"summary.json, report.png and a folder for each island in {run_dir}"),
    ]


def _loss_lines(summary: Summary) -> list[tuple[str, str]]:
    """What became of the samples, and where time went; nothing where it is unknown or there was none."""
    lines = []
    trained, lost, repeated = (summary[f"samples_{what}"] for what in ("trained", "lost", "repeated"))
    if trained is not None and lost is not None:
        told = f"{trained:,} samples trained, {lost:,} lost, "
        is_wrong = f"[bold white on red] {repeated:,} REPEATED: the same samples counted twice [/]"
        lines.append(("data", told + (is_wrong if repeated else "0 repeated")))
    seconds = {cause: (summary["seconds_lost"] or {}).get(cause, 0.0) for cause in CAUSES}
    if sum(seconds.values()) >= LEAST_SECONDS_TOLD:
        names = dict(zip(CAUSES, ("waiting for others", "transferring", "recovering", "in skipped rounds"), strict=True))
        told = ", ".join(f"{seconds[cause]:.1f} s {name}" for cause, name in names.items() if seconds[cause] >= 0.05)
        lines.append(("time lost", f"{told}{' (mean of the islands)' if summary['islands'] > 1 else ''}"))
    return lines


def _checkpoint_lines(summary: Summary) -> list[tuple[str, str]]:
    """Nothing where there was none."""
    counts, lost = summary["checkpoints"] or {}, summary["steps_lost_to_crashes"]
    parts = []
    if counts.get("written"):
        parts.append(f"{counts['written']} written, for which training stood still {counts['stall_seconds']:.2f} s")
    if counts.get("failed"):
        parts.append(f"[bold white on red] {counts['failed']} FAILED [/]")
    if counts.get("skipped"):
        parts.append(f"{counts['skipped']} skipped")
    if counts.get("resumes"):
        parts.append(f"resumed {counts['resumes']} times")
    if lost:
        parts.append(f"{lost} steps lost to crashes")
    return [("checkpoints", ", ".join(parts))] if parts else []


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


def _headline(name: str, summary: Summary) -> str:
    parts = [name, _islands(summary)]
    if summary["eval_loss"] is not None:
        parts.append(f"held-out loss {_loss(summary['eval_loss_start'])} → {_loss(summary['eval_loss'])}")
    if summary["rounds_committed"]:
        parts.append(f"{summary['rounds_committed']} rounds")
    return " · ".join(parts)


