"""Sharded data parallel with FSDP2, block by block: ZeRO-1, 2 and 3 (arXiv 1910.02054) and hybrid shard.

They differ in what stays whole on each rank between micro-batches:

========  ===================  ================  ======================================================
strategy  parameters           gradients         communication in a step of k micro-batches
========  ===================  ================  ======================================================
zero1     until the last       until the last    one all-gather, one reduce-scatter
zero2     until the last       never             one all-gather, k reduce-scatters
zero3     never                never             2k all-gathers, k reduce-scatters
========  ===================  ================  ======================================================

Optimizer state and master weights are sharded in all of them. Hybrid shard adds one all-reduce across the groups, on the last.
"""

import contextlib
from typing import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from islands.strategies.base import DataParallel


def mixed_precision(precision: str, logits: bool) -> tuple[MixedPrecisionPolicy, MixedPrecisionPolicy]:
    """Policies of a block and of the root: with bf16 the master weights and reductions stay fp32, and so do the logits.

    Args:
        logits: whether the root puts out logits; a pipeline stage may not, and hands on bf16.
    """
    if precision != "bf16":
        return MixedPrecisionPolicy(), MixedPrecisionPolicy()
    block = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return block, MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32 if logits else None)


def shard_model(model: nn.Module, mesh: DeviceMesh, strategy: str, precision: str, cpu_offload: bool) -> DataParallel:
    """Shard ``model`` in place: each of its blocks as a unit, then what is left.

    Args:
        mesh: the axis to shard over, or (replicate, shard).
        strategy: zero1, zero2 or zero3.
    """
    block_policy, root_policy = mixed_precision(precision, model.gives_logits)
    options = dict(
        mesh=mesh,
        reshard_after_forward=strategy == "zero3",
        offload_policy=CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if cpu_offload else OffloadPolicy(),
    )
    for block in model.blocks.values():
        fully_shard(block, mp_policy=block_policy, **options)
    fully_shard(model, mp_policy=root_policy, **options)
    return FullySharded(model, strategy)


class FullySharded(DataParallel):
    """Tells FSDP before each micro-batch what may stay whole until the next."""

    def __init__(self, module: FSDPModule, strategy: str) -> None:
        super().__init__(module)
        self._strategy = strategy

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """See :class:`~islands.strategies.base.DataParallel`."""
        self.module.set_is_last_backward(is_last)
        self.module.set_requires_all_reduce(is_last)
        self.module.set_requires_gradient_sync(is_last or self._strategy != "zero1")
        self.module.set_reshard_after_backward(is_last or self._strategy == "zero3")
        yield

    def after_evaluation(self) -> None:
        """A forward without backward leaves whole parameters behind; put every unit back to its shards."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
