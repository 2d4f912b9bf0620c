"""An island of several ranks goes on from a checkpoint of its outer loop bit for bit: its fragments are moved in the background."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from outer_loop import Recorded, outer_round
from rank_pool import RankPool
from small import small_config, small_corpus, whole_parameters
from test_outer_resume import RECIPES, Keeper, Kept, restore, steps_after

from diloco.exchange.base import Seat
from diloco.exchange.in_memory import Hub, InMemoryExchange
from diloco.from_config import make_fragments, make_wire
from diloco.outer_facts import OuterFacts
from diloco.outer_resume import OuterResume
from diloco.outer_state import OuterState
from islands.fragments import schema_of
from islands.island import build_island, meta_model
from islands.process import Process
from islands.train_loop import train

STEPS = 12
GRIDS: dict[str, dict[str, dict[str, Any]]] = {
    "zero3": dict(parallel=dict(data_parallel_strategy="zero3")),
    "zero2": dict(parallel=dict(data_parallel_strategy="zero2")),
    "ddp": dict(parallel=dict(data_parallel_strategy="ddp")),
    "tied pipeline": dict(parallel=dict(data_parallel_strategy="ddp", pipeline_parallel_size=2), model=dict(tied_embeddings=True)),
}


def trained(
    process: Process, outer: dict[str, Any], sections: dict[str, Any], before: list[Kept] | None, facts: dict[str, Any]
) -> dict[str, Any]:
    """One island to the end, from what each rank kept or, taking checkpoints, from the start."""
    steps = dict(steps=STEPS, eval_every=2, micro_batch_size=1, precision="fp32")
    config = small_config(outer=outer, train=steps, swarm=dict(islands=1), **sections)
    island, metrics, states = build_island(config, process, small_corpus()), Recorded(), []

    def made(state: OuterState) -> InMemoryExchange:
        states.append(state)
        return InMemoryExchange(Hub(1), 0, state, make_wire(config), 30.0, 1, config.outer.residual_decay)

    hook = outer_round(island, made, metrics)
    if before is None:
        progress = hook.start(Seat(0))
    else:
        kept = before[process.rank]
        restore(island, kept)
        fragments = make_fragments(config, schema_of(meta_model(config)))
        resume = OuterResume(OuterFacts.from_json(facts), Seat(0), hook, fragments, states[0] if states else None)
        for name, target in resume.targets().items():
            target.copy_(kept.saved.tensors[name])
        progress = resume.go_on(replace(kept.progress))
    keeper = Keeper(island, hook)
    train(island, island.batches(1), metrics, [hook] if before else [hook, keeper], progress)
    return dict(
        rows=metrics.rows,
        parameters=whole_parameters(island),
        digests=[fragment.digest for state in states for fragment in state.fragments],
        kept=keeper.finish(),
    )


def seen_after(result: dict[str, Any], step: int) -> dict[str, list[Any]]:
    """Losses and digests. Norms are left out: a number of threads adds them up in its own order."""
    rows = result["rows"]
    return dict(
        steps=steps_after(result, step),
        evaluations=[(row["step"], row["loss"]) for row in rows if row["kind"] == "eval" and row["step"] > step],
        rounds=[(row["fragment"], row["round"], row["digest"]) for row in rows if row["kind"] == "round" and row["landed"] > step],
    )


def check(ranks: RankPool, recipe: str, grid: str, steps: list[int]) -> int:
    """Go on from each of ``steps``; returns how many rounds were in flight there."""
    whole, flying = ranks.run(trained, 2, RECIPES[recipe], GRIDS[grid], None, {}), 0
    for step in steps:
        kept = [result["kept"][step] for result in whole]
        facts = json.loads(json.dumps(kept[0].saved.facts, allow_nan=False))
        flying += len(facts["flights"])
        again = ranks.run(trained, 2, RECIPES[recipe], GRIDS[grid], kept, facts)
        for result, other in zip(whole, again, strict=True):
            assert seen_after(other, step) == seen_after(result, step), f"from step {step}"
            assert other["digests"] == result["digests"]
            assert all(torch.equal(other["parameters"][name], value) for name, value in result["parameters"].items())
    return flying


def test_with_rounds_in_flight(ranks: RankPool) -> None:
    assert check(ranks, "streaming", "zero3", [7])


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_of_every_kind_and_grid(ranks: RankPool, recipe: str, grid: str) -> None:
    assert bool(check(ranks, recipe, grid, [2, 5, 7])) == (recipe != "blocking")
