"""Whole swarms that are killed at any moment and go on from their checkpoints, as if nothing had happened."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from cluster import Cluster
from island_process import marked
from outer_loop import islands_as_threads
from rank_pool import RankPool

from diloco.config import RunConfig
from islands import checkpoint_files
from islands.config_file import load_config
from islands.island import load_corpus
from islands.process import Process

pytestmark = pytest.mark.timeout(240)

STEPS = 36
STREAMING = [
    "outer.codec.type=int4",
    "outer.error_feedback=true",
    "outer.fragments=2",
    "outer.overlap=2",
    "outer.merge_alpha=0.5",
    "checkpoint.every=3",
    "checkpoint.keep=100",
    "exchange.peer_timeout=60",  # a busy machine is no reason to go on without the other
]

Losses = dict[tuple[int, int], float]


def uninterrupted(process: Process, path: str, settings: list[str]) -> tuple[Losses, dict[tuple[int, int], str]]:
    """Losses by island and step, and digests by fragment and round, of the same run in one process."""
    torch.set_num_threads(1)
    config = load_config(RunConfig, path, settings)
    results = islands_as_threads(process, 2, {}, corpus=load_corpus(config), config=config)
    losses = {(slot, row["step"]): row["loss"] for slot in (0, 1) for row in results[slot]["rows"] if row["kind"] == "step"}
    rounds = [row for row in results[0]["rows"] if row["kind"] == "round"]
    return losses, {(row["fragment"], row["round"]): row["digest"] for row in rounds}


class Swarm(Cluster):
    """Two islands that are killed together."""

    def start_all(self, *more: str) -> None:
        """All have the same list of addresses, as in one file for all: the first in it begins."""
        for island in self.islands:
            island.start(f"swarm.initial_peers=[{','.join(self.addresses)}]", *more)

    def __enter__(self) -> "Swarm":
        self.start_all()
        return self

    def kill_all(self) -> None:
        """SIGKILL for every process of every island at once."""
        for island in self.islands:
            island.read()
            island.lives[-1].ends(by_us=True)
        for pid in marked(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for island in self.islands:
            island.lives[-1].process.wait()
            island.read()

    @property
    def checkpoints(self) -> Path:
        return self.folder / "run" / "checkpoints"

    def last_common_step(self) -> int:
        """Of the newest checkpoint that both have; 0 without any."""
        steps = [{checkpoint_files.step_of(path) for path in checkpoint_files.find(self.checkpoints, slot)} for slot in (0, 1)]
        return max(steps[0] & steps[1], default=0)

    def steps_done(self) -> int:
        """Of the slower island, in its present life."""
        return min(max([row["step"] for row in island.rows("step")], default=0) for island in self.islands)

    def writing(self) -> bool:
        """Whether a checkpoint is being written at this moment."""
        return any(self.checkpoints.glob("step-*/.island-*"))

    def check_against(self, losses: Losses, digests: dict[tuple[int, int], str]) -> None:
        """All that any life recorded is what the uninterrupted run has."""
        for island in self.islands:
            for number, life in enumerate(island.lives):
                rounds = [(row["fragment"], row["round"], row["landed"], row["outcome"], row["reason"]) for row in life.of_kind("round")]
                where = f"island {island.slot}, life {number}, whose rounds were {rounds}"
                told = [(row["step"], row["loss"]) for row in life.of_kind("step")]
                assert told == [(step, losses[island.slot, step]) for step, _ in told], where
                committed = [row for row in life.of_kind("round") if row["digest"]]
                assert all(digests[row["fragment"], row["round"]] == row["digest"] for row in committed), where

    def check_end(self) -> None:
        """All steps were done, and both came to the end."""
        for island in self.islands:
            assert {row["step"] for life in island.lives for row in life.of_kind("step")} == set(range(1, STEPS + 1))
            assert island.lives[-1].of_kind("event")[-1]["what"] == "end"


def kill_and_resume(swarm: Swarm, when: Callable[[], Any], then: Callable[[], Any] = lambda: True) -> int:
    """Kill all at some moment, which ``then`` proves to have been it; returns the step from which they go on."""
    swarm.wait_until(when, timeout=90)
    swarm.kill_all()
    assert then()
    step = swarm.last_common_step()
    swarm.start_all(f"train.resume={swarm.checkpoints}/step-{step:08d}")
    return step


def run_to_the_end(swarm: Swarm) -> None:
    swarm.wait_until(lambda: all(island.lives[-1].process.poll() == 0 for island in swarm.islands), timeout=120)
    for island in swarm.islands:
        island.read()


def reference(ranks: RankPool, folder: Path) -> tuple[Losses, dict[tuple[int, int], str]]:
    path = folder / "tiny.yaml"
    return ranks.run(uninterrupted, 1, str(path), STREAMING)[0]


@pytest.mark.slow  # tests/distributed/test_outer_resume_ranks.py has it without hivemind, test_rejoin.py one island of several
def test_a_swarm_that_is_killed_goes_on_bit_for_bit(tmp_path: Path, ranks: RankPool) -> None:
    """While a checkpoint is being written; the one before, from which it goes on, has rounds in flight."""
    with Swarm(tmp_path, 2, STREAMING, steps=STEPS, step_seconds=0.1) as swarm:
        step = kill_and_resume(swarm, lambda: swarm.last_common_step() == 9 and swarm.writing(), swarm.writing)
        facts = [checkpoint_files.read_manifest(path).facts for path in swarm.checkpoints.glob(f"step-{step:08d}/island-*")]
        assert len(facts) == 2 and all(each["flights"] for each in facts), "nothing was in flight"
        run_to_the_end(swarm)
    swarm.check_against(*reference(ranks, tmp_path))
    swarm.check_end()


def next_moment(swarm: Swarm, kind: str, draw: random.Random) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """When to kill, and what proves afterwards that it was then."""
    later = min(swarm.last_common_step() + draw.randint(1, 5), STEPS - 1)

    def reached() -> bool:
        return swarm.steps_done() >= later and swarm.last_common_step() > 0

    if kind == "writing":
        return (lambda: reached() and swarm.writing()), swarm.writing
    if kind == "round":
        faults = swarm.islands[draw.randint(0, 1)].faults
        (faults / "hold_in_transfer").touch()
        fired = faults / "hold_in_transfer.fired"
        fired.unlink(missing_ok=True)
        return fired.exists, fired.exists
    if kind == "resuming":
        sizes = [island.log.stat().st_size for island in swarm.islands]

        def resuming() -> bool:
            told = [island.log.read_bytes()[size:] for island, size in zip(swarm.islands, sizes)]
            return all(b"resuming from" in each for each in told) and not any(island.rows("step") for island in swarm.islands)

        return resuming, lambda: not any(island.rows("step") for island in swarm.islands)
    pause = draw.uniform(0.0, 0.3)
    since: list[float] = []

    def somewhere() -> bool:
        if reached():
            since.append(time.monotonic())
        return bool(since) and time.monotonic() > since[0] + pause

    return somewhere, lambda: True


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_swarm_that_is_killed_twenty_times_goes_on_bit_for_bit(tmp_path: Path, ranks: RankPool) -> None:
    draw, kinds = random.Random(6), ["step", "writing", "round", "resuming", "step"] * 4
    with Swarm(tmp_path, 2, STREAMING, steps=STEPS, step_seconds=0.1) as swarm:
        expected = reference(ranks, tmp_path)
        for kind in kinds:
            kill_and_resume(swarm, *next_moment(swarm, kind, draw))
            swarm.check_against(*expected)
        for island in swarm.islands:
            (island.faults / "hold_in_transfer").unlink(missing_ok=True)
        run_to_the_end(swarm)
    swarm.check_against(*expected)
    swarm.check_end()
