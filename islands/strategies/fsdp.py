"""Fully sharded data parallel (FSDP2): parameters, gradients and optimizer state sharded, block by block."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_model(model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    """Shard ``model`` in place over ``mesh``: each of its blocks as a unit, then what is left.

    Gradients are reduced in fp32 at least; with bf16 the sharded master weights stay fp32.
    """
    bf16 = precision == "bf16"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    root_policy = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, torch.float32) if bf16 else policy
    fully_shard(model, mesh=mesh, mp_policy=root_policy)


def reshard(model: nn.Module) -> None:
    """After a forward without backward FSDP may hold whole parameters; put every unit back to its shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
