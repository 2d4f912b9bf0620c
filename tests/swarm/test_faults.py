"""Cuts, partitions, frozen trainers, damaged memory and contributions that must not count; four real islands on loopback.

The tests share one swarm and run in order; after each, all islands hold the same bits and commit a round together.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any, Iterator

import pytest
from harness import PEER_TIMEOUT, Island, Swarm, assert_same, eventually, running, settings, status

from diloco.reduction import CHUNK

SIZES = [3 * CHUNK + 77]
WEIGHTS = [1000.0, 1000.0, 900.0, 900.0]
ALL = [0, 1, 2, 3]

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Four islands that have committed a round; a fifth slot is free."""
    folder = tmp_path_factory.mktemp("faults")

    def island(name: str, **swarm: Any) -> Island:
        keys = {"islands": 4, "max_slots": 5, "identity_file": str(folder / f"{name}.key"), **swarm}
        return Island(folder / name, settings(swarm=keys), SIZES)

    first = island("0", slot=0)
    first.ask("join")
    address = eventually(first.address)
    with running([first]) as started:
        for slot in (1, 2, 3):
            started.append(island(str(slot), slot=slot, initial_peers=[address]))
            started[-1].ask("join")
        for each in started:
            each.answer()
        swarm = Swarm(started)
        commit(swarm, 10)
        yield swarm


def commit(swarm: Swarm, seed: int, only: list[int] = ALL) -> list[Any]:
    """A round that all of them commit. They drift in the same direction, as islands that train do."""
    launch(swarm, seed, only)
    outcomes = swarm.outcomes(0, only)
    assert [outcome.kind for outcome in outcomes] == ["committed"] * len(only), outcomes
    assert {outcome.members for outcome in outcomes} == {tuple(only)}, outcomes
    assert_same(swarm, only)
    return outcomes


def launch(swarm: Swarm, seed: int, only: list[int] = ALL, **odd: Any) -> None:
    """Launch a round; ``odd`` holds keywords for the last of them."""
    for index in only:
        keywords = odd if index == only[-1] else {}
        swarm.islands[index].call("launch", 0, WEIGHTS[index], seed, **keywords)


def events(island: Island, what: str) -> list[str]:
    """Details of the events of one kind since the last look."""
    return [event.detail for event in island.wait_for_event(what) if event.what == what]


def cut(swarm: Swarm, side: list[int], other: list[int]) -> None:
    """Nothing passes between the two sides."""
    peers = [island.call("address").rpartition("/")[2] for island in swarm.islands]
    for here, there in ((side, other), (other, side)):
        for index in here:
            swarm.islands[index].arm("cut", " ".join(peers[far] for far in there))


def heal(swarm: Swarm) -> None:
    """Links are whole again, and everyone has noticed."""
    cut_off = [island for island in swarm.islands if (island.folder / "cut").exists()]
    for island in swarm.islands:
        island.disarm("cut")
        island.call("events")
    for island in cut_off:
        island.wait_for_event("back")
    time.sleep(PEER_TIMEOUT / 2)  # the second one a little later than the first


def test_a_partition_that_heals(swarm: Swarm) -> None:
    """Both halves go on alone. Afterwards the one with more tokens wins, and the other half rejoins it."""
    before = swarm.agreed(0)[0]["height"]
    cut(swarm, [0, 1], [2, 3])
    launch(swarm, 20)
    outcomes = swarm.outcomes(0)
    assert [(outcome.kind, outcome.members) for outcome in outcomes] == [("committed", (0, 1))] * 2 + [("committed", (2, 3))] * 2
    assert outcomes[0].digest != outcomes[2].digest
    heal(swarm)
    launch(swarm, 30)
    outcomes = swarm.outcomes(0)
    # The losers take over the winners' state, and are in the same round with what they offered.
    assert [(outcome.kind, outcome.members) for outcome in outcomes] == [("committed", (0, 1, 2, 3))] * 4, outcomes
    assert_same(swarm)
    assert swarm.agreed(0)[0]["ledger"].tokens == 3800 + 2000 + 3800
    commit(swarm, 40)
    assert swarm.agreed(0)[0]["height"] == before + 3


def test_a_cut_after_the_vote(swarm: Swarm) -> None:
    """All others have its vote, and it hears nothing more: whatever they decide, it counts once and all agree in the end."""
    tokens = swarm.agreed(0)[0]["ledger"].tokens
    victim = swarm.islands[3]
    victim.arm("cut_after_vote")
    launch(swarm, 50)
    victim.wait_until_fired("cut_after_vote")
    outcomes = swarm.outcomes(0)
    assert [outcome.kind for outcome in outcomes[:3]] == ["committed"] * 3, outcomes
    heal(swarm)
    launch(swarm, 60)
    swarm.outcomes(0)
    launch(swarm, 65)  # if its vote counted, its work since then can't, as it does not know where that begins
    swarm.outcomes(0)
    [last] = commit(swarm, 70)[:1]
    ledger = swarm.agreed(0)[0]["ledger"]
    assert ledger.tokens == last.tokens > tokens


def test_a_frozen_trainer_is_not_waited_for(swarm: Swarm) -> None:
    """Its exchange process lives on and says so: a round costs the others peer_timeout at most."""
    victim = swarm.islands[3]
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        eventually(lambda: status(victim.pid) == "T")
        outcomes = commit(swarm, 80, only=[0, 1, 2])
        assert all(outcome.exchange_seconds < 3 * PEER_TIMEOUT for outcome in outcomes)
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    time.sleep(2.0)  # until its exchange process has seen it move, and told the others
    launch(swarm, 90, only=[3])
    [outcome] = swarm.outcomes(0, only=[3])
    assert outcome.kind == "left_out"
    eventually(lambda: victim.call("agreed", 0)["height"] == swarm.agreed(0)[0]["height"])
    commit(swarm, 100)


def test_damaged_memory_is_taken_over_again(swarm: Swarm) -> None:
    """One island's agreed state has a wrong bit: the votes show it, it gets the state of the others, and is told."""
    swarm.islands[2].call("damage", 0)
    launch(swarm, 110)
    outcomes = swarm.outcomes(0)
    assert [outcome.kind for outcome in outcomes] == ["committed", "committed", "left_out", "committed"], outcomes
    assert outcomes[2].rejected and "damaged" in outcomes[2].reason
    assert "damaged in memory" in events(swarm.islands[2], "damaged")[0]
    commit(swarm, 120)


@pytest.mark.parametrize(
    ("odd", "fault", "rule", "told"),
    [
        ({"scale": 1e6}, "", "norm", "far larger than the others'"),
        ({"scale": -1.0}, "", "opposite", "works against"),
        ({}, "exaggerate", "claim", "larger than the norm"),
        ({}, "break", "claim", "not finite"),
    ],
)
def test_a_contribution_that_must_not_count(
    swarm: Swarm, odd: dict[str, Any], fault: str, rule: str, told: str
) -> None:
    """The others commit without it, and name it; its island takes the anchor."""
    culprit = swarm.islands[3]
    for island in swarm.islands:
        island.call("events")
    if fault:
        culprit.arm(fault)
    launch(swarm, 130, **odd)
    outcomes = swarm.outcomes(0)
    if fault:
        assert culprit.fired(fault)
    assert [outcome.kind for outcome in outcomes] == ["committed"] * 3 + ["left_out"], outcomes
    assert {outcome.members for outcome in outcomes} == {(0, 1, 2)}
    assert outcomes[3].rejected and repr(rule) in outcomes[3].reason
    for island in swarm.islands[:3]:
        [detail] = events(island, "excluded")
        assert detail.startswith("island 3") and told in detail
    assert_same(swarm)
    commit(swarm, 140)


def test_a_byte_that_one_member_got_wrong(swarm: Swarm) -> None:
    """Digests differ, nothing is applied, and the next attempt agrees."""
    swarm.islands[1].arm("corrupt_mean")
    for island in swarm.islands:
        island.call("events")
    commit(swarm, 150)
    assert swarm.islands[1].fired("corrupt_mean")
    told = [event.detail for island in swarm.islands for event in island.call("events") if event.what == "disagreement"]
    assert told and "island 0:" in told[0], "the first to have all votes tells, and keeps the others from it"


@pytest.mark.slow
def test_an_island_whose_slot_was_given_away_gets_another(swarm: Swarm, tmp_path: Path) -> None:
    """Cut off, and replaced by one that asks for its slot: when it is back it comes in as a newcomer, in the free slot."""
    cut(swarm, [3], [0, 1, 2])
    commit(swarm, 160, only=[0, 1, 2])
    keys = {"islands": 4, "max_slots": 5, "slot": 3, "initial_peers": [swarm.islands[1].call("address")]}
    newcomer = Island(tmp_path / "replacement", settings(swarm=keys), SIZES)
    with running([newcomer]):
        seat = newcomer.call("join")
        assert (seat.slot, seat.epoch, seat.late) == (3, 1, True)
        loser = swarm.islands[3]
        for island in swarm.islands:
            island.disarm("cut")
        loser.wait_for_event("rejoined")
        launch(swarm, 170, only=[3])
        [outcome] = swarm.outcomes(0, only=[3])
        assert (outcome.kind, outcome.seat.slot, outcome.seat.late) == ("left_out", 4, True)
        everyone = Swarm([*swarm.islands, newcomer])
        for index, island in enumerate(everyone.islands):
            island.call("launch", 0, 1000.0, 180)
        outcomes = everyone.outcomes(0)
        assert {(outcome.kind, outcome.members) for outcome in outcomes} == {("committed", (0, 1, 2, 3, 4))}
