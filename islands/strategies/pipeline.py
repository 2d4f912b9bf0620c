"""Pipeline parallel: the layers are divided among ranks, and micro-batches follow one another through them.

torch runs the schedules. ``zero_bubble`` is its interleaved ZB1P, not ZB-V: that one puts neighbouring stages on one
rank, and then torch can't run the forward pass alone, which an evaluation does.

With every schedule and strategy torch keeps the gradients of a stage whole until the last micro-batch is through, and
reduces them then, once. In a step zero1 and zero2 are therefore the same. zero3 frees the parameters of a block after
each forward pass; from a backward pass to the next forward pass they stay whole, and the interleaved schedules gather
stages ahead. With bf16, zero_bubble adds weight gradients of consecutive micro-batches in bf16, the others add in fp32.
"""

import contextlib
import time
from typing import Any, Callable, ContextManager, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from islands.config import IslandConfig, ParallelSection
from islands.forward_backward import IGNORED, cross_entropy_sum
from islands.initialize import canonical_name, parameter_dtype
from islands.mesh import Grid
from islands.strategies.base import DataParallel
from islands.strategies.pipeline_plan import INTERLEAVED, num_micro_batches, partition, stages_per_rank

_SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved_1f1b": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}


def split(model: nn.Module, parallel: ParallelSection, axis: DeviceMesh) -> list[nn.Module]:
    """This rank's stages of the whole ``model`` on the meta device: stage ``s`` is for rank ``s`` modulo the ranks."""
    layers = partition(model.layer_costs(), axis.size() * stages_per_rank(parallel))
    return [model.stage(part) for part in layers[axis.get_local_rank() :: axis.size()]]


class Pipeline:
    """Runs batches through the stages of all ranks of a pipeline; a :class:`~islands.forward_backward.ForwardBackward`.

    Args:
        parts: this rank's stages, in order.
        axis: the ranks of the pipeline.
        loss_context: entered around schedules; tensor parallelism cuts the loss by vocabulary in it.

    Attributes:
        copies: parameters here that are copies of another stage's.
    """

    def __init__(
        self,
        parts: list[DataParallel],
        axis: DeviceMesh,
        config: IslandConfig,
        grid: Grid,
        device: torch.device,
        loss_context: Callable[[], ContextManager[None]],
    ) -> None:
        self._parts, self._group = parts, axis.get_group()
        self._computing, self._stepping = _Clock(device), _Clock(device)
        self._scale, self._total = 1.0, torch.zeros((), dtype=torch.float64, device=device)
        self._tied = _TiedWeight.find([part.module for part in parts], self._group)
        self.copies = [self._tied.parameter] if self._tied and self._tied.is_copy else []
        self._share, self._loss_context = config.train.global_batch_size // grid.data, loss_context
        self._schedule = self._build_schedule(config, grid, device)
        dist.all_reduce(self._total, group=self._group)  # NCCL connects a group's ranks at once: not amid a schedule

    def _build_schedule(self, config: IslandConfig, grid: Grid, device: torch.device) -> Any:
        rank, ranks, micro_batches = self._group.rank(), self._group.size(), num_micro_batches(config, grid.data)
        dtype = torch.bfloat16 if config.train.precision == "bf16" else parameter_dtype(config)
        batch, positions, size = self._parts[0].module.hidden_shape(self._share // micro_batches)
        tokens = torch.empty((batch, positions), dtype=torch.int64, device="meta")
        if config.parallel.sequence_parallel:  # a tensor rank hands its positions to the same rank of the next stage
            positions //= grid.tensor
        hidden = torch.empty((batch, positions, size), dtype=dtype, device="meta", requires_grad=True)
        stages = [
            _Stage(
                self._computing,
                part.module,
                rank + ranks * place,
                ranks * len(self._parts),
                device,
                # With both known torch need not run a batch to find out, at each change from training to evaluation.
                input_args=tokens if rank + place == 0 else hidden,
                output_args=hidden,  # logits on the last stage, which hands them to none
                group=self._group,
            )
            for place, part in enumerate(self._parts)
        ]
        schedule = config.parallel.pipeline_schedule
        return _SCHEDULES[schedule](
            stages if schedule in INTERLEAVED else stages[0], micro_batches, loss_fn=self._loss, scale_grads=False
        )

    def train(self, inputs: Tensor, targets: Tensor, scale: float) -> Tensor:
        """See :class:`~islands.forward_backward.ForwardBackward`."""
        self._scale, self._total = scale, torch.zeros_like(self._total)
        self._computing.reset()
        self._stepping.reset()
        with self._stepping.running(), self._loss_context():
            self._schedule.step(*self._arguments(inputs), target=targets, return_outputs=False)
        if self._tied:
            self._tied.sum_gradients()
        dist.all_reduce(self._total, group=self._group)
        return self._total

    def evaluate(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """See :class:`~islands.forward_backward.ForwardBackward`. Padded to whole batches, as schedules want."""
        self._total = torch.zeros_like(self._total)
        padding = (0, 0, 0, -len(inputs) % self._share)
        inputs, targets = F.pad(inputs, padding), F.pad(targets, padding, value=IGNORED)
        with torch.no_grad(), self._loss_context():
            for x, y in zip(inputs.split(self._share), targets.split(self._share), strict=True):
                self._schedule.eval(*self._arguments(x), target=y, return_outputs=False)
        dist.all_reduce(self._total, group=self._group)
        return self._total

    def after_evaluation(self) -> None:
        """See :class:`~islands.forward_backward.ForwardBackward`."""
        for part in self._parts:
            part.after_evaluation()

    def measurements(self) -> dict[str, float]:
        """The share of the last step in which the ranks of the pipeline, on average, computed nothing."""
        mine = self._total.new_tensor([self._computing.seconds(), self._stepping.seconds()])
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everyone, mine, group=self._group)
        computing, stepping = torch.stack(everyone).unbind(dim=1)
        return {"bubble": float(1 - computing.mean() / stepping.max())}  # ranks end one after another: the last counts

    def _arguments(self, inputs: Tensor) -> tuple[Tensor, ...]:
        return (inputs,) if self._group.rank() == 0 else ()  # later stages get theirs from the one before

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Called on the last stage for each micro-batch."""
        with self._computing.running():
            loss = cross_entropy_sum(logits, targets)
            self._total += loss.detach()
            return loss * self._scale


class _Stage(PipelineStage):
    """A stage that notes when it computes."""

    def __init__(self, clock: "_Clock", *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._clock = clock

    def forward_one_chunk(self, *arguments: Any, **keywords: Any) -> Any:
        with self._clock.running():
            return super().forward_one_chunk(*arguments, **keywords)

    def backward_one_chunk(self, *arguments: Any, **keywords: Any) -> None:
        with self._clock.running():
            super().backward_one_chunk(*arguments, **keywords)

    def backward_weight_one_chunk(self, *arguments: Any, **keywords: Any) -> None:
        with self._clock.running():
            super().backward_weight_one_chunk(*arguments, **keywords)

    def backward_maybe_with_nosync(self, backward_type: str, *arguments: Any, **keywords: Any) -> Any:
        if backward_type != "full":  # torch looks for parameters in the graph; those of zero3 are there while whole
            for module in self.submod.modules():
                if isinstance(module, FSDPModule):
                    module.unshard()
        return super().backward_maybe_with_nosync(backward_type, *arguments, **keywords)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        if self.has_backward:  # not in an evaluation
            super().perform_reduce_grad(grad_scale_factor)


class _Clock:
    """Sums the time between pairs of points in what the device is given to do; reading it waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        """Forget what was measured."""
        self._spans.clear()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the time of the block."""
        start = self._now()
        yield
        self._spans.append((start, self._now()))

    def seconds(self) -> float:
        """The sum."""
        if self._device.type == "cpu":
            return sum(end - start for start, end in self._spans)
        for _, end in self._spans:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in self._spans) / 1000

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


class _TiedWeight:
    """A parameter that the first and the last stage both hold, and update alike: both get the sum of its gradients.

    Args:
        is_copy: whether the other one is the original.
    """

    def __init__(self, parameter: nn.Parameter, is_copy: bool, group: dist.ProcessGroup) -> None:
        self.parameter, self.is_copy, self._group = parameter, is_copy, group

    @classmethod
    def find(cls, stages: list[nn.Module], group: dist.ProcessGroup) -> "_TiedWeight | None":
        """The one among the parameters of ``stages``, if there is one."""
        for stage in stages:
            for name, parameter in stage.named_parameters():
                if canonical_name(name) in {*stage.aliases, *stage.aliases.values()}:
                    return cls(parameter, canonical_name(name) in stage.aliases, group)
        return None

    def sum_gradients(self) -> None:
        """Add the other stage's gradient. Only two ranks take part, and a + b is b + a to the bit."""
        gradient = self.parameter.grad
        mine = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        theirs, other = torch.empty_like(mine), self._group.size() - 1 - self._group.rank()
        transfers = [
            dist.P2POp(dist.isend, mine, group=self._group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        mine += theirs
