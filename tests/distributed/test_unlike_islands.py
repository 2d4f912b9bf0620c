"""Islands that differ in speed, and one that joins a run in progress: time, data and learning rate."""

import time
from itertools import chain
from typing import Any

import pytest
import torch
from outer_loop import islands_as_threads, said, scripted_training
from rank_pool import RankPool
from small import small_config, small_corpus

from diloco.exchange.base import Seat, Work
from islands.data.base import Sampler, num_samples
from islands.learning_rate import learning_rate
from islands.process import Process
from islands.train_loop import Progress

STEPS, BATCH, TOKENS = 50, 8, 128


class Nap:
    """Makes each inner step take so much longer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def after_step(self, progress: Progress, tokens: int) -> float:
        time.sleep(self._seconds)
        return 0.0


def unlike_islands(process: Process, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Two islands, of which the second is slow; on text that can be learned: 17 of 257 tokens occur."""
    return islands_as_threads(process, 2, overrides, lambda slot: [Nap(0.06 * slot)], small_corpus(40_000, vocab=17))


def of(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["kind"] == kind]


@pytest.fixture(scope="module")
def by_the_clock(ranks: RankPool) -> list[dict[str, Any]]:
    """What two unlike islands end with whose rounds come every 0.2 seconds."""
    overrides = dict(outer=dict(sync_every="0.2s"), swarm=dict(islands=2), train=dict(steps=STEPS))
    return ranks.run(unlike_islands, 1, overrides)[0]


def test_by_the_clock_unlike_islands_commit_rounds_weighted_by_their_tokens(by_the_clock: list[dict[str, Any]]) -> None:
    fast, slow = (of(result, "round") for result in by_the_clock)
    assert len(fast) == len(slow) >= 2
    assert all(row["outcome"] == "committed" and row["members"] == [0, 1] for row in chain(fast, slow))
    assert [row["digest"] for row in fast] == [row["digest"] for row in slow]
    sums = [row["weight"] + other["weight"] for row, other in zip(fast, slow, strict=True)]
    assert [row["tokens"] for row in fast] == [sum(sums[: number + 1]) for number in range(len(sums))]
    assert sum(row["weight"] for row in fast) > 1.5 * sum(row["weight"] for row in slow)
    for result, rows in zip(by_the_clock, (fast, slow)):
        assert sum(row["weight"] for row in rows) == TOKENS * len(of(result, "step"))  # all that was done has counted
        assert all(row["weight"] == (row["position"] - row["start"]) * 16 for row in rows)


def test_by_the_clock_unlike_islands_end_together_when_all_tokens_have_counted(by_the_clock: list[dict[str, Any]]) -> None:
    total = STEPS * TOKENS * 2
    for result in by_the_clock:
        tokens = [row["tokens"] for row in of(result, "round")]
        assert tokens[-1] >= total > max(tokens[:-1])
    fast, slow = (len(of(result, "step")) for result in by_the_clock)
    assert fast > 1.5 * slow and (fast + slow) * TOKENS >= total
    for name, parameter in by_the_clock[0]["parameters"].items():
        assert torch.equal(parameter, by_the_clock[1]["parameters"][name])
    for result in by_the_clock:
        steps = [row["step"] for row in of(result, "step")]
        assert steps == list(range(1, len(steps) + 1))
        first, *_, last = (row["loss"] for row in of(result, "eval"))
        assert last < first - 1


def test_by_the_clock_the_learning_rate_is_that_of_the_counted_tokens(by_the_clock: list[dict[str, Any]]) -> None:
    config = small_config().optimizer
    for result in by_the_clock:
        expected, steps, rounds = 0, of(result, "step"), {row["step"]: row for row in of(result, "round")}
        for row in steps:
            assert row["lr"] == learning_rate(config, expected, STEPS, BATCH)
            expected = min(expected + 1, STEPS - 1)
            if row["step"] in rounds:
                expected = rounds[row["step"]]["tokens"] // (2 * TOKENS)


def test_unlike_islands_never_meet_the_same_sample(by_the_clock: list[dict[str, Any]]) -> None:
    seen = [list(chain(*result["samples"])) for result in by_the_clock]
    assert len(set(chain(*seen))) == sum(map(len, seen))
    order = Sampler(num_samples(small_corpus(40_000).train, 16), seed=0, max_slots=2)
    for slot, result in enumerate(by_the_clock):
        assert seen[slot] == order(torch.arange(len(seen[slot])).numpy(), slot).tolist()  # without a gap
        assert [row["position"] for row in of(result, "step")] == [BATCH * row["step"] for row in of(result, "step")]


def test_by_the_clock_all_ranks_follow_the_first_and_come_when_called(ranks: RankPool) -> None:
    total = 8 * TOKENS
    outcomes = [said("committed", tokens=tokens, step=50) for tokens in (total // 2, total - 1, total)]
    overrides = dict(outer=dict(sync_every="1000s"), train=dict(steps=8))
    for result in ranks.run(scripted_training, 2, outcomes, overrides, Seat(0), True):
        assert [row["step"] for row in of(result, "round")] == [1, 2, 3]
        assert [row["lr_step"] for row in of(result, "step")] == [1, 5, 8]
        assert result["progress"] == Progress(step=3, slot=0, position=24, lr_step=8)


def test_by_the_clock_no_round_begins_before_its_time(ranks: RankPool) -> None:
    overrides = dict(outer=dict(sync_every="1.5s"), train=dict(steps=4))
    (result,) = ranks.run(scripted_training, 1, [said("committed", tokens=10**9)], overrides)
    steps = of(result, "step")
    assert len(steps) > 4  # the run goes on until its tokens have counted, whatever the number of steps
    assert [row["lr"] for row in steps[3:]] == [steps[3]["lr"]] * len(steps[3:])


# Joining late.

LATE = Seat(slot=2, epoch=1, position=48, step=3, tokens=3 * TOKENS * 2, late=True)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_late_island_begins_with_anchor_data_and_learning_rate_of_the_swarm(ranks: RankPool, world_size: int) -> None:
    overrides = dict(outer=dict(sync_every=3), train=dict(steps=6))
    results = ranks.run(scripted_training, world_size, [said("committed", step=6)], overrides, LATE)
    for result in results:
        assert all(bool((parameter == 0.5).all()) for parameter in result["start"].values())
        assert all(bool((parameter == 0.25).all()) for parameter in result["landed"][-1].values())
        rates = [learning_rate(small_config().optimizer, lr_step, 6, BATCH) for lr_step in (3, 4, 5)]
        assert [(row["step"], row["lr"], row["slot"], row["position"]) for row in of(result, "step")] == [
            (4, rates[0], 2, 56), (5, rates[1], 2, 64), (6, rates[2], 2, 72)
        ]  # fmt: skip
        assert [row["step"] for row in of(result, "eval")] == [6]
    order = Sampler(num_samples(small_corpus().train, 16), seed=0, max_slots=4)
    parts = [list(chain(*(result["samples"][0] for result in results)))]
    assert parts[0] == order(48 + torch.arange(BATCH).numpy(), 2).tolist()
    assert results[0]["offers"] == [Work(3 * TOKENS, 48, 72, 6)]
    assert results[0]["calls"] == ["started", 4, 5, 6]


def test_a_late_island_by_the_clock_has_the_learning_rate_of_the_swarms_tokens(ranks: RankPool) -> None:
    overrides = dict(outer=dict(sync_every="1000s"), train=dict(steps=12), swarm=dict(islands=2))
    outcomes = [said("committed", tokens=12 * TOKENS * 2)]
    seat = Seat(slot=2, position=48, step=7, tokens=5 * TOKENS * 2, late=True)
    (result,) = ranks.run(scripted_training, 1, outcomes, overrides, seat, True)
    (row,) = of(result, "step")
    assert (row["step"], row["lr"]) == (8, learning_rate(small_config().optimizer, 5, 12, BATCH))


@pytest.mark.parametrize("sync_every", [3, "1000s"])
def test_an_island_that_joins_after_the_end_does_nothing(ranks: RankPool, sync_every: int | str) -> None:
    overrides = dict(outer=dict(sync_every=sync_every), train=dict(steps=6))
    seat = Seat(slot=2, position=48, step=6, tokens=6 * TOKENS, late=True)
    (result,) = ranks.run(scripted_training, 1, [], overrides, seat)
    assert result["rows"] == [] and result["calls"] == ["started"]
