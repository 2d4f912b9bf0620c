"""Which fragments launch and land when."""

import pytest

from diloco.schedule import Schedule


def launches(schedule: Schedule) -> dict[int, list[int]]:
    """Steps after which something launches, and what."""
    return {step: found for step in range(1, schedule.steps + 1) if (found := schedule.launches(step))}


def test_one_fragment_launches_every_so_many_steps() -> None:
    assert launches(Schedule(steps=12, sync_every=4)) == {4: [0], 8: [0], 12: [0]}


def test_the_last_step_ends_with_a_round_even_between_two() -> None:
    assert launches(Schedule(steps=10, sync_every=4)) == {4: [0], 8: [0], 10: [0]}
    assert launches(Schedule(steps=3, sync_every=100)) == {3: [0]}


def test_every_step_may_have_a_round() -> None:
    assert launches(Schedule(steps=3, sync_every=1)) == {1: [0], 2: [0], 3: [0]}


def test_fragments_are_staggered_evenly() -> None:
    found = launches(Schedule(steps=24, sync_every=12, num_fragments=3))
    assert found == {4: [2], 8: [1], 12: [0], 16: [2], 20: [1], 24: [0, 1, 2]}


@pytest.mark.parametrize(("sync_every", "fragments"), [(12, 1), (12, 3), (12, 5), (7, 3), (3, 5), (1, 4)])
def test_every_fragment_launches_once_in_each_period(sync_every: int, fragments: int) -> None:
    schedule = Schedule(steps=1000, sync_every=sync_every, num_fragments=fragments)
    for start in (1, 2, 50):
        period = [index for step in range(start, start + sync_every) for index in schedule.launches(step)]
        assert sorted(period) == list(range(fragments))


@pytest.mark.parametrize("fragments", [1, 3])
def test_what_launches_lands_at_once(fragments: int) -> None:
    schedule = Schedule(steps=24, sync_every=12, num_fragments=fragments)
    assert all(schedule.landings(step) == schedule.launches(step) for step in range(1, 25))
