"""Islands as threads: they agree to the bit, on exactly the members that are named, or nothing changes."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Callable

import pytest
import torch
from small import small_config
from torch import Tensor

from diloco.codecs.none import NoCodec
from diloco.exchange.base import JoinError, RoundOutcome, Work
from diloco.exchange.in_memory import Hub, InMemoryExchange, build
from diloco.outer_optimizers.sgd import Config, Sgd
from diloco.outer_state import FragmentState, Layout, OuterState
from diloco.reduction import CHUNK, Wire

SIZES = [CHUNK + 37, 5]
NAN, INF = float("nan"), float("inf")


class Islands:
    """So many islands around one hub, all at the same anchor."""

    def __init__(
        self, count: int, deadline: float = 10.0, min_islands: int = 1, max_weight_ratio: float = INF, shared: bool = False
    ) -> None:
        self.hub = Hub(count)
        first = OuterState(Layout(SIZES, Sgd(Config())))
        self.states = [first, *(first.twin() if shared else OuterState(first.layout) for _ in range(count - 1))]
        self.exchanges = [
            InMemoryExchange(self.hub, slot, state, Wire(NoCodec(), NoCodec()), deadline, min_islands, 1.0, max_weight_ratio)
            for slot, state in enumerate(self.states)
        ]
        for state in self.states:
            for fragment in state.fragments:
                fragment.anchor.copy_(torch.linspace(-1, 1, fragment.numel))
                fragment.initialize()

    def fragments(self, index: int = 0) -> list[FragmentState]:
        return [state.fragments[index] for state in self.states]

    def launch(
        self, slot: int, fragment: int = 0, weight: int = 1, round_number: int = 0, poison: float = 0.0
    ) -> Tensor:
        """Move ``slot`` away from its anchor and launch. Returns what it moved by, as fp32 has it."""
        state = self.states[slot].fragments[fragment]
        step = torch.randn(state.numel, generator=torch.Generator().manual_seed(100 * slot + round_number))
        step[-1] += poison
        state.local.copy_(state.anchor - step)
        moved = state.anchor - state.local
        self.exchanges[slot].launch(fragment, work(weight, self.states[slot].fragments[fragment].ledger.positions[slot]))
        return moved

    def outcomes(self, fragment: int = 0, slots: list[int] | None = None) -> list[RoundOutcome]:
        """Of all islands, which wait at the same time."""
        exchanges = [self.exchanges[slot] for slot in slots] if slots else self.exchanges
        return together([lambda exchange=exchange: exchange.outcome(fragment) for exchange in exchanges])


def work(tokens: int, start: int = 0) -> Work:
    """So many tokens; every sequence has 10."""
    return Work(tokens, start, start + tokens // 10, step=7)


def together(calls: list[Callable[[], RoundOutcome]]) -> list[RoundOutcome]:
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(timeout=30) for future in futures]


def plain_step(anchor: Tensor, momentum: Tensor, moved: list[Tensor], weights: list[int]) -> tuple[Tensor, Tensor]:
    """The outer step of DiLoCo, as the paper writes it: anchor and momentum."""
    mean = torch.zeros_like(anchor)
    for step, weight in zip(moved, weights, strict=True):
        mean = mean + step * (weight / sum(weights))
    momentum = momentum * 0.9 + mean
    return anchor - (momentum * 0.9 + mean) * 0.7, momentum


def test_three_islands_agree_on_the_plain_outer_step_to_the_bit_over_three_rounds() -> None:
    islands, weights = Islands(3), [1000, 3000, 500]
    anchor, momentum = islands.fragments()[0].anchor.clone(), torch.zeros(SIZES[0])
    for round_number in range(3):
        arriving = {slot: islands.launch(slot, 0, weights[slot], round_number) for slot in (2, 0, 1)}
        moved = [arriving[slot] for slot in range(3)]  # the order of slots counts, not that of arrival
        outcomes = islands.outcomes()
        anchor, momentum = plain_step(anchor, momentum, moved, weights)
        for state, outcome in zip(islands.fragments(), outcomes, strict=True):
            assert torch.equal(state.anchor, anchor) and torch.equal(state.optimizer_state["momentum"], momentum)
            assert (outcome.kind, outcome.height, outcome.reason) == ("committed", round_number + 1, "")
            assert (outcome.members, outcome.weights) == ((0, 1, 2), tuple(weights))
            assert outcome.digest == state.digest
        assert len({outcome.digest for outcome in outcomes}) == 1
        assert len({state.lineage for state in islands.fragments()}) == 1


def test_islands_that_share_what_is_agreed_make_the_outer_step_once_and_swap_it_in_each_for_itself() -> None:
    islands, apart, weights = Islands(3, shared=True), Islands(3), [1000, 3000, 500]
    for round_number in range(3):
        for each in (islands, apart):
            for slot in range(3):
                each.launch(slot, 0, weights[slot], round_number)
        before = islands.fragments()[0].anchor.clone()
        first = islands.exchanges[2].outcome(0)
        assert [state.height for state in islands.fragments()] == [round_number, round_number, round_number + 1]
        assert torch.equal(islands.fragments()[0].anchor, before)  # who has not taken the outcome still has the old one
        outcomes = [*islands.outcomes(slots=[1, 0]), first]
        assert {outcome.digest for outcome in outcomes} == {outcome.digest for outcome in apart.outcomes()}
    anchors = {state.anchor.data_ptr() for state in islands.fragments()}
    assert len(anchors) == 1 and len({state.local.data_ptr() for state in islands.fragments()}) == 3
    assert torch.equal(islands.fragments()[0].anchor, apart.fragments()[0].anchor)


def test_who_joins_while_a_round_is_on_is_not_waited_for_and_follows_it() -> None:
    islands = Islands(3, shared=True)
    islands.hub.leave(2)
    for slot in (0, 1):
        islands.launch(slot)
    assert islands.hub.join(2) == 0
    assert not islands.exchanges[2].is_late(0)
    assert {outcome.kind for outcome in islands.outcomes(slots=[1])} == {"committed"}
    assert islands.exchanges[2].is_late(0)
    islands.launch(2)
    (outcome,) = islands.outcomes(slots=[2])
    assert (outcome.kind, outcome.members, outcome.height) == ("left_out", (0, 1), 1)
    assert outcome.reason == "the round had begun before this island was there"
    islands.exchanges[0].outcome(0)
    for slot in range(3):
        islands.launch(slot, round_number=1)
    assert [(outcome.kind, outcome.members) for outcome in islands.outcomes()] == [("committed", (0, 1, 2))] * 3


def test_what_an_open_round_may_count_is_not_trained_on_again_by_who_comes_back() -> None:
    islands = Islands(2)
    islands.launch(1, weight=50)
    islands.exchanges[1].close()
    assert islands.hub.join(1) == 5


def test_no_island_weighs_more_than_allowed() -> None:
    islands = Islands(3, max_weight_ratio=2.0)
    for slot, weight in enumerate((100, 1000, 100)):
        islands.launch(slot, weight=weight)
    assert {outcome.weights for outcome in islands.outcomes()} == {(100.0, 200.0, 100.0)}


def test_what_breaks_a_rule_is_left_out_and_not_built_upon() -> None:
    islands = Islands(3)
    for slot in range(3):
        islands.launch(slot, poison=1e6 if slot == 1 else 0.0)
    first, second, third = islands.outcomes()
    assert (first.kind, first.members, first.rejected) == ("committed", (0, 2), False) and third.kind == "committed"
    assert (second.kind, second.rejected) == ("left_out", True)
    assert "is far larger than the others'" in second.reason and second.digest == first.digest


def test_an_outcome_tells_the_islands_own_norm_and_its_cosine_with_the_mean() -> None:
    islands = Islands(2)
    moved = [islands.launch(slot, weight=weight).double() for slot, weight in enumerate((1, 3))]
    mean = moved[0] / 4 + moved[1] * 3 / 4
    for step, outcome in zip(moved, islands.outcomes(), strict=True):
        assert outcome.pseudo_gradient_norm == pytest.approx(float(step.norm()), rel=1e-6)
        assert outcome.cosine == pytest.approx(float(step @ mean / step.norm() / mean.norm()), rel=1e-5)


def test_an_outcome_tells_what_the_swarm_has_counted() -> None:
    islands = Islands(2)
    for slot, tokens in enumerate((100, 30)):
        islands.launch(slot, weight=tokens)
    assert [(o.position, o.step, o.tokens) for o in islands.outcomes()] == [(10, 7, 130), (3, 7, 130)]
    for slot, tokens in enumerate((50, 70)):
        islands.launch(slot, weight=tokens, poison=NAN if slot == 1 else 0.0)
    committed, left_out = islands.outcomes()
    assert (committed.position, committed.tokens) == (15, 180)
    assert (left_out.kind, left_out.position, left_out.tokens) == ("left_out", 3, 180)  # its work has not counted
    assert {state.ledger.positions[:3] for state in islands.fragments()} == {(15, 3, 0)}


def test_an_island_is_called_while_another_waits_for_it() -> None:
    islands = Islands(2)
    assert not islands.exchanges[1].called(0)
    islands.launch(0)
    assert islands.exchanges[1].called(0) and not islands.exchanges[1].called(1)
    islands.launch(1)
    islands.outcomes()
    assert not any(exchange.called(0) for exchange in islands.exchanges)


def test_fragments_have_rounds_of_their_own() -> None:
    islands = Islands(2)
    for fragment in (1, 0):
        for slot in range(2):
            islands.launch(slot, fragment)
    assert {outcome.fragment for outcome in islands.outcomes(0)} == {0}
    assert [state.height for state in islands.fragments(0)] == [1, 1]
    assert [state.height for state in islands.fragments(1)] == [0, 0]
    assert {outcome.kind for outcome in islands.outcomes(1)} == {"committed"}


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_an_island_that_is_not_finite_is_left_out_and_follows_the_others_at_once(poison: float) -> None:
    islands = Islands(3)
    start = islands.fragments()[0].anchor.clone()
    moved = [islands.launch(slot, 0, slot + 1, poison=poison if slot == 1 else 0.0) for slot in range(3)]
    began = time.monotonic()
    outcomes = islands.outcomes()
    assert time.monotonic() - began < 5  # nobody waited for the deadline
    anchor, _ = plain_step(start, torch.zeros(SIZES[0]), [moved[0], moved[2]], [1.0, 3.0])
    assert [outcome.kind for outcome in outcomes] == ["committed", "left_out", "committed"]
    assert outcomes[1].reason == "own pseudo-gradient is not finite" and not outcomes[0].reason
    for state, outcome in zip(islands.fragments(), outcomes, strict=True):
        assert torch.equal(state.anchor, anchor) and torch.equal(state.previous_anchor, start)
        assert (outcome.members, outcome.weights, outcome.height) == ((0, 2), (1.0, 3.0), 1)
        assert outcome.digest == outcomes[0].digest


def test_an_island_that_was_left_out_takes_part_again() -> None:
    islands = Islands(2)
    for slot in range(2):
        islands.launch(slot, poison=NAN if slot else 0.0)
    islands.outcomes()
    for slot in range(2):
        islands.launch(slot, round_number=1)
    assert [(outcome.kind, outcome.members) for outcome in islands.outcomes()] == [("committed", (0, 1))] * 2


def test_when_no_island_is_finite_nothing_changes_and_the_next_round_can_commit() -> None:
    islands = Islands(2)
    before = [state.digest for state in islands.fragments()]
    for slot in range(2):
        islands.launch(slot, poison=NAN)
    for outcome in islands.outcomes():
        assert (outcome.kind, outcome.height, outcome.members) == ("skipped", 0, ())
        assert outcome.reason == "own pseudo-gradient is not finite"
    assert [state.digest for state in islands.fragments()] == before
    for slot in range(2):
        islands.launch(slot)
    assert {outcome.kind for outcome in islands.outcomes()} == {"committed"}


def test_an_island_that_does_not_come_skips_the_round_for_the_others() -> None:
    islands = Islands(3, deadline=0.1)
    before = islands.fragments()[0].digest
    for slot in (0, 2):
        islands.launch(slot)
    for outcome in islands.outcomes(slots=[0, 2]):
        assert (outcome.kind, outcome.height) == ("skipped", 0)
        assert outcome.reason == "islands [1] offered nothing within 0.1 s"
    assert {state.digest for state in islands.fragments()} == {before}


def test_after_a_skipped_round_the_latecomer_and_the_others_commit_what_they_offer_now() -> None:
    islands = Islands(2, deadline=0.1)
    start = islands.fragments()[0].anchor.clone()
    islands.launch(0)
    assert islands.outcomes(slots=[0])[0].kind == "skipped"
    moved = [islands.launch(slot, round_number=5) for slot in (1, 0)]
    assert [outcome.kind for outcome in islands.outcomes()] == ["committed"] * 2
    expected, _ = plain_step(start, torch.zeros(SIZES[0]), moved[::-1], [1.0, 1.0])
    assert torch.equal(islands.fragments()[0].anchor, expected)
    assert islands.fragments()[0].digest == islands.fragments()[1].digest


def test_an_island_that_leaves_is_not_waited_for() -> None:
    islands = Islands(3)
    for slot in (0, 2):
        islands.launch(slot)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(islands.outcomes, 0, [0, 2])
        time.sleep(0.05)
        assert not waiting.done()
        islands.exchanges[1].close()
        islands.exchanges[1].close()  # twice does no harm
        assert [(outcome.kind, outcome.members) for outcome in waiting.result(5)] == [("committed", (0, 2))] * 2


def test_what_an_island_offered_before_it_left_counts() -> None:
    islands = Islands(2)
    for slot in range(2):
        islands.launch(slot)
    islands.exchanges[1].close()
    (outcome,) = islands.outcomes(slots=[0])
    assert (outcome.kind, outcome.members) == ("committed", (0, 1))


def test_fewer_islands_than_asked_for_never_commit() -> None:
    islands = Islands(3, min_islands=3)
    before = islands.fragments()[0].digest
    for slot in range(3):
        islands.launch(slot, poison=NAN if slot == 2 else 0.0)
    for outcome in islands.outcomes():
        assert (outcome.kind, outcome.members) == ("skipped", ())
        assert outcome.reason == "only islands [0, 1] offered something; exchange.min_islands=3"
    assert {state.digest for state in islands.fragments()} == {before}


@pytest.mark.parametrize("slot", [-1, 3])
def test_a_run_with_one_island_needs_no_other_whatever_its_slot(slot: int) -> None:
    state = OuterState(Layout([5], Sgd(Config())))
    state.fragments[0].initialize()
    exchange = build(small_config(swarm=dict(slot=slot)), state, schema="")
    assert exchange.join().slot == max(slot, 0)
    state.fragments[0].local.fill_(1.0)
    exchange.launch(0, work(4))
    outcome = exchange.outcome(0)
    assert (outcome.kind, outcome.members, outcome.weights) == ("committed", (max(slot, 0),), (4.0,))
    assert exchange.events() == []
    exchange.close()


def test_several_islands_need_another_exchange() -> None:
    with pytest.raises(JoinError, match="swarm.islands=2; use exchange.type=hivemind between processes"):
        build(small_config(swarm=dict(islands=2)), OuterState(Layout([5], Sgd(Config()))), schema="")
