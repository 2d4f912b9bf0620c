"""``diloco sweep``: runs the cells of a sweep side by side, each in a process of its own, and reports what came of them.

A cell that is finished is never run again, so a sweep that was stopped or killed goes on with the same command; one that was
interrupted is run afresh. The number of threads depends on the file and the machine alone, so a cell comes to the same bits whenever
it is run.
"""

import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Callable, Iterator, Literal, Sequence

from diloco.launch_processes import LAUNCH_MARK, end_all, start_process
from diloco.live_view import clock
from diloco.run_files import RowTail, island_dirs, lock_run_dir, metrics_file, write_atomically
from diloco.run_record import read_run
from diloco.sweep_cells import Cell, make_cells
from diloco.sweep_config import SweepFile, read_sweep
from diloco.sweep_places import Places, find_places
from diloco.sweep_report import write_sweep_report
from diloco.sweep_view import Standing, SweepView, make_view
from islands.config_file import ConfigError, dump_config

CELL_FAILED, INTERRUPTED = 1, 130
LOG_LINES_AFTER_FAILURE = 15
_POLL_SECONDS = 0.25
_DONE = "done.json"  # in the folder of a cell that is finished
_OWN = "sweep.json"  # makes a folder that of a sweep


#: Makes the command of one cell: (cell, its configuration file) -> argv.
CellCommand = Callable[[Cell, Path], list[str]]


def cell_command(cell: Cell, file: Path) -> list[str]:
    """A simulation, or one island by itself."""
    return [sys.executable, "-m", "islands" if cell.is_baseline else "diloco", str(file)]


@dataclass(frozen=True)
class Plan:
    """What will be run, and where."""

    sweep: SweepFile
    cells: list[Cell]
    places: Places
    command: CellCommand = cell_command

    @property
    def folder(self) -> Path:
        """Where it is written."""
        return self.sweep.folder


@dataclass
class _Running:
    """A cell that was started."""

    cell: Cell
    process: subprocess.Popen[bytes]
    gpu: str | None
    tails: list[RowTail]
    started: float = field(default_factory=time.monotonic)
    tokens: int = 0

    def read(self) -> None:
        """See how far it is."""
        self.tokens += sum(row.get("tokens", 0) for tail in self.tails for row in tail.read() if row["kind"] == "step")

    @property
    def share(self) -> float:
        """Of its tokens."""
        return min(1.0, self.tokens / self.cell.tokens)


def sweep(config_file: Path, overrides: Sequence[str], command: CellCommand = cell_command) -> int:
    """Run all cells that are not finished yet, and write the report.

    Returns:
        The exit code: 0 where all cells are finished, 1 where some failed, 130 when it was interrupted.

    Raises:
        ConfigError: before the first cell starts.
    """
    plan = replace(make_plan(config_file, overrides), command=command)
    _check_folder(plan.folder)
    with lock_run_dir(plan.folder, "sweep.dir") as lock, _signals_interrupt():
        plan.folder.mkdir(parents=True, exist_ok=True)
        cells = {cell.digest: cell.name for cell in plan.cells}
        write_atomically(plan.folder / _OWN, json.dumps(dict(source=plan.sweep.source, cells=cells), indent=2).encode())
        missing = [cell for cell in plan.cells if not is_done(cell)]
        print(_told(plan, len(missing)), flush=True)
        failed: dict[str, str] = {}
        try:
            with make_view() as view:
                _run_all(plan, missing, failed, view, lock.fileno())
        except KeyboardInterrupt:
            return _tell_interruption(plan, failed, config_file, overrides)
        summary = write_sweep_report(plan.sweep, plan.cells, _done(plan), failed)
    print(f"\n{summary}\nreport: {plan.folder / 'report.html'}")
    if failed:
        print(f"{len(failed)} of {len(plan.cells)} cells failed; the same command tries them again", file=sys.stderr)
    return CELL_FAILED if failed else 0


def make_plan(config_file: Path, overrides: Sequence[str]) -> Plan:
    """Check every cell, and see how many fit side by side. Raises ConfigError."""
    described = read_sweep(config_file, overrides)
    cells = make_cells(described)
    on_gpus = any(cell.config.run.device != "cpu" for cell in cells)
    return Plan(described, cells, find_places(described.section.jobs, len(cells), on_gpus))


def is_done(cell: Cell) -> bool:
    """Whether the cell was run to its end, with the very configuration that it has now."""
    try:
        return json.loads((cell.folder / _DONE).read_bytes()).get("digest") == cell.digest
    except FileNotFoundError:
        return False


def _check_folder(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and ((folder / _OWN).exists() or not any(folder.iterdir()))):
        raise ConfigError(f"sweep.dir={folder} exists and holds no sweep, so it stays as it is. Choose another folder")


def _run_all(plan: Plan, waiting: list[Cell], failed: dict[str, str], view: SweepView, lock: int) -> None:
    """Until no cell is left. What runs when something goes wrong is ended at once: it is run afresh another time.

    Args:
        failed: gains why, by the names of cells that failed.
    """
    mark, running, waiting = uuid.uuid4().hex, [], list(waiting)
    estimate = _Estimate(waiting)
    free = plan.places.free
    try:
        while waiting or running:
            while waiting and free:
                running.append(_start(plan, waiting.pop(0), free.pop(0), mark, lock))
            for one in running:
                one.read()
            for ended in [one for one in running if one.process.poll() is not None]:
                running.remove(ended)
                free.append(ended.gpu)
                estimate.ended(ended)
                _settle(ended, failed, view)
            shown = [(one.cell.name, one.share) for one in running]
            ended_cells = len(plan.cells) - len(waiting) - len(running)
            view.refresh(Standing(ended_cells, len(failed), len(plan.cells), shown, estimate.seconds_left(running)))
            time.sleep(_POLL_SECONDS)
    finally:
        end_all([one.process for one in running], mark, at_once=lambda: True)


class _Estimate:
    """Of the time left, by the tokens that all cells together train on in a second."""

    def __init__(self, cells: list[Cell]) -> None:
        self._left, self._started, self._done = sum(cell.tokens for cell in cells), time.monotonic(), 0

    def ended(self, one: _Running) -> None:
        """A cell needs nothing more."""
        self._left -= one.cell.tokens
        self._done += one.cell.tokens

    def seconds_left(self, running: list[_Running]) -> float | None:
        """None until there is something to go by."""
        done, tokens = sum(one.share * one.cell.tokens for one in running) + self._done, self._left
        left = tokens - sum(one.share * one.cell.tokens for one in running)
        return left / done * (time.monotonic() - self._started) if done else None


def _start(plan: Plan, cell: Cell, gpu: str | None, mark: str, lock: int) -> _Running:
    if cell.folder.exists():  # what was interrupted, or failed
        shutil.rmtree(cell.folder)
    cell.folder.mkdir(parents=True)
    file = cell.folder / "config.yaml"
    file.write_text(dump_config(cell.config))
    environment = {**plan.places.environment(gpu), LAUNCH_MARK: mark}
    islands = 1 if cell.is_baseline else cell.workers
    tails = [RowTail(metrics_file(cell.folder, island)) for island in range(islands)]
    return _Running(cell, start_process(plan.command(cell, file), cell.folder / "log.txt", environment, lock), gpu, tails)


def _settle(ended: _Running, failed: dict[str, str], view: SweepView) -> None:
    """A cell's process is gone: note that it is finished, or tell why it is not."""
    cell, code, seconds = ended.cell, ended.process.returncode, time.monotonic() - ended.started
    if code == 0 and _at_its_end(cell.folder):
        shutil.rmtree(cell.folder / "checkpoints", ignore_errors=True)  # one a cell would fill the disk, and nothing goes on from it
        write_atomically(cell.folder / _DONE, json.dumps(dict(digest=cell.digest, seconds=seconds)).encode())
        view.tell(f"finished {cell.name} in {clock(seconds)}")
        return
    how = f"failed with exit code {code}" if code else "stopped before its end"
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else how
    log = cell.folder / "log.txt"
    last = log.read_text(errors="replace").splitlines()[-LOG_LINES_AFTER_FAILURE:]
    failed[cell.name] = f"{how}: {last[-1] if last else 'it said nothing'}"
    view.tell("\n".join([f"FAILED {cell.name} {how}; the others go on. The end of {log}:", *(f"  {line}" for line in last)]))


def _at_its_end(run_dir: Path) -> bool:
    """Whether an island has come to it, from which others may be gone, as scripted. One that is asked to stop exits with 0, too."""
    return bool(island_dirs(run_dir)) and any(record.ended for record in read_run(run_dir))


def _tell_interruption(plan: Plan, failed: dict[str, str], config_file: Path, overrides: Sequence[str]) -> Literal[130]:
    done = len(_done(plan))
    print(
        f"\nInterrupted. {done} of {len(plan.cells)} cells are finished and kept. "
        f"To go on: {shlex.join(['diloco', 'sweep', str(config_file), *overrides])}",
        flush=True,
    )
    if done:
        write_sweep_report(plan.sweep, plan.cells, _done(plan), failed)
        print(f"report of what there is: {plan.folder / 'report.html'}")
    return INTERRUPTED


def _done(plan: Plan) -> set[str]:
    return {cell.name for cell in plan.cells if is_done(cell)}


def _told(plan: Plan, missing: int) -> str:
    tokens = {cell.tokens for cell in plan.cells}
    each = f"{max(tokens):,} tokens each" if len(tokens) == 1 else f"{min(tokens):,} to {max(tokens):,} tokens each"
    before = f", {len(plan.cells) - missing} of them finished before" if missing < len(plan.cells) else ""
    return f"{plan.sweep.run_name}: {len(plan.cells)} cells of {each}{before}; {plan.places} in {plan.folder}"


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGTERM and a closed terminal are Ctrl-C, too; what is ignored, as under nohup, stays so."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [each for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
