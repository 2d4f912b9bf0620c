"""Pipeline stages: their weights, their evaluation, what they send and how long they wait."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rank_pool import RankPool
from small import plain_model, small_config, small_corpus, whole_parameters
from torch import nn
from torch.profiler import ProfilerActivity, profile

from islands.data.base import num_samples, windows
from islands.initialize import named_parameters
from islands.island import build_island
from islands.process import Process
from islands.run import open_metrics
from islands.train_loop import train


def pipelined(**sections: Any) -> dict[str, Any]:
    """Two ranks of a pipeline, four micro-batches."""
    sections["parallel"] = dict(pipeline_parallel_size=2) | sections.get("parallel", {})
    sections["train"] = dict(micro_batch_size=2) | sections.get("train", {})
    return sections


def initial_weights(process: Process, overrides: dict[str, Any]) -> dict[str, torch.Tensor]:
    return whole_parameters(build_island(small_config(**overrides), process, small_corpus()))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("world_size, parallel", [
    (2, dict(pipeline_schedule="interleaved_1f1b")),
    (4, dict(data_parallel_strategy="zero3")),
    (4, dict(data_parallel_strategy="ddp")),
])  # fmt: skip
def test_a_seed_gives_the_same_weights_on_every_grid_bit_for_bit(
    ranks: RankPool, world_size: int, parallel: dict[str, Any], tied: bool
) -> None:
    model = dict(num_layers=4, tied_embeddings=tied)
    overrides = pipelined(parallel=parallel, model=model, train=dict(micro_batch_size=1))
    expected = named_parameters([plain_model(small_config(**overrides))])
    for weights in ranks.run(initial_weights, world_size, overrides):
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], parameter) for name, parameter in expected.items())


def held_out_loss(process: Process, overrides: dict[str, Any]) -> float:
    return build_island(small_config(**overrides), process, small_corpus()).evaluate()


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
@pytest.mark.parametrize("sequences", [3, 13])
def test_evaluation_of_any_number_of_sequences(ranks: RankPool, schedule: str, sequences: int) -> None:
    overrides = pipelined(
        parallel=dict(pipeline_schedule=schedule), model=dict(num_layers=4), train=dict(eval_sequences=sequences)
    )
    config, held_out = small_config(**overrides), small_corpus().held_out
    rows = np.arange(sequences) * (num_samples(held_out, config.data.seq_len) // sequences)
    inputs, targets = windows(held_out, rows, config.data.seq_len)
    expected = F.cross_entropy(plain_model(config)(inputs).flatten(0, 1), targets.flatten()).item()
    assert ranks.run(held_out_loss, 2, overrides) == pytest.approx([expected] * 2, abs=1e-10)


def bf16_steps(process: Process, overrides: dict[str, Any]) -> list[float]:
    island = build_island(small_config(**overrides), process, small_corpus())
    return [island.train_step(*island.batches().at(0, 8 * step), 1e-3).loss for step in range(3)]


def test_bf16_stages_follow_the_bf16_model(ranks: RankPool) -> None:
    overrides = pipelined(train=dict(precision="bf16"))
    (expected,) = ranks.run(bf16_steps, 1, overrides | dict(parallel={}))
    for losses in ranks.run(bf16_steps, 2, overrides):
        assert losses == pytest.approx(expected, rel=1e-5)  # close like fp32 sums: no more is rounded to bf16


def reductions(process: Process, overrides: dict[str, Any]) -> int:
    """Reduce-scatters of one step."""
    island = build_island(small_config(**overrides), process, small_corpus())
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        island.train_step(*island.batches().at(0, 0), 1e-3)
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("c10d::_reduce_scatter"))


def test_gradients_are_reduced_once_a_step_however_many_micro_batches(ranks: RankPool) -> None:
    for micro_batch_size in (1, 2):
        overrides = pipelined(train=dict(micro_batch_size=micro_batch_size))
        assert ranks.run(reductions, 4, overrides) == [2] * 4  # of the one block, and of embedding or output


#: Seconds that a block of :func:`slow_training` sleeps in each direction: far more than it computes.
NAP = 0.03


def sleep_in(block: nn.Module) -> None:
    """Make both directions of a block take long, however busy the machine is."""
    block.register_forward_pre_hook(lambda *_: time.sleep(NAP))
    block.register_full_backward_hook(lambda *_: time.sleep(NAP))


def slow_training(process: Process, overrides: dict[str, Any]) -> None:
    island = build_island(small_config(**overrides), process, small_corpus())
    for part in island.model.parts:
        for block in part.blocks.values():
            sleep_in(block)
    metrics = open_metrics(island, slot=0)
    train(island, island.batches(), metrics)
    metrics.close()


@pytest.mark.parametrize("schedule, micro_batch_size", [("gpipe", 8), ("1f1b", 2), ("interleaved_1f1b", 4)])
def test_the_bubble_is_as_predicted(ranks: RankPool, tmp_path: Path, schedule: str, micro_batch_size: int) -> None:
    overrides = pipelined(
        run=dict(dir=str(tmp_path)),
        parallel=dict(pipeline_schedule=schedule),
        model=dict(num_layers=4),
        train=dict(steps=2, micro_batch_size=micro_batch_size),
    )
    ranks.run(slow_training, 2, overrides)
    rows = [json.loads(line) for line in (tmp_path / "island-0" / "metrics.jsonl").read_text().splitlines()]
    predicted = next(row["detail"]["predicted_bubble"] for row in rows if row["kind"] == "event")
    measured = [row["bubble"] for row in rows if row["kind"] == "step"]
    assert measured[-1] == pytest.approx(predicted, abs=0.1)
