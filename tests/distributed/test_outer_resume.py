"""An island that goes on from a checkpoint of its outer loop trains as if nothing had happened, whatever was in flight."""

import json
import threading
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from outer_loop import Recorded, islands_as_threads, outer_round, watched
from rank_pool import RankPool
from small import small_config, small_corpus, whole_parameters
from torch import Tensor

from diloco.exchange.base import Seat
from diloco.exchange.in_memory import Hub, InMemoryExchange
from diloco.from_config import make_fragments, make_wire
from diloco.outer_facts import OuterFacts
from diloco.outer_resume import OuterResume
from diloco.outer_round import OuterRound
from diloco.outer_state import OuterState
from islands.checkpoint_part import Saved
from islands.initialize import named_parameters
from islands.fragments import schema_of
from islands.island import Island, build_island, meta_model
from islands.process import Process
from islands.progress import Progress
from islands.train_loop import train

ISLANDS, STEPS = 2, 12

#: What may be in flight, and how.
RECIPES: dict[str, dict[str, Any]] = {
    "blocking": dict(sync_every=4),
    "streaming": dict(
        sync_every=4, fragments=2, overlap=3, merge_alpha=0.5, codec=dict(type="int4"), error_feedback=True, residual_decay=0.95
    ),
    "two in flight": dict(sync_every=3, fragments=2, overlap=3, codec=dict(type="topk", k=64), error_feedback=True),
    "eager": dict(sync_every=3, overlap="eager", codec=dict(type="int8")),
    "delayed": dict(sync_every=3, overlap=2, optimizer=dict(type="delayed_nesterov", lr=0.5, momentum=0.9)),
    "adam": dict(sync_every=4, fragments=2, overlap=1, optimizer=dict(type="adam", lr=0.01)),
}


@dataclass
class Kept:
    """A checkpoint in memory."""

    progress: Progress
    parameters: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]
    saved: Saved = field(default_factory=Saved)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def optimizer_of(island: Island) -> torch.optim.Optimizer:
    return island.optimizer


def moments(island: Island) -> dict[str, dict[str, Tensor]]:
    state, parameters = optimizer_of(island).state, named_parameters(island.model.parts)
    return {name: dict(state[parameter]) for name, parameter in parameters.items() if parameter in state}


class Keeper:
    """Takes a checkpoint after every inner step, and collects it beside the training."""

    def __init__(self, island: Island, outer: OuterRound) -> None:
        self._island, self._outer, self.kept = island, outer, {}
        self._threads: list[threading.Thread] = []

    def after_step(self, progress: Progress, tokens: int) -> float:
        parameters = {name: local(p).detach().clone() for name, p in named_parameters(self._island.model.parts).items()}
        copies = {name: {k: v.clone() for k, v in each.items()} for name, each in moments(self._island).items()}
        kept = self.kept[self._outer._log.inner_step] = Kept(replace(progress), parameters, copies)
        collect = self._outer.snapshot()

        def work() -> None:
            kept.saved = collect()

        self._threads.append(threading.Thread(target=work, daemon=True))
        self._threads[-1].start()
        return 0.0

    def finish(self) -> dict[int, Kept]:
        for thread in self._threads:
            thread.join(30)
        return self.kept


@torch.no_grad()
def restore(island: Island, kept: Kept) -> None:
    for name, parameter in named_parameters(island.model.parts).items():
        local(parameter).copy_(kept.parameters[name])
        optimizer_of(island).state[parameter] = {key: value.clone() for key, value in kept.moments[name].items()}


def train_all(
    process: Process, outer: dict[str, Any], before: list[Kept] | None = None, seats: tuple[int, int] = (0, 1), steps: int = STEPS
) -> list[dict[str, Any]]:
    """Both islands to the end, from ``before`` or, taking checkpoints, from the start; ``seats``: the slot that each gets."""
    config = small_config(outer=outer, train=dict(steps=steps), swarm=dict(islands=ISLANDS))
    hub, corpus = Hub(ISLANDS), small_corpus()
    islands = [watched(build_island(config, process, corpus)) for _ in range(ISLANDS)]
    results: list[dict[str, Any]] = [{} for _ in range(ISLANDS)]

    def run(number: int) -> None:
        metrics, island, slot, states = Recorded(), islands[number], seats[number], []

        def made(state: OuterState) -> InMemoryExchange:
            states.append(state)
            return InMemoryExchange(hub, slot, state, make_wire(config), 30.0, 1, config.outer.residual_decay)

        hook = outer_round(island, made, metrics)
        if before is None:
            progress = hook.start(Seat(slot))
        else:
            restore(island, before[number])
            facts = OuterFacts.from_json(json.loads(json.dumps(before[number].saved.facts, allow_nan=False)))
            fragments = make_fragments(config, schema_of(meta_model(config)))
            resume = OuterResume(facts, Seat(slot), hook, fragments, states[0])
            for name, target in resume.targets().items():
                target.copy_(before[number].saved.tensors[name])
            progress = resume.go_on(replace(before[number].progress))
        keeper = Keeper(island, hook)
        train(island, island.batches(ISLANDS), metrics, [hook] if before else [hook, keeper], progress)
        results[number] = dict(
            rows=metrics.rows,
            parameters=whole_parameters(island),
            digests=[fragment.digest for fragment in states[0].fragments],
            kept=keeper.finish(),
            samples=island.train_step.samples,
        )

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(ISLANDS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def steps_after(result: dict[str, Any], step: int) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in result["rows"] if row["kind"] == "step" and row["step"] > step]


def rounds_after(result: dict[str, Any], step: int) -> list[tuple[Any, ...]]:
    keys = ("round", "fragment", "step", "landed", "start", "position", "weight", "outcome", "encoded_bytes", "digest")
    keys += ("pseudo_gradient_norm", "members")
    return [tuple(map(str, (row[key] for key in keys))) for row in result["rows"] if row["kind"] == "round" and row["landed"] > step]


def stopped(process: Process, outer: dict[str, Any], steps: list[int]) -> int:
    """Go on from each of ``steps``; returns how many rounds were in flight there."""
    whole, flying = train_all(process, outer), 0
    assert all(len(result["kept"]) == STEPS and all(kept.saved.facts for kept in result["kept"].values()) for result in whole)
    for step in steps:
        before = [result["kept"][step] for result in whole]
        flying += sum(len(kept.saved.facts["flights"]) for kept in before)
        for result, again in zip(whole, train_all(process, outer, before), strict=True):
            assert steps_after(again, step) == steps_after(result, step), f"from step {step}"
            assert rounds_after(again, step) == rounds_after(result, step), f"from step {step}"
            assert again["digests"] == result["digests"]
            assert all(torch.equal(again["parameters"][name], value) for name, value in result["parameters"].items())
    return flying


@pytest.mark.parametrize(("recipe", "steps"), [("streaming", [3, 7]), ("two in flight", [8]), ("eager", [7])])
def test_from_any_step_both_islands_go_on_bit_for_bit(ranks: RankPool, recipe: str, steps: list[int]) -> None:
    (flying,) = ranks.run(stopped, 1, RECIPES[recipe], steps)
    assert flying


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_from_every_step_both_islands_go_on_bit_for_bit(ranks: RankPool, recipe: str) -> None:
    (flying,) = ranks.run(stopped, 1, RECIPES[recipe], list(range(1, STEPS)), timeout=180.0)
    assert bool(flying) == (recipe != "blocking")


def keeping_changes_nothing(process: Process, outer: dict[str, Any]) -> None:
    kept = train_all(process, outer)
    overrides = dict(outer=outer, train=dict(steps=STEPS), swarm=dict(islands=ISLANDS))
    for one, other in zip(kept, islands_as_threads(process, ISLANDS, overrides), strict=True):
        assert steps_after(one, 0) == steps_after(other, 0)
        assert all(torch.equal(one["parameters"][name], value) for name, value in other["parameters"].items())


def test_taking_checkpoints_changes_nothing(ranks: RankPool) -> None:
    ranks.run(keeping_changes_nothing, 1, RECIPES["streaming"])


def seats_exchanged(process: Process, outer: dict[str, Any]) -> None:
    """The islands get each other's slot: what they had not brought in yet is theirs no more; nothing counts twice."""
    before = [result["kept"][6] for result in train_all(process, outer)]
    results = train_all(process, outer, before, (1, 0))
    assert results[0]["digests"] == results[1]["digests"]
    for number, result in enumerate(results):
        facts = OuterFacts.from_json(before[1 - number].saved.facts)
        counted = max(fragment.ledger.positions[1 - number] for fragment in facts.fragments)
        starts = [row["start"] for row in result["rows"] if row["kind"] == "round"]
        assert min(starts) == counted and all(row["outcome"] == "committed" for row in result["rows"] if row["kind"] == "round")


def test_in_another_slot_an_island_goes_on_from_the_anchor(ranks: RankPool) -> None:
    ranks.run(seats_exchanged, 1, RECIPES["streaming"])


def continued(process: Process, outer: dict[str, Any]) -> None:
    before = [result["kept"][STEPS] for result in train_all(process, outer)]
    for result in train_all(process, outer, before, steps=2 * STEPS):
        rounds = [(row["fragment"], row["step"], row["outcome"]) for row in result["rows"] if row["kind"] == "round"]
        assert rounds == [(fragment, step, "committed") for step, fragment in ((14, 1), (16, 0), (18, 1), (20, 0), (22, 1), (24, 0), (24, 1))]
        assert not [row for row in result["rows"] if row["kind"] == "event"], "work was dropped"


def test_a_run_that_was_at_its_end_goes_on_to_a_later_one(ranks: RankPool) -> None:
    ranks.run(continued, 1, RECIPES["streaming"])
