"""Averaging of flat vectors over ranks, encoded or not, equals a plainly computed mean."""

import pytest
import torch
import torch.distributed as dist
from rank_pool import RankPool
from torch import Tensor

from diloco.exchange.process_group import Averager
from islands.process import Process

RANKS = 3
SIZES = [1, 255, 4000]


def values_of(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    draw = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    return (draw * 10 ** torch.linspace(-4, 2, size, dtype=torch.float64)).to(dtype)


def averaged(process: Process, codec: str, dtype: torch.dtype, broken: int | None) -> list[tuple[Tensor, float, int]]:
    averager, found = Averager(dist.new_group(), codec, process.device), []
    for size in SIZES:
        values = values_of(process.rank, size, dtype)
        if process.rank == broken:
            values[size // 2] = float("nan") if size % 2 else float("inf")
        averaging = averager.begin(values, torch.tensor([float(process.rank)], dtype=torch.float64))
        result = averaging.result()
        assert averaging.seconds() > 0
        found.append((result.mean, float(result.sums), averager.bytes_each_way(size, dtype)))
    return found


def coded(values: Tensor, codec: str, part: int) -> Tensor:
    """What values become on the wire, written plainly: parts of ``part`` elements, filled up with zeros, are encoded by themselves."""
    if codec == "bf16":
        return values.to(torch.bfloat16).to(values.dtype)
    out = torch.zeros_like(values)
    for start in range(0, len(values), part):
        for block in range(start, min(start + part, len(values)), 256):
            piece = slice(block, min(block + 256, start + part, len(values)))
            scale = values[piece].float().abs().max() / 127
            if scale > 0:
                out[piece] = ((values[piece].float() / scale).round().clamp(-127, 127) * scale).to(values.dtype)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("codec", ["none", "bf16", "int8"])
def test_all_ranks_get_the_same_mean_and_it_is_the_plain_one(ranks: RankPool, codec: str, dtype: torch.dtype) -> None:
    everyone = ranks.run(averaged, RANKS, codec, dtype, None)
    for index, size in enumerate(SIZES):
        block = {"none": 1, "bf16": 1, "int8": 256}[codec]
        part = -(-size // (RANKS * block)) * block
        given = [values_of(rank, size, dtype) for rank in range(RANKS)]
        if codec != "none":
            given = [coded(values, codec, part) for values in given]
        mean = (given[0] + given[1] + given[2]) / RANKS
        expected = mean if codec == "none" else coded(mean, codec, part)
        found = [rank[index] for rank in everyone]
        assert all(torch.equal(found[0][0], mean) for mean, _, _ in found)
        if codec == "none":  # the backend adds in an order of its own
            torch.testing.assert_close(found[0][0], expected, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(found[0][0], expected)
        assert found[0][1] == 0 + 1 + 2
        whole = {"none": size * dtype.itemsize, "bf16": 2 * part * RANKS, "int8": part * RANKS * 260 // 256}[codec]
        assert found[0][2] == 2 * (RANKS - 1) * whole // RANKS


@pytest.mark.parametrize("codec", ["none", "bf16", "int8"])
def test_what_is_not_finite_on_one_rank_is_not_finite_on_all(ranks: RankPool, codec: str) -> None:
    for rank in ranks.run(averaged, RANKS, codec, torch.float32, 1):
        assert all(not bool(torch.isfinite(mean).all()) for mean, _, _ in rank)
