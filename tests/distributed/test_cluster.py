"""Replicas of one job: gradients averaged at every step, or islands that average what they moved by, equal what defines them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from outer_loop import Recorded, islands_as_threads
from rank_pool import RankPool
from small import plain_training, small_config, small_corpus, whole_parameters
from test_parity import TOLERANCE, largest_difference, with_slow

from diloco.config import RunConfig
from diloco.cluster import check_cluster, cluster_round
from islands.data.base import Sampler, num_samples, windows
from islands.island import build_island
from islands.learning_rate import learning_rate
from islands.process import Process, one_of
from islands.progress import Progress
from islands.train_loop import train

PLAIN = dict(type="sgd", lr=1.0, momentum=0.0)


def in_one_job_config(islands: int, overrides: dict[str, Any]) -> RunConfig:
    """The small run, whose islands share a job."""
    return small_config(**{"exchange": dict(type="process_group"), **overrides, "swarm": dict(islands=islands, max_slots=islands)})


def in_one_job(process: Process, islands: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """Train ``islands`` islands, or as many replicas of one, on all ranks; what this rank saw and ends with."""
    config, corpus, metrics = in_one_job_config(islands, overrides), small_corpus(), Recorded()
    grid, every_step = check_cluster(config, process.world_size), config.outer.sync_every == 1
    if every_step:
        island, hooks, slot = build_island(config, process, corpus, replace(grid, replicas=islands)), [], 0
        progress = Progress()
    else:
        mine, slot = one_of(process, islands), process.rank // grid.world_size
        island = build_island(config, mine, corpus, replace(grid, islands=islands), process)
        hooks = [cluster_round(config, island, metrics)]
        progress = hooks[0].start(Progress(slot=slot))
    train(island, island.batches(islands), metrics, hooks, progress)
    return dict(rows=metrics.rows, parameters=whole_parameters(island), slot=slot)


def of(result: dict[str, Any], kind: str, key: str) -> list[Any]:
    return [row[key] for row in result["rows"] if row["kind"] == kind]


def in_one_process(islands: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """The batches of all replicas joined, in a plain loop."""
    config, corpus = small_config(**overrides), small_corpus()
    seq_len, size, steps = config.data.seq_len, config.train.global_batch_size, config.train.steps
    order = Sampler(num_samples(corpus.train, seq_len), config.run.seed)  # position p of slot s is sample p x islands + s
    places = [torch.arange(islands * size * step, islands * size * (step + 1)).numpy() for step in range(steps)]
    joint = [windows(corpus.train, order(each), seq_len) for each in places]
    return plain_training(config, joint, [learning_rate(config.optimizer, step, steps, size) for step in range(steps)])


#: Ranks, replicas, `parallel`.
EVERY_STEP: dict[str, tuple[int, int, dict[str, Any]]] = {
    "zero3": (4, 2, dict()),
    "zero2 x tp2": (8, 2, dict(data_parallel_strategy="zero2", tensor_parallel_size=2)),
    "pipeline x zero3": (8, 2, dict(pipeline_parallel_size=2)),
    "ddp": (4, 2, dict(data_parallel_strategy="ddp")),
    "zero1 of hybrid": (8, 2, dict(data_parallel_strategy="hybrid_shard", shard_size=2)),
}


@pytest.mark.parametrize("grid", with_slow(EVERY_STEP, slow=EVERY_STEP.keys() - {"zero3"}))
def test_every_step_is_hybrid_shard_and_equals_one_process(ranks: RankPool, grid: str) -> None:
    world_size, islands, parallel = EVERY_STEP[grid]
    model = dict(pad_vocab_to_multiple_of=2) if "tensor_parallel_size" in parallel else {}
    overrides = dict(parallel=parallel, model=model, outer=dict(sync_every=1, optimizer=PLAIN), train=dict(micro_batch_size=2))
    expected = in_one_process(islands, dict(model=model))
    for rank in ranks.run(in_one_job, world_size, islands, overrides):
        assert of(rank, "step", "loss") == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert of(rank, "step", "grad_norm") == pytest.approx(expected["norms"], abs=TOLERANCE)
        assert largest_difference(rank["parameters"], expected["parameters"]) < TOLERANCE
        assert of(rank, "step", "tokens") == [islands * 8 * 16] * 5


NESTEROV = dict(lr=0.7, momentum=0.9)

#: Ranks, islands, `parallel`, `outer`.
EVERY_K: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "parameter averaging": (2, 2, dict(), dict(optimizer=PLAIN)),
    "one island": (1, 1, dict(), dict(optimizer=NESTEROV)),
    "zero3": (4, 2, dict(), dict(optimizer=NESTEROV)),
    "zero2, fragments, overlap, alpha": (
        4,
        2,
        dict(data_parallel_strategy="zero2"),
        dict(sync_every=3, optimizer=NESTEROV, fragments=2, overlap=2, merge_alpha=0.5),
    ),
    "zero3 x tp2, adam": (8, 2, dict(tensor_parallel_size=2), dict(optimizer=dict(type="adam"), overlap=1)),
    "pipeline x zero3 tied, delayed nesterov": (
        8,
        2,
        dict(pipeline_parallel_size=2),
        dict(optimizer=dict(type="delayed_nesterov", buffer_rounds=2), fragments=2, overlap=1),
    ),
    "4 islands of ddp": (8, 4, dict(data_parallel_strategy="ddp"), dict(optimizer=NESTEROV)),
}


_FAST = {"one island", "zero2, fragments, overlap, alpha", "zero3 x tp2, adam"}


@pytest.mark.parametrize("recipe", with_slow(EVERY_K, slow=EVERY_K.keys() - _FAST))
def test_every_k_steps_equals_the_exchange_in_memory(ranks: RankPool, recipe: str) -> None:
    world_size, islands, parallel, outer = EVERY_K[recipe]
    outer = dict(sync_every=2) | outer
    tied = dict(tied_embeddings=True) if "tied" in recipe else {}
    model = tied | (dict(pad_vocab_to_multiple_of=2) if "tensor_parallel_size" in parallel else {})
    shared = dict(outer=outer, model=model, train=dict(steps=7, micro_batch_size=2))
    (expected,) = ranks.run(islands_as_threads, 1, islands, shared)
    for rank in ranks.run(in_one_job, world_size, islands, shared | dict(parallel=parallel)):
        same = expected[rank["slot"]]
        assert of(rank, "step", "loss") == pytest.approx(of(same, "step", "loss"), abs=TOLERANCE)
        assert largest_difference(rank["parameters"], same["parameters"]) < TOLERANCE
        for key in ("step", "fragment", "outcome", "landed", "start", "position", "weight", "tokens"):
            assert of(rank, "round", key) == of(same, "round", key), key
        assert of(rank, "round", "pseudo_gradient_norm") == pytest.approx(of(same, "round", "pseudo_gradient_norm"), abs=TOLERANCE)


@pytest.mark.parametrize(("codec", "bits"), [("bf16", 16), ("int8", 8.125)])
def test_encoded_rounds_tell_their_bits_and_islands_agree(ranks: RankPool, codec: str, bits: float) -> None:
    overrides = dict(outer=dict(sync_every=2, optimizer=PLAIN, codec=dict(type=codec)))
    first, second = ranks.run(in_one_job, 2, 2, overrides)
    assert of(first, "round", "bits_per_parameter") == pytest.approx([bits] * 3, rel=0.01)
    assert of(first, "round", "digest") == of(second, "round", "digest") and len(set(of(first, "round", "digest"))) == 3
    assert all(torch.equal(first["parameters"][name], second["parameters"][name]) for name in first["parameters"])
    plain = ranks.run(in_one_job, 2, 2, dict(outer=dict(sync_every=2, optimizer=PLAIN)))[0]
    assert of(first, "step", "loss") == pytest.approx(of(plain, "step", "loss"), abs=1e-2)


WHOLE = 8 * 36_576  # bytes of all parameters in fp64


@pytest.mark.parametrize("sync_every", [1, 2])
def test_steps_tell_what_they_send_inside_a_replica_and_across(ranks: RankPool, sync_every: int) -> None:
    overrides = dict(outer=dict(sync_every=sync_every, optimizer=PLAIN), parallel=dict(data_parallel_strategy="zero2"))
    for rank in ranks.run(in_one_job, 4, 2, overrides):
        first, *rows = [row for row in rank["rows"] if row["kind"] == "step"]
        assert "bytes_inside" not in first
        for row in rows:  # padding to even shards, and sums of losses and norms, come on top
            # An all-gather and a reduce-scatter of all parameters between two ranks: each sends half of them, twice.
            assert row["bytes_inside"] == pytest.approx(2 * WHOLE, rel=0.005)
            # An all-reduce of each rank's half with its like in the other replica, who adds up one half of that.
            meets = sync_every == 1 or row["step"] in (2, 4, 5)
            assert row["bytes_across"] == pytest.approx(WHOLE if meets else 0, rel=0.005)
