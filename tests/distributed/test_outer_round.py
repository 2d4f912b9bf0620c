"""The outer loop around a real island: islands are threads of one process, or the only one over two ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from outer_loop import islands_as_threads, said, scripted_training
from rank_pool import RankPool
from small import plain_training, small_config, small_corpus

from islands.data.base import Sampler, num_samples, windows
from islands.island import build_island
from islands.metrics import Metrics
from islands.process import Process
from islands.train_loop import train

#: fp64 rounding; see test_parity.
TOLERANCE = 1e-10


def test_rounds_at_every_step_equal_data_parallel_training(ranks: RankPool) -> None:
    overrides = dict(
        optimizer=dict(type="sgd", lr=0.5, clip_norm=0.0, schedule="constant", warmup_steps=0),
        outer=dict(sync_every=1, optimizer=dict(lr=1.0, momentum=0.0)),
        swarm=dict(islands=3),
    )
    (results,) = ranks.run(islands_as_threads, 1, 3, overrides)
    config, corpus = small_config(**overrides), small_corpus()
    seq_len, size = config.data.seq_len, config.train.global_batch_size
    order = Sampler(num_samples(corpus.train, seq_len), config.run.seed)  # position p of slot s is sample 3 p + s
    joint = [windows(corpus.train, order(torch.arange(3 * size * i, 3 * size * (i + 1)).numpy()), seq_len) for i in range(5)]
    expected = plain_training(config, joint, [0.5] * 5)
    for result in results:
        for name, parameter in expected["parameters"].items():
            assert float((result["parameters"][name] - parameter).abs().max()) < TOLERANCE
    losses = [[row["loss"] for row in result["rows"] if row["kind"] == "step"] for result in results]
    assert [sum(step) / 3 for step in zip(*losses)] == pytest.approx(expected["losses"], abs=TOLERANCE)


def test_islands_drift_apart_between_rounds_and_agree_after_each(ranks: RankPool) -> None:
    overrides = dict(outer=dict(sync_every=2), swarm=dict(islands=2))
    (results,) = ranks.run(islands_as_threads, 1, 2, overrides)
    rounds = [[row for row in result["rows"] if row["kind"] == "round"] for result in results]
    assert [row["step"] for row in rounds[0]] == [2, 4, 5]  # the last step ends with a round, whatever H
    assert [row["outcome"] for row in rounds[0]] == ["committed"] * 3
    assert [row["digest"] for row in rounds[0]] == [row["digest"] for row in rounds[1]]
    assert len({row["digest"] for row in rounds[0]}) == 3
    assert rounds[0][0]["weight"] == 2 * 8 * 16  # tokens of two steps
    assert rounds[0][2]["weight"] == 8 * 16
    assert all(0 < row["cosine"] < 1 for row in rounds[0])
    for name, parameter in results[0]["parameters"].items():
        assert torch.equal(parameter, results[1]["parameters"][name])


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_becomes_of_the_parameters_after_each_outcome(ranks: RankPool, world_size: int) -> None:
    outcomes = [said(kind) for kind in ("skipped", "committed", "left_out", "committed")]
    overrides = dict(outer=dict(sync_every=1), train=dict(steps=4))
    results = ranks.run(scripted_training, world_size, outcomes, overrides)
    for result in results:
        for name, start in result["start"].items():
            skipped, committed, left_out, last = (landed[name] for landed in result["landed"])
            assert torch.equal(skipped, result["locals"][0][name])
            assert torch.equal(committed, start - 0.25)
            moved = (start - 0.25) - 0.25 - (start - 0.25)  # new anchor - old anchor, rounded as computed
            assert torch.equal(left_out, result["locals"][2][name] + moved)
            assert torch.equal(last, start - 0.25 - 0.25 - 0.25)
    weights = [work.tokens for work in results[0]["offers"]]
    assert weights == [128, 256, 128, 256]  # work that was not averaged counts again in the next offer


@pytest.mark.parametrize("kind", ["skipped", "left_out"])
def test_parameters_that_are_not_finite_are_replaced_by_the_anchor(ranks: RankPool, kind: str) -> None:
    outcomes = [said(kind, pseudo_gradient_norm=float("nan")), said("committed")]
    overrides = dict(outer=dict(sync_every=1), train=dict(steps=2))
    result = ranks.run(scripted_training, 1, outcomes, overrides)[0]
    for name, start in result["start"].items():
        assert torch.equal(result["landed"][0][name], start if kind == "skipped" else start - 0.25)
    assert [work.tokens for work in result["offers"]] == [128, 128]  # the work is lost, and does not count
    assert [work.start for work in result["offers"]] == [0, 8]
    (event,) = [row for row in result["rows"] if row["kind"] == "event"]
    assert (event["what"], event["detail"]) == ("dropped", "8 sequences: the parameters were not finite at step 1")


def rows_of_plain_training(process: Process, folder: str) -> list[dict[str, float]]:
    import json

    island = build_island(small_config(), process, small_corpus())
    metrics = Metrics(Path(folder), 0, enabled=process.rank == 0)
    train(island, island.batches(), metrics)
    metrics.close()
    text = (Path(folder) / "metrics.jsonl").read_text() if process.rank == 0 else ""
    return [json.loads(line) for line in text.splitlines()]


def losses_of_bare_steps(process: Process) -> tuple[list[float], float]:
    from islands.learning_rate import learning_rate

    island = build_island(small_config(), process, small_corpus())
    batches, rates = island.batches(), [learning_rate(island.config.optimizer, step, 5, 8) for step in range(5)]
    return [island.train_step(*batches.at(0, 8 * step), rates[step]).loss for step in range(5)], island.evaluate()


def test_without_hooks_the_loop_is_plain_training_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    rows = ranks.run(rows_of_plain_training, 2, str(tmp_path))[0]
    losses, evaluation = ranks.run(losses_of_bare_steps, 2)[0]
    assert [row["loss"] for row in rows if row["kind"] == "step"] == losses
    assert [row["loss"] for row in rows if row["kind"] == "eval"][-1] == evaluation
