"""Which fragments launch when, and where the learning rate stands."""

from typing import Any

import pytest
from small import small_config

from diloco.from_config import make_schedule
from diloco.schedule import RoundTimer, Standing, StepSchedule, TimedSchedule
from islands.config_file import ConfigError


def launches(schedule: StepSchedule) -> dict[int, list[int]]:
    """Steps after which something launches, and what."""
    return {step: found for step in range(1, schedule.steps + 1) if (found := schedule.launches(step))}


# By steps.


def test_one_fragment_launches_every_so_many_steps() -> None:
    assert launches(StepSchedule(steps=12, sync_every=4)) == {4: [0], 8: [0], 12: [0]}


def test_the_last_step_ends_with_a_round_even_between_two() -> None:
    assert launches(StepSchedule(steps=10, sync_every=4)) == {4: [0], 8: [0], 10: [0]}
    assert launches(StepSchedule(steps=3, sync_every=100)) == {3: [0]}


def test_every_step_may_have_a_round() -> None:
    assert launches(StepSchedule(steps=3, sync_every=1)) == {1: [0], 2: [0], 3: [0]}


def test_fragments_are_staggered_evenly() -> None:
    found = launches(StepSchedule(steps=24, sync_every=12, num_fragments=3))
    assert found == {4: [2], 8: [1], 12: [0], 16: [2], 20: [1], 24: [0, 1, 2]}


@pytest.mark.parametrize(("sync_every", "fragments"), [(12, 1), (12, 3), (12, 5), (7, 3), (3, 5), (1, 4)])
def test_every_fragment_launches_once_in_each_period(sync_every: int, fragments: int) -> None:
    schedule = StepSchedule(steps=1000, sync_every=sync_every, num_fragments=fragments)
    for start in (1, 2, 50):
        period = [index for step in range(start, start + sync_every) for index in schedule.launches(step)]
        assert sorted(period) == list(range(fragments))


def test_by_steps_an_island_is_where_the_swarm_is() -> None:
    schedule = StepSchedule(steps=100, sync_every=10)
    assert schedule.joined(step=30, tokens=7) == Standing(30, 30)
    assert schedule.stepped(Standing(31, 31)) == Standing(31, 31)
    assert schedule.landed(Standing(40, 40), step=60, tokens=7) == Standing(60, 60)
    assert schedule.landed(Standing(40, 40), step=40, tokens=7) == Standing(40, 40)
    assert schedule.landed(Standing(40, 40), step=20, tokens=7) == Standing(20, 20)  # after a partition


def test_a_jump_does_not_pass_by_the_last_round_of_another_fragment() -> None:
    schedule = StepSchedule(steps=100, sync_every=10, num_fragments=2)
    assert schedule.landed(Standing(40, 40), step=100, tokens=7, finished=False) == Standing(99, 99)
    assert schedule.landed(Standing(100, 100), step=100, tokens=7, finished=False) == Standing(100, 100)
    assert schedule.landed(Standing(40, 40), step=103, tokens=7) == Standing(100, 100)


# By the clock.


def test_by_the_clock_the_learning_rate_follows_the_tokens_of_the_swarm() -> None:
    schedule = TimedSchedule(steps=100, seconds=9.0, total_tokens=200_000)
    assert schedule.joined(step=30, tokens=50_000) == Standing(30, 25)
    assert schedule.landed(Standing(40, 90), step=60, tokens=50_000) == Standing(40, 25)  # the island's own steps go on
    assert schedule.landed(Standing(40, 20), step=60, tokens=51_999) == Standing(40, 25)
    assert schedule.landed(Standing(40, 20), step=60, tokens=52_000) == Standing(40, 26)


def test_by_the_clock_only_counted_tokens_end_the_run() -> None:
    schedule = TimedSchedule(steps=100, seconds=9.0, total_tokens=200_000)
    assert schedule.stepped(Standing(500, 100)) == Standing(500, 99)
    assert schedule.stepped(Standing(40, 41)) == Standing(40, 41)
    assert schedule.landed(Standing(40, 99), step=60, tokens=199_999) == Standing(40, 99)
    for tokens in (200_000, 10**9):
        assert schedule.landed(Standing(40, 20), step=60, tokens=tokens) == Standing(40, 100)
        assert schedule.joined(step=60, tokens=tokens) == Standing(60, 100)


def nobody(fragment: int) -> bool:
    return False


def test_a_round_is_due_when_its_time_since_the_last_is_over() -> None:
    timer = RoundTimer(TimedSchedule(steps=9, seconds=10.0, total_tokens=1), now=100.0)
    assert [timer.due(now, nobody) for now in (101.0, 109.9, 110.0, 117.0)] == [[], [], [0], [0]]
    timer.landed(0, since=118.0)
    assert [timer.due(now, nobody) for now in (119.0, 127.9, 128.0)] == [[], [], [0]]


def test_an_island_that_others_wait_for_comes_at_once() -> None:
    timer = RoundTimer(TimedSchedule(steps=9, seconds=10.0, total_tokens=1, num_fragments=3), now=0.0)
    assert timer.due(0.1, lambda fragment: fragment == 1) == [1]


def test_by_the_clock_fragments_are_staggered_evenly() -> None:
    timer = RoundTimer(TimedSchedule(steps=9, seconds=12.0, total_tokens=1, num_fragments=3), now=0.0)
    found = {}
    for now in range(1, 25):
        for fragment in timer.due(float(now), nobody):
            found.setdefault(now, []).append(fragment)
            timer.landed(fragment, float(now))
    assert found == {4: [2], 8: [1], 12: [0], 16: [2], 20: [1], 24: [0]}


# From a configuration.


@pytest.mark.parametrize("sync_every", [1, 7])
def test_a_whole_number_means_steps(sync_every: int) -> None:
    config = small_config(outer=dict(sync_every=sync_every), train=dict(steps=50))
    assert make_schedule(config, 3) == StepSchedule(50, sync_every, 3)


@pytest.mark.parametrize(("sync_every", "seconds"), [("90s", 90.0), ("1.5s", 1.5)])
def test_a_time_means_seconds_and_the_tokens_of_all_islands(sync_every: str, seconds: float) -> None:
    overrides = dict(train=dict(steps=50, global_batch_size=8), data=dict(seq_len=16), swarm=dict(islands=3))
    config = small_config(outer=dict(sync_every=sync_every), **overrides)
    assert make_schedule(config, 2) == TimedSchedule(50, seconds, total_tokens=50 * 8 * 16 * 3, num_fragments=2)


@pytest.mark.parametrize("value", [0, -3, True, 2.5, None, "90", "90 s", "1m", "0s", "-1s", "1e3s", "s", "infs", [30]])
def test_what_is_neither_steps_nor_seconds_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        small_config(outer=dict(sync_every=value))
    (told,) = str(refused.value).splitlines()[1:]
    rule = "is neither inner steps, a whole number from 1 such as 30, nor seconds such as 90s or 1.5s"
    assert told == f"  outer.sync_every: {value!r} {rule}"


@pytest.mark.parametrize(("after", "overlap", "met"), [(0, 0, 3), (2, 0, 3), (3, 0, 6), (3, 2, 8), (17, 2, 20), (18, 2, 20), (19, 0, 20)])
def test_islands_have_met_when_the_next_launch_has_landed(after: int, overlap: int, met: int) -> None:
    schedule = StepSchedule(steps=20, sync_every=6, num_fragments=2)  # one of the two launches every 3 steps, and both after 20
    assert schedule.meeting_after(after, overlap) == met
