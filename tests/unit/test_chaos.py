"""The plan that dice make, and what is measured of a swarm that lived through it."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "swarm"))  # its modules name each other as tests in there do

import chaos_measures as measures  # noqa: E402
from chaos_plan import KINDS, random_plan  # noqa: E402
from fault_player import Strike  # noqa: E402
from faults import parse_fault, parse_plan  # noqa: E402
from island_process import Life  # noqa: E402


def test_the_plan_holds_every_kind_and_kills_the_founder() -> None:
    faults = parse_plan(random_plan(seed=3, seconds=600, islands=4, every=25, recovery=40))
    first = [fault for fault in faults if fault.kind != "restart"]
    assert {fault.kind for fault in first} == set(KINDS) and len(first) == 23
    assert ("kill", (0,)) in {(fault.kind, fault.islands) for fault in faults}
    moments = [fault.at_seconds for fault in first]
    assert all(after - before == 25 for before, after in zip(moments, moments[1:])) and moments[-1] <= 560
    assert all(fault.seconds < 25 for fault in faults)


def test_each_killed_island_is_started_again_and_dice_with_one_seed_fall_alike() -> None:
    plan = random_plan(7, 300, 3, 20, 30, kinds=["kill", "nan"])
    assert plan == random_plan(7, 300, 3, 20, 30, kinds=["kill", "nan"]) != random_plan(8, 300, 3, 20, 30, kinds=["kill", "nan"])
    faults = parse_plan(plan)
    kills = [fault.islands for fault in faults if fault.kind == "kill"]
    assert kills == [fault.islands for fault in faults if fault.kind == "restart"]


def life(*rows: dict[str, Any], ended: float) -> Life:
    return Life(process=None, started=0.0, ended=ended, rows=list(rows))


def step(number: int, time: float, stall: float = 0.0) -> dict[str, Any]:
    return {"kind": "step", "step": number, "position": 4 * number, "time": time, "stall_seconds": stall, "step_seconds": 1.0}


def committed(number: int, time: float, members: list[int], digest: str = "a") -> dict[str, Any]:
    row = {"kind": "round", "fragment": 0, "round": number, "time": time}
    return {**row, "members": members, "digest": digest, "outcome": "committed"}


def test_steps_that_are_missing_done_twice_or_dropped_are_lost_but_not_by_the_victim() -> None:
    drop = {"kind": "event", "what": "dropped", "time": 3.0, "detail": "12 sequences: why"}
    assert measures.steps_lost([[life(step(1, 1), step(2, 2), ended=2), life(step(9, 9), step(10, 10), ended=10)]], []) == 0
    assert measures.steps_lost([[life(step(1, 1), step(2, 2), step(5, 4), ended=4)]], []) == 2
    assert measures.steps_lost([[life(step(1, 1), step(2, 2), step(2, 3), ended=3)]], []) == 1
    dropped = life(step(1, 1), step(2, 2), drop, ended=3)
    assert measures.steps_lost([[dropped]], []) == 3
    assert measures.steps_lost([[dropped]], [Strike(parse_fault("nan 0 @ 1s"), began=1.0, proof="seen")]) == 0
    assert measures.steps_lost([[dropped]], [Strike(parse_fault("nan 1 @ 1s"), began=1.0, proof="seen")]) == 3


def test_throughput_counts_waiting_and_not_the_time_in_which_the_island_could_not_train() -> None:
    short = (step(number, number, stall=1e-4) for number in range(1, 6))
    waits = life(*short, step(6, 10, stall=4), ended=10)  # 5 steps of 9 s
    assert measures.step_seconds([[waits]]) == 1
    assert measures.throughput_ratio([[waits]], [], 1.0) == pytest.approx(5 / 9)
    frozen = Strike(parse_fault("freeze 0 for 4s"), began=5.5, ended=9.5, proof="seen", stops_trainer=1.0)
    assert measures.throughput_ratio([[waits]], [frozen], 1.0) == 1
    elsewhere = Strike(parse_fault("freeze 1 for 4s"), began=5.5, ended=9.5, proof="seen", stops_trainer=1.0)
    assert measures.throughput_ratio([[waits]], [elsewhere], 1.0) == pytest.approx(5 / 9)


def test_an_island_that_hangs_until_the_end_is_seen() -> None:
    hangs = life(step(1, 1), step(2, 2), ended=21)
    assert measures.throughput_ratio([[hangs]], [], 1.0) == pytest.approx(1 / 20)
    assert measures.stalls([[hangs]], [])[0] == (18, 21, 0)


def test_stalls_are_those_of_islands_that_were_not_the_victim() -> None:
    islands = [[life(step(1, 10, stall=7), ended=10)], [life(step(1, 10, stall=3), ended=10)]]
    freeze = Strike(parse_fault("freeze 0 for 5s"), began=4, ended=9, proof="seen")
    assert measures.stalls(islands, [])[0] == (7, 10, 0)
    assert measures.stalls(islands, [freeze])[0] == (3, 10, 1)


def test_recovery_is_the_next_round_that_counts_the_victim() -> None:
    rows = [committed(1, 5, [0, 1]), committed(2, 12, [0]), committed(3, 15, [0, 1])]
    islands = [[life(*rows, ended=20)], [life(*rows, ended=20)]]
    restart = Strike(parse_fault("restart 1"), began=6, ended=6.1, proof="seen")
    cut = Strike(parse_fault("cut 1 for 5s"), began=6, ended=11, proof="seen")
    assert measures.recovery_seconds(islands, restart) == 9
    assert measures.recovery_seconds(islands, cut) == 4
    assert measures.recovery_seconds(islands, Strike(parse_fault("kill 1"), began=6, ended=6)) is None
    assert measures.recovery_seconds(islands, Strike(parse_fault("restart 1"), began=16, ended=16)) == math.inf


def test_a_round_that_was_over_before_and_is_only_recorded_after_a_thaw_is_no_recovery() -> None:
    late = [life(committed(1, 11.1, [0, 1]), committed(2, 14, [0, 1]), ended=20)]
    others = [life(committed(1, 5.9, [0, 1]), committed(2, 13.9, [0, 1]), ended=20)]
    freeze = Strike(parse_fault("freeze 0 for 5s"), began=6, ended=11, proof="seen")
    assert measures.recovery_seconds([late, others], freeze) == 3


def test_digests_of_all_lives_are_compared() -> None:
    same = [[life(committed(1, 5, [0, 1]), ended=9)], [life(committed(1, 5, [0, 1]), ended=6)]]
    assert measures.digests(same) == {(0, 1): {"a"}} and measures.rounds_committed(same) == 1
    same[1].append(life(committed(1, 8, [1], digest="b"), ended=9))
    assert measures.digests(same) == {(0, 1): {"a", "b"}}
