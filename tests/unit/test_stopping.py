"""Signals to processes that train, and ranks that stop after the same step."""

import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from rank_pool import _PRELOAD

from islands.process import Process
from islands.stopping import StopAgreement, Stopped, Stopping

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="counts on signals as Linux has them"),
    pytest.mark.timeout(60),
]


def alone(store: dist.Store | None = None, rank: int = 0, world_size: int = 1) -> Process:
    return Process(rank, world_size, rank, torch.device("cpu"), 10.0, store or dist.HashStore())


def trainee(log: str, grace: float, does: str) -> None:
    """A process that trains until it is asked to stop; or does something else then."""
    sys.stdout = sys.stderr = open(log, "w", buffering=1)
    store = dist.HashStore()
    with Stopping(alone(store), grace) as stopping:
        print("ready")
        steps = 0
        while not stopping.agreed(steps) and does not in ("waits", "joins"):
            steps += 1
            time.sleep(0.01)
        if does == "waits":
            store.wait(["what nobody sets"], timedelta(seconds=50))  # outside of Python, where no handler runs
        while does == "joins":
            stopping.raise_if_asked()
            time.sleep(0.01)
        if does == "saves for ever":
            time.sleep(50)
        print("saved")


Start = Callable[..., BaseProcess]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log.txt"


@pytest.fixture
def start(log: Path) -> Iterator[Start]:
    """Starts a trainee, and waits until signals are taken care of."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    started: list[BaseProcess] = []

    def begin(does: str, grace: float = 30.0) -> BaseProcess:
        process = context.Process(target=trainee, args=(str(log), grace, does))
        process.start()
        started.append(process)
        await_line(log, "ready")
        return process

    yield begin
    for process in started:
        process.kill()
        process.join()


def await_line(log: Path, line: str) -> None:
    deadline = time.monotonic() + 30
    while not (log.exists() and line in log.read_text()):
        assert time.monotonic() < deadline, f"{line!r} was never printed"
        time.sleep(0.01)


def ended(process: BaseProcess, seconds: float = 5.0) -> int | None:
    process.join(seconds)
    return process.exitcode


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_wish_lets_the_process_save_and_end(start: Start, log: Path, number: int) -> None:
    process = start("trains")
    os.kill(process.pid, number)
    assert ended(process) == 0
    assert log.read_text() == "ready\nstopping: a last checkpoint, then the end; again ends at once\nsaved\n"


def test_a_second_interrupt_ends_at_once(start: Start, log: Path) -> None:
    process = start("saves for ever")
    os.kill(process.pid, signal.SIGINT)
    await_line(log, "stopping")
    os.kill(process.pid, signal.SIGINT)
    assert ended(process) == 130
    assert "asked twice" in log.read_text()


def test_a_second_sigterm_ends_at_once_but_one_that_comes_by_two_ways_is_one(start: Start, log: Path) -> None:
    process = start("saves for ever")
    for _ in range(3):
        os.kill(process.pid, signal.SIGTERM)
        await_line(log, "stopping")
        time.sleep(0.1)
    assert process.is_alive()
    time.sleep(2.0)
    os.kill(process.pid, signal.SIGTERM)
    assert ended(process) == 143


@pytest.mark.parametrize("does", ["saves for ever", "waits"])
def test_the_grace_ends_what_hangs_and_says_where(start: Start, log: Path, does: str) -> None:
    process = start(does, grace=0.5)
    os.kill(process.pid, signal.SIGTERM)
    assert ended(process) == 1
    told = log.read_text()
    assert "has not ended in the 0.5 s (checkpoint.grace)" in told
    assert "time.sleep(50)" in told or "store.wait(" in told


def test_who_waits_before_training_began_leaves_with_0(start: Start, log: Path) -> None:
    process = start("joins")
    os.kill(process.pid, signal.SIGTERM)
    assert ended(process) == 0
    assert "saved" not in log.read_text()


def test_the_signals_are_given_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    threads = threading.active_count()
    with Stopping(alone(), 30.0) as stopping:
        assert not stopping.agreed(1)
        stopping.raise_if_asked()
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert threading.active_count() == threads


class Lockstep:
    """Ranks as threads. A step needs what all others have given to it, as one with collectives does, and no more."""

    def __init__(self, world_size: int, asks: dict[int, int], seed: int) -> None:
        store = dist.HashStore()
        self.ranks = [StopAgreement(alone(store, rank, world_size)) for rank in range(world_size)]
        self.asks, self.random, self.last = asks, random.Random(seed), [0] * world_size
        self.given = threading.Barrier(world_size)

    def run(self) -> list[int]:
        """The last step of each rank."""
        threads = [threading.Thread(target=self._train, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.last

    def _train(self, rank: int) -> None:
        for step in range(1, 50):
            self._pause()
            if self.asks.get(rank) == step:
                self.ranks[rank].wish()
            self.given.wait(10)
            self._pause()
            if self.ranks[rank].reached(step):
                self.last[rank] = step
                return

    def _pause(self) -> None:
        if self.random.random() < 0.3:
            time.sleep(self.random.random() / 2000)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_all_ranks_stop_after_the_same_step_whoever_is_asked(world_size: int) -> None:
    draw = random.Random(world_size)
    for seed in range(25):
        asks = {draw.randrange(world_size): draw.randrange(1, 12) for _ in range(draw.randrange(1, 4))}
        steps = Lockstep(world_size, asks, seed).run()
        first = min(asks.values())
        assert len(set(steps)) == 1, f"seed {seed}: {asks} led to {steps}"
        assert first <= steps[0] <= first + 1, f"seed {seed}: asked in step {first}, stopped after {steps[0]}"


def test_rank_0_hears_of_the_wish_of_another_rank() -> None:
    store = dist.HashStore()
    with Stopping(alone(store, 0, 2), 30.0) as stopping:
        stopping.raise_if_asked()
        StopAgreement(alone(store, 1, 2)).wish()
        with pytest.raises(Stopped) as stopped:
            stopping.raise_if_asked()
    assert not stopped.value.code  # which is how a process ends with exit code 0
