"""The device mesh of a job, and every check on its shape."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from islands import plugins
from islands.config import IslandConfig
from islands.config_file import ConfigError
from islands.process import Process
from islands.strategies.pipeline_plan import check_pipeline

AXES = ("island", "pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True)
class Grid:
    """Sizes of the mesh axes of one island.

    Attributes:
        replicas: grids of these sizes that are one island: they average gradients at every step, and each trains on the batch of a slot
            of its own.
        islands: islands of this shape in the job, side by side; each trains on its own.
    """

    pipeline: int
    replicate: int
    shard: int
    tensor: int
    replicas: int = 1
    islands: int = 1

    @property
    def data(self) -> int:
        """Ranks that split the batch of a slot."""
        return self.replicate * self.shard

    @property
    def copies(self) -> int:
        """Of each shard, all of which get the same gradient."""
        return self.replicas * self.replicate

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.islands * self.replicas * self.pipeline * self.data * self.tensor

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES[1:])
        return f"{self.replicas} x ({sizes})" if self.replicas > 1 else sizes


def check_grid(config: IslandConfig, world_size: int) -> Grid:
    """The grid that ``config`` asks for on ``world_size`` ranks.

    Raises:
        ConfigError: the sizes don't multiply to the world, batch or model don't divide, or a pipeline can't be cut or
            filled; with what would fit.
    """
    parallel, train = config.parallel, config.train
    model_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    data = parallel.data_parallel_size
    if data == 0:
        raise ConfigError("parallel.data_parallel_size: 0 is not a number of ranks; give 1 or more, or -1 for the rest")
    cut = f"tensor_parallel_size {parallel.tensor_parallel_size} x pipeline_parallel_size {parallel.pipeline_parallel_size}"
    if world_size % model_ranks:
        raise ConfigError(
            f"parallel: {cut} = {model_ranks} does not divide the {world_size} ranks of this island. Start "
            f"{_nearest_multiples(world_size, model_ranks)} ranks, or use sizes whose product divides {world_size}"
        )
    if data == -1:
        data = world_size // model_ranks
    if data * model_ranks != world_size:
        raise ConfigError(
            f"parallel: data_parallel_size {data} x {cut} = {data * model_ranks} ranks, but this island has {world_size}. "
            f"Set data_parallel_size to {world_size // model_ranks} (or -1: the rest), or start {data * model_ranks} ranks"
        )
    if train.global_batch_size % data:
        nearest = sorted({max(data, train.global_batch_size // data * data), (train.global_batch_size // data + 1) * data})
        raise ConfigError(
            f"train.global_batch_size: {train.global_batch_size} sequences don't divide among {data} data-parallel ranks; "
            f"the nearest that do are {' and '.join(map(str, nearest))}"
        )
    share, micro = train.global_batch_size // data, train.micro_batch_size
    if micro and share % micro:
        fitting = [size for size in range(1, share + 1) if share % size == 0]
        raise ConfigError(
            f"train.micro_batch_size: {micro} does not divide the {share} sequences of each rank; "
            f"sizes that do: {', '.join(map(str, fitting))}"
        )
    if parallel.pipeline_parallel_size > 1:
        check_pipeline(config, share)
    shard = {"ddp": 1, "hybrid_shard": parallel.shard_size}.get(parallel.data_parallel_strategy, data)
    if data % shard:
        fitting = [size for size in range(1, data + 1) if data % size == 0]
        raise ConfigError(
            f"parallel.shard_size: {shard} does not divide the {data} data-parallel ranks; "
            f"sizes that do: {', '.join(map(str, fitting))}"
        )
    _check_tensor_parallel(config)
    return Grid(
        pipeline=parallel.pipeline_parallel_size, replicate=data // shard, shard=shard, tensor=parallel.tensor_parallel_size
    )


def _check_tensor_parallel(config: IslandConfig) -> None:
    size, seq_len = config.parallel.tensor_parallel_size, config.data.seq_len
    if size == 1:
        return
    plugins.load("islands.models", config.model.type).check_tensor_parallel(config.model, size)
    if config.parallel.sequence_parallel and seq_len % size:
        nearest = sorted({max(size, seq_len // size * size), (seq_len // size + 1) * size})
        raise ConfigError(
            f"parallel.sequence_parallel: tensor_parallel_size={size} ranks can't share data.seq_len={seq_len} positions evenly; "
            f"the nearest lengths that they can are {' and '.join(map(str, nearest))}; or set sequence_parallel to false"
        )
    if config.train.compile:
        raise ConfigError(
            f"train.compile: true does not go with parallel.tensor_parallel_size={size}: torch.compile fails on the "
            "distributed tensors of tensor parallelism today; set train.compile to false, or tensor_parallel_size to 1"
        )


def _nearest_multiples(number: int, factor: int) -> str:
    below = number // factor * factor
    return f"{below} or {below + factor}" if below else f"{factor}"


@dataclass(frozen=True)
class IslandMesh:
    """The mesh (island, pipeline, replicate, shard, tensor), and ``data``: replicate x shard, the ranks of an island that see different
    samples; those of one replica are neighbours in it."""

    root: DeviceMesh
    data: DeviceMesh


def build_mesh(grid: Grid, process: Process) -> IslandMesh:
    """Arrange the ranks of the job; called on all of them alike. Those of an island are neighbours, and so are those of a replica: they
    are on one node where it has as many."""
    sizes = (grid.islands, grid.replicas, grid.pipeline, grid.replicate, grid.shard, grid.tensor)
    ranks = torch.arange(grid.world_size).view(sizes).transpose(1, 2).flatten(2, 3)  # replicas and replicate are one axis
    root = DeviceMesh(process.device.type, ranks, mesh_dim_names=AXES)
    data = root["replicate", "shard"]._flatten("data")
    groups = [*root.get_all_groups(), data.get_group()]
    if grid.tensor > 1:  # DTensor finds it, and sums a norm over both axes at once
        groups.append(root["shard", "tensor"]._flatten("shard_tensor").get_group())
    for group in groups:
        _set_timeout(group, process.timeout)
    return IslandMesh(root, data)


def _set_timeout(group: dist.ProcessGroup, seconds: float) -> None:
    """Groups made by a mesh don't inherit the timeout of the world group: they would hang for half an hour."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)
