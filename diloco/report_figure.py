"""``report.png``: loss over tokens with the rounds, and below it how fast each island was."""

from itertools import accumulate
from typing import TYPE_CHECKING

from diloco.run_files import Row
from diloco.run_record import Incarnation, IslandRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SMOOTHING_WINDOW = 1 / 40  # share of the steps that the smoothed loss averages on either side
ISLANDS_IN_LEGEND = 10


def draw_report(headline: str, records: list[IslandRecord]) -> "Figure":
    """The picture of a run."""
    from matplotlib.figure import Figure  # takes a second to import, and every rank of an island imports this file
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(9, 6), layout="constrained")
    losses, speeds = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for record in records:
        color = f"C{record.island % 10}"
        label = f"island {record.island}" if len(records) <= ISLANDS_IN_LEGEND else None
        for number, incarnation in enumerate(record.incarnations):  # a line of its own for each: there is a gap between
            steps = incarnation.steps
            _draw_losses(losses, *_over_tokens(incarnation, steps, "loss"), color, None if number else label)
            speeds.plot(*_over_tokens(incarnation, steps, "tokens_per_second"), color=color, linewidth=0.8)
    for record in records:
        _draw_evals(losses, record, f"C{record.island % 10}")
    if timeline := max(records, key=lambda record: len(record.rounds), default=None):
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


def _over_tokens(incarnation: Incarnation, rows: list[Row], key: str) -> tuple[list[int], list[float]]:
    """``key`` of each row that has one, over the tokens of :func:`_positions`."""
    positions = _positions(incarnation.rows)
    known = [row for row in rows if row.get(key) is not None and id(row) in positions]
    return [positions[id(row)] for row in known], [row[key] for row in known]


def _positions(rows: list[Row]) -> dict[int, int]:
    """Tokens that the island had trained on at each row (by its ``id``): also those that others trained on before it joined, or
    while it stood still, so that the same place means the same time of the run on all islands."""
    found, total, before, waiting = {0: 0}, 0, 0, []
    for row in rows:
        if row["kind"] == "round":  # written before the step after which it was
            waiting.append(row)
            continue
        if row["kind"] == "step":
            tokens = row.get("tokens", 0)
            if row["step"] != before + 1:
                total = (row.get("lr_step", row["step"]) - 1) * tokens
            total, before = total + tokens, row["step"]
            found |= {id(each): total for each in waiting}
            waiting = []
        found[id(row)] = total
    return found | {id(each): total for each in waiting}


def _draw_losses(panel: "Axes", positions: list[int], losses: list[float], color: str, label: str | None) -> None:
    panel.plot(positions, losses, color=color, linewidth=0.6, alpha=0.3)
    panel.plot(positions, _smooth(losses), color=color, linewidth=1.6, label=label)


def _smooth(values: list[float]) -> list[float]:
    """Means of a window around each value: unlike a running mean, it does not lag behind a falling curve."""
    sums, most = list(accumulate(values, initial=0.0)), round(len(values) * SMOOTHING_WINDOW)
    reaches = [min(most, i, len(values) - 1 - i) for i in range(len(values))]  # equal on both sides, up to the ends
    return [(sums[i + reach + 1] - sums[i - reach]) / (2 * reach + 1) for i, reach in enumerate(reaches)]


def _draw_evals(panel: "Axes", record: IslandRecord, color: str) -> None:
    """Loss on held-out text, which training never sees."""
    for number, incarnation in enumerate(record.incarnations):
        panel.plot(
            *_over_tokens(incarnation, incarnation.evals, "loss"),
            linestyle="none",
            marker="o",
            markersize=6,
            markerfacecolor="white",
            markeredgecolor=color,
            zorder=3,
            label="held-out text" if record.evals and record.island == 0 and number == 0 else None,
        )


def _draw_rounds(panels: tuple["Axes", "Axes"], record: IslandRecord) -> None:
    committed = {"color": "0.8", "linewidth": 0.8, "linestyle": "-"}
    missed = {"color": "crimson", "linewidth": 1.2, "linestyle": ":"}
    for name, style, outcomes in (
        ("round committed", committed, ("committed",)),
        ("round skipped or left out", missed, ("skipped", "left_out")),
    ):
        places = []
        for incarnation in record.incarnations:
            rows = [row for row in incarnation.of("round") if row.get("outcome") in outcomes]
            places += _over_tokens(incarnation, rows, "step")[0]
        for panel in panels:
            for number, place in enumerate(places):
                panel.axvline(place, zorder=0, label=None if number else name, **style)
