"""Norm and clipping of a gradient whose parameters may be plain, sharded on different meshes, and spread over stages."""

from collections import defaultdict
from typing import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def gradient_norm(
    parameters: Iterable[nn.Parameter],
    pipeline_group: dist.ProcessGroup | None = None,
    counted_elsewhere: Collection[nn.Parameter] = (),
) -> Tensor:
    """L2 norm of the whole gradient, equal on all ranks; a scalar tensor.

    Args:
        pipeline_group: stages that hold the other parameters; None when there is one stage.
        counted_elsewhere: parameters that another stage counts: copies of tied weights.
    """
    skipped = {id(parameter) for parameter in counted_elsewhere}
    squared: list[Tensor] = []
    for group in _by_mesh(p for p in parameters if id(p) not in skipped).values():
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in group])
        squared.append((norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2)
    total = torch.stack(squared).sum()
    if pipeline_group is not None:
        dist.all_reduce(total, group=pipeline_group)
    return total.sqrt()


def clip_gradient(parameters: Iterable[nn.Parameter], norm: Tensor, largest: float) -> None:
    """Scale the gradient so that its norm, given as ``norm``, is at most ``largest``."""
    for group in _by_mesh(parameters).values():
        torch.nn.utils.clip_grads_with_norm_(group, largest, norm)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[DeviceMesh | None, list[nn.Parameter]]:
    """Operations on several DTensors at once need them to be on one mesh."""
    groups = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            groups[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
    return groups
