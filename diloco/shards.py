"""What one rank holds of a fragment, where it lies: shards as one flat vector, in the order of the schema. Nothing is gathered."""

from collections import Counter
from typing import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from islands.checkpoint_state import sharded_like
from islands.fragments import Fragment
from islands.initialize import local_box, named_parameters
from islands.process import Process


class Shards:
    """This rank's parts of the parameters of a fragment; none, where other pipeline stages have them all.

    Args:
        holders: by parameter, how many ranks of the island hold the same part as this one.

    Attributes:
        numel: elements of all parts.
    """

    def __init__(self, parts: list[nn.Module], fragment: Fragment, holders: dict[str, int]) -> None:
        self._parts, start = parts, 0
        self._pieces: dict[str, slice] = {}
        self._holders = holders
        here = named_parameters(parts)
        for name in (parameter.name for parameter in fragment.parameters):
            if name in here and (numel := _local(here[name]).numel()):
                self._pieces[name] = slice(start, start + numel)
                start += numel
        self.numel = start

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Of each parameter where its part lies in the flat vector, and the part itself, as it is now."""
        here = named_parameters(self._parts)
        return ((piece, _local(here[name])) for name, piece in self._pieces.items())

    def square(self, flat: Tensor) -> Tensor:
        """This rank's share (fp64 scalar, on its device) of the sum of squares of a flat vector: the shares of all ranks add up to it."""
        total = torch.zeros((), dtype=torch.float64, device=flat.device)
        for name, piece in self._pieces.items():
            total += torch.linalg.vector_norm(flat[piece], dtype=torch.float64).square() / self._holders[name]
        return total

    def by_parameter(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector by name, each in the shape of its parameter and cut up among the ranks as that is."""
        here = named_parameters(self._parts)
        return {
            name: sharded_like(here[name].detach(), flat[piece].view(_local(here[name]).shape)) for name, piece in self._pieces.items()
        }


def count_holders(parts: list[nn.Module], process: Process) -> dict[str, int]:
    """By parameter of this rank, how many ranks of the island hold the same part. Called on all of them alike."""
    mine = {name: local_box(parameter) for name, parameter in named_parameters(parts).items()}
    everyone: list[dict[str, object]] = [mine] * process.world_size
    if process.world_size > 1:
        dist.all_gather_object(everyone, mine, group=process.group)
    holders = Counter(item for held in everyone for item in held.items())
    return {name: holders[name, box] for name, box in mine.items()}


def _local(parameter: Tensor) -> Tensor:
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
