"""Every grid equals one process on the same global batch."""

from typing import Any, Collection, Iterable

import pytest
import torch
from rank_pool import RankPool
from small import plain_training, small_config, small_corpus, whole_parameters

from islands.data.base import Batches, Sampler, num_samples
from islands.forward_backward import IGNORED
from islands.island import build_island
from islands.learning_rate import learning_rate
from islands.process import Process

#: In fp64 rounding stays below 1e-12 and real mistakes begin at 1e-3.
TOLERANCE = 1e-10


#: The batch: 12 sequences, so that 4 ranks can run 3 micro-batches each.
BATCH = 12


def train_island(process: Process, overrides: dict[str, Any], padded: bool) -> dict[str, Any]:
    """Five steps; losses and norms as this rank reports them, and the whole parameters."""
    config = small_config(**overrides)
    island, steps = build_island(config, process, small_corpus()), config.train.steps
    batches, data = island.batches(), island.mesh.data
    share, results = BATCH // data.size(), []
    for step in range(steps):
        inputs, targets = batches.at(0, BATCH * step)
        if padded:
            targets[pad_mask(step)[data.get_local_rank() * share :][:share]] = IGNORED
        results.append(island.train_step(inputs, targets, learning_rate(config.optimizer, step, steps, BATCH)))
    return dict(
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        parameters=whole_parameters(island),
        evaluation=island.evaluate(),
        again=island.evaluate(),
    )


def pad_mask(step: int) -> torch.Tensor:
    """Which of the (12, 16) targets are padding: more of them in later sequences, so that ranks have unequal counts."""
    draw = torch.rand(BATCH, 16, generator=torch.Generator().manual_seed(step))
    return draw < torch.linspace(0.0, 0.9, BATCH)[:, None]


def reference(overrides: dict[str, Any], padded: bool) -> dict[str, Any]:
    """The same steps in this process, on whole batches."""
    config, corpus = small_config(**overrides), small_corpus()
    seq_len, steps = config.data.seq_len, config.train.steps
    batches = Batches(corpus.train, seq_len, BATCH, Sampler(num_samples(corpus.train, seq_len), config.run.seed), 0, 1)
    rates = [learning_rate(config.optimizer, step, steps, BATCH) for step in range(steps)]
    whole = [batches.at(0, BATCH * step) for step in range(steps)]
    if padded:
        whole = [(x, y.masked_fill(pad_mask(step), IGNORED)) for step, (x, y) in enumerate(whole)]
    return plain_training(config, whole, rates)


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def check_parity(ranks: RankPool, world_size: int, padded: bool = False, **overrides: dict[str, Any]) -> None:
    """Losses, gradient norms and parameters of every rank against one process."""
    overrides["train"] = dict(global_batch_size=BATCH) | overrides.get("train", {})
    expected = reference(overrides, padded)
    for rank in ranks.run(train_island, world_size, overrides, padded):
        assert rank["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        assert rank["norms"] == pytest.approx(expected["norms"], abs=TOLERANCE)
        assert largest_difference(rank["parameters"], expected["parameters"]) < TOLERANCE
        assert rank["evaluation"] == rank["again"]  # an evaluation leaves the model as it was


GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, dict(data_parallel_strategy="zero3")),
    "one rank ddp": (1, dict(data_parallel_strategy="ddp")),
    "ddp 2": (2, dict(data_parallel_strategy="ddp")),
    "ddp 4": (4, dict(data_parallel_strategy="ddp")),
    "zero1 2": (2, dict(data_parallel_strategy="zero1")),
    "zero2 2": (2, dict(data_parallel_strategy="zero2")),
    "zero2 4": (4, dict(data_parallel_strategy="zero2")),
    "zero3 2": (2, dict(data_parallel_strategy="zero3")),
    "zero3 4": (4, dict(data_parallel_strategy="zero3")),
    "hybrid 2x2": (4, dict(data_parallel_strategy="hybrid_shard", shard_size=2)),
    "hybrid 2x2 zero2": (4, dict(data_parallel_strategy="hybrid_shard", shard_size=2, shard_strategy="zero2")),
}


@pytest.mark.parametrize("micro_batch_size", [0, 1], ids=["whole", "accumulated"])
@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_equals_one_process(ranks: RankPool, grid: str, micro_batch_size: int) -> None:
    world_size, parallel = GRIDS[grid]
    check_parity(ranks, world_size, parallel=parallel, train=dict(micro_batch_size=micro_batch_size))


def with_slow(grids: Iterable[str], slow: Collection[str]) -> list[Any]:
    """Parameters of a test, those in ``slow`` marked: they cost seconds and differ little from their neighbours."""
    return [pytest.param(grid, marks=[pytest.mark.slow] * (grid in slow)) for grid in grids]


#: With two tensor ranks.
TENSOR_GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, dict()),
    "tp2 sequence": (2, dict(sequence_parallel=True)),
    "zero3 x tp2": (4, dict(data_parallel_strategy="zero3")),
    "zero3 x tp2 sequence": (4, dict(data_parallel_strategy="zero3", sequence_parallel=True)),
    "zero2 x tp2": (4, dict(data_parallel_strategy="zero2")),
    "zero1 x tp2 sequence": (4, dict(data_parallel_strategy="zero1", sequence_parallel=True)),
    "ddp x tp2 sequence": (4, dict(data_parallel_strategy="ddp", sequence_parallel=True)),
    "ddp x tp2": (4, dict(data_parallel_strategy="ddp")),
    "hybrid 2x2 x tp2": (8, dict(data_parallel_strategy="hybrid_shard", shard_size=2)),
}


def check_tensor_parity(ranks: RankPool, grid: str, micro_batches: int = 1, padded: bool = False, **overrides: Any) -> None:
    """4 query heads share 2 key-value heads; the vocabulary of 257 is padded to 258."""
    world_size, parallel = TENSOR_GRIDS[grid]
    micro_batch_size = BATCH * 2 // world_size // micro_batches
    overrides["parallel"] = dict(tensor_parallel_size=2, **parallel)
    overrides["model"] = dict(pad_vocab_to_multiple_of=2) | overrides.get("model", {})
    overrides["train"] = dict(micro_batch_size=micro_batch_size) | overrides.get("train", {})
    check_parity(ranks, world_size, padded, **overrides)


@pytest.mark.parametrize("grid", with_slow(TENSOR_GRIDS, slow=("zero3 x tp2 sequence", "zero2 x tp2", "ddp x tp2", "hybrid 2x2 x tp2")))
def test_every_tensor_grid_equals_one_process(ranks: RankPool, grid: str) -> None:
    check_tensor_parity(ranks, grid, micro_batches=2, padded=grid.startswith("zero1"))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_four_tensor_ranks_with_four_key_value_heads(ranks: RankPool, sequence_parallel: bool) -> None:
    parallel = dict(tensor_parallel_size=4, sequence_parallel=sequence_parallel)
    check_parity(ranks, 4, parallel=parallel, model=dict(num_kv_heads=4, pad_vocab_to_multiple_of=4))


@pytest.mark.parametrize("grid", with_slow(["tp2", "zero3 x tp2 sequence", "ddp x tp2"], slow=("ddp x tp2",)))
def test_tied_embeddings_cut_by_vocabulary(ranks: RankPool, grid: str) -> None:
    check_tensor_parity(ranks, grid, model=dict(tied_embeddings=True))


@pytest.mark.parametrize(
    ("grid", "mode"),
    [
        ("tp2 sequence", "full"),
        ("tp2 sequence", "selective"),
        pytest.param("zero3 x tp2", "full", marks=pytest.mark.slow),
        pytest.param("ddp x tp2", "selective", marks=pytest.mark.slow),
    ],
)
def test_recompute_of_cut_blocks(ranks: RankPool, grid: str, mode: str) -> None:
    check_tensor_parity(ranks, grid, micro_batches=2, train=dict(recompute=mode))


def test_cpu_offload_of_cut_parameters(ranks: RankPool) -> None:
    parallel = dict(tensor_parallel_size=2, data_parallel_strategy="zero3", cpu_offload=True)
    check_parity(ranks, 2, parallel=parallel, model=dict(pad_vocab_to_multiple_of=2))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
def test_tied_embeddings(ranks: RankPool, strategy: str) -> None:
    check_parity(ranks, 2, parallel=dict(data_parallel_strategy=strategy), model=dict(tied_embeddings=True))


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_padding_spread_unevenly_over_ranks(ranks: RankPool, strategy: str) -> None:
    check_parity(
        ranks, 4, padded=True, parallel=dict(data_parallel_strategy=strategy), train=dict(micro_batch_size=1)
    )


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_recompute(ranks: RankPool, mode: str, strategy: str) -> None:
    check_parity(
        ranks, 2, parallel=dict(data_parallel_strategy=strategy), train=dict(recompute=mode, micro_batch_size=2)
    )


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_cpu_offload(ranks: RankPool, strategy: str) -> None:
    check_parity(ranks, 2, parallel=dict(data_parallel_strategy=strategy, cpu_offload=True))


@pytest.mark.parametrize("options", [dict(static_graph=True), dict(find_unused_parameters=True), dict(gradient_as_bucket_view=False)])
def test_options_of_ddp(ranks: RankPool, options: dict[str, bool]) -> None:
    check_parity(
        ranks, 2, parallel=dict(data_parallel_strategy="ddp", ddp=options), train=dict(micro_batch_size=2)
    )


def pipeline(ranks: int = 2, schedule: str = "1f1b", **keys: Any) -> dict[str, Any]:
    return dict(pipeline_parallel_size=ranks, pipeline_schedule=schedule, **keys)


#: Ranks, `parallel`, and the layers of a model with tied embeddings (None: the small model as it is).
PIPELINES: dict[str, tuple[int, dict[str, Any], int | None]] = {
    "gpipe": (2, pipeline(schedule="gpipe"), None),
    "1f1b": (2, pipeline(), None),
    "1f1b tied": (2, pipeline(), 3),
    "interleaved": (2, pipeline(schedule="interleaved_1f1b"), 4),
    "zero bubble": (2, pipeline(schedule="zero_bubble"), 5),
    "zero bubble, 3 stages a rank": (2, pipeline(schedule="zero_bubble", pipeline_stages_per_rank=3), 6),
    "offloaded tied": (2, pipeline(cpu_offload=True), 2),
    "4 ranks interleaved": (4, pipeline(4, "interleaved_1f1b"), 8),
    "zero3": (4, pipeline(data_parallel_strategy="zero3"), None),
    "zero3 zero bubble tied": (4, pipeline(schedule="zero_bubble", data_parallel_strategy="zero3"), 4),
    "zero2": (4, pipeline(data_parallel_strategy="zero2"), None),
    "zero1 interleaved tied": (4, pipeline(schedule="interleaved_1f1b", data_parallel_strategy="zero1"), 4),
    "ddp tied": (4, pipeline(data_parallel_strategy="ddp"), 2),
    "hybrid 2x2": (8, pipeline(data_parallel_strategy="hybrid_shard", shard_size=2), None),
}


@pytest.mark.parametrize(
    "grid",
    with_slow(
        PIPELINES,
        slow=("zero bubble, 3 stages a rank", "4 ranks interleaved", "zero3 zero bubble tied", "zero2", "zero1 interleaved tied", "hybrid 2x2"),
    ),
)
def test_every_pipeline_equals_one_process_with_padding(ranks: RankPool, grid: str) -> None:
    world_size, parallel, tied_layers = PIPELINES[grid]
    model = dict(num_layers=tied_layers, tied_embeddings=True) if tied_layers else {}
    micro_batch_size = 1 if world_size == 8 else 3  # 4 or 2 micro-batches a rank, and 3 on 8 ranks
    train = dict(micro_batch_size=micro_batch_size)
    check_parity(ranks, world_size, padded=True, parallel=parallel, model=model, train=train)


#: Stages that tensor parallelism has cut, with a padded vocabulary.
CUT_PIPELINES: dict[str, tuple[int, dict[str, Any], bool]] = {
    "tp2": (4, pipeline(tensor_parallel_size=2), True),
    "tp2 sequence": (4, pipeline(tensor_parallel_size=2, sequence_parallel=True), False),
    "zero2 x tp2": (8, pipeline(tensor_parallel_size=2, data_parallel_strategy="zero2"), False),
    "zero3 x tp2 sequence zero bubble": (
        8,
        pipeline(tensor_parallel_size=2, sequence_parallel=True, schedule="zero_bubble", data_parallel_strategy="zero3"),
        True,
    ),
    "ddp x tp2": (8, pipeline(tensor_parallel_size=2, data_parallel_strategy="ddp"), False),
}


@pytest.mark.parametrize(
    "grid", with_slow(CUT_PIPELINES, slow=("tp2", "tp2 sequence", "zero3 x tp2 sequence zero bubble", "ddp x tp2"))
)
def test_a_pipeline_of_tensor_parallel_stages(ranks: RankPool, grid: str) -> None:
    world_size, parallel, tied = CUT_PIPELINES[grid]
    model = dict(num_layers=4, pad_vocab_to_multiple_of=2, tied_embeddings=tied)
    check_parity(ranks, world_size, padded=True, parallel=parallel, model=model, train=dict(micro_batch_size=3))


@pytest.mark.parametrize(
    "schedule, mode",
    [
        ("1f1b", "full"),
        pytest.param("interleaved_1f1b", "selective", marks=pytest.mark.slow),
        pytest.param("zero_bubble", "full", marks=pytest.mark.slow),
    ],
)
def test_recompute_in_a_pipeline(ranks: RankPool, schedule: str, mode: str) -> None:
    train = dict(recompute=mode, micro_batch_size=3)
    check_parity(ranks, 2, parallel=pipeline(schedule=schedule), model=dict(num_layers=4), train=train)


def bf16_losses(process: Process, parallel: dict[str, Any]) -> tuple[list[float], set[torch.dtype]]:
    config = small_config(train=dict(precision="bf16"), parallel=parallel, model=dict(pad_vocab_to_multiple_of=2))
    island = build_island(config, process, small_corpus())
    batches = island.batches()
    losses = [island.train_step(*batches.at(0, 8 * step), 1e-3).loss for step in range(5)]
    return losses, {parameter.dtype for parameter in island.model.parts[0].parameters()}


@pytest.mark.parametrize(
    "parallel",
    [
        dict(data_parallel_strategy="zero3"),
        dict(tensor_parallel_size=2, data_parallel_strategy="zero3", sequence_parallel=True),
        dict(tensor_parallel_size=2, data_parallel_strategy="ddp"),
    ],
    ids=["zero3", "zero3 x tp2 sequence", "ddp x tp2"],
)
def test_bf16_keeps_fp32_weights_and_follows_fp32(ranks: RankPool, parallel: dict[str, Any]) -> None:
    optimizer = dict(lr=1e-3, schedule="constant", warmup_steps=0)
    config = small_config(train=dict(precision="fp32"), optimizer=optimizer, model=dict(pad_vocab_to_multiple_of=2))
    corpus, seq_len = small_corpus(), config.data.seq_len
    batches = Batches(corpus.train, seq_len, 8, Sampler(num_samples(corpus.train, seq_len), 0), 0, 1)
    expected = plain_training(config, [batches.at(0, 8 * step) for step in range(5)], [1e-3] * 5)["losses"]
    for losses, dtypes in ranks.run(bf16_losses, 2, parallel):
        assert dtypes == {torch.float32}
        assert losses == pytest.approx(expected, rel=2e-2)  # bf16 has 8 bits of mantissa
        assert losses != expected


def skipped_step(process: Process) -> tuple[bool, bool]:
    island = build_island(small_config(), process, small_corpus())
    before = whole_parameters(island)
    inputs, targets = island.batches().at(0, 0)
    with torch.no_grad():
        next(island.model.parts[0].parameters()).to_local().fill_(float("nan") if process.rank == 0 else 0.0)
    broken = whole_parameters(island)
    result = island.train_step(inputs, targets, 1e-3)
    after = whole_parameters(island)
    unchanged = all(torch.equal(broken[name].nan_to_num(7), after[name].nan_to_num(7)) for name in before)
    return result.applied, unchanged


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(ranks: RankPool) -> None:
    assert ranks.run(skipped_step, 2) == [(False, True)] * 2
