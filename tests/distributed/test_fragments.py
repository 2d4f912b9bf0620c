"""Fragments leave the model whole and come back to the bit."""

import re
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from small import plain_model, small_config, small_corpus, whole_parameters
from torch import Tensor

import islands.parameter_mover
from islands.config_file import ConfigError
from islands.fragments import Fragment, ParameterSpec, cut, schema_of
from islands.initialize import named_parameters
from islands.island import build_island, meta_model
from islands.parameter_mover import ParameterMover
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
    islands.parameter_mover.BUCKET_BYTES = bucket_bytes
    island = build_island(small_config(**overrides), process, small_corpus())
    fragments, mine = halves(overrides), process.rank == owner
    mover = ParameterMover(island.model.parts, fragments, process)
    vectors = [torch.zeros(f.numel, dtype=torch.float64) if mine else None for f in fragments]
    before, moving = whole_parameters(island), [mover.gather(index, owner, vector) for index, vector in enumerate(vectors)]
    with torch.no_grad():
        for parameter in named_parameters(island.model.parts).values():
            parameter.zero_()  # what was gathered is what it was before, although it may be on its way still
    for future in moving:
        future.result()
    for incoming in [mover.scatter(index, owner, vector) for index, vector in enumerate(vectors)]:
        incoming.apply()
    restored = whole_parameters(island)
    for index, vector in enumerate(vectors):
        mover.scatter(index, owner, vector).apply(Tensor.add_)
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


def names(fragments: list[Fragment]) -> list[list[str]]:
    """Blocks and other parameters of each, every block once."""
    short = [[re.sub(r"^layers\.(\d+)\..*", r"\1", spec.name) for spec in fragment.parameters] for fragment in fragments]
    return [list(dict.fromkeys(each)) for each in short]


def test_every_parameter_that_trains_belongs_to_one_fragment() -> None:
    model = meta_model(small_config(model=dict(num_layers=5)))
    schema = schema_of(model)
    for count in (1, 2, 3, 5):
        for pattern in ("strided", "contiguous"):
            for separate in (False, True):
                fragments = cut(schema, count, pattern, separate)
                assert len(fragments) == count
                assert sorted(spec.name for f in fragments for spec in f.parameters) == sorted(named_parameters([model]))
    (whole,) = cut(schema, 1)
    assert [spec.name for spec in whole.parameters] == list(named_parameters([model]))
    assert whole.numel == sum(parameter.numel() for parameter in model.parameters())


def test_blocks_are_cut_as_asked() -> None:
    schema = schema_of(meta_model(small_config(model=dict(num_layers=5))))
    ends = ["embed_tokens.weight", "norm.weight", "lm_head.weight"]
    assert names(cut(schema, 3, "strided", separate_ends=True)) == [["0", "2", "4"], ["1", "3"], ends]
    assert names(cut(schema, 3, "contiguous", separate_ends=True)) == [["0", "1"], ["2", "3", "4"], ends]
    merged = cut(schema, 3)
    assert [[name for name in each if name not in ends] for each in names(merged)] == [["0", "3"], ["1", "4"], ["2"]]
    sizes = [fragment.numel for fragment in merged]
    assert max(sizes) - min(sizes) <= max(spec.numel for spec in schema) * 2


def test_a_frozen_parameter_is_left_out_and_shifts_no_other() -> None:
    model = meta_model(small_config(model=dict(num_layers=4)))
    before = names(cut(schema_of(model), 2))
    model.norm.weight.requires_grad_(False)
    for parameter in model.blocks["1"].parameters():
        parameter.requires_grad_(False)
    after = names(cut(schema_of(model), 2))
    assert before[0][:3] == ["embed_tokens.weight", "0", "2"] and {"norm.weight", "1"} & {*sum(after, [])} == set()
    assert sum(after, []) and {"0", "2", "3"} <= {*sum(after, [])}


@pytest.mark.parametrize(("count", "separate", "most"), [(6, False, 5), (7, True, 6)])
def test_more_fragments_than_blocks_are_refused(count: int, separate: bool, most: int) -> None:
    schema = schema_of(meta_model(small_config(model=dict(num_layers=5))))
    with pytest.raises(ConfigError, match=f"outer.fragments={count} .* has 5 blocks that train; give at most {most}"):
        cut(schema, count, "strided", separate)


def unknown_placement(process: Process) -> None:
    island = build_island(small_config(), process, small_corpus())
    ParameterMover(island.model.parts, [Fragment("all", (ParameterSpec("norm.weight", (33,)),))], process)


def test_a_schema_that_does_not_fit_the_model_is_refused(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="the ranks hold 32 of the 33 elements of norm.weight"):
        ranks.run(unknown_placement, 2)
