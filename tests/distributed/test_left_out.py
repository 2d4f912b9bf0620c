"""What becomes of an island's work, data and step when a round goes on without it: exact in parameters and tokens."""

from typing import Any

import pytest
import torch
from outer_loop import said, scripted_training
from rank_pool import RankPool
from small import small_config, small_corpus

from diloco.exchange.base import RoundOutcome, Seat, Work
from islands.data.base import Sampler, num_samples
from islands.learning_rate import learning_rate

#: Of one inner step: 8 sequences of 16 tokens.
BATCH, TOKENS = 8, 128


def trained(ranks: RankPool, outcomes: list[RoundOutcome], world_size: int = 1, **sections: Any) -> dict[str, Any]:
    overrides = dict(outer=dict(sync_every=1), train=dict(steps=len(outcomes))) | sections
    return ranks.run(scripted_training, world_size, outcomes, overrides)[0]


def of(result: dict[str, Any], kind: str, *keys: str) -> list[Any]:
    """The values of ``keys`` in each row of a kind."""
    rows = [row for row in result["rows"] if row["kind"] == kind]
    return [row[keys[0]] if len(keys) == 1 else tuple(row[key] for key in keys) for row in rows]


def samples(slot: int, position: int) -> list[int]:
    order = Sampler(num_samples(small_corpus().train, 16), seed=0, max_slots=4)
    return order(position + torch.arange(BATCH).numpy(), slot).tolist()


def is_anchor(result: dict[str, Any], step: int, rounds: int) -> bool:
    """Whether the parameters after ``step`` are the anchor of so many rounds, of which each moves it by -0.25."""
    for name, expected in result["start"].items():
        for _ in range(rounds):
            expected = expected - 0.25
        if not torch.equal(result["landed"][step - 1][name], expected):
            return False
    return True


def test_carried_work_is_offered_again(ranks: RankPool) -> None:
    result = trained(ranks, [said("left_out"), said("left_out"), said("committed"), said("committed")])
    assert result["offers"] == [
        Work(TOKENS, 0, 8, 1), Work(2 * TOKENS, 0, 16, 2), Work(3 * TOKENS, 0, 24, 3), Work(TOKENS, 24, 32, 4)
    ]  # fmt: skip
    assert [is_anchor(result, step, step) for step in (1, 2, 3, 4)] == [False, False, True, True]
    assert of(result, "event", "what") == []


def test_dropped_work_is_forgotten_and_told(ranks: RankPool) -> None:
    outcomes = [said("skipped"), said("left_out"), said("committed")]
    result = trained(ranks, outcomes, outer=dict(sync_every=1, left_out="drop"))
    assert result["offers"] == [Work(TOKENS, 0, 8, 1), Work(2 * TOKENS, 0, 16, 2), Work(TOKENS, 16, 24, 3)]
    assert is_anchor(result, 2, 1) and is_anchor(result, 3, 2)
    told = "16 sequences: left out of a round, and outer.left_out is drop (as scripted)"
    assert of(result, "event", "what", "detail") == [("dropped", told)]


@pytest.mark.parametrize("left_out", ["carry", "drop"])
def test_work_on_sequences_that_count_already_never_counts_again(ranks: RankPool, left_out: str) -> None:
    outcomes = [said("committed"), said("left_out", position=32), said("committed")]
    result = trained(ranks, outcomes, outer=dict(sync_every=1, left_out=left_out))
    assert result["offers"] == [Work(TOKENS, 0, 8, 1), Work(TOKENS, 8, 16, 2), Work(TOKENS, 32, 40, 3)]
    assert is_anchor(result, 2, 2)
    assert result["samples"] == [samples(0, 0), samples(0, 8), samples(0, 32)]
    (detail,) = of(result, "event", "detail")
    assert detail == "8 sequences: sequences up to 32 of the slot count already, and would count twice"


@pytest.mark.parametrize("left_out", ["carry", "drop"])
def test_a_round_that_counted_this_island_without_its_knowledge_loses_nothing(ranks: RankPool, left_out: str) -> None:
    outcomes = [said("left_out", position=8), said("committed")]
    result = trained(ranks, outcomes, outer=dict(sync_every=1, left_out=left_out))
    assert result["offers"] == [Work(TOKENS, 0, 8, 1), Work(TOKENS, 8, 16, 2)]
    assert is_anchor(result, 1, 1) and of(result, "event", "what") == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_island_that_lost_its_slot_begins_again_where_the_new_one_is(ranks: RankPool, world_size: int) -> None:
    seat = Seat(slot=3, epoch=2, position=40, step=4, tokens=999, late=True)
    outcomes = [said("left_out", seat=seat), said("committed", step=5), said("committed", step=6)]
    result = trained(ranks, outcomes, world_size, train=dict(steps=6))
    assert is_anchor(result, 1, 1) and is_anchor(result, 2, 2)
    assert result["offers"] == [Work(TOKENS, 0, 8, 1), Work(TOKENS, 40, 48, 5), Work(TOKENS, 48, 56, 6)]
    if world_size == 1:
        assert result["samples"] == [samples(0, 0), samples(3, 40), samples(3, 48)]
    assert of(result, "step", "step", "slot", "position") == [(1, 0, 8), (5, 3, 48), (6, 3, 56)]
    assert of(result, "round", "slot", "start", "position") == [(0, 0, 8), (3, 40, 48), (3, 48, 56)]
    (detail,) = of(result, "event", "detail")
    assert detail == "8 sequences: it was done in a slot that the island has lost; now it has slot 3"


@pytest.mark.parametrize("kind", ["left_out", "committed"])
def test_an_island_that_stood_still_follows_the_step_of_the_others(ranks: RankPool, kind: str) -> None:
    outcomes = [said(kind, step=9), *[said("committed")] * 2]  # the first round at 3, the others at 12 and 14
    result = trained(ranks, outcomes, outer=dict(sync_every=3), train=dict(steps=14, eval_every=4))
    config = small_config().optimizer
    assert of(result, "step", "step", "lr") == [
        (step, learning_rate(config, step - 1, 14, BATCH)) for step in (1, 2, 3, 10, 11, 12, 13, 14)
    ]
    assert of(result, "round", "step") == [3, 12, 14]
    assert of(result, "eval", "step") == [0, 9, 12, 14]  # a multiple of 4 was crossed, or it is the end
    assert of(result, "step", "position") == [8 * number for number in range(1, 9)]  # data has no gap


def test_an_island_that_comes_to_the_end_of_the_others_ends(ranks: RankPool) -> None:
    result = trained(ranks, [said("left_out", step=14)], outer=dict(sync_every=3), train=dict(steps=14))
    assert of(result, "step", "step") == [1, 2, 3] and of(result, "eval", "step") == [0, 14]
    assert is_anchor(result, 3, 1)  # no round follows that could count what it did
    assert of(result, "event", "detail") == ["24 sequences: left out of the last round (as scripted)"]


def test_what_the_last_round_did_not_count_is_told_and_the_parameters_stay(ranks: RankPool) -> None:
    result = trained(ranks, [said("committed"), said("skipped"), said("skipped")])
    assert of(result, "event", "detail") == ["16 sequences: the last round was skipped (as scripted)"]
    for name, parameter in result["landed"][2].items():
        assert torch.equal(parameter, result["locals"][2][name])
