"""What the prediction says without any rank: its parts, its command line, its table of strategies."""

import json
from pathlib import Path
from typing import Any

import pytest
from small import small_config

from islands.activations import activation_bytes
from islands.memory import Estimate, compare, estimate, in_words, main
from islands.mesh import check_grid

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def predicted(num_ranks: int = 4, **sections: Any) -> Estimate:
    config = small_config(**sections)
    return estimate(config, check_grid(config, num_ranks))


def test_recomputation_keeps_less_and_selective_is_between() -> None:
    kept = [activation_bytes(small_config(train=dict(recompute=mode)), 8) for mode in ("none", "selective", "full")]
    assert kept[0] > kept[1] > kept[2] > 0


def test_activations_grow_with_the_micro_batch_and_nothing_else_does() -> None:
    large, small = (predicted(train=dict(micro_batch_size=size), data=dict(seq_len=64)) for size in (2, 1))
    assert large.activations == pytest.approx(2 * small.activations, rel=0.1)
    assert large.parameters == small.parameters and large.optimizer == small.optimizer


def test_plain_sgd_has_no_state_and_momentum_one_copy() -> None:
    assert predicted(optimizer=dict(type="sgd")).optimizer == 0
    adam = predicted().optimizer
    assert predicted(optimizer=dict(type="sgd", momentum=0.9)).optimizer * 2 == adam


def test_offload_moves_shards_to_the_host() -> None:
    stays, moves = (predicted(parallel=dict(cpu_offload=offload)) for offload in (False, True))
    assert stays.host == 0 and moves.optimizer == 0
    assert moves.state + moves.host == stays.state


def test_buckets_apart_from_gradients_hold_them_twice() -> None:
    views, apart = (
        predicted(parallel=dict(data_parallel_strategy="ddp", ddp=dict(gradient_as_bucket_view=view)))
        for view in (True, False)
    )
    assert apart.gradients == 2 * views.gradients


def test_each_strategy_is_shown_beside_the_chosen_one() -> None:
    assert list(compare(small_config(), 4)) == ["ddp", "zero1", "zero2", "zero3", "hybrid_shard"]
    assert "hybrid_shard" not in compare(small_config(), 2)  # groups of one rank shard nothing
    found = compare(small_config(parallel=dict(data_parallel_strategy="hybrid_shard", shard_size=4)), 8)
    assert found["zero3"].parameters < found["hybrid_shard"].parameters < found["ddp"].parameters * 2


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 << 40, "5120.00 GiB")]
)
def test_bytes_in_words(num_bytes: int, words: str) -> None:
    assert in_words(num_bytes) == words


def test_the_command_line_prints_bytes_or_why_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(CONFIG), "--json", "--world-size", "4", "model.num_layers=2"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["world_size"] == 4 and answer["chosen"] == "zero3"
    ddp = answer["bytes"]["ddp"]
    assert ddp["total"] == sum(ddp[part] for part in ("parameters", "gradients", "optimizer", "activations", "buffers"))
    assert main([str(CONFIG), "model.num_layers=2"]) == 0
    table = capsys.readouterr().out
    assert "of 2 ranks" in table and all(strategy in table for strategy in ("ddp", "zero1", "zero2", "zero3"))
    assert main([str(CONFIG), "--world-size", "3"]) == 2
    assert "global_batch_size" in capsys.readouterr().err
