"""Bytes per rank, before anything is started: ``python -m islands.memory CONFIG [key=value …] [--world-size N]``.

What each strategy of ``islands/strategies`` holds at its worst moment. W is the whole model and S a rank's shard of
it, both in the precision of the master weights; w the whole model and u two units in the precision that computes. A
unit is a block, or all that is outside the blocks; the two are the block in its backward pass, and what is outside,
which is done last.

=========  ==========  ================================================================  =========
strategy   parameters  gradients of k micro-batches                                      optimizer
=========  ==========  ================================================================  =========
ddp        W           W; 2 W if k > 1, for they wait beside the buckets, not inside     o W
zero1      S + w       u; W if k > 1, for they wait whole (+ u where they come in bf16)  o S
zero2      S + w       u; S + u if k > 1                                                 o S
zero3      S + u       S + u                                                             o S
=========  ==========  ================================================================  =========

o is 2 for AdamW. Buffers are what a unit's gradients are copied to for their reduction; with zero3 the next block,
gathered ahead; and with hybrid_shard S, as FSDP keeps the reduced gradients of a step until the next.

Not counted: what the device's runtime and allocator take, and temporaries of the optimizer step.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from islands import plugins
from islands.activations import activation_bytes
from islands.config import OUTER_SECTIONS, IslandConfig, ParallelSection
from islands.config_file import ConfigError, load_config
from islands.initialize import parameter_dtype
from islands.island import meta_model
from islands.mesh import Grid, check_grid
from islands.process import world_size

#: The most ranks that ``hybrid_shard`` shards over where the configuration does not say: those of a common node.
_NODE = 8


@dataclass(frozen=True)
class Estimate:
    """Bytes on the fullest rank, at the worst moment of a step.

    Attributes:
        parameters: master weights or shards of them, and whole copies.
        buffers: what collectives read from and write to.
        host: of parameters, gradients and optimizer state, what ``cpu_offload`` keeps on the host; not in the others.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int
    host: int = 0

    @property
    def state(self) -> int:
        """Parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All that the device holds."""
        return self.state + self.activations + self.buffers


@dataclass(frozen=True)
class _Units:
    """Elements of what strategies gather as one, padded so that ``shards`` ranks have equal parts."""

    blocks: tuple[int, ...]
    outside: int

    @property
    def whole(self) -> int:
        return sum(self.blocks) + self.outside

    @property
    def block(self) -> int:
        return max(self.blocks, default=0)


def estimate(config: IslandConfig, grid: Grid) -> Estimate:
    """What a rank of ``grid`` will hold. Nothing is allocated.

    Tensor parallelism is taken to divide everything; a pipeline, to divide the blocks and to hold as many micro-batches
    as stages.
    """
    parallel = config.parallel
    strategy = parallel.data_parallel_strategy
    if strategy == "hybrid_shard":
        strategy = parallel.shard_strategy
    micro = config.train.micro_batch_size or config.train.global_batch_size // grid.data
    num_micro_batches = config.train.global_batch_size // grid.data // micro
    units = _units(meta_model(config), grid)
    in_flight = min(grid.pipeline, num_micro_batches) / grid.pipeline
    activations = int(activation_bytes(config, micro) * in_flight) // grid.tensor
    if strategy == "ddp":
        return _replicated(config, units, num_micro_batches, activations)
    return _sharded(config, units, grid, strategy, num_micro_batches, activations)


def _replicated(config: IslandConfig, units: _Units, num_micro_batches: int, activations: int) -> Estimate:
    whole = units.whole * parameter_dtype(config).itemsize
    apart = num_micro_batches > 1 or not config.parallel.ddp.gradient_as_bucket_view
    return Estimate(whole, whole * (2 if apart else 1), round(whole * _optimizer_ratio(config)), activations, buffers=0)


def _sharded(
    config: IslandConfig, units: _Units, grid: Grid, strategy: str, num_micro_batches: int, activations: int
) -> Estimate:
    master = parameter_dtype(config).itemsize
    compute = torch.bfloat16.itemsize if config.train.precision == "bf16" else master
    shard, accumulates = units.whole // grid.shard * master, num_micro_batches > 1
    two_units = (units.outside + units.block) * compute
    gathered = two_units if strategy == "zero3" else units.whole * compute
    waiting = two_units
    if strategy == "zero1" and accumulates:
        waiting = units.whole * master + (two_units if compute != master else 0)
    shard_gradients = shard if strategy == "zero3" or (strategy == "zero2" and accumulates) else 0
    optimizer = round(shard * _optimizer_ratio(config))
    ahead = units.block * compute if strategy == "zero3" else 0
    reduced = max(units.block, units.outside) * master + (shard if grid.copies > 1 else 0)
    offload = config.parallel.cpu_offload
    return Estimate(
        parameters=gathered + (0 if offload else shard),
        gradients=waiting + (0 if offload else shard_gradients),
        optimizer=0 if offload else optimizer,
        activations=activations,
        buffers=reduced + ahead,
        host=shard + shard_gradients + optimizer if offload else 0,
    )


def _units(model: nn.Module, grid: Grid) -> _Units:
    """Elements a rank of the fullest stage has in each block and outside of them, padded as FSDP pads shards."""

    def elements(parameters: list[nn.Parameter]) -> int:
        rows = (-(-parameter.shape[0] // grid.shard) * grid.shard * parameter[0].numel() for parameter in parameters)
        return sum(rows) // grid.tensor

    blocks = [list(block.parameters()) for block in model.blocks.values()]
    inside = {id(parameter) for block in blocks for parameter in block}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    stage = blocks[: -(-len(blocks) // grid.pipeline)]
    return _Units(tuple(map(elements, stage)), elements(outside))


def _optimizer_ratio(config: IslandConfig) -> float:
    """Bytes of optimizer state for each byte of parameters: of the tensors that are as large as the parameter."""
    parameter = nn.Parameter(torch.zeros(8, 8))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = plugins.build("islands.optimizers", config.optimizer, [parameter])
    optimizer.step()
    state = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    return sum(value.nbytes for value in state if value.numel() == parameter.numel()) / parameter.nbytes


def compare(config: IslandConfig, num_ranks: int) -> dict[str, Estimate | str]:
    """The estimate of each strategy on ``num_ranks`` ranks; where a strategy can't be used, why."""
    parallel = config.parallel
    data = check_grid(config, num_ranks).data
    node = max(size for size in range(1, _NODE + 1) if data % size == 0 and size < max(data, 2))
    group = parallel.shard_size or node
    result: dict[str, Estimate | str] = {}
    for strategy in ("ddp", "zero1", "zero2", "zero3", *(["hybrid_shard"] if group > 1 else [])):
        keys = dict(
            data_parallel_strategy=strategy,
            shard_size=group if strategy == "hybrid_shard" else 0,
            cpu_offload=parallel.cpu_offload and strategy != "ddp",
        )
        section = ParallelSection.model_validate({**parallel.model_dump(), **keys})
        beside = config.model_copy(update={"parallel": section})
        try:
            result[strategy] = estimate(beside, check_grid(beside, num_ranks))
        except ConfigError as error:
            result[strategy] = str(error)
    return result


def in_words(num_bytes: float) -> str:
    """``1.50 GiB``"""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.{0 if unit == 'B' else 2}f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def _table(config: IslandConfig, num_ranks: int, estimates: dict[str, Estimate | str]) -> Table:
    chosen = config.parallel.data_parallel_strategy
    table = Table(
        title=f"Predicted MiB on the fullest of {num_ranks} ranks (chosen: {chosen})", padding=0, pad_edge=False
    )
    columns = ("parameters", "gradients", "optimizer", "activations", "buffers", "total", "host")
    table.add_column("strategy", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for strategy, found in estimates.items():
        if isinstance(found, str):
            table.add_row(strategy, "not usable", *[""] * (len(columns) - 1))
        else:
            cells = (f"{getattr(found, column) / (1 << 20):,.1f}" for column in columns)
            table.add_row(strategy, *cells, style="bold" if strategy == chosen else None)
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table. Returns the exit code: 2 for a configuration that can't be used."""
    parser = argparse.ArgumentParser(
        prog="python -m islands.memory",
        description="Predict the bytes that a rank will hold, with each data-parallel strategy. Starts nothing.",
    )
    parser.add_argument("config", help="YAML file; the sections outer, exchange and swarm are skipped")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key, such as model.preset=1B")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks of the island, data-parallel where other sizes leave them"
    )
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    chosen = parser.parse_intermixed_args(arguments)
    try:
        rest = ["parallel.data_parallel_size=-1"] if chosen.world_size else []
        config = load_config(IslandConfig, chosen.config, [*rest, *chosen.overrides], ignore=OUTER_SECTIONS)
        num_ranks = chosen.world_size or ranks_of(config)
        estimates = compare(config, num_ranks)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if chosen.json:
        rows = {
            name: found if isinstance(found, str) else {**asdict(found), "total": found.total}
            for name, found in estimates.items()
        }
        print(json.dumps(dict(world_size=num_ranks, chosen=config.parallel.data_parallel_strategy, bytes=rows)))
    else:
        Console().print(_table(config, num_ranks, estimates))
    return 0


def ranks_of(config: IslandConfig) -> int:
    """As many ranks as the sizes multiply to; of those that take the rest, as many as torchrun started."""
    parallel = config.parallel
    model_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    data = parallel.data_parallel_size
    return data * model_ranks if data > 0 else max(world_size(), model_ranks)


if __name__ == "__main__":
    sys.exit(main())
