"""Run a function on n ranks with a gloo group of its own, in processes that stay warm between tests."""

import gc
import math
import multiprocessing
import os
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, Callable

import torch
import torch.distributed as dist

_PRELOAD = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining", "islands.run"]


#: torch caches what it knows of a mesh, and with it the mesh's groups, whose threads wake often. A worker may have so many.
_MOST_THREADS = 100


class RankError(AssertionError):
    """A rank raised or died; the message holds each such rank's traceback."""


class RankPool:
    """Up to ``size`` warm workers, forked from a server that has torch imported."""

    def __init__(self, size: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._jobs = 0
        self._size = size
        self._workers = [self._start() for _ in range(size)]

    def run(self, function: Callable[..., Any], world_size: int, *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """``function(process, *arguments)`` on every rank of a new group.

        Returns:
            What each rank returned, by rank.

        Raises:
            RankError: a rank raised, died or took longer than ``timeout`` seconds.
        """
        self._jobs += 1
        for rank, (_, connection) in enumerate(self._workers[:world_size]):
            connection.send((function, arguments, rank, world_size, self._store.port, self._jobs, timeout))
        deadline = time.monotonic() + timeout
        answers = [self._answer(rank, deadline) for rank in range(world_size)]
        if any(threads > _MOST_THREADS for _, _, threads in answers):
            # All of them: a later job may find a group of an earlier one in torch's caches, which is then all there or not at all.
            self.close()
            self._workers = [self._start() for _ in range(self._size)]
        errors = [f"rank {rank}: {value}" for rank, (ok, value, _) in enumerate(answers) if not ok]
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value, _ in answers]

    def close(self) -> None:
        """End all workers."""
        for worker, connection in self._workers:
            worker.kill()
            worker.join()
            connection.close()

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        worker = self._context.Process(target=_work, args=(theirs,), daemon=True)
        worker.start()
        theirs.close()
        return worker, ours

    def _answer(self, rank: int, deadline: float) -> tuple[bool, Any, float]:
        """Whether it went well, the result, and the threads that the worker has left; no end of them if it is of no use."""
        _, connection = self._workers[rank]
        try:
            if connection.poll(max(0.0, deadline - time.monotonic())):
                return connection.recv()
            return False, "no answer in time", math.inf
        except EOFError:
            return False, "died", math.inf


def _work(connection: Connection) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported is never garbage: collections between jobs stay short
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        connection.send((*_run_job(*job), len(os.listdir("/proc/self/task"))))


def _run_job(
    function: Callable[..., Any], arguments: tuple, rank: int, world_size: int, port: int, job: int, timeout: float
) -> tuple[bool, Any]:
    from islands.process import process_group

    os.environ |= dict(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(job),  # names of its own in the shared store
    )
    try:
        with process_group(torch.device("cpu"), timeout) as process:
            return True, function(process, *arguments)
    except BaseException:  # whatever it was, the test wants to read it
        return False, traceback.format_exc()
    finally:
        gc.collect()
