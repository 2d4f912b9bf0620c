"""This process among the ranks of its island. The only file that reads the environment or names a backend."""

import contextlib
import ctypes
import os
import pickle
import signal
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Iterator

import torch
import torch.distributed as dist

from islands.config_file import ConfigError


@dataclass(frozen=True)
class Process:
    """One rank.

    Attributes:
        device: where this rank computes.
        timeout: seconds until a collective that hangs is an error.
        store: where the ranks can leave messages for each other without a collective.
        group: the ranks of the island, for CPU tensors; None where they are all ranks of the job.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    timeout: float
    store: dist.Store
    group: dist.ProcessGroup | None = None


def world_size() -> int:
    """Ranks of this island, as torchrun set it; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_rank() -> bool:
    """Whether this process speaks for its island and holds its anchor."""
    return int(os.environ.get("RANK", "0")) == 0


def pick_device(wanted: str) -> torch.device:
    """The device of this rank for ``run.device``. ``auto`` takes GPUs only if every local rank gets its own.

    Raises:
        ConfigError: ``cuda`` was asked for and there are fewer GPUs than local ranks.
    """
    local_rank, local_ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    enough = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    if wanted == "cuda" and not enough:
        raise ConfigError(
            f"run.device: 'cuda' needs one GPU for each of the {local_ranks} local ranks and torch sees "
            f"{torch.cuda.device_count()}; start fewer ranks or set run.device to cpu"
        )
    return torch.device("cuda", local_rank) if enough and wanted != "cpu" else torch.device("cpu")


@contextlib.contextmanager
def process_group(device: torch.device, timeout: float) -> Iterator[Process]:
    """Join the island's ranks, and leave them whichever way the block ends.

    Works without torchrun too, as an island of one rank.
    """
    _die_with_parent()
    rank = int(os.environ.get("RANK", "0"))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # operations that the flight recorder keeps
    store = _store(rank, timeout)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size(),
        timeout=timedelta(seconds=timeout),
    )
    try:
        yield Process(rank, world_size(), int(os.environ.get("LOCAL_RANK", "0")), device, timeout, store)
    finally:
        dist.destroy_process_group()


def num_restarts() -> int:
    """How often torchrun has started the ranks of this island again since it began."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def one_of(process: Process, islands: int) -> Process:
    """This process among the ranks of its island, where a job is ``islands`` of them, each of neighbouring ranks. Called on all of them."""
    size = process.world_size // islands
    island, rank = divmod(process.rank, size)
    ranks = list(range(island * size, (island + 1) * size))
    store = dist.PrefixStore(f"island{island}", process.store)
    return replace(process, rank=rank, world_size=size, store=store, group=_gloo_group(ranks, process.timeout))


def background_group(process: Process, timeout: float | None = None) -> dist.ProcessGroup:
    """A group of all ranks of the island for CPU tensors, to be used by one thread while another one trains. Called on all of them alike.

    Args:
        timeout: seconds until a collective that hangs is an error; default that of the process.
    """
    ranks = dist.get_process_group_ranks(process.group) if process.group else None
    return _gloo_group(ranks, timeout or process.timeout)


def _gloo_group(ranks: list[int] | None, timeout: float) -> dist.ProcessGroup:
    """Of all ranks of the job (None), or of some: then the others need not know."""
    return dist.new_group(ranks, timedelta(seconds=timeout), backend="gloo", use_local_synchronization=ranks is not None)


def is_collective_failure(error: BaseException) -> bool:
    """Whether ``error`` is a collective that timed out or lost a rank; one backend tells that in its message only."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def dump_flight_recorder() -> bytes:
    """The last collective operations of this rank, pickled for torchfrtrace; empty where the backend records none."""
    bindings = torch._C._distributed_c10d
    dump = getattr(bindings, "_dump_nccl_trace", None) or getattr(bindings, "_dump_fr_trace", None)
    return dump() if dump else b""


def last_collective() -> str:
    """Name of the collective operation that this rank called last; empty where the backend records none."""
    recording = dump_flight_recorder()
    entries = pickle.loads(recording).get("entries") if recording else None
    return entries[-1]["profiling_name"] if entries else ""


def _store(rank: int, timeout: float) -> dist.Store:
    """The ranks' meeting point. Each restart by torchrun gets names of its own: old ones make gloo connect to the dead."""
    if "MASTER_ADDR" not in os.environ:
        return dist.HashStore()
    hosted_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size=world_size(),
        is_master=rank == 0 and not hosted_by_agent,
        timeout=timedelta(seconds=timeout),
    )
    return dist.PrefixStore(f"attempt{num_restarts()}", store)


def _die_with_parent() -> None:
    """When torchrun is killed its workers would live on as orphans; on Linux the kernel can end them."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        parent = os.getppid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it ended just before
            raise SystemExit("the process that started this rank is gone")
