"""Running out of memory, as a message with what to change."""

import contextlib
import os
import resource
import sys
from typing import Iterator

import torch

from islands.config import IslandConfig
from islands.memory import Estimate, estimate, in_words
from islands.mesh import Grid
from islands.process import Process

#: How the CPU's allocator says it; it has no exception of its own.
_CPU_WORDS = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")


class OutOfMemory(RuntimeError):
    """A rank's device is full. The message names rank, sizes and the largest levers."""


@contextlib.contextmanager
def explained_memory(config: IslandConfig, grid: Grid, process: Process) -> Iterator[None]:
    """Inside, running out of memory is raised as :class:`OutOfMemory`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(describe(config, grid, process)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` is an allocation that failed, on any device."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in str(error) for words in _CPU_WORDS)


def describe(config: IslandConfig, grid: Grid, process: Process) -> str:
    """Who ran out, what is held, what was to be expected, what helps most."""
    used, peak, total = _device_bytes(process.device)
    lines = [
        f"rank {process.rank} ran out of memory on {process.device}: {in_words(used)} allocated, "
        f"peak {in_words(peak)}, of {in_words(total)} in all",
        f"predicted for this grid ({grid}): {split_in_words(estimate(config, grid))}",
        "what would help, the largest first:",
        *(f"  {lever}" for lever in levers(config, grid)),
    ]
    return "\n".join(lines)


def split_in_words(predicted: Estimate) -> str:
    """The parts of an estimate in one line."""
    parts = ("parameters", "gradients", "optimizer", "activations", "buffers")
    return ", ".join(f"{part} {in_words(getattr(predicted, part))}" for part in parts)


def levers(config: IslandConfig, grid: Grid) -> list[str]:
    """What can still be changed, in the order in which to try: what costs no or little speed comes first."""
    train, parallel = config.train, config.parallel
    micro = train.micro_batch_size or train.global_batch_size // grid.data
    found = []
    if micro > 1:
        smaller = max(size for size in range(1, micro) if micro % size == 0)
        found.append(f"train.micro_batch_size={smaller} (now {micro}): activations shrink with it; the batch stays")
    if train.recompute != "full":
        found.append(f"train.recompute=full (now {train.recompute}): keeps blocks' inputs only, for a third more compute")
    ladder = ["ddp", "zero1", "zero2", "zero3"]
    if parallel.data_parallel_strategy in ladder[:-1] and grid.data > 1:
        stronger = ladder[ladder.index(parallel.data_parallel_strategy) + 1 :]
        found.append(f"parallel.data_parallel_strategy={' or '.join(stronger)} (now {parallel.data_parallel_strategy})")
    elif parallel.data_parallel_strategy == "hybrid_shard" and grid.replicate > 1:
        found.append(f"parallel.shard_size={grid.data} (now {grid.shard}): shards over all data-parallel ranks")
    if not parallel.cpu_offload:
        found.append("parallel.cpu_offload=true: shards and optimizer state in host memory, slow; not with ddp")
    found.append(f"more ranks than {grid.world_size}: each holds a smaller shard")
    return found


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes that were in use: tensors on a GPU, the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # in bytes there, in KiB elsewhere


def _device_bytes(device: torch.device) -> tuple[int, int, int]:
    """Allocated now, at most so far, and all there is."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), peak_memory_bytes(device), torch.cuda.mem_get_info(device)[1]
    page, peak = os.sysconf("SC_PAGE_SIZE"), peak_memory_bytes(device)
    total = os.sysconf("SC_PHYS_PAGES") * page
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * page, peak, total
    except OSError:  # not Linux
        return peak, peak, total
