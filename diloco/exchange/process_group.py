"""Islands that are slices of one job's mesh: each rank averages its shards with the ranks that hold the same ones of the other islands.

It is no :class:`~diloco.exchange.base.Exchange`: nobody comes or goes, nothing is decided, and there is no process beside the trainer.
All islands are at the same round, or the job hangs and ends.
"""

import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Callable, Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from diloco.config import ExchangeSection, RunConfig, SwarmSection
from diloco.device_codecs import CODECS, DeviceCodec


class Config(ExchangeSection):
    """``exchange.type: process_group``"""

    type: Literal["process_group"] = "process_group"
    offload: bool = Field(False, description="keep anchor and outer optimizer state in pinned memory of the CPU, not on the GPU")


def check(config: RunConfig) -> None:
    """Refuse what replicas of one job can't do. Raises ValueError, naming the keys."""
    outer, swarm = config.outer, config.swarm
    for wrong, told in (
        (not isinstance(outer.sync_every, int), f"outer.sync_every={outer.sync_every} goes by the clock; give inner steps"),
        (outer.overlap == "eager", "outer.overlap=eager needs every island's own share; give inner steps"),
        (outer.late == "land_late", "outer.late=land_late lands rounds as they come, and ranks have to do so alike; leave it out"),
        (outer.adaptive.target > 0, "outer.adaptive.target is for links that change; leave it out"),
        (outer.error_feedback, "outer.error_feedback has no place to keep what was lost; leave it out"),
        (outer.codec.type not in CODECS, f"outer.codec.type={outer.codec.type}: on the device there are {', '.join(CODECS)}"),
    ):
        if wrong:
            raise ValueError(f"exchange.type=process_group: {told}")
    for key, told in dict(initial_peers="are reached", key_file="are kept out", slot="are numbered", announce="are told").items():
        if getattr(swarm, key) != SwarmSection.model_fields[key].default:
            raise ValueError(
                f"exchange.type=process_group has all swarm.islands in one job, and swarm.{key} says how others {told}; leave it out"
            )
    if outer.sync_every == 1:
        _check_every_step(config)


def _check_every_step(config: RunConfig) -> None:
    outer = config.outer
    plain = outer.optimizer.type == "sgd" and outer.optimizer.lr == 1 and outer.optimizer.momentum == 0
    plain = plain and not outer.optimizer.warmup_rounds and outer.optimizer.decay == "constant"
    has = ", ".join(f"{key}={value}" for key, value in outer.optimizer.model_dump().items() if key in ("type", "lr", "momentum", "decay"))
    for wrong, told in (
        (not plain, f"outer.optimizer ({has}) has no anchor to step; set type: sgd, lr: 1, momentum: 0, which is plain averaging"),
        (outer.codec.type != "none", f"outer.codec.type={outer.codec.type} has no pseudo-gradient to encode; set it to none"),
        (outer.overlap != 0, f"outer.overlap={outer.overlap} has no round to wait for; set it to 0"),
        (outer.merge_alpha != 0, f"outer.merge_alpha={outer.merge_alpha} has no anchor to meet; set it to 0"),
    ):
        if wrong:
            raise ValueError(f"outer.sync_every=1 with exchange.type=process_group averages gradients at every step: {told}; or sync less often")


@dataclass(frozen=True)
class Averaged:
    """What became of a contribution.

    Attributes:
        mean: over the islands, of this rank's shards; not finite where a contribution was not.
        square: sum over the islands of what each gave as the square of its own.
        seconds: from the launch until it was there, as far as the CPU can tell.
    """

    mean: Tensor
    square: Tensor
    seconds: float


class Averaging:
    """A contribution under way."""

    def __init__(self, future: "Future[Averaged]", ready: Callable[[], None]) -> None:
        self._future, self._ready = future, ready

    def result(self) -> Averaged:
        """Wait for it. Raises what the collective raised."""
        averaged = self._future.result()
        self._ready()
        return averaged


class Averager:
    """Averages flat vectors over ``group`` while training goes on, one after another. Called on all of its ranks alike.

    On the CPU a thread of its own does it, on an accelerator a stream of its own, to which all is given at once: so collectives of
    different groups come in the same order on all ranks.

    Args:
        group: this rank and those in its place on the other islands; used for nothing else.
        codec: what values become on the wire; each is encoded once, added up in fp32 in the order of the islands, and the mean is encoded
            once. ``none``: as they are, by all-reduce.
    """

    def __init__(self, group: dist.ProcessGroup, codec: str, device: torch.device) -> None:
        self._group, self._codec, self._device = group, CODECS[codec], device
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        if device.type == "cpu":
            threading.Thread(target=self._work, name="averager", daemon=True).start()
        else:
            self._module: Any = torch.get_device_module(device)
            self._stream = self._module.Stream(device)

    def bytes_each_way(self, numel: int, dtype: torch.dtype) -> int:
        """What this rank sends, and receives, for a vector: all but its own n-th part of contribution and mean."""
        ranks = self._group.size()
        whole = self._codec.num_bytes(_padded(numel, ranks, self._codec)) if self._codec else numel * dtype.itemsize
        return 2 * (ranks - 1) * whole // ranks

    def begin(self, values: Tensor, square: Tensor) -> Averaging:
        """Begin to average ``values`` (flat) and add up ``square`` (a scalar), which are the averager's from now on."""
        started, future = time.monotonic(), Future()

        @torch.no_grad()
        def job() -> None:
            try:
                mean = self._average(values)
                dist.all_reduce(square, group=self._group)
                future.set_result(Averaged(mean, square, time.monotonic() - started))
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)

        if self._device.type == "cpu":
            self._jobs.put(job)
            return Averaging(future, lambda: None)
        for given in (values, square):
            given.record_stream(self._stream)  # else their memory might be used again while it is read here
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            job()
        end = self._stream.record_event()
        return Averaging(future, lambda: self._module.current_stream(self._device).wait_event(end))

    def _work(self) -> None:
        """The thread's own: what it has not finished ends with the process."""
        while True:
            self._jobs.get()()

    def _average(self, values: Tensor) -> Tensor:
        ranks = self._group.size()
        if not self._codec:
            if values.numel():
                dist.all_reduce(values, group=self._group)
            return values.div_(ranks)
        return average_encoded(values, self._group, self._codec) if values.numel() else values


def average_encoded(values: Tensor, group: dist.ProcessGroup, codec: DeviceCodec) -> Tensor:
    """The mean over ``group`` of flat ``values``, the same bits on all ranks: each rank adds up an n-th part."""
    ranks, size = group.size(), values.numel()
    padded = values.new_zeros(_padded(size, ranks, codec))
    padded[:size] = values
    parts = codec.encode(padded.view(ranks, -1))
    theirs = torch.empty_like(parts)
    dist.all_to_all_single(theirs, parts, group=group)
    mean = codec.decode(theirs[0], values.dtype)
    for part in theirs[1:]:
        mean += codec.decode(part, values.dtype)
    mine = codec.encode((mean / ranks).view(1, -1))
    dist.all_gather_into_tensor(parts, mine, group=group)
    return torch.cat([codec.decode(part, values.dtype) for part in parts])[:size]


def _padded(numel: int, ranks: int, codec: DeviceCodec) -> int:
    """Elements, up to whole blocks for every rank."""
    return -(-numel // (ranks * codec.block)) * ranks * codec.block
