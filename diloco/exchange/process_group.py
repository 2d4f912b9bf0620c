"""Islands that are slices of one job's mesh: each rank averages its shards with the ranks that hold the same ones of the other islands.

It is no :class:`~diloco.exchange.base.Exchange`: nobody comes or goes, nothing is decided, and there is no process beside the trainer.
All islands are at the same round, or the job hangs and ends.
"""

import math
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

from diloco.config import ExchangeSection, RunConfig
from diloco.device_codecs import CODECS, DeviceCodec


#: Keys of `swarm` by which islands that are jobs of their own meet.
_OF_OTHERS = ("initial_peers", "key_file", "slot", "announce", "identity_file", "data_connections")


class Config(ExchangeSection):
    """``exchange.type: process_group``"""

    type: Literal["process_group"] = "process_group"
    offload: bool = Field(False, description="keep anchor and outer optimizer state in pinned memory of the CPU, not on the GPU")


def check(config: RunConfig) -> None:
    """Refuse what replicas of one job can't do. Raises ValueError, naming the keys."""
    outer = config.outer
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
    for name, section, keys in (
        ("swarm", config.swarm, _OF_OTHERS),
        ("exchange", config.exchange, ("min_islands", "max_weight_ratio")),
        ("outer", outer, ("left_out",)),
    ):
        for key in keys:
            value, default = getattr(section, key), type(section).model_fields[key].default
            if value != default:
                raise ValueError(
                    "exchange.type=process_group has all islands in one job, where nobody comes, goes or is late: "
                    f"{name}.{key}={value} has no meaning there; leave it out"
                )
    if outer.sync_every == 1:
        _check_every_step(config)
    elif isinstance(outer.sync_every, int) and config.checkpoint.every:
        _check_kept(config)


def _check_kept(config: RunConfig) -> None:
    """Islands are at most from one launch to the next landing apart, and one may still be writing what the others have written."""
    outer, checkpoint = config.outer, config.checkpoint
    apart = math.ceil(int(outer.sync_every) / outer.fragments) + int(outer.overlap)
    needed = 2 + math.ceil(apart / checkpoint.every)
    if checkpoint.keep < needed:
        raise ValueError(
            f"checkpoint.keep={checkpoint.keep} with checkpoint.every={checkpoint.every}: islands can be {apart} steps apart between two "
            f"rounds, and a crash might leave no step of which all have a checkpoint; keep at least {needed}, or write them less often"
        )


def _check_every_step(config: RunConfig) -> None:
    outer = config.outer
    plain = outer.optimizer.type == "sgd" and outer.optimizer.lr == 1 and outer.optimizer.momentum == 0
    plain = plain and not outer.optimizer.warmup_rounds and outer.optimizer.decay == "constant"
    has = ", ".join(f"{key}={value}" for key, value in outer.optimizer.model_dump().items())
    for wrong, told in (
        (not plain, f"outer.optimizer ({has}) has no anchor to step; set type: sgd, lr: 1, momentum: 0, which is plain averaging"),
        (outer.codec.type != "none", f"outer.codec.type={outer.codec.type} has no pseudo-gradient to encode; set it to none"),
        (outer.overlap != 0, f"outer.overlap={outer.overlap} has no round to wait for; set it to 0"),
        (outer.merge_alpha != 0, f"outer.merge_alpha={outer.merge_alpha} has no anchor to meet; set it to 0"),
        (config.exchange.offload, "exchange.offload=true has no anchor to keep; set it to false"),
    ):
        if wrong:
            raise ValueError(
                f"outer.sync_every=1 with exchange.type=process_group averages gradients at every step: {told}; or sync less often"
            )


@dataclass(frozen=True)
class Averaged:
    """What became of a contribution.

    Attributes:
        mean: over the islands, of this rank's shards; not finite where a contribution was not.
        sums: over the islands, of the numbers that came with it.
    """

    mean: Tensor
    sums: Tensor


class Averaging:
    """A contribution under way.

    Attributes:
        seconds: from the launch until it was there; to be asked for when the device has done all that it was given.
    """

    def __init__(self, future: "Future[Averaged]", ready: Callable[[], None], seconds: Callable[[], float]) -> None:
        self._future, self._ready, self.seconds = future, ready, seconds

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

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """That a vector becomes, filled up to whole blocks for every rank."""
        return self._codec.num_bytes(_padded(numel, self._group.size(), self._codec)) if self._codec else numel * dtype.itemsize

    def bytes_each_way(self, numel: int, dtype: torch.dtype) -> int:
        """What this rank sends, and receives, for a vector: all but its own n-th part of contribution and mean."""
        ranks = self._group.size()
        return 2 * (ranks - 1) * self.encoded_bytes(numel, dtype) // ranks

    def begin(self, values: Tensor, numbers: Tensor) -> Averaging:
        """Begin to average ``values`` (flat) and add up ``numbers``, which are the averager's from now on."""
        started, ended, future = time.monotonic(), time.monotonic(), Future()

        @torch.no_grad()
        def job() -> None:
            nonlocal ended
            try:
                mean = self._average(values)
                dist.all_reduce(numbers, group=self._group)
                ended = time.monotonic()
                future.set_result(Averaged(mean, numbers))
            except BaseException as error:  # raised where the result is asked for
                future.set_exception(error)

        if self._device.type == "cpu":
            self._jobs.put(job)
            return Averaging(future, lambda: None, lambda: ended - started)
        for given in (values, numbers):
            given.record_stream(self._stream)  # else their memory might be used again while it is read here
        self._stream.wait_stream(self._module.current_stream(self._device))
        start, end = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        start.record(self._stream)
        with self._module.stream(self._stream):
            job()
        end.record(self._stream)

        def ready() -> None:
            self._module.current_stream(self._device).wait_event(end)

        return Averaging(future, ready, lambda: start.elapsed_time(end) / 1000)

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
