"""Rows, console lines and TensorBoard."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from islands.config_file import ConfigError
from islands.metrics import Metrics

STEP = dict(
    step=7, loss=1.25, lr=3e-4, grad_norm=0.5, tokens=2048, tokens_per_second=12345.6, step_seconds=0.1, stall_seconds=0.0
)
ROUND = dict(fragments=1, round=3, fragment=0, step=30, members=[0, 2], weight=100, outcome="committed", reason="", digest="ab")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_row_carries_kind_island_and_time_and_all_that_was_given(tmp_path: Path) -> None:
    before = time.time()
    metrics = Metrics(tmp_path / "island-3", 3, enabled=True)
    metrics.write("step", **STEP)
    metrics.write("event", what="start", detail={"ranks": 2})
    step, event = rows(tmp_path / "island-3")  # before it is closed: whoever watches sees whole lines
    metrics.close()
    assert step.items() >= {**STEP, "kind": "step", "island": 3}.items()
    assert before <= step["time"] <= time.time()
    assert event.items() >= {"kind": "event", "island": 3, "what": "start", "detail": {"ranks": 2}}.items()


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(tmp_path / "island-0", 0, enabled=False, tensorboard=True)
    metrics.write("step", **STEP)
    metrics.close()
    assert not list(tmp_path.iterdir()) and not capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "values", "line"),
    [
        ("step", STEP, "step      7  loss 1.2500  lr 3.00e-04  grad norm 0.500  12,346 tokens/s"),
        ("eval", dict(step=0, loss=5.5451), "step      0  held-out loss 5.5451"),
        ("round", ROUND, "step     30  round 3 committed by islands [0, 2]"),
        ("round", ROUND | dict(fragment=2, fragments=3), "step     30  round 3 of fragment 2 committed by islands [0, 2]"),
        ("round", ROUND | dict(outcome="skipped", reason="nobody came"), "step     30  round 3 skipped: nobody came"),
        ("event", dict(what="lost", detail="island 2"), "lost: island 2"),
    ],
)
def test_what_one_reads_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, values: dict[str, Any], line: str
) -> None:
    metrics = Metrics(tmp_path, 0, enabled=True)
    metrics.write(kind, **values)
    metrics.close()
    assert capsys.readouterr().out == line + "\n"


def test_details_for_programs_are_not_for_the_console(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(tmp_path, 0, enabled=True)
    metrics.write("event", what="start", detail={"ranks": 2})
    metrics.close()
    assert capsys.readouterr().out == "" and len(rows(tmp_path)) == 1


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tensorboard: true needs the extra: pip install 'diloco\[tensorboard\]'"):
        Metrics(tmp_path / "island-0", 0, enabled=True, tensorboard=True)
    assert not list(tmp_path.iterdir())  # refused before an earlier run's rows are gone


class Board:
    """Stands for TensorBoard's writer."""

    def __init__(self, folder: str) -> None:
        self.folder, self.scalars, self.closed = folder, {}, False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def close(self) -> None:
        self.closed = True


def test_numbers_go_to_tensorboard_by_kind_and_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boards: list[Board] = []
    module = type(sys)("torch.utils.tensorboard")
    module.SummaryWriter = lambda folder: boards.append(Board(folder)) or boards[0]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    metrics = Metrics(tmp_path / "island-1", 1, enabled=True, tensorboard=True)
    metrics.write("step", **STEP)
    metrics.write("round", **ROUND)
    metrics.write("event", what="start", detail="no step")
    metrics.close()
    (board,) = boards
    assert board.folder == str(tmp_path / "tensorboard" / "island-1") and board.closed
    assert board.scalars["step/loss", 7] == 1.25 and board.scalars["round/weight", 30] == 100
    assert {name for name, _ in board.scalars} == {
        *(f"step/{key}" for key in STEP if key != "step"), "round/round", "round/fragment", "round/fragments", "round/weight"
    }  # fmt: skip


def test_step_lines_keep_their_distance_and_rows_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(tmp_path, 0, enabled=True)
    for step in range(100):
        metrics.write("step", **STEP | dict(step=step))
    metrics.close()
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert [row["step"] for row in rows(tmp_path)] == list(range(100))


def test_metrics_of_an_earlier_run_are_moved_aside(tmp_path: Path) -> None:
    for step in range(3):
        metrics = Metrics(tmp_path, 0, enabled=True)
        metrics.write("step", **STEP | dict(step=step))
        metrics.close()
    kept = {path.name: json.loads(path.read_text())["step"] for path in tmp_path.iterdir()}
    assert kept == {"metrics.1.jsonl": 0, "metrics.2.jsonl": 1, "metrics.jsonl": 2}
