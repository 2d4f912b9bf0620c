"""``report.html``: one file that needs no network, with the answer on top.

Every number on it is one of ``results.csv`` or ``settings.csv``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.html_report_figures import Picture, pictures, png, svg
from diloco.report_measures import FINISHED
from diloco.report_predictions import BANDWIDTHS, RTT_LABEL
from diloco.report_study import CLOSE_PERCENT, Setting, Study, choose
from diloco.run_files import write_atomically

_TEMPLATE = "html_report.html"
_ANSWER_LINK = ("100mbit", "100 Mbit/s")
_BANDWIDTH_LABELS = {"10mbit": "10 Mbit/s", "100mbit": "100 Mbit/s", "1gbit": "1 Gbit/s", "10gbit": "10 Gbit/s"}


@dataclass(frozen=True)
class Number:
    """A value of a table as people read it.

    Attributes:
        scale: what is shown is the value divided by it.
        table, row, column: where the value stands: ``results`` by ``cell``, or ``settings`` by ``setting``.
    """

    value: Any
    form: str
    table: str
    row: str
    column: str
    scale: float = 1.0

    def __str__(self) -> str:
        if self.value is None:
            return "–"
        return format(self.value if self.form == "" else self.value / self.scale, self.form)


@dataclass(frozen=True)
class Column:
    """One of a table."""

    key: str
    head: str
    form: str = ""
    scale: float = 1.0
    spread: str = ""  # column of what is told after ±


_SETTINGS = [
    Column("runs", "runs", ".0f"),
    Column("eval_loss", "held-out loss", ".4f", spread="eval_loss_spread"),
    Column("loss_above_baseline_percent", "above data-parallel, %", "+.2f", spread="loss_above_baseline_percent_spread"),
    Column("rounds", "rounds", ",.0f"),
    Column("bits_per_parameter", "bits a parameter", ".3g"),
    Column("bytes_per_island", "MB sent by an island", ",.4g", 1e6),
    Column("times_fewer_bytes", "times fewer bytes", ",.3g"),
    Column("step_seconds", "ms a step", ",.3g", 1e-3),
    Column("mean_distance", "distance", ".3g"),
    Column("mean_norm", "norm", ".3g"),
    Column("mean_cosine", "cosine", ".2f"),
]
_PREDICTED = [Column(f"predicted_utilization_{name}", _BANDWIDTH_LABELS[name], ".1f", 1e-2) for name in BANDWIDTHS]
_RUNS = [
    Column("status", "status"),
    Column("eval_loss", "held-out loss", ".4f"),
    Column("train_loss", "training loss", ".4f"),
    Column("tokens", "tokens", ",.0f"),
    Column("rounds", "rounds", ",.0f"),
    Column("bytes_per_island", "MB sent by an island", ",.4g", 1e6),
    Column("step_seconds", "ms a step", ",.3g", 1e-3),
    Column("encode_seconds", "ms to encode", ",.3g", 1e-3),
    Column("decode_seconds", "ms to decode", ",.3g", 1e-3),
    Column("measured_utilization", "computing, %", ".1f", 1e-2),
    Column("wall_seconds", "seconds in all", ",.0f"),
]


def write_page(study: Study, folder: Path, figures: bool = True) -> str:
    """Write ``report.html`` into ``folder``, and each figure as PNG into ``figures`` below it.

    Returns:
        The answer in words.
    """
    drawn = [(picture, picture.figure()) for picture in pictures(study)]
    if figures:
        (folder / "figures").mkdir(exist_ok=True)
        for picture, figure in drawn:
            write_atomically(folder / "figures" / f"{picture.name}.png", png(figure))
    shown = [(picture, svg(figure, picture.name)) for picture, figure in drawn]
    answer = answer_of(study)
    write_atomically(folder / "report.html", _render(study, shown, answer).encode())
    return "".join(map(str, answer))


def answer_of(study: Study) -> list[str | Number]:
    """The setting to take, what it costs and what it saves: a sentence with its numbers."""
    chosen = choose(study)
    if chosen is None:
        return ["No run with rounds between islands has come to its end yet."]
    return [*_loss_words(chosen), *_bytes_words(chosen), *_link_words(chosen), "."]


def _loss_words(chosen: Setting) -> Iterable[str | Number]:
    above = _number(chosen, "loss_above_baseline_percent", ".2f")
    if above.value is None:
        yield from (f"{chosen.label} ends at a held-out loss of ", _number(chosen, "eval_loss", ".4f"))
        return
    if above.value >= 0:
        yield from (f"{chosen.label} loses ", above, " %")
    else:
        yield from (f"{chosen.label} changes the loss by ", above, " %")
    spread = _number(chosen, "loss_above_baseline_percent_spread", ".2f")
    if spread.value is not None:
        yield from (" (± ", spread, " between seeds)")
    yield " against data-parallel training on as many tokens"


def _bytes_words(chosen: Setting) -> Iterable[str | Number]:
    fewer = _number(chosen, "times_fewer_bytes", ",.3g")
    if fewer.value is not None and fewer.value < 1.05:
        yield " and sends no fewer bytes"
    elif fewer.value is not None:
        yield from (" and sends ", fewer, " times fewer bytes")


def _link_words(chosen: Setting) -> Iterable[str | Number]:
    name, told = _ANSWER_LINK
    busy = _number(chosen, f"predicted_utilization_{name}", ".1f", 1e-2)
    if busy.value is not None:
        yield from (f"; on links of {told} and {RTT_LABEL} it is predicted to compute ", busy, " % of the time")


def _number(setting: Setting, column: str, form: str, scale: float = 1.0) -> Number:
    return Number(setting.row.get(column), form, "settings", setting.label, column, scale)


def _render(study: Study, shown: Sequence[tuple[Picture, str]], answer: Sequence[str | Number]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # torch needs it, too

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.tests["number"] = lambda value: isinstance(value, Number)
    finished = [row for row in study.rows if row["status"] == FINISHED]
    return environment.get_template(_TEMPLATE).render(
        study=study,
        answer=answer,
        rule_percent=f"{CLOSE_PERCENT:g}",
        rtt=RTT_LABEL,
        pictures=shown,
        finished=len(finished),
        device_note=_device_note(study),
        measured_heads=[column.head for column in _SETTINGS],
        predicted_heads=[column.head for column in _PREDICTED],
        settings=[_cells(each.row, [*_SETTINGS, *_PREDICTED], "settings", "setting") for each in study.settings],
        run_heads=[column.head for column in _RUNS],
        runs=[_cells(row, _RUNS, "results", "cell") for row in study.rows],
        failed=[(row["cell"], row["error"]) for row in study.rows if row.get("error")],
    )


def _cells(row: dict[str, Any], columns: Sequence[Column], table: str, index: str) -> tuple[str, list[list[str | Number]]]:
    """Name of a row, and what is in each of its cells."""
    name, cells = row[index], []
    for column in columns:
        cell: list[str | Number] = [Number(row.get(column.key), column.form, table, name, column.key, column.scale)]
        if column.spread and row.get(column.spread) is not None:
            cell += [" ± ", Number(row[column.spread], column.form.lstrip("+"), table, name, column.spread, column.scale)]
        cells.append(cell)
    return name, cells


def _device_note(study: Study) -> str:
    if study.simulated:
        return (
            "The islands of each run were simulated in one process, with the arithmetic of a real swarm. Losses, norms, cosines and "
            "seconds of computing are measured; bytes are computed by the rules of the exchange; what links would do is predicted."
        )
    return "Losses, norms, cosines, bytes and seconds are measured on the runs themselves; what other links would do is predicted."
