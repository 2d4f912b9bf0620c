"""The same weights on every mesh: each parameter is drawn from a generator seeded by its own name."""

import hashlib
from typing import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from islands.config import IslandConfig
from islands.huggingface import Weights

_DTYPES = {"fp32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


def parameter_dtype(config: IslandConfig) -> torch.dtype:
    """What parameters are kept in: fp32, also where bf16 computes."""
    return _DTYPES[config.train.precision]


def canonical_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for part in ("_checkpoint_wrapped_module.", "_orig_mod.", "module."):
        name = name.replace(part, "")
    return name


def named_parameters(parts: Iterable[nn.Module]) -> dict[str, nn.Parameter]:
    """Parameters of a rank's parts of the model, by canonical name, in the model's own order; a tied one appears once.

    A copy that ties this rank's part to another pipeline stage has the name of the original, and so its weights too.
    """
    return {
        part.aliases.get(canonical_name(name), canonical_name(name)): parameter
        for part in parts
        for name, parameter in part.named_parameters()
    }


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` with parameters of ``dtype``. Unlike ``model.to`` it works inside dispatch modes, and unlike torch's
    default dtype it concerns no other thread."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            cast = nn.Parameter(parameter.detach().to(dtype), requires_grad=parameter.requires_grad)
            module.register_parameter(name, cast)
    model.tie_weights()
    return model


@torch.no_grad()
def initialize(
    parts: Iterable[nn.Module],
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    offloaded: bool = False,
    weights: Weights | None = None,
) -> None:
    """Give a rank's parts of a model, built on the meta device, their memory and weights.

    A rank draws one whole parameter at a time on the CPU and keeps its shard, so the whole model never exists on one rank, and
    no mesh, device or order of modules changes a bit.

    Args:
        weights: what the model begins with instead, as far as they go; a rank reads its shards of them.
    """
    for part in parts:
        part.to_empty(device="cpu" if offloaded else device)
        part.tie_weights()  # to_empty gives every module a tensor of its own
        part.init_buffers(device, dtype)
        for name, parameter in named_parameters([part]).items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if weights is None or not weights.cover(name):
                local.copy_(local_part(_draw(part, name, parameter, seed), parameter))
            if weights is not None:
                weights.read(name, local_box(parameter)[0], local)


def _draw(part: nn.Module, name: str, parameter: Tensor, seed: int) -> Tensor:
    """The whole parameter, fp32 on the CPU."""
    whole = torch.empty(parameter.shape, dtype=torch.float32)
    part.init_parameter(name, torch.Generator().manual_seed(_seed_of(name, seed)), whole)
    return whole


def _seed_of(name: str, seed: int) -> int:
    """Well mixed in its low 32 bits: torch's CPU generator looks at no others."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4], "little")


def local_box(parameter: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of what this rank holds of a parameter, in the whole one."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim(), tuple(parameter.shape)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(offset), tuple(shape)


def local_part(whole: Tensor, parameter: Tensor) -> Tensor:
    """The view of ``whole``, shaped like the whole ``parameter``, that this rank holds."""
    offset, shape = local_box(parameter)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape))]
