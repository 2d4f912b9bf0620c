"""Where the cells of a sweep run: how many side by side, on which GPU, with how many threads."""

import os
from dataclasses import dataclass

from diloco.launch_plan import visible_gpus


@dataclass(frozen=True)
class Places:
    """As many as cells that run side by side.

    Attributes:
        threads: of each cell.
        gpus: ids, of which each cell gets one; empty: all compute on the CPU.
    """

    jobs: int
    threads: int
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{len(self.gpus)} GPUs" if self.gpus else f"CPU, {self.threads} threads each"
        return f"{self.jobs} side by side ({where})"

    @property
    def free(self) -> list[str | None]:
        """The GPU of each, before the first cell starts."""
        return [self.gpus[number % len(self.gpus)] if self.gpus else None for number in range(self.jobs)]

    def environment(self, gpu: str | None) -> dict[str, str]:
        """Of the process of a cell: that of the sweep, and what it adds."""
        own = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(self.threads)}
        return {**os.environ, **own, **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})}


def find_places(asked: int, num_cells: int, on_gpus: bool) -> Places:
    """Those for so many cells, by the file and the machine alone: how many are left of them does not change what a cell computes.

    Args:
        asked: ``sweep.jobs``.
    """
    gpus, cores = visible_gpus() if on_gpus else (), num_cores()
    jobs = min(asked or len(gpus) or cores, num_cells)
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return Places(jobs, int(threads) if threads.isdecimal() else max(1, cores // jobs), gpus)


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
