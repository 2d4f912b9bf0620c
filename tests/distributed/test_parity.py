"""Every grid equals one process on the same global batch."""

from typing import Any

import pytest
import torch
from rank_pool import RankPool
from small import plain_training, small_config, small_corpus, whole_parameters

from islands.data.base import Batches, Sampler, num_samples
from islands.island import build_island
from islands.learning_rate import learning_rate
from islands.process import Process

#: In fp64 rounding stays below 1e-12 and real mistakes begin at 1e-3.
TOLERANCE = 1e-10


def train_island(process: Process, overrides: dict[str, Any]) -> dict[str, Any]:
    """Five steps; losses and norms as this rank reports them, and the whole parameters."""
    config = small_config(**overrides)
    island, steps = build_island(config, process, small_corpus()), config.train.steps
    batches = island.batches()
    results = [
        island.train_step(*batches[step], learning_rate(config.optimizer, step, steps, 8)) for step in range(steps)
    ]
    return dict(
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        parameters=whole_parameters(island),
        evaluation=island.evaluate(),
        again=island.evaluate(),
    )


def reference(overrides: dict[str, Any]) -> dict[str, Any]:
    """The same steps in this process, on whole batches."""
    config, corpus = small_config(**overrides), small_corpus()
    seq_len, size, steps = config.data.seq_len, config.train.global_batch_size, config.train.steps
    batches = Batches(corpus.train, seq_len, size, Sampler(num_samples(corpus.train, seq_len), config.run.seed), 0, 1)
    rates = [learning_rate(config.optimizer, step, steps, 8) for step in range(steps)]
    return plain_training(config, [batches[step] for step in range(steps)], rates)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("train", [{}, {"micro_batch_size": 1}], ids=["whole", "accumulated"])
@pytest.mark.parametrize("model", [{}, {"tied_embeddings": True}], ids=["untied", "tied"])
def test_zero3_equals_one_process(ranks: RankPool, world_size: int, train: dict, model: dict) -> None:
    overrides = dict(train=train, model=model)
    expected = reference(overrides)
    for rank in ranks.run(train_island, world_size, overrides):
        assert rank["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert rank["norms"] == pytest.approx(expected["norms"], abs=TOLERANCE)
        assert largest_difference(rank["parameters"], expected["parameters"]) < TOLERANCE
        assert rank["evaluation"] == rank["again"]  # an evaluation leaves the model as it was


def bf16_losses(process: Process) -> tuple[list[float], set[torch.dtype]]:
    config = small_config(train=dict(precision="bf16"))
    island = build_island(config, process, small_corpus())
    batches = island.batches()
    losses = [island.train_step(*batches[step], 1e-3).loss for step in range(5)]
    return losses, {parameter.dtype for parameter in island.model.parts[0].parameters()}


def test_bf16_keeps_fp32_weights_and_follows_fp32(ranks: RankPool) -> None:
    config = small_config(train=dict(precision="fp32"), optimizer=dict(lr=1e-3, schedule="constant", warmup_steps=0))
    corpus, seq_len = small_corpus(), config.data.seq_len
    batches = Batches(corpus.train, seq_len, 8, Sampler(num_samples(corpus.train, seq_len), 0), 0, 1)
    expected = plain_training(config, [batches[step] for step in range(5)], [1e-3] * 5)["losses"]
    for losses, dtypes in ranks.run(bf16_losses, 2):
        assert dtypes == {torch.float32}
        assert losses == pytest.approx(expected, rel=2e-2)  # bf16 has 8 bits of mantissa
        assert losses != expected


def skipped_step(process: Process) -> tuple[bool, bool]:
    island = build_island(small_config(), process, small_corpus())
    before = whole_parameters(island)
    inputs, targets = island.batches()[0]
    with torch.no_grad():
        next(island.model.parts[0].parameters()).to_local().fill_(float("nan") if process.rank == 0 else 0.0)
    broken = whole_parameters(island)
    result = island.train_step(inputs, targets, 1e-3)
    after = whole_parameters(island)
    unchanged = all(torch.equal(broken[name].nan_to_num(7), after[name].nan_to_num(7)) for name in before)
    return result.applied, unchanged


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(ranks: RankPool) -> None:
    assert ranks.run(skipped_step, 2) == [(False, True)] * 2
