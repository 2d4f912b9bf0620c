"""Bytes that collectives put onto links: inside a replica, and across replicas of one job."""

import contextlib
from typing import Any, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from islands.process import Process

_MEASURED_STEP = 2  # of this process: in the first one strategies still find out what there is to do


class Traffic:
    """What the ranks of one replica send in a step, all of them together. Made, and called, on all ranks of the job alike.

    The collectives of a step are noted once and taken to be the same in all others; those between steps are told with :meth:`sent_across`.
    They count as rings over the ranks of a group in their order, which is what moves the fewest bytes: a rank sends (n - 1) / n of a tensor
    in an all-gather or reduce-scatter, and twice that in an all-reduce.

    Args:
        process: this rank among those that average gradients.
        replicas: that those are; the ranks of one are neighbours.
        size: ranks of one replica.
    """

    def __init__(self, process: Process, replicas: int, size: int) -> None:
        self._process, self._replicas, self._size = process, replicas, size
        self._steps, self._each_step, self._between = 0, None, 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around each step."""
        self._steps += 1
        if self._steps != _MEASURED_STEP:
            yield
            return
        with _Collectives(self._size) as noted:
            yield
        sums = torch.tensor([noted.inside, noted.across], dtype=torch.float64)
        if self._process.world_size > 1:
            dist.all_reduce(sums, group=self._process.group)
        self._each_step = [round(value / self._replicas) for value in sums.tolist()]

    def sent_across(self, num_bytes: int) -> None:
        """The ranks of a replica have sent so many bytes to others since the last step."""
        self._between += num_bytes

    def measurements(self) -> dict[str, int]:
        """For the row of a step: ``bytes_inside`` and ``bytes_across``; none before they are known."""
        between, self._between = self._between, 0
        if self._each_step is None:
            return {}
        inside, across = self._each_step
        return {"bytes_inside": inside, "bytes_across": across + between}


class _Collectives(TorchDispatchMode):
    """Sums what this rank sends in the collectives called inside of it, also by torch itself and in backward passes.

    Args:
        size: ranks of one replica.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size, self.inside, self.across = size, 0.0, 0.0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), keywords: dict[str, Any] | None = None) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):
            self._note(function._schema.name.partition("::")[2].strip("_"), arguments)
        return function(*arguments, **(keywords or {}))

    def _note(self, name: str, arguments: tuple) -> None:
        group = _group_of(arguments)
        if group is None:  # waits, and the like
            return
        ranks = dist.get_process_group_ranks(group)
        if name == "send":
            num_bytes, share = _bytes(arguments[0]), float(len({dist.get_rank() // self._size, ranks[arguments[2]] // self._size}) > 1)
        else:
            replicas = len({rank // self._size for rank in ranks})
            num_bytes, share = _sent(name, arguments, len(ranks)), (replicas / len(ranks) if replicas > 1 else 0.0)
        self.across += num_bytes * share
        self.inside += num_bytes * (1 - share)


def _sent(name: str, arguments: tuple, ranks: int) -> float:
    """Bytes that one rank sends, of ``ranks`` in a ring. What it gives is the argument that torch names so."""
    part = (ranks - 1) / ranks
    if name in ("allreduce", "allreduce_coalesced", "all_reduce", "all_reduce_coalesced"):
        return 2 * part * _bytes(arguments[0])
    if name in ("allgather_base", "allgather"):  # outputs, then inputs
        return (ranks - 1) * _bytes(arguments[1])
    if name == "all_gather_into_tensor":
        return (ranks - 1) * _bytes(arguments[0])
    if name in ("reduce_scatter_base", "alltoall_base"):  # output, then input
        return part * _bytes(arguments[1])
    if name in ("reduce_scatter_tensor", "all_to_all_single", "broadcast", "reduce"):
        return part * _bytes(arguments[0])
    return 0.0  # recv and barriers


def _bytes(value: Any) -> int:
    tensors = [value] if isinstance(value, Tensor) else [each for each in value if isinstance(each, Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def _group_of(arguments: tuple) -> dist.ProcessGroup | None:
    """The group of a collective, which is one of its arguments: an object, or the last name."""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument):
            return dist.ProcessGroup.unbox(argument)
    name = arguments[-1] if arguments and isinstance(arguments[-1], str) else None
    return dist.distributed_c10d._resolve_process_group(name) if name else None
