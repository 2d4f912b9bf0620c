"""What a person sees of a sweep: bars that live in a terminal, or plain lines anywhere else."""

import time
from dataclasses import dataclass
from typing import Protocol, Self, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from diloco.live_view import clock

PLAIN_SECONDS = 30.0


@dataclass(frozen=True)
class Standing:
    """How far a sweep is.

    Attributes:
        ended: cells that need nothing more; ``failed`` of them did fail.
        running: name of each cell that runs, and which share of its tokens it has trained on.
        seconds_left: estimated; None: too early to tell.
    """

    ended: int
    failed: int
    cells: int
    running: Sequence[tuple[str, float]]
    seconds_left: float | None

    def __str__(self) -> str:
        parts = [f"{self.ended} of {self.cells} cells"]
        if self.failed:
            parts.append(f"{self.failed} failed")
        if self.seconds_left is not None:
            parts.append(f"about {clock(self.seconds_left)} left")
        return " · ".join(parts)


class SweepView(Protocol):
    """Where a sweep shows things; a context manager."""

    def tell(self, text: str) -> None:
        """Something that is worth telling at once."""

    def refresh(self, standing: Standing) -> None:
        """Show how far it is; may be called as often as one likes."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def make_view() -> SweepView:
    """The view that suits standard output."""
    console = Console()
    return TerminalView(console) if console.is_terminal and not console.is_dumb_terminal else PlainView()


class PlainView:
    """A line whenever something happened, and one now and then."""

    def __init__(self) -> None:
        self._shown_at = time.monotonic()

    def tell(self, text: str) -> None:
        """See :class:`SweepView`."""
        print(text, flush=True)

    def refresh(self, standing: Standing) -> None:
        """See :class:`SweepView`."""
        if time.monotonic() - self._shown_at >= PLAIN_SECONDS:
            self._shown_at = time.monotonic()
            running = ", ".join(f"{name} {share:.0%}" for name, share in standing.running)
            print(f"{standing} · running: {running}", flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None: ...


class TerminalView:
    """A bar for the sweep and one for each cell that runs, redrawn in place; what happens scrolls by above them."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(BarColumn(24), TextColumn("{task.description}", markup=False), console=console)
        self._whole: TaskID | None = None
        self._cells: dict[str, TaskID] = {}

    def tell(self, text: str) -> None:
        """See :class:`SweepView`."""
        self._progress.console.print(text, markup=False, highlight=False)

    def refresh(self, standing: Standing) -> None:
        """See :class:`SweepView`."""
        if self._whole is None:
            self._whole = self._progress.add_task("", total=standing.cells)
        done = standing.ended + sum(share for _, share in standing.running)
        self._progress.update(self._whole, completed=done, description=str(standing))
        running = dict(standing.running)
        for name in self._cells.keys() - running:
            self._progress.remove_task(self._cells.pop(name))
        for name, share in running.items():
            if name not in self._cells:
                self._cells[name] = self._progress.add_task(name, total=1.0)
            self._progress.update(self._cells[name], completed=share)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
