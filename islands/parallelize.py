"""Apply the strategies to a model, in the one order that works."""

from dataclasses import dataclass
from functools import partial
from typing import Collection

import torch.distributed as dist
from torch import nn

from islands.config import IslandConfig
from islands.forward_backward import ForwardBackward, WholeModel
from islands.huggingface import open_weights
from islands.initialize import initialize, parameter_dtype
from islands.mesh import Grid, IslandMesh
from islands.process import Process
from islands.strategies import ddp, fsdp, pipeline, recompute, tensor
from islands.strategies.base import DataParallel


@dataclass(frozen=True)
class ParallelModel:
    """A rank's part of the model.

    Attributes:
        parts: modules whose parameters have the names they have in the whole model; one, or one a pipeline stage.
        pipeline_group: ranks that hold the other stages; None where this rank holds all layers.
        counted_elsewhere: parameters here that are copies of another stage's.
    """

    parts: list[nn.Module]
    forward_backward: ForwardBackward
    pipeline_group: dist.ProcessGroup | None = None
    counted_elsewhere: Collection[nn.Parameter] = ()


def parallelize(model: nn.Module, grid: Grid, mesh: IslandMesh, process: Process, config: IslandConfig) -> ParallelModel:
    """Turn the whole ``model`` on the meta device into this rank's part, filled with its weights.

    The order matters: each pipeline stage is treated like a model; recomputation wraps what tensor parallelism has cut,
    compilation sees what is recomputed, and sharding wraps compiled blocks. Only DistributedDataParallel wants weights
    to be there already.

    Raises:
        ConfigError: the weights in ``model.init_from`` are not those of the model.
    """
    weights = open_weights(config.model, model)
    train, axis = config.train, mesh.root["pipeline"]
    parts = pipeline.split(model, config.parallel, axis) if grid.pipeline > 1 else [model]
    for part in parts:
        if grid.tensor > 1:
            tensor.cut_model(part, mesh.root["tensor"], config.parallel.sequence_parallel)
        if train.recompute != "none":
            recompute.recompute_blocks(part, train.recompute)
        if train.compile:
            for block in part.blocks.values():
                block.compile()
    wrapped = [_data_parallel(part, grid, mesh, config) for part in parts]
    initialize(parts, process.device, parameter_dtype(config), config.run.seed, config.parallel.cpu_offload, weights)
    loss_context = partial(tensor.loss_context, grid.tensor)
    if grid.pipeline > 1:
        pipelined = pipeline.Pipeline(wrapped, axis, config, grid, process.device, loss_context)
        return ParallelModel(parts, pipelined, axis.get_group(), pipelined.copies)
    micro_batch_size = train.micro_batch_size or train.global_batch_size // grid.data
    group, options = mesh.data.get_group(), config.parallel.ddp
    whole = wrapped[0] or ddp.wrap_model(model, group, options, train.precision, process.device)
    return ParallelModel(parts, WholeModel(whole, micro_batch_size, loss_context))


def _data_parallel(part: nn.Module, grid: Grid, mesh: IslandMesh, config: IslandConfig) -> DataParallel | None:
    """Shard or replicate ``part`` over the data axes; None where DistributedDataParallel wraps it later."""
    parallel, precision, strategy = config.parallel, config.train.precision, config.parallel.data_parallel_strategy
    if strategy == "ddp":
        cut = grid.tensor > 1 or grid.pipeline > 1
        return ddp.replicate_model(part, mesh.root["replicate"], precision) if cut else None
    axes = mesh.root["replicate", "shard"] if grid.copies > 1 else mesh.root["shard"]
    if strategy == "hybrid_shard":
        strategy, axes = parallel.shard_strategy, mesh.root["replicate", "shard"]
    return fsdp.shard_model(part, axes, strategy, precision, parallel.cpu_offload)
