"""Fragments between a model spread over the ranks of an island and flat vectors on one rank's CPU, in the background.

The one place that knows how strategies spread a parameter over ranks. What crosses its border is flat, whole and in the order of
the schema, and therefore the same for every mesh.
"""

import queue
import threading
import zlib
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Callable, Iterator, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from islands.fragments import Fragment
from islands.initialize import local_box, named_parameters
from islands.process import Process, background_group

#: Bytes in one message between two ranks.
BUCKET_BYTES = 64 << 20

Apply = Callable[[Tensor, Tensor], object]
T = TypeVar("T")


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


@dataclass
class _Message:
    """Regions that go from one rank to another together; ``values`` are theirs, one after another, where this rank has them."""

    source: int
    destination: int
    regions: list[_Region]
    values: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        """The values of each region."""
        return list(self.values.split([region.numel for region in self.regions]))


class Incoming:
    """A fragment on its way to this rank."""

    def __init__(self, arrival: "Future[list[tuple[_Region, Tensor]]]", local: Callable[[_Region], Tensor]) -> None:
        self._arrival, self._local = arrival, local

    @torch.no_grad()
    def apply(self, apply: Apply = Tensor.copy_) -> None:
        """Wait for it, and call ``apply(local, part)`` with each of this rank's parameters and the part that is for it."""
        for region, values in self._arrival.result():
            local = self._local(region)
            apply(local, values.view(region.shape).to(local.device))


class ParameterMover:
    """Moves fragments, one after another, in a thread of its own. Made and called on all ranks of the island alike.

    What this rank holds is copied at once, so that training may go on. Each element is gathered once, and sent only to the ranks
    that hold it.

    Args:
        beside: False: what one rank moves is moved before the call returns, and in the caller's thread.

    Attributes:
        fragments: what it moves, in their order.
    """

    def __init__(self, parts: list[nn.Module], fragments: list[Fragment], process: Process, beside: bool = True) -> None:
        self._parts, self.fragments, self._rank = parts, fragments, process.rank
        first = next(parts[0].parameters())
        self._dtype, self._device = first.dtype, first.device
        self._group = background_group(process) if process.world_size > 1 else None
        self._inline = self._group is None and (self._device.type == "cpu" or not beside)  # nothing to wait for but a copy
        self._holders = self._find_holders()
        self._starts = [_starts(fragment) for fragment in fragments]
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        if not self._inline:
            threading.Thread(target=self._work, name="parameter-mover", daemon=True).start()

    def numel(self, fragment: int) -> int:
        """Elements of a fragment."""
        return self.fragments[fragment].numel

    @torch.no_grad()
    def gather(
        self, fragment: int, owner: int, into: Tensor | None, then: Callable[[], None] = lambda: None
    ) -> "Future[None]":
        """Collect the whole fragment in ``into``, flat on the CPU of rank ``owner`` (None on the others).

        Args:
            then: called after that, in the same thread.

        Returns:
            Done when all of it is there, or this rank's part has left.
        """
        parameters, rounds = named_parameters(self._parts), []
        for bucket in self._buckets(fragment):
            senders: dict[int, list[_Region]] = defaultdict(list)
            for region, holders in bucket:
                senders[_pick(region, holders, owner)].append(region)
            messages = [_Message(sender, owner, regions) for sender, regions in senders.items()]
            for message in messages:
                if message.source != self._rank:
                    continue
                held = [_local(parameters, region).reshape(-1) for region in message.regions]
                if message.destination == self._rank and self._device.type == "cpu":
                    self._place(fragment, message.regions, held, into)
                    message.regions = []
                else:
                    message.values = torch.cat(held)
            rounds.append(messages)
        snapshot = _Mark(self._device)

        def carry() -> None:
            for messages in rounds:
                for message in messages:
                    if message.values is not None:
                        message.values = snapshot.to_cpu(message.values)
                for message in self._pass_on(messages):
                    if message.regions:
                        self._place(fragment, message.regions, message.parts, into)
                    message.values = None
            then()

        return self._begin(carry)

    @torch.no_grad()
    def scatter(self, fragment: int, owner: int, source: Tensor | None) -> Incoming:
        """Hand each rank its parts of ``source``, flat on the CPU of rank ``owner``, which must stay as it is until applied."""

        def carry() -> list[tuple[_Region, Tensor]]:
            arrived = []
            for bucket in self._buckets(fragment):
                receivers: dict[int, list[_Region]] = defaultdict(list)
                for region, holders in bucket:
                    for holder in holders:
                        receivers[holder].append(region)
                own = receivers.pop(owner, []) if owner == self._rank else []
                arrived += [(region, self._slot(source, fragment, region)) for region in own]
                messages = [_Message(owner, receiver, regions) for receiver, regions in receivers.items()]
                for message in messages:
                    if message.source == self._rank:
                        parts = [self._slot(source, fragment, region).reshape(-1) for region in message.regions]
                        message.values = torch.cat(parts)
                for message in self._pass_on(messages):
                    arrived += zip(message.regions, message.parts, strict=True)
            return arrived

        parameters = named_parameters(self._parts)
        return Incoming(self._begin(carry), lambda region: _local(parameters, region))

    def _begin(self, carry: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(carry())
            except BaseException as error:
                future.set_exception(error)

        job() if self._inline else self._jobs.put(job)
        return future

    def _work(self) -> None:
        """The thread's own: what it has not finished ends with the process."""
        while True:
            self._jobs.get()()

    def _pass_on(self, messages: list[_Message]) -> list[_Message]:
        """Send and receive side by side; returns those that are for this rank."""
        works, mine = [], [message for message in messages if message.destination == self._rank]
        for message in messages:
            if message.source == self._rank != message.destination:
                works.append(dist.isend(message.values, message.destination, group=self._group))
            elif message.destination == self._rank != message.source:
                message.values = torch.empty(sum(region.numel for region in message.regions), dtype=self._dtype)
                works.append(dist.irecv(message.values, message.source, group=self._group))
        for work in works:
            work.wait()
        return mine

    def _find_holders(self) -> dict[str, dict[_Region, list[int]]]:
        mine = {name: _Region(name, *local_box(parameter)) for name, parameter in named_parameters(self._parts).items()}
        everyone: list[dict[str, _Region]] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        found: dict[str, dict[_Region, list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, holdings in enumerate(everyone):
            for name, region in holdings.items():
                if region.numel:
                    found[name][region].append(rank)
        for parameter in (parameter for fragment in self.fragments for parameter in fragment.parameters):
            held = sum(region.numel for region in found[parameter.name])
            if held != parameter.numel:
                raise RuntimeError(
                    f"the ranks hold {held} of the {parameter.numel} elements of {parameter.name}; "
                    "its placement is not one that can be moved"
                )
        return found

    def _buckets(self, fragment: int) -> Iterator[list[tuple[_Region, list[int]]]]:
        bucket, size = [], 0
        for parameter in self.fragments[fragment].parameters:
            for region, holders in self._holders[parameter.name].items():
                num_bytes = region.numel * self._dtype.itemsize
                if bucket and size + num_bytes > BUCKET_BYTES:
                    yield bucket
                    bucket, size = [], 0
                bucket.append((region, holders))
                size += num_bytes
        yield bucket

    def _place(self, fragment: int, regions: list[_Region], parts: list[Tensor], into: Tensor) -> None:
        for region, values in zip(regions, parts, strict=True):
            self._slot(into, fragment, region).copy_(values.view(region.shape))

    def _slot(self, flat: Tensor, fragment: int, region: _Region) -> Tensor:
        start, shape = self._starts[fragment][region.parameter]
        return region.of(flat[start : start + shape.numel()].view(shape))


class _Mark:
    """A point in this device's work, after which another thread may copy what was written before it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = None
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._module, self._stream = module, module.Stream(device)
            self._stream.wait_stream(module.current_stream(device))

    def to_cpu(self, values: Tensor) -> Tensor:
        """A copy that does not queue up behind the training that goes on meanwhile."""
        if self._stream is None:
            return values
        with self._module.stream(self._stream):
            return values.to("cpu")  # waits for this stream only


def _local(parameters: dict[str, nn.Parameter], region: _Region) -> Tensor:
    parameter = parameters[region.parameter].detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _starts(fragment: Fragment) -> dict[str, tuple[int, torch.Size]]:
    """Where each parameter begins in the flat vector, and its shape."""
    found, start = {}, 0
    for parameter in fragment.parameters:
        found[parameter.name] = start, torch.Size(parameter.shape)
        start += parameter.numel
    return found


def _pick(region: _Region, holders: list[int], owner: int) -> int:
    """Which holder sends: the owner itself where it can, else one by hash, so that replicas share the work."""
    return owner if owner in holders else holders[zlib.crc32(repr(region).encode()) % len(holders)]
