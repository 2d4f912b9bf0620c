"""Every codec and every outer optimizer in whole runs: islands agree to the bit, and the loss is near the plain one."""

from typing import Any

import pytest
import torch
from outer_loop import islands_as_threads
from rank_pool import RankPool

from islands import plugins

CODECS, OPTIMIZERS = plugins.available("diloco.codecs"), plugins.available("diloco.outer_optimizers")


def run(ranks: RankPool, precision: str, **outer: Any) -> list[dict[str, Any]]:
    overrides = dict(outer=dict(sync_every=4, **outer), train=dict(steps=24, precision=precision), swarm=dict(islands=2))
    (results,) = ranks.run(islands_as_threads, 1, 2, overrides)
    return results


def assert_agreed(results: list[dict[str, Any]]) -> None:
    rounds = [[row for row in result["rows"] if row["kind"] == "round"] for result in results]
    assert [row["outcome"] for row in rounds[0]] == ["committed"] * 6
    assert [row["digest"] for row in rounds[0]] == [row["digest"] for row in rounds[1]]
    for name, parameter in results[0]["parameters"].items():
        assert torch.isfinite(parameter).all() and torch.equal(parameter, results[1]["parameters"][name])


def loss_of(results: list[dict[str, Any]]) -> float:
    """Mean over islands and the last steps."""
    losses = [row["loss"] for result in results for row in result["rows"] if row["kind"] == "step" and row["step"] > 20]
    return sum(losses) / len(losses)


@pytest.fixture(scope="module", params=["fp32", pytest.param("fp64", marks=pytest.mark.slow)])
def plain(request: pytest.FixtureRequest, ranks: RankPool) -> tuple[str, float]:
    """A precision, and the loss of a run that loses nothing."""
    return request.param, loss_of(run(ranks, request.param))


@pytest.mark.parametrize("codec", CODECS)
def test_islands_agree_with_every_codec(ranks: RankPool, codec: str, plain: tuple[str, float]) -> None:
    precision, loss = plain
    results = run(ranks, precision, codec=dict(type=codec), error_feedback=True, residual_decay=0.95)
    assert_agreed(results)
    assert loss_of(results) == pytest.approx(loss, rel=0.05 if codec == "topk" else 0.003)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_islands_agree_with_every_outer_optimizer_and_a_schedule(ranks: RankPool, optimizer: str) -> None:
    keys = dict(type=optimizer, warmup_rounds=2, decay="cosine", min_lr_ratio=0.2)
    assert_agreed(run(ranks, "fp32", optimizer=keys))
