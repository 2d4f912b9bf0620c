"""Which changes of a configuration a checkpoint survives."""

from typing import Any

import pytest
from small import small_config

from islands.config_changes import changes


def change(before: dict[str, Any], now: dict[str, Any]) -> tuple[str, str]:
    """The only change between two configurations, and the harm it does."""
    (found,) = changes(small_config(**before).model_dump(), small_config(**now).model_dump())
    return str(found), found.harm


@pytest.mark.parametrize(
    ("before", "now", "told", "harm"),
    [
        (dict(), dict(run=dict(seed=1)), "run.seed: 0 -> 1", "other samples"),
        (dict(), dict(model=dict(num_kv_heads=4)), "model.num_kv_heads: 2 -> 4", "another model"),
        (dict(), dict(model=dict(norm_eps=1e-6)), "model.norm_eps: 1e-05 -> 1e-06", "another model"),
        (dict(), dict(data=dict(seq_len=8)), "data.seq_len: 16 -> 8", "other samples"),
        (dict(), dict(data=dict(held_out=0.1)), "data.held_out: 0.05 -> 0.1", "held out"),
        (dict(), dict(train=dict(precision="fp32")), "train.precision: 'fp64' -> 'fp32'", "another dtype"),
        (dict(), dict(swarm=dict(max_slots=9)), "swarm.max_slots: 8 -> 9", "other samples"),
        (dict(), dict(outer=dict(fragments=2)), "outer.fragments: 1 -> 2", "cut up"),
        (dict(outer=dict(fragments=2)), dict(outer=dict(fragments=2, fragment_pattern="contiguous")), "'contiguous'", "cut up"),
        (dict(), dict(outer=dict(overlap="eager")), "-> 'eager'", "eager overlap"),
        (dict(outer=dict(sync_every="5s")), dict(outer=dict(sync_every=4)), "outer.sync_every: '5s' -> 4", "counted in tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_change(before: dict[str, Any], now: dict[str, Any], told: str, harm: str) -> None:
    found, why = change(before, now)
    assert told in found and harm in why


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (dict(), dict(train=dict(steps=9))),
        (dict(train=dict(precision="fp32")), dict(train=dict(precision="bf16"))),
        (dict(), dict(parallel=dict(data_parallel_strategy="ddp"))),
        (dict(), dict(optimizer=dict(lr=1e-3))),
        (dict(), dict(run=dict(dir="elsewhere"))),
        (dict(outer=dict(sync_every="5s")), dict(outer=dict(sync_every="9s"))),
        (dict(outer=dict(overlap=1, sync_every=4)), dict(outer=dict(overlap=2, sync_every=4))),
    ],
    ids=str,
)
def test_what_can(before: dict[str, Any], now: dict[str, Any]) -> None:
    assert change(before, now)[1] == ""


def test_another_type_of_plug_in_is_one_change() -> None:
    before = small_config().model_dump()
    now = small_config(optimizer=dict(type="sgd")).model_dump()
    assert [(each.key, bool(each.harm)) for each in changes(before, now)] == [("optimizer.type", True)]


def test_sections_that_one_of_both_does_not_have_play_no_part() -> None:
    whole = small_config().model_dump()
    alone = {name: section for name, section in whole.items() if name not in ("outer", "exchange", "swarm")}
    assert changes(whole, alone) == changes(alone, whole) == changes(whole, whole) == []


def test_a_preset_that_comes_to_the_same_sizes_is_harmless() -> None:
    (found,) = changes(dict(model=dict(preset="15M", num_layers=2)), dict(model=dict(preset="60M", num_layers=2)))
    assert found.key == "model.preset" and not found.harm
