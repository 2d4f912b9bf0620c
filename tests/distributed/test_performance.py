"""What steps tell about their speed, their traces, and what is told when memory runs out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from small import small_config, small_corpus

from islands.config_file import ConfigError
from islands.island import build_island
from islands.mesh import check_grid
from islands.metrics import Metrics
from islands.models.llama import num_flops_per_token
from islands.out_of_memory import is_out_of_memory, levers, peak_memory_bytes
from islands.performance import peak_flops
from islands.process import Process
from islands.train_loop import train


def trained(process: Process, folder: str, **sections: Any) -> None:
    config = small_config(run=dict(dir=folder), **sections)
    island = build_island(config, process, small_corpus())
    metrics = Metrics(Path(folder) / "island-0", 0, enabled=process.rank == 0)
    train(island, island.batches(), metrics)
    metrics.close()


def profiled(process: Process, folder: str) -> None:
    trained(process, folder, train=dict(profile=[2, 3]))


def test_chosen_steps_are_traced_on_each_rank_and_rows_tell_the_speed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(profiled, 2, str(tmp_path))
    for rank in range(2):
        trace = json.loads((tmp_path / f"profile/rank{rank}.json").read_text())
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert sum(name.startswith("Optimizer.step") for name in names) == 2
    rows = [json.loads(line) for line in (tmp_path / "island-0/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"]
    config = small_config()
    for row in steps:
        flops = row["tokens_per_second"] * num_flops_per_token(config.model, config.data.seq_len)
        assert row["flops_per_second"] == pytest.approx(flops)
        assert row["peak_memory_bytes"] > 50e6 and "mfu" not in row  # torch alone is more; of a CPU no peak is known


@pytest.mark.parametrize("steps", [[1], [0, 2], [3, 2], [1, 6], [1, 2, 3]])
def test_steps_to_trace_that_the_run_does_not_have_are_refused(steps: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"train.profile=\[.*\] should be \[first, last\]"):
        small_config(train=dict(profile=steps))


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("Tesla T4", None)],
)
def test_the_peak_of_a_device_is_known_by_its_name_or_not_at_all(name: str, peak: float | None) -> None:
    assert peak_flops(name) == peak


def test_peak_memory_of_a_cpu_is_that_of_the_process() -> None:
    before = peak_memory_bytes(torch.device("cpu"))
    block = torch.ones(1 << 27)  # 512 MiB, more than any earlier peak leaves free
    assert peak_memory_bytes(torch.device("cpu")) >= max(before, block.nbytes)


def full_device(process: Process, folder: str) -> str:
    """What is told when the last block of rank 1 can't be computed."""
    config = small_config(run=dict(dir=folder), parallel=dict(data_parallel_strategy="zero2"))
    island = build_island(config, process, small_corpus())
    if process.rank == 1:
        block = list(island.model.parts[0].blocks.values())[-1]
        block.mlp.register_forward_pre_hook(lambda module, inputs: torch.empty(1 << 50))
    try:
        train(island, island.batches(), Metrics(Path(folder), 0, enabled=False))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "trained to the end"


def test_a_full_device_is_told_with_what_would_help(ranks: RankPool, tmp_path: Path) -> None:
    other, full = ranks.run(full_device, 2, str(tmp_path))
    lines = full.splitlines()
    assert lines[0].startswith("OutOfMemory: rank 1 ran out of memory on cpu: ") and "GiB in all" in lines[0]
    assert "predicted for this grid (pipeline 1 x replicate 1 x shard 2 x tensor 1): parameters " in lines[1]
    assert [line.split("=")[0].strip() for line in lines[3:6]] == [
        "train.micro_batch_size", "train.recompute", "parallel.data_parallel_strategy"
    ]  # fmt: skip
    assert "rank 1 is missing: it failed (OutOfMemory: rank 1 ran out of memory on cpu" in other


def test_levers_are_only_those_that_are_left() -> None:
    config = small_config(train=dict(micro_batch_size=1, recompute="full"), parallel=dict(cpu_offload=True))
    assert [lever.split(":")[0] for lever in levers(config, check_grid(config, 4))] == ["more ranks than 4"]


@pytest.mark.parametrize(
    ("error", "is_it"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_failed_allocations_are_told_from_other_errors(error: RuntimeError, is_it: bool) -> None:
    assert is_out_of_memory(error) == is_it
