"""The pictures of a page: drawn once, written as PNG and as SVG that takes the colours of the page."""

import io
import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco.html_report_styles import Styles
from diloco.link_model import Link
from diloco.report_measures import Curves
from diloco.report_predictions import CURVE_BANDWIDTHS, RTT_LABEL, RTT_SECONDS, prediction
from diloco.report_study import Setting, Study
from diloco.sweep_cells import key_label, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURED, PREDICTED = "measured", "predicted"
_INK = "#010203"  # replaced by the colour of the page's text
_SIZE = (5.2, 3.9)  # inches: a phone shows it at three quarters, and can still be read
_LONGEST_LEGEND = 14
_TOKENS = "tokens of all islands"


@dataclass(frozen=True)
class Picture:
    """One figure of a page.

    Attributes:
        name: of its file.
        basis: whether its values were measured or predicted.
        says: what one sees.
    """

    name: str
    title: str
    basis: str
    says: str
    draw: Callable[["Axes"], None]

    def figure(self) -> "Figure":
        """It alone, with a legend below."""
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context(_RC):
            figure = Figure(figsize=_SIZE, layout="constrained")
            panel = figure.subplots()
            self.draw(panel)
            tidy(panel)
            handles, labels = panel.get_legend_handles_labels()
            if 0 < len(labels) <= _LONGEST_LEGEND:
                figure.legend(handles, labels, loc="outside lower center", ncols=3 if max(map(len, labels)) < 16 else 2, frameon=False)
            return figure


_RC: dict[str, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "diloco",
    "font.family": "sans-serif",
    "font.size": 10,
    "legend.fontsize": 9,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color"), _INK),
}


def tidy(panel: "Axes") -> None:
    """What all have in common."""
    panel.spines[["top", "right"]].set_visible(False)
    panel.grid(alpha=0.18)
    panel.set_axisbelow(True)


def png(figure: "Figure") -> bytes:
    """On white, for documents."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=150, facecolor="white")
    figure.set_layout_engine("none")  # it has its layout now, and to find one takes most of the time
    return picture.getvalue()


def svg(figure: "Figure", name: str) -> str:
    """To be put into a page: transparent, text in the page's colour, ids that belong to this figure alone."""
    import matplotlib

    picture = io.StringIO()
    with matplotlib.rc_context(_RC):
        figure.savefig(picture, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = picture.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text.replace(_INK, "currentColor"))
    return re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1), count=1)


def pictures(study: Study) -> list[Picture]:
    """Those for which there is something to show."""
    styles, bytes_are = Styles(study), "computed by the rules of the exchange" if study.simulated else "counted by the exchange"
    axis = x_key(study)
    found = [
        Picture(
            "loss_over_tokens",
            "Loss over tokens",
            MEASURED,
            "Training loss, the mean of islands and seeds, smoothed; what lies above the frame are the first steps.",
            lambda panel: _losses(panel, study, styles),
        ),
        Picture(
            "final_loss",
            f"Final loss against {key_label(axis) if axis else 'setting'}",
            MEASURED,
            "Held-out loss at the end of all tokens; bars are the standard deviation between seeds. Dashed: data-parallel.",
            lambda panel: _final_losses(panel, study, styles, axis),
        ),
        Picture(
            "loss_over_bytes",
            "Loss against bytes",
            MEASURED,
            f"Held-out loss at the end over bytes that one island sends in all, {bytes_are}. The line is the frontier: no other setting "
            "has both a lower loss and fewer bytes.",
            lambda panel: _frontier(panel, study, styles),
        ),
        Picture(
            "utilization",
            "Share of the time that is computing",
            PREDICTED,
            f"By the link model, at a round-trip time of {RTT_LABEL}, from the measured seconds of a step, of encoding and of decoding, on "
            "the device that the runs used: on a faster one, curves move to the right.",
            lambda panel: _over_bandwidth(panel, study, styles, "utilization"),
        ),
        Picture(
            "wall_clock",
            "Wall-clock time of the run",
            PREDICTED,
            f"By the link model, at a round-trip time of {RTT_LABEL}: all steps of the run with one such device an island. Where curves "
            "are flat, the link costs nothing.",
            lambda panel: _over_bandwidth(panel, study, styles, "seconds"),
        ),
        Picture(
            "drift",
            "Distance between islands",
            MEASURED,
            "Of islands from their mean when a round begins: L2 over all parameters, root mean square over islands.",
            lambda panel: _rounds(panel, study, styles, "distance", "distance from the mean (L2)"),
        ),
        Picture(
            "pseudo_gradient",
            "Norm of the pseudo-gradient",
            MEASURED,
            "How far an island has moved from the anchor when a round begins, L2, the mean of islands.",
            lambda panel: _rounds(panel, study, styles, "norm", "norm (L2)"),
        ),
        Picture(
            "cosine",
            "Cosine between islands",
            MEASURED,
            "Between the pseudo-gradients of two islands, the mean of pairs: 1 where all islands agree on where to go, 0 where they have "
            "nothing in common.",
            lambda panel: _rounds(panel, study, styles, "cosine", "cosine"),
        ),
    ]
    return [picture for picture in found if _shows(picture)]


def x_key(study: Study) -> str | None:
    """The key that final losses are drawn over: H where it varies, else the first that does."""
    varying = [key for key in study.keys if len({str(setting.keys.get(key)) for setting in study.islands}) > 1]
    return "outer.sync_every" if "outer.sync_every" in varying else next(iter(varying), None)


def _shows(picture: Picture) -> bool:
    from matplotlib.figure import Figure

    panel = Figure().subplots()
    picture.draw(panel)
    return panel.has_data()


def _losses(panel: "Axes", study: Study, styles: Styles) -> None:
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


def _final_losses(panel: "Axes", study: Study, styles: Styles, axis: str | None) -> None:
    known = [setting for setting in study.islands if setting.row["eval_loss"] is not None]
    values = [setting.keys.get(axis) if axis else setting.label for setting in known]
    numeric = bool(values) and all(isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 for value in values)
    places = values if numeric else [list(dict.fromkeys(map(str, values))).index(str(value)) for value in values]
    lines: dict[str, list[tuple[Any, Setting]]] = {}
    for place, setting in zip(places, known):
        rest = {key: value for key, value in setting.keys.items() if key != axis}
        lines.setdefault(label(rest), []).append((place, setting))
    for name, points in lines.items():
        points.sort(key=lambda point: point[0])
        x, y = [place for place, _ in points], [setting.row["eval_loss"] for _, setting in points]
        spread = [setting.row["eval_loss_spread"] or 0.0 for _, setting in points]
        look = dict(styles.line(points[0][1]), linestyle="-" if numeric else "none")
        if len(lines) == 1:
            look["color"] = styles.plain
        panel.errorbar(x, y, spread, label=name or "islands", capsize=3, linewidth=1.3, markersize=5, **look)
    for setting in (each for each in study.baselines if each.row["eval_loss"] is not None):
        loss, spread = setting.row["eval_loss"], setting.row["eval_loss_spread"] or 0.0
        panel.axhline(loss, label=setting.label, linewidth=1.2, **{**styles.line(setting), "marker": ""})
        panel.axhspan(loss - spread, loss + spread, color=styles.line(setting)["color"], alpha=0.1, linewidth=0)
    if numeric and max(places, default=1) >= 8 * min(places, default=1):
        panel.set_xscale("log")
    if places:
        shown = sorted(set(places))
        panel.set_xticks(shown, [f"{place:g}" for place in shown] if numeric else list(dict.fromkeys(map(str, values))))
        panel.minorticks_off()
    panel.set_xlabel({"outer.sync_every": "H, inner steps between rounds", "swarm.islands": "M, islands"}.get(axis or "", axis or ""))
    panel.set_ylabel("held-out loss (nats per token)")


def _frontier(panel: "Axes", study: Study, styles: Styles) -> None:
    known = [each for each in study.settings if each.row["eval_loss"] is not None and each.row["bytes_per_island"]]
    if not known:
        return
    front = sorted((each.row["bytes_per_island"], each.row["eval_loss"]) for each in known if each.row["on_frontier"])
    panel.plot(*zip(*front), color=styles.baseline, linewidth=6, alpha=0.15, solid_capstyle="round", drawstyle="steps-post")
    for setting in known:
        look = dict(styles.line(setting), linestyle="none", marker=styles.line(setting)["marker"] or "D")
        spread = setting.row["eval_loss_spread"] or 0.0
        panel.errorbar(setting.row["bytes_per_island"], setting.row["eval_loss"], spread, label=setting.label, capsize=3, markersize=6, **look)
    panel.set_xscale("log")
    panel.set_xlabel("bytes sent by each island")
    panel.set_ylabel("held-out loss (nats per token)")
    _engineering(panel.xaxis, "B")


def _over_bandwidth(panel: "Axes", study: Study, styles: Styles, value: str) -> None:
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


def _rounds(panel: "Axes", study: Study, styles: Styles, key: str, name: str) -> None:
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
