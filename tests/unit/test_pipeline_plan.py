"""How layers are divided among stages, what a schedule needs, and what it is predicted to waste."""

import random
from itertools import combinations, pairwise
from typing import Any

import pytest
from small import small_config

from islands.config_file import ConfigError
from islands.island import meta_model
from islands.mesh import check_grid
from islands.strategies.pipeline_plan import partition, predicted_bubble


def test_partition_makes_the_largest_part_as_small_as_any_cut_does() -> None:
    draw = random.Random(0)
    for _ in range(50):
        costs = [draw.randint(1, 20) for _ in range(draw.randint(1, 9))]
        parts = draw.randint(1, len(costs))
        found = partition(costs, parts)
        assert [index for part in found for index in part] == list(range(len(costs)))
        assert len(found) == parts and all(found)
        cuts = ((0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), parts - 1))
        best = min(max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts)
        assert max(sum(costs[part.start : part.stop]) for part in found) == best


def test_equal_layers_are_spread_evenly() -> None:
    assert sorted(map(len, partition([5] * 7, 4))) == [1, 2, 2, 2]


def stages(num_stages: int, **model: Any) -> list[int]:
    """Layers of each stage."""
    whole = meta_model(small_config(model=model))
    return [len(part) for part in partition(whole.layer_costs(), num_stages)]


def test_a_large_vocabulary_leaves_fewer_layers_to_the_last_stage() -> None:
    assert stages(2, num_layers=8, vocab_size=2) == [4, 4]
    assert stages(2, num_layers=8, vocab_size=1000) == [6, 2]


def test_stages_hold_every_parameter_of_the_model_once_by_its_name() -> None:
    whole = meta_model(small_config(model=dict(num_layers=5)))
    held = [name for part in partition(whole.layer_costs(), 3) for name, _ in whole.stage(part).named_parameters()]
    assert sorted(held) == sorted(name for name, _ in whole.named_parameters())


@pytest.mark.parametrize(
    "schedule, ranks, micro_batches, expected",
    [
        ("gpipe", 4, 1, 3 / 4),
        ("1f1b", 4, 13, 3 / 16),
        ("interleaved_1f1b", 4, 8, 1.5 / 9.5),  # 2 stages a rank halve the wait
        ("zero_bubble", 4, 8, 0.5 / 8.5),  # and backward for weights fills two thirds of it
    ],
)
def test_predicted_bubble(schedule: str, ranks: int, micro_batches: int, expected: float) -> None:
    parallel = small_config(parallel=dict(pipeline_parallel_size=ranks, pipeline_schedule=schedule)).parallel
    assert predicted_bubble(parallel, micro_batches) == pytest.approx(expected)


@pytest.mark.parametrize(
    "parallel, train, world_size, message",
    [
        (dict(pipeline_parallel_size=3), {}, 3, "pipeline_parallel_size: 3 stages of pipeline_schedule=1f1b are more "
         "than model.num_layers=2; use at most 2 ranks, or a model with more layers"),
        (dict(pipeline_parallel_size=2, pipeline_schedule="zero_bubble"), {}, 2, "2 ranks x 2 stages each = 4 stages "
         "of pipeline_schedule=zero_bubble are more than model.num_layers=2; choose another pipeline_schedule, or a "),
        (dict(pipeline_parallel_size=2), {}, 2, "train.micro_batch_size: 8 cuts the 8 sequences of each rank into 1 "
         "micro-batches, and parallel.pipeline_schedule=1f1b with pipeline_parallel_size=2 needs at least 2; "
         "sizes that do: 1, 2, 4"),
        (dict(pipeline_parallel_size=2), dict(global_batch_size=2), 4, "no size does; set train.global_batch_size to"),
        (dict(pipeline_parallel_size=2, pipeline_schedule="interleaved_1f1b"),
         dict(global_batch_size=6, micro_batch_size=2), 2, "into 3 micro-batches, and parallel.pipeline_schedule="
         "interleaved_1f1b with pipeline_parallel_size=2 needs a multiple of 2; sizes that do: 1, 3"),
        (dict(pipeline_parallel_size=2, pipeline_schedule="zero_bubble"), dict(compile=True, micro_batch_size=1), 2,
         "zero_bubble takes the backward pass of a block apart, which torch can't do with train.compile=true"),
        (dict(pipeline_parallel_size=2, pipeline_schedule="zero_bubble"),
         dict(recompute="selective", micro_batch_size=1), 2,
         "can't do with train.recompute=selective"),
    ],
)  # fmt: skip
def test_what_a_pipeline_can_not_do_is_refused_with_what_it_can(
    parallel: dict[str, Any], train: dict[str, Any], world_size: int, message: str
) -> None:
    layers = 2 if "layers" in message else 4
    with pytest.raises(ConfigError, match=".*" + message.replace("(", r"\(")):
        check_grid(small_config(parallel=parallel, train=train, model=dict(num_layers=layers)), world_size)
