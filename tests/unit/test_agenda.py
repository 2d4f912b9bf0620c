"""Which rounds land and are launched between two inner steps, where others are slow, or wait."""

import time
from concurrent.futures import Future
from typing import Any, Callable

import pytest
from small import small_config

from diloco.agenda import Agenda
from diloco.exchange.base import RoundOutcome, Seat, Work
from diloco.flight import Boundary, Flight, Logbook
from diloco.from_config import make_layout, make_schedule
from diloco.outer_state import OuterState
from diloco.pace import Pacing
from islands.train_loop import Progress


class Others:
    """An exchange whose rounds are in when the test says so."""

    def __init__(self) -> None:
        self.arrivals: set[int] = set()
        self.late: set[int] = set()
        self.waiting: set[int] = set()
        self.waited_for: list[int] = []

    def arrived(self, fragment: int) -> bool:
        return fragment in self.arrivals

    def outcome(self, fragment: int) -> RoundOutcome:
        if fragment not in self.arrivals:
            self.waited_for.append(fragment)
        return RoundOutcome("committed", fragment, 1)

    def is_late(self, fragment: int) -> bool:
        return fragment in self.late

    def called(self, fragment: int) -> bool:
        return fragment in self.waiting


class Island:
    """Steps through a run and does what its agenda says, with rounds that all commit."""

    def __init__(
        self,
        early: bool = False,
        steps: int = 20,
        hurries: Callable[[], bool] | None = None,
        patience: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        **outer: Any,
    ) -> None:
        config = small_config(outer=outer, train=dict(steps=steps), swarm=dict(islands=2))
        count, state = config.outer.fragments, OuterState(make_layout(config, [4] * config.outer.fragments))
        self.others, self.progress, self.log = Others(), Progress(), Logbook.begin(count, Seat(0))
        schedule = make_schedule(config, count)
        pacing = Pacing(config.outer, state)
        self.agenda = Agenda(schedule, config.outer, self.others, pacing, early, hurries, patience, clock)
        self._clock = clock
        self.told: dict[int, list[tuple[str, int]]] = {}

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.log.inner_step += 1
            self.progress.step = self.progress.lr_step = self.log.inner_step
            for work in self.log.work:
                work.tokens += 10
            while self._act(self.agenda.next(self.progress, self.log)):
                pass

    def _act(self, boundary: Boundary) -> bool:
        told = self.told.setdefault(self.log.inner_step, [])
        for outcome in boundary.landing:
            told.append(("land", outcome.fragment))
            flight = self.log.flights.pop(outcome.fragment)
            self.log.work[outcome.fragment].counted(flight.work)
            self.others.arrivals.discard(outcome.fragment)
            self.agenda.landed(flight)
        for fragment in boundary.launching:
            told.append(("launch", fragment))
            work = Work(self.log.work[fragment].tokens, 0, 1, self.log.inner_step)
            flight = self.log.flights[fragment] = Flight(fragment, 4, work, self.log.inner_step, 0, clock=self._clock)
            flight.gathered.set_result(None)
            self.log.launched_at[fragment] = self.log.inner_step
        for outcome in boundary.arriving:
            told.append(("bring", outcome.fragment))
            self.log.flights[outcome.fragment].outcome = outcome
        return bool(boundary.landing or boundary.launching)

    def events(self) -> dict[int, list[tuple[str, int]]]:
        return {step: told for step, told in self.told.items() if told}


def test_a_round_lands_so_many_steps_after_its_launch() -> None:
    island = Island(sync_every=5, overlap=2, steps=12)
    island.step(12)
    assert island.events() == {
        5: [("launch", 0)], 7: [("land", 0)], 10: [("launch", 0)], 12: [("land", 0), ("launch", 0), ("land", 0)]
    }  # fmt: skip


@pytest.mark.parametrize("outer", [dict(overlap=0), dict(overlap=2), dict(overlap="eager")], ids=["blocking", "tau", "eager"])
def test_who_is_asked_to_stop_waits_for_no_round_but_the_last(outer: dict[str, Any]) -> None:
    """It stays in flight, for the checkpoint; gone on from there, it lands when it is in."""
    asked: list[bool] = []
    island = Island(sync_every=5, steps=11, hurries=lambda: bool(asked), **outer)
    island.others.arrivals.add(0)
    island.step(4)
    island.others.arrivals.clear()
    asked.append(True)
    island.step(6)
    assert not island.others.waited_for and list(island.log.flights) == [0]
    assert island.events() == {5: [("launch", 0)]}
    island.others.arrivals.add(0)
    island.step(1)
    assert island.events()[11][:2] == [("land", 0), ("launch", 0)] and not island.log.flights


def test_an_exchange_that_says_nothing_is_asked_in_the_end() -> None:
    island = Island(sync_every=5, hurries=lambda: False, patience=0.05)
    island.step(5)
    assert island.others.waited_for == [0] and island.events() == {5: [("launch", 0), ("land", 0)]}


def test_several_fragments_are_in_flight_at_once_and_all_end_with_the_run() -> None:
    island = Island(sync_every=4, fragments=2, overlap=3, steps=9)
    island.step(9)
    assert island.events() == {
        2: [("launch", 1)], 4: [("launch", 0)], 5: [("land", 1)], 6: [("launch", 1)], 7: [("land", 0)],
        8: [("launch", 0)], 9: [("land", 1), ("land", 0), ("launch", 0), ("launch", 1), ("land", 0), ("land", 1)],
    }  # fmt: skip


def test_it_waits_for_a_round_that_is_not_in() -> None:
    island = Island(sync_every=5, overlap=2)
    island.step(7)
    assert island.others.waited_for == [0]


def test_or_trains_on_and_lands_it_when_it_is_in() -> None:
    island = Island(sync_every=4, overlap=1, late="land_late")
    island.step(7)
    assert island.events() == {4: [("launch", 0)]} and island.others.waited_for == []
    island.others.arrivals.add(0)
    island.step()
    assert island.events()[8] == [("land", 0), ("launch", 0)]


def test_a_launch_that_came_too_early_follows_the_landing() -> None:
    island = Island(sync_every=4, overlap=1, late="land_late")
    island.step(9)  # 8 was due
    island.others.arrivals.add(0)
    island.step()
    assert island.events() == {4: [("launch", 0)], 10: [("land", 0), ("launch", 0)]}
    island.others.arrivals.add(0)
    island.step(2)
    assert island.events()[11] == [("land", 0)] and island.events()[12] == [("launch", 0)]  # again as scheduled


def test_at_the_end_it_waits_even_if_it_may_land_late() -> None:
    island = Island(sync_every=4, overlap=1, late="land_late", steps=6)
    island.step(6)
    assert island.events() == {4: [("launch", 0)], 6: [("land", 0), ("launch", 0), ("land", 0)]}
    assert island.others.waited_for == [0, 0]


def test_an_eager_round_lands_when_the_next_one_is_launched() -> None:
    island = Island(sync_every=4, overlap="eager", steps=10)
    island.step(10)
    assert island.events() == {
        4: [("launch", 0)], 8: [("land", 0), ("launch", 0)], 10: [("land", 0), ("launch", 0), ("land", 0)]
    }  # fmt: skip


def test_an_island_that_is_late_launches_at_once() -> None:
    island = Island(sync_every=10, overlap=2)
    island.step(3)
    island.others.late.add(0)
    island.step()
    island.others.late.clear()
    assert island.events() == {4: [("launch", 0)]}


def test_it_is_not_late_for_a_round_that_is_on_its_way_to_the_exchange() -> None:
    """Else a round that nobody else begins would follow at once."""
    island = Island(sync_every=10, overlap=2)
    island.step(3)
    island.others.late.add(0)
    island.step(2)
    island.others.late.clear()
    island.others.arrivals.add(0)
    island.step(3)
    assert island.events() == {4: [("launch", 0)], 6: [("land", 0)]}


@pytest.mark.parametrize("late", ["wait", "land_late"])
@pytest.mark.parametrize("early", [False, True])
def test_parameters_that_can_not_be_gathered_are_an_error_at_once(late: str, early: bool) -> None:
    island = Island(early=early, sync_every=4, overlap=1, late=late)
    island.step(4)
    island.log.flights[0].gathered = Future()
    island.log.flights[0].gathered.set_exception(RuntimeError("no such rank"))
    with pytest.raises(RuntimeError, match="no such rank"):
        island.step()


@pytest.mark.parametrize("early", [False, True])
def test_what_is_in_before_its_time_is_brought_to_the_other_ranks(early: bool) -> None:
    island = Island(early=early, sync_every=5, overlap=3)
    island.step(5)
    island.others.arrivals.add(0)
    island.step(3)
    bring = {6: [("bring", 0)]} if early else {}
    assert island.events() == {5: [("launch", 0)], **bring, 8: [("land", 0)]}


def test_by_the_clock_a_round_in_flight_is_not_due_again() -> None:
    now = [0.0]
    island = Island(sync_every="4s", overlap=3, clock=lambda: now[0])
    for second in range(1, 13):
        now[0] = float(second)
        island.step()
    assert island.events() == {4: [("launch", 0)], 7: [("land", 0)], 8: [("launch", 0)], 11: [("land", 0)], 12: [("launch", 0)]}


def test_finished_fragments_and_those_without_work_are_left_alone() -> None:
    island = Island(sync_every=5, fragments=2, steps=5)
    island.log.finished.add(0)
    island.step(5)
    assert island.events() == {3: [("launch", 1), ("land", 1)], 5: [("launch", 1), ("land", 1)]}


def test_a_round_that_it_took_over_does_not_begin_once_more_at_its_step() -> None:
    """The others are past that step: they would wait for this island in another fragment, and it for them in this one."""
    island = Island(sync_every=10, fragments=2, overlap=2, steps=100)
    island.step(10)
    flight = island.log.flights.pop(0)
    flight.outcome = RoundOutcome("left_out", 0, 4, step=40)
    island.agenda.landed(flight)
    island.log.inner_step, island.progress.step = 12, 40
    assert island.agenda.next(island.progress, island.log) == Boundary()
    island.progress.step = 50
    assert island.agenda.next(island.progress, island.log) == Boundary(launching=(0,))
