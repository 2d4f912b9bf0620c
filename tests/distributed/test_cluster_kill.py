"""One rank of a job with two replicas is killed: all end with a message that names it, and with --max-restarts the run goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

CONFIG = dict(
    run=dict(name="killed", device="cpu", timeout=30),
    model=dict(type="llama", hidden_size=32, num_layers=2, num_heads=2, num_kv_heads=2, intermediate_size=64, vocab_size=256),
    data=dict(type="python_stdlib", seq_len=32),
    train=dict(steps=60, global_batch_size=4, eval_sequences=4),
    outer=dict(sync_every=3, optimizer=dict(lr=1.0, momentum=0.0)),
    exchange=dict(type="process_group"),
    swarm=dict(islands=2),
    checkpoint=dict(every=6, keep=3),
)


def start(folder: Path, *options: str) -> subprocess.Popen:
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(CONFIG | dict(run=dict(CONFIG["run"], dir=str(folder / "run")))))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", *options]
    output = (folder / "log").open("w")
    command, environment = [*torchrun, "-m", "diloco", str(config)], {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


def children(process: subprocess.Popen) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def kill_rank(launcher: subprocess.Popen, rank: int, folder: Path) -> None:
    """Once there is a checkpoint of both islands."""
    deadline = time.monotonic() + 90
    while len(list((folder / "run" / "checkpoints").glob("step-*/island-*"))) < 2:
        assert launcher.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.05)
    (victim,) = (pid for pid in children(launcher) if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(victim, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_killed_rank_ends_all_and_is_named(tmp_path: Path) -> None:
    launcher = start(tmp_path)
    kill_rank(launcher, 3, tmp_path)
    others = children(launcher)
    assert launcher.wait(60) != 0
    log = (tmp_path / "log").read_text()
    assert re.search(r"rank 3 is missing: it died or is frozen, and was last seen in \w+ of step \d+", log), log
    assert len(others) >= 3 and not any(Path(f"/proc/{pid}").exists() for pid in others)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_starts_all_again_and_they_go_on(tmp_path: Path) -> None:
    launcher = start(tmp_path, "--max-restarts=1")
    kill_rank(launcher, 1, tmp_path)
    assert launcher.wait(200) == 0, (tmp_path / "log").read_text()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["digests_agree"] and summary["checkpoints"]["resumes"] == 2 and summary["samples_repeated"] == 0
    for island in (0, 1):
        rows = [json.loads(line) for line in (tmp_path / "run" / f"island-{island}" / "metrics.jsonl").open()]
        assert rows[-1]["what"] == "end" or any(row.get("what") == "end" for row in rows)
