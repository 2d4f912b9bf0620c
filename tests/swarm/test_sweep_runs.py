"""A sweep of real cells, killed in the middle: started again, it comes to the very results of one that nobody disturbed."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

#: What is the same whenever and wherever a cell is run.
_EXACT = ("status", "eval_loss", "train_loss", "tokens", "rounds", "bytes_per_island", "mean_norm", "mean_distance", "mean_cosine")
_LIMIT_SECONDS = 600  # of a sweep


def _file(folder: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("".join(f"{number} times {number} is {number * number}\n" for number in range(2000)))
    raw = dict(
        run=dict(name="killed", device="cpu"),
        model=dict(hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=64),
        data=dict(type="text", paths=[str(text)], seq_len=32),
        train=dict(steps=40, global_batch_size=4, eval_sequences=4),
        outer=dict(codec=dict(type="int4")),
        swarm=dict(islands=2),
        sweep=dict(grid={"outer.sync_every": [5, 20]}, jobs=1, baseline=False),
    )
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(raw, sort_keys=False))
    return file


def _run(file: Path, folder: Path, until: Path | None = None) -> int:
    """A sweep to its end; or until a file is there, when it is killed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    sweep = subprocess.Popen([sys.executable, "-m", "diloco", "sweep", str(file), f"sweep.dir={folder}"], env=environment)
    try:
        deadline = time.monotonic() + _LIMIT_SECONDS
        while sweep.poll() is None and not (until and until.exists()):
            assert time.monotonic() < deadline, f"{folder} took too long"
            time.sleep(0.05)
    finally:
        sweep.kill()
    return sweep.wait(10)


def _results(folder: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((folder / "results.csv").open()))
    return [{key: row[key] for key in ("cell", *_EXACT)} for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_sweep_that_was_killed_comes_to_the_same_results(tmp_path: Path) -> None:
    file, whole, killed = _file(tmp_path), tmp_path / "whole", tmp_path / "killed"
    assert _run(file, whole) == 0
    first, second = (row["cell"] for row in _results(whole))
    assert _run(file, killed, until=killed / "cells" / second / "island-1" / "metrics.jsonl") == -signal.SIGKILL
    done = (killed / "cells" / first / "done.json").read_bytes()
    assert not (killed / "cells" / second / "done.json").exists()
    deadline = time.monotonic() + 60
    while (code := _run(file, killed)) == 2 and time.monotonic() < deadline:
        time.sleep(0.5)  # refused until the cell that ran has noticed that the sweep is gone
    assert code == 0
    assert (killed / "cells" / first / "done.json").read_bytes() == done  # with its seconds
    assert _results(killed) == _results(whole)
    assert all(row["status"] == "finished" and float(row["mean_distance"]) > 0 for row in _results(killed))
    assert _rounds(killed) == _rounds(whole) and len(_rounds(whole)) == 8 + 2


def _rounds(folder: Path) -> list[str]:
    return [line for line in (folder / "curves.jsonl").read_text().splitlines() if '"kind": "round"' in line]
