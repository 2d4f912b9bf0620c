"""Fragments, overlap, merging, eager starts and error feedback in real islands against plain loops written here."""

from dataclasses import dataclass, field, replace
from typing import Any, Iterator

import pytest
import torch
import torch.nn.functional as F
from outer_loop import islands_as_threads, said, scripted_training
from rank_pool import RankPool
from small import plain_model, small_config, small_corpus
from torch import Tensor

from diloco.config import RunConfig
from diloco.exchange.base import RoundOutcome, Seat, Work
from diloco.exchange.in_memory import InMemoryExchange
from islands import plugins
from islands.data.base import Sampler, num_samples, windows
from islands.initialize import named_parameters
from islands.learning_rate import learning_rate
from islands.process import Process

#: fp64 rounding; see test_parity.
TOLERANCE = 1e-10
ISLANDS, STEPS, PERIOD = 2, 11, 4
BATCH, TOKENS = 8, 128
OUTER_LR, MOMENTUM = 0.7, 0.9

Vectors = dict[str, Tensor]

BY_THE_CLOCK = dict(outer=dict(sync_every="0.1s", fragments=2, overlap="eager"))


def fragment_of(name: str, count: int) -> int:
    """Two fragments of two blocks: block 0 with the embeddings, block 1 with the head and the last norm, by size."""
    if count == 1:
        return 0
    block = name.split(".")[1]
    return int(block) if block.isdigit() else {"embed_tokens": 0, "lm_head": 1, "norm": 0}[name.split(".")[0]]


@dataclass
class Island:
    """One island of the reference: a model, its optimizer, and where its present period began."""

    config: RunConfig
    slot: int
    base: Vectors = field(default_factory=dict)
    offered: Vectors = field(default_factory=dict)
    residual: Vectors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = plain_model(self.config)
        self.parameters = dict(named_parameters([self.model]))
        self.optimizer = plugins.build("islands.optimizers", self.config.optimizer, self.model.parameters())
        tokens = small_corpus().train
        self.tokens, self.order = tokens, Sampler(num_samples(tokens, 16), self.config.run.seed, ISLANDS)

    def step(self, number: int) -> None:
        inputs, targets = windows(self.tokens, self.order(BATCH * number + torch.arange(BATCH).numpy(), self.slot), 16)
        F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optimizer, number, STEPS, BATCH)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Outer:
    """Anchor and momentum, and Nesterov SGD as torch has it."""

    def __init__(self, parameters: Vectors) -> None:
        self.anchor = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        self.momentum = {name: torch.zeros_like(anchor) for name, anchor in self.anchor.items()}
        self.mean: Vectors = {}

    def ahead(self, name: str, gradient: Tensor) -> tuple[Tensor, Tensor]:
        momentum = MOMENTUM * self.momentum[name] + gradient
        return self.anchor[name] - OUTER_LR * (gradient + MOMENTUM * momentum), momentum

    def step(self, name: str, gradients: list[Tensor]) -> None:
        self.mean[name] = sum(gradients) / len(gradients)
        self.anchor[name], self.momentum[name] = self.ahead(name, self.mean[name])


def launched(step: int, fragments: int) -> Iterator[int]:
    for fragment in range(fragments):
        if step == STEPS or (step + fragment * PERIOD // fragments) % PERIOD == 0:
            yield fragment


@torch.no_grad()
def streaming(islands: list[Island], fragments: int, tau: int, alpha: float) -> Outer:
    """Streaming DiLoCo (arXiv 2501.18512, algorithm 2)."""
    outer, flying = Outer(islands[0].parameters), {}

    def land(fragment: int, keep: float) -> None:
        _, gradients = flying.pop(fragment)
        for name, each in gradients.items():
            outer.step(name, each)
            for island in islands:
                local = island.parameters[name]
                local.copy_(keep * local + (1 - keep) * outer.anchor[name])

    for step in range(1, STEPS + 1):
        for island in islands:
            with torch.enable_grad():
                island.step(step - 1)
        for fragment in [key for key, (at, _) in flying.items() if step in (at + tau, STEPS)]:
            land(fragment, alpha)
        for fragment in launched(step, fragments):
            names = [name for name in outer.anchor if fragment_of(name, fragments) == fragment]
            moved = {name: [outer.anchor[name] - island.parameters[name] for island in islands] for name in names}
            flying[fragment] = step, moved
        for fragment in [key for key in flying if tau == 0 or step == STEPS]:
            land(fragment, 0.0 if step == STEPS else alpha)
    return outer


@torch.no_grad()
def eager(islands: list[Island]) -> Outer:
    """Eager updates (arXiv 2502.12996), with the anchor stepped by the mean of all, one period late."""
    outer = Outer(islands[0].parameters)
    for island in islands:
        island.base = {name: anchor.clone() for name, anchor in outer.anchor.items()}
    for step in range(1, STEPS + 1):
        for island in islands:
            with torch.enable_grad():
                island.step(step - 1)
        if step % PERIOD and step != STEPS:
            continue
        for name in outer.anchor:
            before = [island.offered.get(name) for island in islands]
            if before[0] is not None:
                outer.step(name, before)
            for island in islands:
                local = island.parameters[name]
                moved = island.base[name] - local
                if name in outer.mean and step != STEPS:
                    guess, _ = outer.ahead(name, outer.mean[name] + (moved - island.offered[name]) / len(islands))
                    local.copy_(guess)
                island.base[name], island.offered[name] = local.clone(), moved
    for name in outer.anchor:
        outer.step(name, [island.offered[name] for island in islands])
    return outer


def reference(**outer: Any) -> list[Island]:
    config = small_config(**sections(**outer))
    return [Island(config, slot) for slot in range(ISLANDS)]


def sections(**outer: Any) -> dict[str, Any]:
    return dict(
        outer=dict(sync_every=PERIOD, optimizer=dict(lr=OUTER_LR, momentum=MOMENTUM), **outer),
        train=dict(steps=STEPS),
        swarm=dict(islands=ISLANDS),
    )


def trained(ranks: RankPool, **outer: Any) -> list[dict[str, Any]]:
    (results,) = ranks.run(islands_as_threads, 1, ISLANDS, sections(**outer))
    return results


def distance(result: dict[str, Any], expected: Vectors) -> float:
    return max(float((result["parameters"][name] - values).abs().max()) for name, values in expected.items())


def rounds(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in result["rows"] if row["kind"] == "round"]


@pytest.mark.parametrize(
    ("fragments", "tau", "alpha"),
    [(1, 0, 0.0), (2, 0, 0.0), (1, 2, 0.0), (2, 1, 0.5), (2, 3, 0.25), (1, 4, 0.5)],
    ids=["DiLoCo", "fragments", "tau", "fragments tau alpha", "two in flight", "tau is the period"],
)
def test_streaming_equals_a_plain_loop(ranks: RankPool, fragments: int, tau: int, alpha: float) -> None:
    results = trained(ranks, fragments=fragments, overlap=tau, merge_alpha=alpha)
    outer = streaming(reference(), fragments, tau, alpha)
    for result in results:
        assert distance(result, outer.anchor) < TOLERANCE
        for row in rounds(result):
            assert row["outcome"] == "committed"
            assert row["landed"] == min(row["step"] + tau, STEPS)
    assert [row["digest"] for row in rounds(results[0])] == [row["digest"] for row in rounds(results[1])]


def test_the_reference_can_tell_one_delay_from_another(ranks: RankPool) -> None:
    (result, _) = trained(ranks, fragments=2, overlap=1, merge_alpha=0.5)
    assert distance(result, streaming(reference(), 2, 2, 0.5).anchor) > 1e-6
    assert distance(result, streaming(reference(), 2, 1, 0.25).anchor) > 1e-6


def test_eager_updates_equal_a_plain_loop(ranks: RankPool) -> None:
    results = trained(ranks, overlap="eager")
    outer = eager(reference())
    for result in results:
        assert distance(result, outer.anchor) < TOLERANCE
        assert [(row["step"], row["landed"]) for row in rounds(result)] == [(4, 8), (8, 11), (11, 11)]


def test_every_sample_of_overlapped_rounds_counts_once(ranks: RankPool) -> None:
    for result in trained(ranks, fragments=2, overlap=3):
        for fragment in range(2):
            spans = [(row["start"], row["position"], row["weight"]) for row in rounds(result) if row["fragment"] == fragment]
            ends = [0, *(position for _, position, _ in spans)]
            assert [start for start, _, _ in spans] == ends[:-1] and ends[-1] == STEPS * BATCH
            assert all(weight == 16 * (position - start) for start, position, weight in spans)


def adapting(process: Process, seconds_for_each_byte: float) -> list[dict[str, Any]]:
    """Islands whose rounds take, as far as they are told, a time in proportion to their bytes."""

    class SlowLink(InMemoryExchange):
        def outcome(self, fragment: int) -> RoundOutcome:
            outcome = super().outcome(fragment)
            return replace(outcome, exchange_seconds=1e-6 + seconds_for_each_byte * outcome.encoded_bytes)

    adaptive = dict(target=0.9, codecs=["int8", "int4"], max_sync_every=6)
    outer = dict(sync_every=2, fragments=2, overlap=1, adaptive=adaptive)
    overrides = dict(outer=outer, train=dict(steps=24), swarm=dict(islands=ISLANDS))
    return islands_as_threads(process, ISLANDS, overrides, exchange=SlowLink)


def test_on_a_slow_link_islands_change_codec_and_period_together(ranks: RankPool) -> None:
    (fast,) = ranks.run(adapting, 1, 0.0)
    assert {row["bits_per_parameter"] for row in rounds(fast[0])} == {64.0}  # fp64 here
    (slow,) = ranks.run(adapting, 1, 1.0)
    seen = [[(row["fragment"], row["step"], row["encoded_bytes"], row["digest"]) for row in rounds(result)] for result in slow]
    assert seen[0] == seen[1]
    for fragment in range(2):
        steps = [row["step"] for row in rounds(slow[0]) if row["fragment"] == fragment]
        bits = [row["bits_per_parameter"] for row in rounds(slow[0]) if row["fragment"] == fragment]
        assert bits[0] == 64.0 and 4.0 < bits[-1] < 5.0
        assert steps[1] - steps[0] == 2 and 6 in [later - before for before, later in zip(steps, steps[1:])]
    told = [row["detail"] for row in slow[0]["rows"] if row["kind"] == "event" and row["what"] == "adapted"]
    assert "fragment 1: a round every 6 inner steps as int4, before every 2 as none" in told


# Over several ranks, with outcomes that a test gives: what arrives early moves beside the training.


def landed(result: dict[str, Any], step: int) -> Vectors:
    return result["landed"][step - 1]


def test_several_ranks_merge_what_has_arrived_before_its_time(ranks: RankPool) -> None:
    outer = dict(sync_every=4, overlap=2, merge_alpha=0.5)
    overrides = dict(outer=outer, train=dict(steps=8))
    for result in ranks.run(scripted_training, 2, [said("committed"), said("committed")], overrides):
        for name, start in result["start"].items():
            assert torch.equal(landed(result, 5)[name], result["locals"][4][name])  # launched, not landed
            expected = torch.lerp(result["locals"][5][name], start - 0.25, 0.5)
            assert torch.equal(landed(result, 6)[name], expected)
            assert torch.equal(landed(result, 8)[name], start - 0.25 - 0.25)  # the last round leaves the anchor


def test_several_ranks_keep_what_they_did_while_the_others_went_on(ranks: RankPool) -> None:
    overrides = dict(outer=dict(sync_every=4, overlap=2), train=dict(steps=8))
    outcomes = [said("left_out"), said("committed")]
    for result in ranks.run(scripted_training, 2, outcomes, overrides):
        for name, start in result["start"].items():
            moved = (start - 0.25) - start
            assert torch.equal(landed(result, 6)[name], result["locals"][5][name] + moved)
    offers = ranks.run(scripted_training, 1, [said("left_out"), said("committed")], dict(overrides))[0]["offers"]
    assert [(work.start, work.position, work.tokens) for work in offers] == [(0, 32, 4 * TOKENS), (0, 64, 8 * TOKENS)]


def test_a_skipped_round_leaves_all_to_the_next(ranks: RankPool) -> None:
    overrides = dict(outer=dict(sync_every=4, overlap=2), train=dict(steps=8))
    for result in ranks.run(scripted_training, 2, [said("skipped"), said("committed")], overrides):
        for name in result["start"]:
            assert torch.equal(landed(result, 6)[name], result["locals"][5][name])


@pytest.mark.parametrize(("outer", "step"), [(dict(overlap=2, merge_alpha=0.5), 6), (dict(overlap="eager"), 8)], ids=["tau", "eager"])
def test_parameters_that_lack_what_the_anchor_has_are_replaced_by_it(
    ranks: RankPool, outer: dict[str, Any], step: int
) -> None:
    overrides = dict(outer=outer | dict(sync_every=4), train=dict(steps=9))
    outcomes = [said("committed", rejected=True), said("committed"), said("committed")]
    result = ranks.run(scripted_training, 1, outcomes, overrides)[0]
    assert all(torch.equal(landed(result, step)[name], start - 0.25) for name, start in result["start"].items())
    assert result["offers"][0].position == 32 and result["offers"][1].start == 8 * step  # what was done since is given up


@pytest.mark.parametrize("kind", ["skipped", "left_out"])
def test_an_eager_island_offers_again_what_did_not_count(ranks: RankPool, kind: str) -> None:
    overrides = dict(outer=dict(sync_every=2, overlap="eager"), train=dict(steps=6))
    outcomes = [said("committed"), said(kind), said("committed")]
    result = ranks.run(scripted_training, 1, outcomes, overrides)[0]
    work = [(each.start, each.position) for each in result["offers"]]
    assert work == [(0, 16), (16, 32), (16, 48)]


class LosesItsSlot(InMemoryExchange):
    """What is launched at steps 4 and 6 ends with a new seat, as the island had lost its slot before."""

    def launch(self, fragment: int, work: Work) -> None:
        super().launch(fragment, work)
        self.steps = {**getattr(self, "steps", {}), fragment: work.step}

    def outcome(self, fragment: int) -> RoundOutcome:
        outcome = super().outcome(fragment)
        if self.steps[fragment] not in (4, 6):
            return outcome
        return replace(outcome, kind="left_out", rejected=True, seat=Seat(0, epoch=1, position=80, step=7))


def losing_its_slot(process: Process) -> list[dict[str, Any]]:
    return islands_as_threads(process, 1, sections(fragments=2, overlap=3), exchange=LosesItsSlot)


def test_what_was_in_flight_when_a_slot_was_lost_changes_nothing(ranks: RankPool) -> None:
    """Fragment 0 lands at 7, with the new seat; fragment 1 at 9, when the island has done two steps there."""
    ((result,),) = ranks.run(losing_its_slot, 1)
    assert [(row["step"], row["landed"]) for row in rounds(result)][:3] == [(2, 5), (4, 7), (6, 9)]
    order = Sampler(num_samples(small_corpus().train, 16), seed=0, max_slots=1)
    assert result["samples"][7:] == [order(80 + BATCH * step + torch.arange(BATCH).numpy(), 0).tolist() for step in range(4)]
    assert all(row["weight"] > 0 for row in rounds(result))
    assert [row["start"] for row in rounds(result) if row["step"] > 6] == [80, 80, 88, 104]


def test_by_the_clock_islands_end_with_the_same_parameters(ranks: RankPool) -> None:
    """The end is known with the last fragment's round; those of the others have landed when it was not, on guesses."""
    (results,) = ranks.run(islands_as_threads, 1, ISLANDS, sections() | BY_THE_CLOCK)
    assert distance(results[0], results[1]["parameters"]) == 0


def behind_in_one_fragment(process: Process) -> float:
    """How far its parameters are from the anchors at the end, where the swarm has had the last round of fragment 1 before."""
    states = []

    class Ahead(InMemoryExchange):
        def outcome(self, fragment: int) -> RoundOutcome:
            states[:] = self._state.fragments
            outcome = super().outcome(fragment)
            return replace(outcome, step=STEPS) if fragment else outcome

    (result,) = islands_as_threads(process, 1, sections(fragments=2, overlap=3), exchange=Ahead)
    parts = [[values for name, values in result["parameters"].items() if fragment_of(name, 2) == index] for index in (0, 1)]
    assert [row["step"] for row in rounds(result) if row["fragment"] == 1] == [2]
    return max(
        float((torch.cat([part.flatten() for part in parts[index]]) - state.anchor).abs().max()) for index, state in enumerate(states)
    )


def test_an_island_that_was_behind_ends_with_the_anchor_of_every_fragment(ranks: RankPool) -> None:
    assert ranks.run(behind_in_one_fragment, 1) == [0.0]
