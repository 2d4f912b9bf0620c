"""Islands that come in the middle of a run, come back after a crash, or lose their slot; real processes over loopback."""

from pathlib import Path
from typing import Any, Iterator

import pytest
from harness import Island, Swarm, assert_same, eventually, free_port, is_gone, running, settings

from diloco.launch import make_identity
from diloco.reduction import CHUNK

SIZES = [CHUNK + 77, 5]
WEIGHTS = [1000.0] * 4

pytestmark = pytest.mark.timeout(300)


class Place:
    """Makes islands of one run, each with an identity that it keeps when it is started again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.first_address, self._count = folder, "", 0

    def island(self, name: str, through: list[str] | None = None, **swarm: Any) -> Island:
        """A new process of the island called ``name``; ``through``: whom it asks, by default the first."""
        self._count += 1
        peers = through if through is not None else [self.first_address] if self.first_address else []
        keys = {"islands": 3, "identity_file": str(self.folder / f"{name}.key"), "initial_peers": peers, **swarm}
        return Island(self.folder / f"{name}-{self._count}", settings(swarm=keys), SIZES)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("joining"))


@pytest.fixture(scope="module")
def swarm(place: Place) -> Iterator[Swarm]:
    """Three islands that have committed a round of each fragment; tests add to them, and end them."""
    first = place.island("a", slot=0)
    first.ask("join")
    place.first_address = eventually(first.address)
    with running([first]) as started:
        for slot, name in ((1, "b"), (2, "c")):
            started.append(place.island(name, slot=slot))
            started[-1].ask("join")
        for island in started:
            island.answer()
        swarm = Swarm(started)
        commit(swarm, 10)
        yield swarm


def commit(swarm: Swarm, seed: int, only: list[int] | None = None, fragments: tuple[int, ...] = (0, 1)) -> list[Any]:
    """A round of both fragments that all of them commit."""
    outcomes = []
    for fragment in fragments:
        swarm.launch(fragment, seed, WEIGHTS + WEIGHTS, only)
        ended = swarm.outcomes(fragment, only)
        assert {outcome.kind for outcome in ended} == {"committed"}, ended
        assert len({(outcome.members, outcome.digest) for outcome in ended}) == 1
        assert len(ended[0].members) == len(ended)
        outcomes += ended
    return outcomes


def test_a_newcomer_takes_over_what_the_members_hold(swarm: Swarm, place: Place) -> None:
    """Through a member that is not the first: it gets a free slot, and anchor, momentum, step and position."""
    through = swarm.islands[1].call("address")
    newcomer = place.island("d", through=[through])
    swarm.islands.append(newcomer)
    swarm.islands[0].call("progress", 17, 100.0)
    seat = newcomer.call("join")
    assert (seat.slot, seat.epoch, seat.late, seat.position) == (3, 0, True, 0)
    assert seat.step >= 1 and seat.tokens == 3000
    assert_same(swarm)
    outcomes = commit(swarm, 20)
    assert outcomes[0].members == (0, 1, 2, 3)
    assert_same(swarm)


def test_an_island_that_was_killed_comes_back_to_its_slot(swarm: Swarm, place: Place) -> None:
    """Its old work is over: a new epoch, behind all that was counted; while it is away the others go on."""
    victim = swarm.islands[2]
    pids = [victim.pid, victim.exchange_pid(), victim.daemon_pid()]
    victim.kill_trainer()
    eventually(lambda: all(is_gone(pid) for pid in pids))
    commit(swarm, 30, only=[0, 1, 3])
    swarm.islands[2] = place.island("c")
    seat = swarm.islands[2].call("join")
    assert (seat.slot, seat.epoch, seat.late) == (2, 1, True)
    assert seat.position == 20  # two rounds of ten sequences counted before it was killed
    assert_same(swarm)
    commit(swarm, 40)
    assert_same(swarm)


def test_the_first_island_may_die_too(swarm: Swarm, place: Place) -> None:
    """The others go on, a newcomer would come in through them, and the first itself finds them when it is started again."""
    swarm.islands[0].kill_trainer()
    commit(swarm, 50, only=[1, 2, 3])
    swarm.islands[0] = place.island("a", through=[], slot=0)
    seat = swarm.islands[0].call("join")
    assert (seat.slot, seat.epoch, seat.late) == (0, 1, True)
    assert_same(swarm)
    outcomes = commit(swarm, 60)
    assert outcomes[0].members == (0, 1, 2, 3)


@pytest.mark.slow
def test_no_slot_is_left(swarm: Swarm, place: Place) -> None:
    """A fifth island for four slots waits, and is told why it got none; nobody else notices."""
    if len(swarm.islands) < 4:  # run without the tests before it
        swarm.islands.append(place.island("d"))
        swarm.islands[3].call("join")
    fifth = place.island("e", through=[swarm.islands[3].call("address")], join_timeout=3.0)
    with running([fifth]), pytest.raises(Exception, match=r"all 4 slots are taken \(swarm.max_slots\)"):
        fifth.call("join")
    commit(swarm, 70)


def test_a_donor_that_dies_half_way_is_followed_by_another(swarm: Swarm, place: Place) -> None:
    """Whoever gives state to the newcomer stops in the middle of it; the newcomer has all of it nevertheless."""
    swarm.islands[3].kill_trainer()
    commit(swarm, 80, only=[0, 1, 2])
    for donor in swarm.islands[:3]:
        donor.arm("hang_donation")
    swarm.islands[3] = place.island("d")
    swarm.islands[3].ask("join")
    hung = eventually(lambda: [island for island in swarm.islands[:3] if island.fired("hang_donation")])
    for donor in swarm.islands[:3]:
        donor.disarm("hang_donation")
    hung[0].kill_trainer()
    seat = swarm.islands[3].answer()
    assert seat.slot == 3 and seat.late
    survivors = [index for index, island in enumerate(swarm.islands) if island is not hung[0]]
    assert_same(swarm, survivors)
    commit(swarm, 90, only=survivors)


def test_two_come_back_at_once(swarm: Swarm, place: Place) -> None:
    """Both get their slots and the state while the others go on; neither takes it from the other, who has none yet."""
    absent = [index for index in range(4) if swarm.islands[index].alive()][-2:]
    present = [index for index in range(4) if index not in absent and swarm.islands[index].alive()]
    names = {index: "abcd"[index] for index in absent}
    for index in absent:
        swarm.islands[index].kill_trainer()
    for index in absent:
        swarm.islands[index] = place.island(names[index], through=[swarm.islands[present[0]].call("address")])
        swarm.islands[index].ask("join")
    commit(swarm, 100, only=present)
    seats = [swarm.islands[index].answer() for index in absent]
    assert [seat.slot for seat in seats] == absent and all(seat.late for seat in seats)
    together = sorted([*present, *absent])
    assert_same(swarm, together)
    commit(swarm, 110, only=together)


@pytest.mark.slow
def test_islands_that_start_at_the_same_moment_with_the_same_list_are_one_swarm(tmp_path: Path) -> None:
    """Nobody is told who is the first: all have the same list of addresses, and the first in it gives out the slots."""
    islands, addresses = 4, []
    ports = [free_port() for _ in range(islands)]
    for number, port in enumerate(ports):
        peer = make_identity(tmp_path / f"{number}.key")
        addresses.append(f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}")

    def island(number: int) -> Island:
        own = {"listen": f"127.0.0.1:{ports[number]}", "identity_file": str(tmp_path / f"{number}.key")}
        keys = {"islands": islands, "initial_peers": addresses, "join_timeout": 60.0, **own}
        return Island(tmp_path / str(number), settings(swarm=keys), SIZES)

    with running(island(number) for number in range(islands)) as started:
        for each in started:
            each.ask("join")
        assert sorted(each.answer().slot for each in started) == [0, 1, 2, 3]
        outcomes = commit(Swarm(started), 10, fragments=(1,))
        assert outcomes[0].members == (0, 1, 2, 3)
