"""Tensor parallel: each matrix product is shared by the ranks of the ``tensor`` axis (arXiv 1909.08053, 2205.05198).

A half of a block is a pair of products, the first cut by columns, the second by rows. Communication of a half over n ranks:

=================  ============================  ============================  ======================
sequence parallel  forward                       backward                      stream on a rank
=================  ============================  ============================  ======================
off                one all-reduce                one all-reduce                (B, T, D)
on                 all-gather, reduce-scatter    all-gather, reduce-scatter    (B, T / n, D)
=================  ============================  ============================  ======================

Both move the same bytes. Every parameter becomes a DTensor on the ``tensor`` axis, norm weights too: gradients of one norm
have to live on one mesh to be clipped by it. Embedding and output layer are cut by vocabulary, and so is the loss: logits are
never gathered.
"""

import contextlib
from functools import partial
from typing import ContextManager

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from islands.tensor_plan import Cut


def cut_model(model: nn.Module, mesh: DeviceMesh, sequence_parallel: bool) -> None:
    """Cut the whole ``model``, on the meta device, in place by its own plan over the ``tensor`` axis ``mesh``.

    Raises:
        ValueError: the plan leaves a parameter out.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    for name, cut in model.tensor_plan().items():
        parallelize_module(model, mesh, {name: _style(cut, stream)}, src_data_rank=None)
    model.tie_weights()  # embedding and output layer have been given tensors of their own
    _refuse_leftovers(model)


def loss_context(size: int) -> ContextManager[None]:
    """Around loss and backward on ``size`` tensor ranks: cross-entropy of logits (…, V) that are cut along V.

    What crosses the ranks is the largest logit, the sum of exponentials and the target's logit of each token.
    """
    return loss_parallel() if size > 1 else contextlib.nullcontext()


def _style(cut: Cut, stream: Placement) -> ParallelStyle:
    match cut:
        case Cut.VOCABULARY:
            return _VocabularyRows(stream)
        case Cut.NORM:
            return _OnStream(stream)
        case Cut.HALF:
            return _WholeInput(stream)
        case Cut.COLUMNS:
            return ColwiseParallel()
        case Cut.ROWS:
            return RowwiseParallel(output_layouts=stream)
        case Cut.LOGITS:
            return ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False)


def _refuse_leftovers(model: nn.Module) -> None:
    plain = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    if plain:
        raise ValueError(f"the tensor plan of {type(model).__name__} leaves out {', '.join(plain)}")


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))


class _OnStream(ParallelStyle):
    """Computes each position alone, with weights that every rank holds; they get their gradient from all positions."""

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Replicate())
        module.register_forward_pre_hook(lambda _, inputs: (_on_mesh(inputs[0], device_mesh, self._stream),))
        module.register_forward_hook(lambda _, inputs, output: output.to_local())
        return module


class _WholeInput(ParallelStyle):
    """Makes the first argument whole, as one DTensor for all that use it: their gradients are summed before they are reduced."""

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def make_whole(_: nn.Module, inputs: tuple) -> tuple:
            return _on_mesh(inputs[0], device_mesh, self._stream).redistribute(placements=[Replicate()]), *inputs[1:]

        module.register_forward_pre_hook(make_whole)
        return module


class _VocabularyRows(ParallelStyle):
    """Each rank looks up the tokens whose rows it has, and the sum over ranks is the embedding.

    RowwiseParallel does the same forward, but makes the gradient of the whole matrix on every rank before it takes its rows.
    """

    def __init__(self, stream: Placement) -> None:
        self._stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _distribute(module, device_mesh, Shard(0))
        module.forward = partial(self._look_up, module, device_mesh)
        return module

    def _look_up(self, module: nn.Embedding, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
        """(B, T) -> the stream"""
        rows = module.weight.to_local()  # (V / n, D)
        tokens = tokens - mesh.get_local_rank() * rows.shape[0]
        elsewhere = (tokens < 0) | (tokens >= rows.shape[0])
        found = F.embedding(tokens.masked_fill(elsewhere, 0), rows).masked_fill(elsewhere[..., None], 0.0)
        return _on_mesh(found, mesh, Partial()).redistribute(placements=[self._stream]).to_local()


def _on_mesh(local: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    return DTensor.from_local(local, mesh, [placement], run_check=False)
