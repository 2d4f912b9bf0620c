"""How a sweep is run: side by side, on after an interruption or a failure, and never a finished cell again.

Cells here are a copy of a prepared run, so that they take no time; tests/swarm/test_sweep_runs.py has real ones.
"""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable

import pytest
from study_runs import write_run
from test_sweep_cells import sweep_file

from diloco import sweep as sweeping
from diloco import sweep_places
from diloco.run_files import lock_run_dir
from diloco.sweep_cells import Cell
from islands.config_file import ConfigError

#: Notes that it was started; then does what the cell's seed says: copies a run (0, 1), fails (2), or waits to be ended (3).
_CELL = """
import os, shutil, sys, time
folder, prepared, seed, notes = sys.argv[1:]
open(notes, "a").write(f"{os.path.basename(folder)} {os.getpid()} {os.environ['OMP_NUM_THREADS']}\\n")
if seed == "2":
    sys.exit("the disk is on fire")
if seed == "3" and not os.path.exists(notes + ".go"):
    time.sleep(100)
shutil.copytree(prepared, folder, dirs_exist_ok=True)
"""


class Cells:
    """Makes the commands, and knows which cells were started."""

    def __init__(self, folder: Path) -> None:
        self._notes, self._runs = folder / "notes", folder / "prepared"
        write_run(self._runs / "islands")
        write_run(self._runs / "alone", outer=False)

    def command(self, cell: Cell, file: Path) -> list[str]:
        prepared = self._runs / ("alone" if cell.is_baseline else "islands")
        return [sys.executable, "-S", "-c", _CELL, str(file.parent), str(prepared), str(cell.config.run.seed), str(self._notes)]

    def started(self) -> list[tuple[str, int, str]]:
        """Names, process ids and threads, in order; and forgets them."""
        lines = self._notes.read_text().splitlines() if self._notes.exists() else []
        self._notes.unlink(missing_ok=True)
        return [(name.rpartition("-")[0], int(pid), threads) for name, pid, threads in map(str.split, lines)]

    def let_go(self) -> None:
        """From now on no cell waits."""
        (self._notes.parent / "notes.go").touch()


@pytest.fixture
def cells(tmp_path: Path) -> Cells:
    return Cells(tmp_path)


def seeds(folder: Path, *seeds: int, **keys: Any) -> Path:
    return sweep_file(folder, {"grid": {"run.seed": list(seeds)}, "baseline": False, "jobs": 1, **keys})


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page is tested elsewhere, and takes seconds to draw."""
    monkeypatch.setattr("diloco.sweep_report.write_page", lambda study, folder: "drawn")


def results(folder: Path) -> list[str]:
    return (folder / "sweep" / "results.csv").read_text().splitlines()


def test_cells_are_run_and_a_finished_one_never_again(tmp_path: Path, cells: Cells, plain: None, capsys: Any) -> None:
    file = seeds(tmp_path, 0, 1, baseline=True, jobs=2)
    assert sweeping.sweep(file, [], cells.command) == 0
    assert sorted(name for name, _, _ in cells.started()) == ["data-parallel-seed-0", "data-parallel-seed-1", "seed-0", "seed-1"]
    first = results(tmp_path)
    assert len(first) == 5 and "4 cells of 960 tokens each; 2 side by side" in capsys.readouterr().out
    assert sweeping.sweep(file, [], cells.command) == 0
    assert cells.started() == [] and results(tmp_path) == first
    assert "4 of them finished before" in capsys.readouterr().out


def test_more_cells_leave_those_that_are_finished_alone(tmp_path: Path, cells: Cells, plain: None) -> None:
    assert sweeping.sweep(seeds(tmp_path, 0), [], cells.command) == 0
    cells.started()
    assert sweeping.sweep(seeds(tmp_path, 0, 1), [], cells.command) == 0
    assert [name for name, _, _ in cells.started()] == ["seed-1"]


def test_a_cell_that_fails_is_told_and_the_others_go_on(tmp_path: Path, cells: Cells, plain: None, capsys: Any) -> None:
    file = seeds(tmp_path, 2, 0)
    assert sweeping.sweep(file, [], cells.command) == 1
    told = capsys.readouterr()
    assert "FAILED seed-2" in told.out and "  the disk is on fire" in told.out and "1 of 2 cells failed" in told.err
    status = {line.split(",")[0].rpartition("-")[0]: line.split(",")[1] for line in results(tmp_path)[1:]}
    assert status == {"seed-0": "finished", "seed-2": "failed"}
    cells.started()
    assert sweeping.sweep(file, [], cells.command) == 1  # tried again
    assert [name for name, _, _ in cells.started()] == ["seed-2"]


def test_a_cell_that_was_asked_to_stop_is_not_finished(tmp_path: Path, cells: Cells, plain: None, capsys: Any) -> None:
    for file in (tmp_path / "prepared" / "islands").glob("island-*/metrics.jsonl"):
        file.write_text(file.read_text().replace('"what": "end"', '"what": "stopped"'))
    assert sweeping.sweep(seeds(tmp_path, 0), [], cells.command) == 1  # it exits with 0
    assert "FAILED seed-0" in (told := capsys.readouterr().out) and "stopped before its end" in told
    assert not list((tmp_path / "sweep" / "cells").glob("*/done.json"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_is_done_and_leaves_no_process(
    tmp_path: Path, cells: Cells, plain: None, capsys: Any, number: signal.Signals
) -> None:
    file = seeds(tmp_path, 0, 3, 1)
    before = signal.getsignal(number)
    _when(lambda: (tmp_path / "notes").exists() and "seed-3" in (tmp_path / "notes").read_text(), lambda: os.kill(os.getpid(), number))
    assert sweeping.sweep(file, [], cells.command) == 130
    assert signal.getsignal(number) == before
    (_, _, _), (waiting, pid, _) = cells.started()
    assert waiting == "seed-3" and not Path(f"/proc/{pid}").exists()
    assert f"1 of 3 cells are finished and kept. To go on: diloco sweep {file}" in capsys.readouterr().out
    cells.let_go()
    assert sweeping.sweep(file, [], cells.command) == 0
    assert [name for name, _, _ in cells.started()] == ["seed-3", "seed-1"]


def test_what_an_interrupted_cell_left_is_no_result(tmp_path: Path, cells: Cells, plain: None) -> None:
    file = seeds(tmp_path, 0)
    assert sweeping.sweep(file, [], cells.command) == 0
    (folder,) = (tmp_path / "sweep" / "cells").iterdir()
    (folder / "done.json").unlink()
    (folder / "island-1" / "metrics.jsonl").write_text("stale")
    cells.started()
    assert sweeping.sweep(file, [], cells.command) == 0
    assert len(cells.started()) == 1 and "stale" not in (folder / "island-1" / "metrics.jsonl").read_text()


def test_threads_depend_on_the_file_and_not_on_what_is_left(tmp_path: Path, cells: Cells, plain: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(sweep_places, "num_cores", lambda: 6)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # it would be theirs
    file = seeds(tmp_path, 0, 3, 1, jobs=3)
    cells.let_go()
    assert sweeping.sweep(file, [], cells.command) == 0
    assert {threads for _, _, threads in cells.started()} == {"2"}
    for folder in list((tmp_path / "sweep" / "cells").iterdir())[:2]:
        shutil.rmtree(folder)
    assert sweeping.sweep(file, [], cells.command) == 0
    assert [threads for _, _, threads in cells.started()] == ["2", "2"]


def test_each_cell_has_a_gpu_where_there_are_some(tmp_path: Path, cells: Cells, monkeypatch: Any) -> None:
    monkeypatch.setattr(sweep_places, "visible_gpus", lambda: ("4", "7"))
    places = sweeping.make_plan(seeds(tmp_path, 0, 1, 2, jobs=0), []).places
    assert (places.jobs, places.free, places.environment("7")["CUDA_VISIBLE_DEVICES"]) == (2, ["4", "7"], "7")
    assert sweeping.make_plan(seeds(tmp_path, 0, jobs=0), ["run.device=cpu"]).places.gpus == ()


def test_nothing_starts_where_one_cell_is_invalid(tmp_path: Path, cells: Cells) -> None:
    with pytest.raises(ConfigError, match=re.escape("cell {outer.sync_every: 0}")):
        sweeping.sweep(sweep_file(tmp_path, dict(grid={"outer.sync_every": [5, 0]})), [], cells.command)
    assert cells.started() == [] and not (tmp_path / "sweep").exists()


def test_a_folder_that_is_in_use_or_somebody_elses_stays_as_it_is(tmp_path: Path, cells: Cells) -> None:
    file = seeds(tmp_path, 0)
    with lock_run_dir(tmp_path / "sweep"), pytest.raises(ConfigError, match="sweep.dir=.* is in use"):
        sweeping.sweep(file, [], cells.command)
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="holds no sweep, so it stays"):
        sweeping.sweep(file, [], cells.command)
    assert cells.started() == []


def test_checkpoints_of_a_finished_cell_are_removed(tmp_path: Path, cells: Cells, plain: None) -> None:
    (tmp_path / "prepared" / "islands" / "checkpoints" / "step-1").mkdir(parents=True)
    assert sweeping.sweep(seeds(tmp_path, 0), [], cells.command) == 0
    (folder,) = (tmp_path / "sweep" / "cells").iterdir()
    assert not (folder / "checkpoints").exists() and json.loads((folder / "done.json").read_text())["seconds"] > 0


def _when(ready: Callable[[], bool], then: Callable[[], None]) -> None:
    """Do something from another thread as soon as it is time; within half a minute."""

    def wait() -> None:
        deadline = time.monotonic() + 30
        while not ready() and time.monotonic() < deadline:
            time.sleep(0.02)
        then()

    threading.Thread(target=wait, daemon=True).start()
