"""Activation checkpointing: forget activations in the forward pass and compute them again in the backward pass."""

from functools import partial

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

#: Costly to compute and small to keep: `selective` saves their results and recomputes the rest. Matrix products, and the sums
#: over tensor-parallel ranks that follow them.
_SAVED = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.all_reduce.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def recompute_blocks(model: nn.Module, mode: str) -> None:
    """Wrap each block in place. ``full`` keeps only its input; ``selective`` also the results of matrix products."""
    options = {}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for name, block in model.blocks.items():
        model.blocks[name] = checkpoint_wrapper(block, preserve_rng_state=False, **options)  # nothing in a block is random


def _policy(context: object, operation: object, *arguments: object, **keywords: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _SAVED else CheckpointPolicy.PREFER_RECOMPUTE
