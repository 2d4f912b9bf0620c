"""Measured links: what is counted, and that numbers come out."""

import math

import pytest
import torch.distributed as dist
from rank_pool import RankPool
from small import small_config

from islands.interconnect import LinkRate, MatrixRate, bus_factor, measure, measure_links
from islands.process import Process

COLLECTIVES = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_receive"]


@pytest.mark.parametrize(
    ("collective", "factors"),
    [
        ("all_reduce", {2: 1.0, 4: 1.5, 8: 1.75}),
        ("all_gather", {2: 0.5, 4: 0.75}),
        ("reduce_scatter", {2: 0.5, 4: 0.75}),
        ("all_to_all", {2: 0.5, 4: 0.75}),
        ("broadcast", {2: 1.0, 4: 1.0}),
        ("send_receive", {2: 1.0, 4: 1.0}),
    ],
)
def test_bus_factors(collective: str, factors: dict[int, float]) -> None:
    assert {ranks: bus_factor(collective, ranks) for ranks in factors} == factors


def three_ranks(process: Process) -> list[LinkRate]:
    return measure_links("world", dist.group.WORLD, process, [4096, 1])


def test_sizes_are_cut_to_equal_parts_of_at_least_one_element(ranks: RankPool) -> None:
    rates = ranks.run(three_ranks, 3)
    assert rates[0] == rates[1] == rates[2]  # of the slowest, wherever it is
    assert [rate.collective for rate in rates[0]] == COLLECTIVES * 2
    assert [rate.num_bytes for rate in rates[0]] == [4092] * 6 + [12] * 6


def on_mesh(process: Process) -> tuple[list[LinkRate], list[MatrixRate]]:
    config = small_config(parallel=dict(data_parallel_strategy="hybrid_shard", shard_size=2))
    return measure(process, config, [1 << 12, 1 << 18])


def test_each_axis_that_has_ranks_is_measured(ranks: RankPool) -> None:
    links, matrices = ranks.run(on_mesh, 4)[0]
    assert {(rate.axis, rate.ranks) for rate in links} == {("replicate", 2), ("shard", 2)}
    for rate in links:
        assert 0 < rate.seconds < 10
        expected = rate.num_bytes / rate.seconds * bus_factor(rate.collective, rate.ranks)
        assert rate.bus_bytes_per_second == pytest.approx(expected)
    assert [rate.dtype for rate in matrices] == ["fp32", "bf16"]
    assert all(math.isfinite(rate.flops_per_second) and rate.flops_per_second > 1e6 for rate in matrices)
