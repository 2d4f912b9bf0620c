"""Fragments leave the model whole and come back to the bit."""

from typing import Any

import pytest
import torch
from rank_pool import RankPool
from small import plain_model, small_config, small_corpus, whole_parameters
from torch import Tensor

import islands.fragments
from islands.fragments import Fragment, ParameterMover, schema_of
from islands.initialize import named_parameters
from islands.island import build_island, meta_model
from islands.process import Process


#: The vocabulary of 257 padded, so that two tensor ranks can share it; 129 rows each, which data ranks then cut unevenly.
MODEL = dict(pad_vocab_to_multiple_of=2)
PIPELINE = dict(pipeline_parallel_size=2)


def overrides_of(parallel: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Sections of the configuration."""
    return dict(parallel=parallel, model=MODEL | dict(tied_embeddings=tied), train=dict(micro_batch_size=1))


def halves(overrides: dict[str, Any]) -> list[Fragment]:
    """Every other parameter, so that neither fragment is a run of the model."""
    schema = schema_of(meta_model(small_config(**overrides)))
    return [Fragment("even", schema[::2]), Fragment("odd", schema[1::2])]


def flat(parameters: dict[str, Tensor], fragment: Fragment) -> Tensor:
    return torch.cat([parameters[spec.name].reshape(-1) for spec in fragment.parameters])


def move(process: Process, owner: int, bucket_bytes: int, overrides: dict[str, Any]) -> dict[str, object]:
    """Gather both fragments, wreck the model, scatter them back; then add a second time through ``apply``."""
    islands.fragments.BUCKET_BYTES = bucket_bytes
    island = build_island(small_config(**overrides), process, small_corpus())
    fragments, mine = halves(overrides), process.rank == owner
    mover = ParameterMover(island.model.parts, fragments)
    vectors = [torch.zeros(f.numel, dtype=torch.float64) if mine else None for f in fragments]
    for index, vector in enumerate(vectors):
        mover.gather(index, owner, vector)
    before = whole_parameters(island)
    with torch.no_grad():
        for parameter in named_parameters(island.model.parts).values():
            parameter.zero_()
    for index, vector in enumerate(vectors):
        mover.scatter(index, owner, vector)
    restored = whole_parameters(island)
    for index, vector in enumerate(vectors):
        mover.scatter(index, owner, vector, apply=Tensor.add_)
    return dict(vectors=vectors, before=before, restored=restored, doubled=whole_parameters(island))


@pytest.mark.parametrize(
    ("world_size", "owner", "bucket_bytes", "parallel", "tied"),
    [
        (1, 0, 64 << 20, dict(), False),
        (2, 1, 64 << 20, dict(), False),
        (4, 0, 5000, dict(), False),
        (2, 1, 5000, dict(tensor_parallel_size=2), False),
        (4, 0, 64 << 20, dict(tensor_parallel_size=2, sequence_parallel=True), False),
        (4, 3, 5000, dict(tensor_parallel_size=2, data_parallel_strategy="ddp"), False),
        pytest.param(
            8,
            5,
            5000,
            dict(tensor_parallel_size=2, data_parallel_strategy="hybrid_shard", shard_size=2),
            False,
            marks=pytest.mark.slow,
        ),
        (2, 0, 64 << 20, PIPELINE, False),
        (4, 3, 5000, PIPELINE, False),
        (2, 1, 64 << 20, PIPELINE, True),
        (8, 6, 5000, PIPELINE | dict(tensor_parallel_size=2), True),
    ],
    ids=[
        "1",
        "zero3 2",
        "zero3 4",
        "tp2",
        "zero3 x tp2 sequence",
        "ddp x tp2",
        "hybrid 2x2 x tp2",
        "pp2",
        "pp2 x zero3",
        "pp2 tied",
        "pp2 x zero3 x tp2 tied",
    ],
)
def test_weights_are_the_same_on_each_grid_and_gather_then_scatter_is_bit_identical(
    ranks: RankPool, world_size: int, owner: int, bucket_bytes: int, parallel: dict[str, Any], tied: bool
) -> None:
    overrides = overrides_of(parallel, tied)
    initial = {name: p.detach() for name, p in named_parameters([plain_model(small_config(**overrides))]).items()}
    results = ranks.run(move, world_size, owner, bucket_bytes, overrides)
    for index, fragment in enumerate(halves(overrides)):
        assert torch.equal(results[owner]["vectors"][index], flat(initial, fragment))
    for result in results:
        assert result["before"].keys() == initial.keys()
        for name, parameter in initial.items():
            assert torch.equal(result["before"][name], parameter)
            assert torch.equal(result["restored"][name], parameter)
            assert torch.equal(result["doubled"][name], 2 * parameter)


def test_every_parameter_belongs_to_one_fragment() -> None:
    model = meta_model(small_config())
    (whole,) = islands.fragments.whole_model(schema_of(model))
    assert [spec.name for spec in whole.parameters] == list(named_parameters([model]))
    assert whole.numel == sum(parameter.numel() for parameter in model.parameters())
    model.norm.weight.requires_grad_(False)  # a frozen parameter is left out, and shifts no other
    assert "norm.weight" not in [spec.name for spec in schema_of(model)]


def unknown_placement(process: Process) -> None:
    island = build_island(small_config(), process, small_corpus())
    ParameterMover(island.model.parts, [Fragment("all", (islands.fragments.ParameterSpec("norm.weight", (33,)),))])


def test_a_schema_that_does_not_fit_the_model_is_refused(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="the ranks hold 32 of the 33 elements of norm.weight"):
        ranks.run(unknown_placement, 2)
