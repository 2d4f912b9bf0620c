"""An island under torchrun, of which a rank dies, or which is asked to stop."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Iterator

import pytest
from rank_pool import RankPool

from diloco.run_record import read_run
from islands.checkpoint_files import find, verify
from islands.process import Process
from islands.stopping import StopAgreement

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
    pytest.mark.timeout(180),
]

CONFIG = """
run: {{name: small, dir: {folder}/run, device: cpu, timeout: 20}}
model: {{hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, intermediate_size: 64}}
data: {{type: text, paths: ["{folder}/*.txt"], seq_len: 32}}
optimizer: {{lr: 3.0e-3, warmup_steps: 2}}
train: {{steps: 12, global_batch_size: 4, eval_sequences: 4}}
checkpoint: {{every: 4, grace: 20}}
"""

#: Runs one island; in torchrun's first attempt rank 1 dies in step 7, when the checkpoint of step 4 is whole.
DYING = """
import os, pathlib, signal, sys, time
from islands import __main__ as island, train_step
train = train_step.TrainStep.__call__
done, checkpoint = 0, pathlib.Path(sys.argv.pop())
def dies(self, *arguments):
    global done
    done += 1
    if done == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        while not checkpoint.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    return train(self, *arguments)
train_step.TrainStep.__call__ = dies
sys.exit(island.main())
"""


def cost(process: Process) -> float:
    """Seconds for which a step waits to learn whether to stop."""
    agreement = StopAgreement(process)
    started = time.monotonic()
    assert not any(agreement.reached(step) for step in range(1000))
    return (time.monotonic() - started) / 1000


def test_asking_whether_to_stop_costs_a_step_less_than_half_a_millisecond(ranks: RankPool) -> None:
    assert min(ranks.run(cost, 2)) < 5e-4


class Torchrun:
    """One island of two ranks."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, []
        (folder / "text.txt").write_text(" ".join(f"word{number % 97}" for number in range(4000)))
        (folder / "config.yaml").write_text(CONFIG.format(folder=folder))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TEST_FOLDER": str(self.folder)}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.started.append(process)
        return process

    def living(self) -> list[int]:
        """Process ids of all that was started and lives."""
        mark, found = f"TEST_FOLDER={self.folder}".encode(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def ranks(self) -> list[int]:
        """Process ids of the ranks."""
        children = Path(f"/proc/{self.started[-1].pid}/task/{self.started[-1].pid}/children").read_text().split()
        return [int(child) for child in children if b"\0RANK=" in Path(f"/proc/{child}/environ").read_bytes()]

    def rows(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "run" / "island-0" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def check_saved(self) -> int:
        """The step after which it stopped, of which there is a whole checkpoint."""
        assert self.rows("event")[-1]["what"] == "stopped"
        step = self.rows("step")[-1]["step"]
        assert verify(find(self.folder / "run" / "checkpoints")[0]).step == step
        return step

    def await_steps(self, number: int, after: int = 0) -> None:
        deadline = time.monotonic() + 60
        while sum(row["step"] > after for row in self.rows("step")) < number:
            assert time.monotonic() < deadline and self.started[-1].poll() is None, "it does not train"
            time.sleep(0.02)


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Torchrun]:
    made = Torchrun(tmp_path)
    yield made
    for pid in made.living():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for process in made.started:
        process.communicate()


def test_an_island_of_which_a_rank_died_goes_on_from_its_checkpoint(torchrun: Torchrun) -> None:
    script, folder = torchrun.folder / "dying.py", torchrun.folder
    script.write_text(DYING)
    checkpoint = folder / "run" / "checkpoints" / "step-00000004" / "island-0"
    output, _ = torchrun.start("--max-restarts=1", str(script), str(folder / "config.yaml"), str(checkpoint)).communicate(timeout=100)
    assert torchrun.started[0].returncode == 0, output
    assert "resuming from" in output
    (record,) = read_run(folder / "run")
    assert [each.events("resumed") != [] for each in record.incarnations] == [False, True]
    assert record.incarnations[1].events("resumed")[0]["detail"]["step"] == 4
    assert record.num_lost_steps == 2  # 5 and 6
    assert [row["step"] for row in record.steps] == list(range(1, 13)) and record.ended
    assert torchrun.living() == []


@pytest.mark.slow
def test_an_island_that_is_asked_saves_and_goes_on_later(torchrun: Torchrun) -> None:
    """Asked by one rank the first time, by torchrun the second time."""
    arguments = ["-m", "islands", str(torchrun.folder / "config.yaml"), "optimizer.schedule=constant", "checkpoint.every=0"]
    first = torchrun.start(*arguments, "train.steps=100000")
    torchrun.await_steps(5)
    os.kill(torchrun.ranks()[1], signal.SIGTERM)
    output, _ = first.communicate(timeout=60)
    assert first.returncode == 0, output
    reached = torchrun.check_saved()

    second = torchrun.start(*arguments, "train.steps=90000")
    torchrun.await_steps(5, after=reached)
    second.terminate()  # of itself it ends with 1, whatever its ranks do
    output, _ = second.communicate(timeout=60)
    assert "resuming from" in output and "train.steps: 100000 -> 90000" in output
    assert torchrun.rows("step")[0]["step"] == reached + 1
    assert torchrun.check_saved() >= reached + 5
    assert torchrun.living() == []
