"""Whole runs as a user starts them: torchrun, exchange processes, libp2p daemons, over loopback."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Iterator

import pytest
from cluster import TINY, write_text
from harness import eventually
from island_process import MARK, marked

from islands.checkpoint_files import find, verify


class Run:
    """Processes of one test, and all that they started: they carry its mark in their environment."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self.environment = {**os.environ, MARK: self.mark, "OMP_NUM_THREADS": "1"}
        write_text(folder)

    def config(self, islands: int, ranks: int, steps: int) -> str:
        """Path of a configuration."""
        path = self.folder / "tiny.yaml"
        path.write_text(TINY.format(folder=self.folder, islands=islands, ranks=ranks, steps=steps))
        return str(path)

    def start(self, *arguments: str, module: str = "diloco") -> subprocess.Popen:
        """``python -m`` with ``module`` and the arguments."""
        return subprocess.Popen(
            [sys.executable, "-m", *filter(None, [module]), *arguments],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def rows(self, island: int, kind: str) -> list[dict]:
        """Rows of an island so far."""
        path = self.folder / "run" / f"island-{island}" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [row for row in map(json.loads, lines) if row["kind"] == kind]

    def living(self) -> list[str]:
        """Command lines of the processes that carry the mark."""
        return list(marked(self.mark).values())


def address_of(first: subprocess.Popen) -> str:
    """What the first island prints for the others."""
    lines = []
    while not (found := re.search("initial_peers=.(/ip4/[^] ]+)", "".join(lines[-1:]))):
        lines.append(first.stdout.readline())
        assert lines[-1], "the first island ended before it told its address:\n" + "".join(lines)
    return found[1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    for pid in marked(made.mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(180)
def test_launch_trains_one_model_on_two_islands_of_two_ranks(run: Run) -> None:
    launched = run.start("launch", run.config(islands=2, ranks=2, steps=12))
    output, _ = launched.communicate(timeout=170)
    assert launched.returncode == 0, output
    summary = json.loads((run.folder / "run" / "summary.json").read_text())
    assert summary["digests_agree"] is True
    assert (summary["rounds_committed"], summary["rounds_skipped"]) == (3, 0)
    assert summary["eval_loss"] < summary["eval_loss_start"]
    assert summary["tokens"] == 2 * 12 * 4 * 32
    assert (run.folder / "run" / "report.png").stat().st_size > 10_000
    islands = [run.rows(island, "round") for island in (0, 1)]
    assert [row["digest"] for row in islands[0]] == [row["digest"] for row in islands[1]]
    assert all(row["members"] == [0, 1] for row in islands[0])
    assert run.rows(0, "eval")[-1]["loss"] == run.rows(1, "eval")[-1]["loss"]  # both evaluate the one anchor
    assert run.rows(0, "step")[0]["loss"] != run.rows(1, "step")[0]["loss"]  # on data of their own before
    assert run.living() == []


@pytest.mark.slow  # test_rejoin kills one, too
@pytest.mark.timeout(180)
def test_an_island_that_is_killed_leaves_the_others_training_at_one_anchor(run: Run) -> None:
    config, steps = run.config(islands=3, ranks=1, steps=250), 250
    first = run.start(config)
    peers = f"swarm.initial_peers=[{address_of(first)}]"
    others = [run.start(config, peers), run.start(config, peers)]
    by_slot = {0: first}
    eventually(lambda: len(run.rows(1, "round")) >= 2 and len(run.rows(2, "round")) >= 2)
    for process in others:
        environ = f"/proc/{process.pid}/fd"
        by_slot |= {slot: process for slot in (1, 2) if any(_writes(environ, f"island-{slot}"))}
    os.killpg(by_slot[2].pid, signal.SIGKILL)
    killed_after = len(run.rows(2, "round"))
    eventually(lambda: any(row["members"] == [0, 1] for row in run.rows(0, "round")))
    assert killed_after < steps // 5  # it was killed in the middle of the run
    for slot in (0, 1):
        by_slot[slot].communicate(timeout=150)
        assert by_slot[slot].returncode == 0
    rounds = [{row["round"]: row["digest"] for row in run.rows(slot, "round")} for slot in (0, 1)]
    assert rounds[0] == rounds[1] and len(rounds[0]) >= killed_after
    dead = {row["round"]: row["digest"] for row in run.rows(2, "round")}
    assert all(rounds[0][height] == digest for height, digest in dead.items())
    assert [row["step"] for row in run.rows(0, "step")] == list(range(1, steps + 1))  # no inner step was lost
    eventually(lambda: run.living() == [])


def _writes(folder: str, name: str) -> Iterator[bool]:
    """Whether a process has a file open below a folder of that name."""
    for entry in Path(folder).iterdir():
        yield f"/{name}/" in os.readlink(entry)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_islands_with_different_grids_train_one_model(run: Run) -> None:
    """In rounds of every kind at once: fragments, beside the training, merged, of few bits."""
    config = run.config(islands=2, ranks=2, steps=12)
    outer = ["outer.fragments=2", "outer.overlap=2", "outer.merge_alpha=0.5", "outer.codec.type=int4", "outer.error_feedback=true"]
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "diloco", config, *outer]
    first = run.start(*torchrun, "parallel.data_parallel_strategy=zero3", module="")
    peers = f"swarm.initial_peers=[{address_of(first)}]"
    cut = ["parallel.tensor_parallel_size=2", "parallel.data_parallel_size=1", "parallel.sequence_parallel=true"]
    second = run.start(*torchrun, *cut, peers, module="")
    for process in (first, second):
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 0, output
    grids = [run.rows(island, "event")[0]["detail"]["grid"] for island in (0, 1)]
    assert grids == ["pipeline 1 x replicate 1 x shard 2 x tensor 1", "pipeline 1 x replicate 1 x shard 1 x tensor 2"]
    rounds = [sorted(run.rows(island, "round"), key=lambda row: (row["fragment"], row["round"])) for island in (0, 1)]
    digests = [[row["digest"] for row in each] for each in rounds]
    assert digests[0] == digests[1] and len(set(digests[0])) == 6
    assert [(row["step"], row["landed"]) for row in rounds[0]] == [(5, 7), (10, 12), (12, 12), (3, 5), (8, 10), (12, 12)]
    assert all(row["outcome"] == "committed" and 4.2 < row["bits_per_parameter"] < 4.4 for row in rounds[1])
    losses = [run.rows(island, "eval") for island in (0, 1)]
    assert losses[0][0]["loss"] == pytest.approx(losses[1][0]["loss"], abs=1e-5)  # the same weights at the start
    assert losses[0][-1]["loss"] == pytest.approx(losses[1][-1]["loss"], abs=1e-5)  # and the same anchor at the end


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_cluster_of_two_replicas_is_one_island_among_others(run: Run) -> None:
    config = run.config(islands=2, ranks=1, steps=12)
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node"]
    hybrid = ["parallel.data_parallel_size=-1", "parallel.data_parallel_strategy=hybrid_shard", "parallel.shard_size=2"]
    first = run.start(*torchrun, "4", "-m", "diloco", config, *hybrid, module="")
    second = run.start(*torchrun, "1", "-m", "diloco", config, f"swarm.initial_peers=[{address_of(first)}]", module="")
    for process in (first, second):
        output, _ = process.communicate(timeout=150)
        assert process.returncode == 0, output
    grids = [run.rows(island, "event")[0]["detail"]["grid"] for island in (0, 1)]
    assert grids == ["pipeline 1 x replicate 2 x shard 2 x tensor 1", "pipeline 1 x replicate 1 x shard 1 x tensor 1"]
    rounds = [run.rows(island, "round") for island in (0, 1)]
    digests = [[row["digest"] for row in each] for each in rounds]
    assert digests[0] == digests[1] and len(set(digests[0])) == 3
    assert all((row["outcome"], row["members"]) == ("committed", [0, 1]) for row in rounds[0])


@pytest.mark.slow  # its parts: test_stop.py, test_launch.py (one wish, an unfinished run), test_outer_resume_ranks.py
@pytest.mark.timeout(180)
def test_control_c_stops_with_checkpoints_and_the_same_command_goes_on(run: Run) -> None:
    config = run.config(islands=2, ranks=1, steps=100_000)
    launched = run.start("launch", config, "optimizer.schedule=constant")
    eventually(lambda: len(run.rows(0, "round")) >= 1 and len(run.rows(1, "round")) >= 1)
    assert len(run.living()) >= 9  # launcher, and for each island torchrun, rank, exchange process, daemon
    os.kill(launched.pid, signal.SIGINT)
    output, _ = launched.communicate(timeout=40)
    assert launched.returncode == 0, output
    assert run.living() == []
    assert not (run.folder / "run" / "summary.json").exists()  # the time of their grace is for checkpoints
    stopped = [verify(find(run.folder / "run" / "checkpoints", slot)[0]) for slot in (0, 1)]
    assert [manifest.step for manifest in stopped] == [run.rows(slot, "step")[-1]["step"] for slot in (0, 1)]
    assert f"Stopped at step {max(manifest.step for manifest in stopped)} of 100000. To go on: diloco launch {config}" in output

    steps = max(manifest.step for manifest in stopped) + 12
    again = run.start("launch", config, "optimizer.schedule=constant", f"train.steps={steps}")
    output, _ = again.communicate(timeout=100)
    assert again.returncode == 0, output
    assert "going on from step" in output
    summary = json.loads((run.folder / "run" / "summary.json").read_text())
    assert summary["digests_agree"] is True and summary["checkpoints"]["resumes"] == 2
    assert (summary["samples_repeated"], summary["steps_lost_to_crashes"], summary["samples_lost"]) == (0, 0, 0)
    missed = 5 if len({manifest.step // 5 for manifest in stopped}) > 1 else 0  # a round that one went into alone while the other left
    assert summary["tokens"] == (2 * steps - missed) * 4 * 32
    for slot, manifest in enumerate(stopped):
        assert run.rows(slot, "step")[0]["step"] == manifest.step + 1
    assert run.living() == []


@pytest.mark.slow  # tests/distributed/test_restart.py has one island whose rank dies
@pytest.mark.timeout(240)
def test_an_island_whose_rank_dies_comes_back_and_the_others_go_on(run: Run) -> None:
    config, steps = run.config(islands=2, ranks=2, steps=400), 400
    launched = run.start("launch", config, "--max-restarts", "1", "checkpoint.every=10", "exchange.peer_timeout=5")
    eventually(lambda: any(row["what"] == "checkpoint" for row in run.rows(1, "event")), timeout=60)
    rank = next(pid for pid in marked(run.mark) if _is_rank(pid, slot=1, rank=1))
    os.kill(rank, signal.SIGKILL)
    killed_at = run.rows(0, "step")[-1]["step"]
    output, _ = launched.communicate(timeout=200)
    assert launched.returncode == 0, output
    assert run.rows(0, "step")[0]["step"] == 1 and run.rows(0, "step")[-1]["step"] == steps > killed_at
    (resumed,) = [row for row in run.rows(1, "event") if row["what"] == "resumed"]
    assert resumed["detail"]["step"] >= 10
    summary = json.loads((run.folder / "run" / "summary.json").read_text())
    assert summary["digests_agree"] is True and summary["samples_repeated"] == 0
    assert run.living() == []


def _is_rank(pid: int, slot: int, rank: int) -> bool:
    command, environment = (Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0") for name in ("cmdline", "environ"))
    is_trainer = b"diloco" in command and b"torch.distributed.run" not in command
    return is_trainer and f"swarm.slot={slot}".encode() in command and f"RANK={rank}".encode() in environment
