"""Measure what ranks can send each other and compute: ``torchrun … -m islands.interconnect [CONFIG] [key=value …]``.

With a CONFIG each axis of its mesh is measured, all groups along the axis at once, as in training; without, all ranks
as one.

Of a collective on n ranks that takes t seconds, *size* S is the larger of what a rank puts in and gets out, in bytes.
*Bus bandwidth* is S/t times the share of S that each link has to carry whatever the algorithm, so that it can be
compared with what the link is sold for:

==================  =============  ==========
collective          S              factor
==================  =============  ==========
all_reduce          in = out       2 (n-1)/n
all_gather          out            (n-1)/n
reduce_scatter      in             (n-1)/n
all_to_all          in = out       (n-1)/n
broadcast           out            1
send_receive        in = out       1
==================  =============  ==========

The last is a ring: each rank sends to the next and receives from the one before. *Latency* is the time of the smallest
size.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from islands.config import OUTER_SECTIONS, IslandConfig, RunSection
from islands.config_file import ConfigError, load_config
from islands.memory import in_words
from islands.mesh import AXES, build_mesh, check_grid
from islands.process import Process, is_first_rank, pick_device, process_group, world_size

#: Sizes in bytes, small to large; a GPU's links need more to be filled.
CPU_SIZES = (1 << 10, 1 << 20, 1 << 23)
GPU_SIZES = (1 << 10, 1 << 20, 1 << 24, 1 << 28)

_WARM_UPS, _REPEATS = 2, 7
_ITEM = torch.float32.itemsize


@dataclass(frozen=True)
class LinkRate:
    """One collective of one size.

    Attributes:
        axis: of the mesh, or ``world``.
        num_bytes: S, a multiple of 4 n.
        seconds: median, of the slowest rank.
        bus_bytes_per_second: bus bandwidth.
    """

    axis: str
    collective: str
    ranks: int
    num_bytes: int
    seconds: float
    bus_bytes_per_second: float


@dataclass(frozen=True)
class MatrixRate:
    """Floating-point operations a second of a square matrix product of ``size`` rows, on the slowest rank."""

    dtype: str
    size: int
    flops_per_second: float


def bus_factor(collective: str, ranks: int) -> float:
    """Bytes that each link carries for a byte of S."""
    if collective in ("broadcast", "send_receive"):
        return 1.0
    return (2.0 if collective == "all_reduce" else 1.0) * (ranks - 1) / ranks


def measure_links(axis: str, group: dist.ProcessGroup, process: Process, sizes: Iterable[int]) -> list[LinkRate]:
    """Every collective at every size over ``group``; called on all ranks of the island alike."""
    ranks, rates = group.size(), []
    for wanted in sizes:
        elements = max(1, wanted // _ITEM // ranks) * ranks
        for name, run in _collectives(group, elements, process.device).items():
            seconds = _slowest(_median_seconds(run, process.device, group), process.device)
            num_bytes = elements * _ITEM
            rates.append(LinkRate(axis, name, ranks, num_bytes, seconds, num_bytes / seconds * bus_factor(name, ranks)))
    return rates


def measure_matrices(process: Process) -> list[MatrixRate]:
    """Rates of matrix products in fp32 and bf16; called on all ranks alike."""
    rates = []
    size = 8192 if process.device.type == "cuda" else 512
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(size, size, device=process.device).to(dtype) for _ in range(2))
        seconds = _slowest(_median_seconds(lambda: a @ b, process.device), process.device)
        rates.append(MatrixRate(name, size, 2 * size**3 / seconds))
    return rates


def _collectives(group: dist.ProcessGroup, elements: int, device: torch.device) -> dict[str, Callable[[], object]]:
    """Each with buffers of S = ``elements`` fp32 numbers."""
    whole, other = torch.zeros(elements, device=device), torch.zeros(elements, device=device)
    part = torch.zeros(elements // group.size(), device=device)
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "broadcast": lambda: dist.broadcast(whole, group_src=0, group=group),
        "send_receive": lambda: _ring(whole, other, group),
    }


def _ring(source: Tensor, target: Tensor, group: dist.ProcessGroup) -> None:
    rank, ranks = group.rank(), group.size()
    send = dist.P2POp(dist.isend, source, group=group, group_peer=(rank + 1) % ranks)
    receive = dist.P2POp(dist.irecv, target, group=group, group_peer=(rank - 1) % ranks)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


def _median_seconds(run: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None) -> float:
    """Of several runs, each begun by all ranks of ``group`` together."""
    seconds = []
    for _ in range(_WARM_UPS + _REPEATS):
        if group is not None:
            dist.barrier(group)
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_WARM_UPS:])


def _slowest(seconds: float, device: torch.device) -> float:
    largest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def measure(
    process: Process, config: IslandConfig | None, sizes: Sequence[int]
) -> tuple[list[LinkRate], list[MatrixRate]]:
    """Everything, on all axes of ``config``'s mesh that have more than one rank; on the world without one."""
    groups = {"world": dist.group.WORLD}
    if config is not None:
        grid = check_grid(config, process.world_size)
        mesh = build_mesh(grid, process)
        groups = {axis: mesh.root.get_group(axis) for axis in AXES[1:] if getattr(grid, axis) > 1}
    links = []
    for axis, group in groups.items():
        links += measure_links(axis, group, process, sizes) if group.size() > 1 else []
    return links, measure_matrices(process)


def main() -> int:
    """Measure and print. Returns the exit code: 2 for a configuration that can't be used."""
    parser = argparse.ArgumentParser(
        prog="torchrun … -m islands.interconnect", description="Measure links and matrix products."
    )
    parser.add_argument("config", nargs="?", help="YAML file, whose mesh is measured axis by axis; without: all ranks")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key of CONFIG")
    parser.add_argument("--json", action="store_true", help="print bytes and seconds as JSON")
    chosen = parser.parse_intermixed_args()
    try:
        config = chosen.config and load_config(IslandConfig, chosen.config, chosen.overrides, ignore=OUTER_SECTIONS)
        run = config.run if config else RunSection.model_validate({})
        if config:
            check_grid(config, world_size())
        device = pick_device(run.device)
    except ConfigError as error:
        if is_first_rank():
            print(error, file=sys.stderr)
        return 2
    warnings.simplefilter("ignore", FutureWarning)  # newer torch renames collectives that older ones need
    with process_group(device, run.timeout) as process:
        sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
        links, matrices = measure(process, config or None, sizes)
    if is_first_rank():
        _print(links, matrices, chosen.json)
    return 0


def _print(links: list[LinkRate], matrices: list[MatrixRate], as_json: bool) -> None:
    if as_json:
        print(json.dumps(dict(links=[asdict(rate) for rate in links], matrices=[asdict(rate) for rate in matrices])))
        return
    table = Table(title="Collectives: median of the slowest rank")
    for column in ("axis", "ranks", "collective", "size", "time", "bus bandwidth"):
        table.add_column(column, justify="left" if column in ("axis", "collective") else "right")
    for rate in links:
        time_, bandwidth = f"{rate.seconds * 1e6:,.0f} µs", f"{rate.bus_bytes_per_second / 1e9:.3f} GB/s"
        table.add_row(rate.axis, str(rate.ranks), rate.collective, in_words(rate.num_bytes), time_, bandwidth)
    console = Console()
    if links:
        console.print(table)
    for rate in matrices:
        teraflops = rate.flops_per_second / 1e12
        console.print(f"{rate.dtype} matrix product, {rate.size} rows: {teraflops:.3g} TFLOP/s a rank")


if __name__ == "__main__":
    sys.exit(main())
