"""Every rank holds everything, and gradients are averaged."""

import contextlib
from typing import ContextManager, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from islands.config import DdpSection
from islands.strategies.base import DataParallel
from islands.strategies.fsdp import FullySharded, mixed_precision


def replicate_model(model: nn.Module, mesh: DeviceMesh, precision: str) -> DataParallel:
    """Replicate a model that tensor or pipeline parallelism has cut, in place; DistributedDataParallel fits neither.

    Parameters become DTensors, so that gradients of one norm live on one mesh.
    """
    block_policy, root_policy = mixed_precision(precision, model.gives_logits)
    for block in model.blocks.values():
        replicate(block, mesh=mesh, mp_policy=block_policy)
    replicate(model, mesh=mesh, mp_policy=root_policy)
    return FullySharded(model, strategy="zero1")  # the same machinery: all gradients wait for the last micro-batch


def wrap_model(
    model: nn.Module, group: dist.ProcessGroup, options: DdpSection, precision: str, device: torch.device
) -> DataParallel:
    """Wrap a model that is already filled with its weights, the same on all ranks."""
    module = DistributedDataParallel(
        model,
        process_group=group,
        bucket_cap_mb=options.bucket_mb,
        gradient_as_bucket_view=options.gradient_as_bucket_view,
        static_graph=options.static_graph,
        find_unused_parameters=options.find_unused_parameters,
        init_sync=False,  # weights are equal by construction, also where a rank could not reach the others' memory
    )
    return Replicated(module, options.static_graph, torch.bfloat16 if precision == "bf16" else None, device)


class Replicated(DataParallel):
    """DistributedDataParallel that averages once a step."""

    def __init__(
        self, module: DistributedDataParallel, static_graph: bool, autocast: torch.dtype | None, device: torch.device
    ) -> None:
        super().__init__(module)
        self._recording = static_graph  # the graph is recorded in the first step, which must not skip a reduction
        self._autocast, self._device_type = autocast, device.type

    @contextlib.contextmanager
    def micro_batch(self, is_last: bool) -> Iterator[None]:
        """See :class:`~islands.strategies.base.DataParallel`."""
        waits = not is_last and not self._recording
        with self.module.no_sync() if waits else contextlib.nullcontext(), self._casting():
            yield
        self._recording = self._recording and not is_last

    def evaluating(self) -> ContextManager[None]:
        """See :class:`~islands.strategies.base.DataParallel`."""
        return self._casting()

    def _casting(self) -> torch.autocast:
        return torch.autocast(self._device_type, dtype=self._autocast, enabled=self._autocast is not None)
