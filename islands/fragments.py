"""Parameters by name: cut into fragments, gathered whole onto one rank's CPU and put back.

The one place that knows how strategies spread a parameter over ranks. What crosses its border is flat, whole and in the order of
the schema, and therefore the same for every mesh.
"""

import hashlib
import zlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from islands.initialize import local_box, named_parameters

#: Bytes that one rank moves before the next bucket begins: what bounds the copies held beside the model.
BUCKET_BYTES = 64 << 20


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter as a whole, whatever holds its shards."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class Fragment:
    """Parameters that are exchanged together, one after another in a flat vector of ``numel`` elements."""

    name: str
    parameters: tuple[ParameterSpec, ...]

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)


def schema_of(model: nn.Module) -> tuple[ParameterSpec, ...]:
    """Every parameter that trains, in the model's order. A model on the meta device serves."""
    parameters = named_parameters([model]).items()
    return tuple(ParameterSpec(name, tuple(p.shape)) for name, p in parameters if p.requires_grad)


def schema_hash(schema: tuple[ParameterSpec, ...]) -> str:
    """SHA-256 (hex) of names and shapes in order: equal where states can be exchanged."""
    return hashlib.sha256(repr([(p.name, p.shape) for p in schema]).encode()).hexdigest()


def whole_model(schema: tuple[ParameterSpec, ...]) -> list[Fragment]:
    """One fragment with everything in it."""
    return [Fragment("all", schema)]


@dataclass(frozen=True)
class _Region:
    """A box of a parameter that one or several ranks hold."""

    parameter: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, whole: Tensor) -> Tensor:
        """The view of the box in the whole parameter."""
        return whole[tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape))]


class ParameterMover:
    """Moves fragments between a model spread over ranks and flat vectors on one rank's CPU.

    Made and called on all ranks of the island alike. Sends to each rank only what it holds, and gathers each element once.
    """

    def __init__(self, parts: list[nn.Module], fragments: list[Fragment]) -> None:
        self._parts, self._fragments, self._rank = parts, fragments, dist.get_rank()
        mine = {name: _Region(name, *local_box(parameter)) for name, parameter in named_parameters(parts).items()}
        everyone: list[dict[str, _Region]] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        self._holders: dict[str, dict[_Region, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, holdings in enumerate(everyone):
            for name, region in holdings.items():
                if region.numel:
                    self._holders[name][region].append(rank)
        for parameter in (parameter for fragment in fragments for parameter in fragment.parameters):
            held = sum(region.numel for region in self._holders[parameter.name])
            if held != parameter.numel:
                raise RuntimeError(
                    f"the ranks hold {held} of the {parameter.numel} elements of {parameter.name}; "
                    "its placement is not one that can be moved"
                )

    @torch.no_grad()
    def gather(self, fragment: int, owner: int, into: Tensor | None) -> None:
        """Collect the whole fragment in ``into``, flat on the CPU of rank ``owner`` (None on the others)."""
        for bucket in self._buckets(fragment):
            pairs: dict[tuple[int, int], list[_Region]] = defaultdict(list)
            for region, holders in bucket:
                pairs[_pick(region, holders, owner), owner].append(region)
            self._exchange(pairs, read=self._local, write=lambda region, values: self._slot(into, fragment, region).copy_(values))

    @torch.no_grad()
    def scatter(
        self, fragment: int, owner: int, source: Tensor | None, apply: Callable[[Tensor, Tensor], object] = Tensor.copy_
    ) -> None:
        """Hand each rank its parts of ``source``, flat on the CPU of rank ``owner``; ``apply(local, part)`` uses them."""
        for bucket in self._buckets(fragment):
            pairs: dict[tuple[int, int], list[_Region]] = defaultdict(list)
            for region, holders in bucket:
                for holder in holders:
                    pairs[owner, holder].append(region)
            self._exchange(
                pairs,
                read=lambda region: self._slot(source, fragment, region),
                write=lambda region, values: apply(self._local(region), values.to(self._local(region).device)),
            )

    def _buckets(self, fragment: int) -> Iterator[list[tuple[_Region, list[int]]]]:
        bucket, size = [], 0
        for parameter in self._fragments[fragment].parameters:
            for region, holders in self._holders[parameter.name].items():
                num_bytes = region.numel * 4
                if bucket and size + num_bytes > BUCKET_BYTES:
                    yield bucket
                    bucket, size = [], 0
                bucket.append((region, holders))
                size += num_bytes
        yield bucket

    def _exchange(
        self,
        pairs: dict[tuple[int, int], list[_Region]],
        read: Callable[[_Region], Tensor],
        write: Callable[[_Region, Tensor], object],
    ) -> None:
        """One flat message for each pair (source, destination) of ranks; a pair of one rank is a plain copy."""
        sends, receives = [], []
        for (source, destination), regions in pairs.items():
            if source == destination == self._rank:
                for region in regions:
                    write(region, read(region))
            elif source == self._rank:
                message = torch.cat([read(region).reshape(-1).to("cpu", self._dtype) for region in regions])
                sends.append((dist.isend(message, destination), message))  # the message must outlive the send
            elif destination == self._rank:
                message = torch.empty(sum(region.numel for region in regions), dtype=self._dtype)
                receives.append((dist.irecv(message, source), message, regions))
        for work, message, regions in receives:
            work.wait()
            for region, values in zip(regions, message.split([region.numel for region in regions]), strict=True):
                write(region, values.view(region.shape))
        for work, _ in sends:
            work.wait()

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._parts[0].parameters()).dtype

    def _local(self, region: _Region) -> Tensor:
        parameter = named_parameters(self._parts)[region.parameter].detach()
        return parameter.to_local() if isinstance(parameter, DTensor) else parameter

    def _slot(self, flat: Tensor, fragment: int, region: _Region) -> Tensor:
        start = 0
        for parameter in self._fragments[fragment].parameters:
            if parameter.name == region.parameter:
                return region.of(flat[start : start + parameter.numel].view(parameter.shape))
            start += parameter.numel
        raise KeyError(region.parameter)


def _pick(region: _Region, holders: list[int], owner: int) -> int:
    """Which holder sends: the owner itself where it can, else one by hash, so that replicas share the work."""
    return owner if owner in holders else holders[zlib.crc32(repr(region).encode()) % len(holders)]
