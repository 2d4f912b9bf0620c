"""What a person sees while islands train: a table that lives in a terminal, or plain lines anywhere else."""

import sys
import time
from dataclasses import dataclass
from typing import Literal, Protocol, Self, Sequence

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.run_files import Row

State = Literal["starting", "joining", "training", "done", "failed", "stopped"]

STATE_STYLES: dict[State, str] = {
    "starting": "dim",
    "joining": "yellow",
    "training": "cyan",
    "done": "green",
    "failed": "bold red",
    "stopped": "yellow",
}

#: What the table need not tell in words, and the state in which it leaves an island. The launcher knows all addresses.
QUIET_EVENTS: dict[str, State | None] = {"start": "joining", "address": None, "end": "done", "stopped": "stopped"}

PLAIN_PROGRESS_SECONDS = 10.0
REFRESH_SECONDS = 0.25


@dataclass
class IslandProgress:
    """How far one island is, as its rows tell.

    Attributes:
        saved: step of its newest checkpoint.
        begun: how often it has begun, which is once if no rank dies.
        finished: it has done all steps.
    """

    island: int
    steps: int
    state: State = "starting"
    step: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    committed: int = 0
    skipped: int = 0
    left_out: int = 0
    saved: int | None = None
    begun: int = 0
    finished: bool = False
    first_step: tuple[float, int] | None = None
    last_step: tuple[float, int] | None = None

    def apply(self, row: Row) -> str | None:
        """Take in one row. Returns what is worth telling at once, such as a skipped round."""
        kind = row["kind"]
        if kind == "step":
            return self._apply_step(row)
        if kind == "round":
            return self._apply_round(row)
        if kind == "event":
            return self._apply_event(row)
        return None

    def seconds_left(self) -> float | None:
        """Estimated from the pace since the first step."""
        if self.first_step is None or self.last_step is None or self.last_step[1] <= self.first_step[1]:
            return None
        seconds, steps = (last - first for last, first in zip(self.last_step, self.first_step))
        return seconds / steps * max(self.steps - self.step, 0)

    def _apply_step(self, row: Row) -> None:
        self.state = "training"
        self.step = row.get("lr_step", row.get("step", self.step))  # how far in the run, however many steps it did itself
        self.loss = row.get("loss", self.loss)
        self.tokens_per_second = row.get("tokens_per_second", self.tokens_per_second)
        self.last_step = (row.get("time", time.time()), self.step)
        self.first_step = self.first_step or self.last_step

    def _apply_round(self, row: Row) -> str | None:
        outcome = row.get("outcome")
        if outcome == "committed":
            self.committed += 1
            return None
        if outcome == "left_out":
            self.left_out += 1
        else:
            self.skipped += 1
        told = str(outcome).replace("_", " ")
        fragment = f" of fragment {row.get('fragment')}" if row.get("fragments", 1) > 1 else ""
        return f"round {row.get('round')}{fragment} {told} at step {row.get('step')}: {row.get('reason') or 'no reason given'}"

    def _apply_event(self, row: Row) -> str | None:
        what, detail = row.get("what"), row.get("detail")
        if what in QUIET_EVENTS:
            self.state = QUIET_EVENTS[what] or self.state
            self.finished = self.finished or what == "end"
            if what == "start":
                self.begun += 1
                self.first_step = self.last_step = None  # again, maybe: the time between says nothing of its pace
            return None
        if what == "checkpoint" and isinstance(detail, dict):
            self.saved = detail.get("step", self.saved)
            return None
        if what == "resumed" and isinstance(detail, dict):
            return f"goes on from the checkpoint of step {detail.get('step')}"
        return f"{what}: {detail}" if detail else str(what)


class View(Protocol):
    """Where the launcher shows things. A context manager; ``refresh`` may be called as often as one likes."""

    def line(self, island: int, text: str) -> None:
        """One line that an island printed."""

    def notice(self, island: int, text: str) -> None:
        """Something that happened to an island and is worth telling at once."""

    def tell(self, text: str) -> None:
        """Something about the whole run that is worth telling at once."""

    def refresh(self, islands: Sequence[IslandProgress], force: bool = False) -> None:
        """Show how far the islands are, if it is time to (or ``force``)."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def make_view(title: str) -> View:
    """The view that suits standard output."""
    console = Console()
    return TerminalView(title, console) if console.is_terminal and not console.is_dumb_terminal else PlainView()


class PlainView:
    """Lines with the island's name before each, and now and then one line of progress for each island."""

    def __init__(self) -> None:
        self._shown_at = time.monotonic()
        self._shown_steps: dict[int, tuple[int, State]] = {}

    def line(self, island: int, text: str) -> None:
        """See :class:`View`."""
        print(f"island {island} | {text}")

    def notice(self, island: int, text: str) -> None:
        """The island printed it too, where it is text."""

    def tell(self, text: str) -> None:
        """See :class:`View`."""
        print(text, flush=True)

    def refresh(self, islands: Sequence[IslandProgress], force: bool = False) -> None:
        """See :class:`View`."""
        if force or time.monotonic() - self._shown_at >= PLAIN_PROGRESS_SECONDS:
            self._shown_at = time.monotonic()
            for progress in islands:
                if self._shown_steps.get(progress.island) != (progress.step, progress.state):
                    self._shown_steps[progress.island] = (progress.step, progress.state)
                    self.line(progress.island, progress_line(progress))
        sys.stdout.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        sys.stdout.flush()


def progress_line(progress: IslandProgress) -> str:
    """One island in one line."""
    parts = [f"{progress.state} {progress.step}/{progress.steps}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.tokens_per_second is not None:
        parts.append(f"{progress.tokens_per_second:,.0f} tokens/s")
    parts.append(f"rounds {_rounds(progress)}")
    if progress.saved is not None:
        parts.append(f"saved at {progress.saved}")
    if progress.begun > 1:
        parts.append(f"begun again {progress.begun - 1}x")
    if progress.state == "training" and (left := progress.seconds_left()) is not None:
        parts.append(f"{clock(left)} left")
    return " · ".join(parts)


class TerminalView:
    """A table of all islands that is redrawn in place; what happens scrolls by above it."""

    def __init__(self, title: str, console: Console) -> None:
        self._title = title
        self._console = console
        self._started = self._shown_at = time.monotonic()
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)

    def line(self, island: int, text: str) -> None:
        """Kept in log.txt only: the table shows what matters, and lines would scroll what happened out of sight."""

    def notice(self, island: int, text: str) -> None:
        """See :class:`View`."""
        self._console.print(Text(f"island {island} | ", style="bold yellow") + Text(text))

    def tell(self, text: str) -> None:
        """See :class:`View`."""
        self._console.print(Text(text, style="bold"))

    def refresh(self, islands: Sequence[IslandProgress], force: bool = False) -> None:
        """See :class:`View`."""
        if force or time.monotonic() - self._shown_at >= REFRESH_SECONDS:
            self._shown_at = time.monotonic()
            self._live.update(self._render(islands), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def _render(self, islands: Sequence[IslandProgress]) -> Group:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("island", style="bold")
        table.add_column("state")
        table.add_column("step", justify="right", min_width=9)
        table.add_column("", width=24)
        for name, width in (("loss", 7), ("tokens/s", 8), ("rounds", 6), ("saved", 6)):
            table.add_column(name, justify="right", min_width=width)
        for progress in islands:
            speed = progress.tokens_per_second
            table.add_row(
                str(progress.island),
                Text(_state(progress), style=STATE_STYLES[progress.state]),
                f"{progress.step}/{progress.steps}",
                ProgressBar(total=progress.steps, completed=progress.step, width=24),
                "–" if progress.loss is None else f"{progress.loss:.3f}",
                "–" if speed is None else f"{speed:,.0f}",
                _rounds(progress),
                "–" if progress.saved is None else str(progress.saved),
            )
        return Group(self._headline(islands), table)

    def _headline(self, islands: Sequence[IslandProgress]) -> Text:
        headline = Text.assemble((self._title, "bold"), f" · {clock(time.monotonic() - self._started)} elapsed")
        left = [seconds for progress in islands if (seconds := progress.seconds_left()) is not None]
        return headline.append(f" · about {clock(max(left))} left") if left else headline


def _state(progress: IslandProgress) -> str:
    return progress.state if progress.begun < 2 else f"{progress.state} (begun again {progress.begun - 1}x)"


def _rounds(progress: IslandProgress) -> str:
    counts = {"skipped": progress.skipped, "left out": progress.left_out}
    missed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"{progress.committed} ({missed})" if missed else f"{progress.committed}"


def clock(seconds: float) -> str:
    """Such as ``2:05``, or ``1:00:00``."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
