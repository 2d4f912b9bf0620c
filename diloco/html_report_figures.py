"""The pictures of a page: drawn once, written as PNG and as SVG that takes the colours of the page."""

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diloco import html_report_panels as panels
from diloco.html_report_styles import Styles
from diloco.report_predictions import RTT_LABEL
from diloco.report_study import Study
from diloco.sweep_cells import key_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURED, PREDICTED = "measured", "predicted"
_INK = "#010203"  # replaced by the colour of the page's text
_SIZE = (5.2, 3.9)  # inches: a phone shows it at three quarters, and can still be read
_LONGEST_LEGEND = 14


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
    over = key_label(axis) if axis else "setting"
    found = [
        Picture(
            "loss_over_tokens",
            "Loss over tokens",
            MEASURED,
            "Training loss, the mean of islands and seeds, smoothed; what lies above the frame are the first steps.",
            lambda panel: panels.losses(panel, study, styles),
        ),
        Picture(
            "final_loss",
            f"Final loss against {over}",
            MEASURED,
            "Held-out loss at the end of all tokens; bars are the standard deviation between seeds. Dashed: data-parallel.",
            lambda panel: panels.final_losses(panel, study, styles, axis),
        ),
        Picture(
            "loss_above_baseline",
            f"Loss above data-parallel against {over}",
            MEASURED,
            "Held-out loss at the end, in percent above that of the data-parallel run with the same seed and as many tokens; bars are the "
            "standard deviation of that between seeds, which have much in common.",
            lambda panel: panels.losses_above_baseline(panel, study, styles, axis),
        ),
        Picture(
            "loss_over_bytes",
            "Loss against bytes",
            MEASURED,
            f"Held-out loss at the end over bytes that one island sends in all, {bytes_are}. The line is the frontier: no other setting "
            "has both a lower loss and fewer bytes.",
            lambda panel: panels.frontier(panel, study, styles),
        ),
        Picture(
            "utilization",
            "Share of the time that is computing",
            PREDICTED,
            f"By the link model, at a round-trip time of {RTT_LABEL}, from the measured seconds of a step, of encoding and of decoding on "
            "the device that the runs used, in the fastest run that had the same to do. On a faster device, curves move to the right.",
            lambda panel: panels.over_bandwidth(panel, study, styles, "utilization"),
        ),
        Picture(
            "wall_clock",
            "Wall-clock time of the run",
            PREDICTED,
            f"By the link model, at a round-trip time of {RTT_LABEL}: all steps of the run with one such device an island. Where curves "
            "are flat, the link costs nothing.",
            lambda panel: panels.over_bandwidth(panel, study, styles, "seconds"),
        ),
        Picture(
            "drift",
            "Distance between islands",
            MEASURED,
            "Of islands from their mean when a round begins: L2 over all parameters, root mean square over islands.",
            lambda panel: panels.rounds(panel, study, styles, "distance", "distance from the mean (L2)"),
        ),
        Picture(
            "pseudo_gradient",
            "Norm of the pseudo-gradient",
            MEASURED,
            "How far an island has moved from the anchor when a round begins, L2, the mean of islands.",
            lambda panel: panels.rounds(panel, study, styles, "norm", "norm (L2)"),
        ),
        Picture(
            "cosine",
            "Cosine between islands",
            MEASURED,
            "Between the pseudo-gradients of two islands, the mean of pairs: 1 where all islands agree on where to go, 0 where they have "
            "nothing in common.",
            lambda panel: panels.rounds(panel, study, styles, "cosine", "cosine"),
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
