"""What replicas of one job can't do is refused before anything starts, and the message names the keys."""

from typing import Any

import pytest
from small import small_config

from diloco.cluster import check_cluster
from islands.config_file import ConfigError

PLAIN = dict(type="sgd", lr=1.0, momentum=0.0)


def config(outer: dict[str, Any], **swarm: Any) -> Any:
    return small_config(exchange=dict(type="process_group"), outer=outer, swarm=dict(islands=2, **swarm))


@pytest.mark.parametrize(
    ("outer", "keys"),
    [
        (dict(sync_every="90s"), ["outer.sync_every=90s"]),
        (dict(overlap="eager"), ["outer.overlap=eager"]),
        (dict(late="land_late"), ["outer.late=land_late"]),
        (dict(adaptive=dict(target=0.9)), ["outer.adaptive.target"]),
        (dict(error_feedback=True), ["outer.error_feedback"]),
        (dict(codec=dict(type="int4"), error_feedback=False), ["outer.codec.type=int4", "none, bf16, int8"]),
        (dict(sync_every=1), ["outer.sync_every=1", "outer.optimizer", "momentum=0.9", "lr=0.7"]),
        (dict(sync_every=1, optimizer=dict(type="adam")), ["outer.sync_every=1", "type=adam"]),
        (dict(sync_every=1, optimizer=PLAIN | dict(warmup_rounds=3)), ["outer.sync_every=1", "outer.optimizer", "warmup_rounds=3"]),
        (dict(sync_every=1, optimizer=PLAIN, codec=dict(type="int8")), ["outer.sync_every=1", "outer.codec.type=int8"]),
        (dict(sync_every=1, optimizer=PLAIN, overlap=1), ["outer.sync_every=1", "outer.overlap=1"]),
        (dict(sync_every=1, optimizer=PLAIN, merge_alpha=0.5), ["outer.sync_every=1", "outer.merge_alpha=0.5"]),
    ],
)
def test_outer_keys_that_mean_nothing_are_refused(outer: dict[str, Any], keys: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        config(outer)
    assert all(key in str(refused.value) for key in ["exchange.type=process_group", *keys])


def test_keys_by_which_islands_find_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="swarm.slot=1 has no meaning"):
        config({}, slot=1)
    with pytest.raises(ConfigError, match="exchange.min_islands=2 has no meaning"):
        small_config(exchange=dict(type="process_group", min_islands=2))


def test_so_few_checkpoints_that_islands_may_have_none_in_common_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"islands can be 12 steps apart.*keep at least 5"):
        small_config(exchange=dict(type="process_group"), outer=dict(sync_every=10, overlap=2), checkpoint=dict(every=4))
    small_config(exchange=dict(type="process_group"), outer=dict(sync_every=10, overlap=2), checkpoint=dict(every=12))


def test_plain_averaging_goes_with_every_step_and_every_k_steps() -> None:
    assert config(dict(sync_every=1, optimizer=PLAIN)).outer.sync_every == 1
    assert config(dict(sync_every=10, optimizer=PLAIN, codec=dict(type="bf16"), overlap=3)).outer.sync_every == 10


def test_ranks_are_divided_evenly_among_replicas() -> None:
    assert check_cluster(config({}), 4).shard == 2
    with pytest.raises(ConfigError, match=r"the 5 ranks of the job can't be divided among 2 replicas.*to 1 or 5"):
        check_cluster(config({}), 5)
