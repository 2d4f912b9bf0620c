"""What is in each picture of a page."""

import statistics
from typing import TYPE_CHECKING, Any

from diloco.html_report_styles import Styles
from diloco.link_model import Link
from diloco.report_measures import Curves
from diloco.report_predictions import CURVE_BANDWIDTHS, RTT_SECONDS, prediction
from diloco.report_study import Setting, Study
from diloco.sweep_cells import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_TOKENS = "tokens of all islands"
_AXIS_NAMES = {"outer.sync_every": "H, inner steps between rounds", "swarm.islands": "M, islands"}


def losses(panel: "Axes", study: Study, styles: Styles) -> None:
    """Training loss over tokens, the mean of a setting's runs. Cut above, so that the ends can be told apart."""
    early = []
    for setting in study.settings:
        points = _mean_curve([curves.losses for curves in setting.curves])
        if points:
            panel.plot(*zip(*points), label=setting.label, linewidth=1.3, **{**styles.line(setting), "marker": ""})
            early.append(points[len(points) // 8][1])
    if early:
        panel.set_ylim(top=max(early))
    panel.set_xlabel(_TOKENS)
    panel.set_ylabel("loss (nats per token)")
    _engineering(panel.xaxis)


def _mean_curve(curves: list[list[tuple[float, Any]]]) -> list[tuple[float, float]]:
    """Over runs, at the places that all of them have: runs of one setting step alike."""
    shared = set.intersection(*({place for place, _ in curve} for curve in curves)) if curves else set()
    found = [{place: value for place, value in curve} for curve in curves]
    return [(place, statistics.fmean(each[place] for each in found)) for place in sorted(shared)]


def final_losses(panel: "Axes", study: Study, styles: Styles, axis: str | None) -> None:
    """Held-out loss at the end over one key, a line for each combination of the others."""
    _over_key(panel, study, styles, axis, "eval_loss")
    for setting in (each for each in study.baselines if each.row["eval_loss"] is not None):
        loss, spread = setting.row["eval_loss"], setting.row["eval_loss_spread"] or 0.0
        panel.axhline(loss, label=setting.label, linewidth=1.2, **{**styles.line(setting), "marker": ""})
        panel.axhspan(loss - spread, loss + spread, color=styles.baseline, alpha=0.1, linewidth=0)
    panel.set_ylabel("held-out loss (nats per token)")


def losses_above_baseline(panel: "Axes", study: Study, styles: Styles, axis: str | None) -> None:
    """By how much it is above that of the data-parallel run with the same seed."""
    if _over_key(panel, study, styles, axis, "loss_above_baseline_percent"):
        panel.axhline(0.0, label="data-parallel", color=styles.baseline, linestyle=(0, (4, 2)), linewidth=1.2)
    panel.set_ylabel("above data-parallel, %")


def _over_key(panel: "Axes", study: Study, styles: Styles, axis: str | None, column: str) -> bool:
    """One column of the settings over one key, with its spread. Returns whether there was any."""
    known = [setting for setting in study.islands if setting.row[column] is not None]
    values = [setting.keys.get(axis) if axis else setting.label for setting in known]
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in values)
    names = list(dict.fromkeys(map(str, values)))
    places = values if numeric else [names.index(str(value)) for value in values]
    lines: dict[str, list[tuple[Any, Setting]]] = {}
    for place, setting in zip(places, known):
        rest = {key: value for key, value in setting.keys.items() if key != axis}
        lines.setdefault(label(rest) or "islands", []).append((place, setting))
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        x, y = [place for place, _ in points], [setting.row[column] for _, setting in points]
        spread = [setting.row[f"{column}_spread"] or 0.0 for _, setting in points]
        look = dict(styles.line(points[0][1]), linestyle="-" if numeric else "none")
        if len(lines) == 1:
            look["color"] = styles.plain
        panel.errorbar(x, y, spread, label=name, capsize=3, linewidth=1.3, markersize=5, **look)
    if known:
        if numeric and max(places) >= 8 * min(places):
            panel.set_xscale("log")
        shown = sorted(set(places))
        panel.set_xticks(shown, [f"{place:g}" for place in shown] if numeric else names)
        panel.minorticks_off()
    panel.set_xlabel(_AXIS_NAMES.get(axis or "", axis or ""))
    return bool(known)


def frontier(panel: "Axes", study: Study, styles: Styles) -> None:
    """Held-out loss at the end over the bytes that an island sent, with the settings that none beats in both."""
    known = [each for each in study.settings if each.row["eval_loss"] is not None and each.row["bytes_per_island"]]
    if not known:
        return
    front = sorted((each.row["bytes_per_island"], each.row["eval_loss"]) for each in known if each.row["on_frontier"])
    panel.plot(*zip(*front), color=styles.baseline, linewidth=6, alpha=0.15, solid_capstyle="round", drawstyle="steps-post")
    for setting in known:
        look = dict(styles.line(setting), linestyle="none", marker=styles.line(setting)["marker"] or "D")
        spread = setting.row["eval_loss_spread"] or 0.0
        place = setting.row["bytes_per_island"], setting.row["eval_loss"]
        panel.errorbar(*place, spread, label=setting.label, capsize=3, markersize=6, **look)
    panel.set_xscale("log")
    panel.set_xlabel("bytes sent by each island")
    panel.set_ylabel("held-out loss (nats per token)")
    _engineering(panel.xaxis, "B")


def over_bandwidth(panel: "Axes", study: Study, styles: Styles, value: str) -> None:
    """``utilization``, or the ``seconds`` of the whole run, that the link model predicts."""
    for setting in study.settings:
        points = [(bits, found) for bits in CURVE_BANDWIDTHS if (found := _predicted(setting, bits, value)) is not None]
        if points:
            panel.plot(*zip(*points), label=setting.label, linewidth=1.5, **{**styles.line(setting), "marker": ""})
    panel.set_xscale("log")
    panel.set_xlabel("bandwidth of an island, each way")
    _engineering(panel.xaxis, "bit/s")
    if value == "utilization":
        panel.set_ylim(0, 1.02)
        panel.set_ylabel("predicted compute utilization")
        panel.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    else:
        panel.set_yscale("log")
        panel.set_ylabel("predicted seconds")
        _engineering(panel.yaxis)


def _predicted(setting: Setting, bits: float, value: str) -> float | None:
    """Mean over the setting's runs."""
    link = Link(bits, RTT_SECONDS)
    found = [(each, run) for run in setting.runs if (each := prediction(run, link))]
    if not found:
        return None
    return statistics.fmean(each.utilization if value == "utilization" else each.seconds_per_step * run["steps"] for each, run in found)


def rounds(panel: "Axes", study: Study, styles: Styles, key: str, name: str) -> None:
    """One of the attributes of :class:`~diloco.report_drift.Drift`, over tokens."""
    for setting in study.islands:
        points = _mean_curve([_of_rounds(curves, key) for curves in setting.curves])
        if points:
            look = dict(styles.line(setting))
            look["marker"] = look["marker"] if len(points) < 12 else ""
            panel.plot(*zip(*points), label=setting.label, linewidth=1.2, markersize=4, **look)
    panel.set_xlabel(_TOKENS)
    panel.set_ylabel(name)
    _engineering(panel.xaxis)


def _of_rounds(curves: Curves, key: str) -> list[tuple[float, float]]:
    return [(tokens, value) for tokens, drift in curves.rounds if (value := getattr(drift, key)) is not None]


def _engineering(axis: Any, unit: str = "") -> None:
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axis.set_major_formatter(EngFormatter(unit, sep=" " if unit else ""))
    if axis.get_scale() == "log":
        low, high = sorted(axis.get_view_interval())
        axis.set_major_locator(LogLocator(subs=(1.0,) if high > 100 * low else (1.0, 2.0, 5.0)))
        axis.set_minor_formatter(NullFormatter())
