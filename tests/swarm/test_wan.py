"""Whole islands over links that are slow and long, that break, and that come back."""

import time
from pathlib import Path
from typing import Iterator

import pytest
import wan
from cluster import Cluster
from fault_player import FaultPlayer, Strike
from faults import parse_plan
from island_process import IslandProcess
from wan import WanLink

PEER_TIMEOUT = 4.0

pytestmark = pytest.mark.skipif(bool(wan.missing()), reason=wan.missing())

SETTINGS = [f"exchange.peer_timeout={PEER_TIMEOUT}", "exchange.round_deadline=20", "outer.sync_every=4"]
STEP_SECONDS = 0.1


def rounds(island: IslandProcess, outcome: str = "committed") -> list[dict]:
    """Its rounds that ended like that."""
    return [row for row in island.rows("round") if row["outcome"] == outcome]


def digests(island: IslandProcess) -> dict[int, str]:
    """What it held after each round that it took part in or took over."""
    return {row["round"]: row["digest"] for row in island.rows("round") if row["outcome"] != "skipped"}


def events(island: IslandProcess, what: str) -> list[dict]:
    """Its events of that kind."""
    return [row for row in island.rows("event") if row["what"] == what]


def assert_one_model(islands: list[IslandProcess]) -> None:
    """Wherever two islands have both seen a round, they held the same bits after it."""
    first, *others = [digests(island) for island in islands]
    for other in others:
        common = first.keys() & other.keys()
        assert common and {height: first[height] for height in common} == {height: other[height] for height in common}


def agree_after(cluster: Cluster, moment: float, timeout: float) -> None:
    """Wait for a round after ``moment`` that names all islands, and for all of them to hold the same bits after it."""
    everyone = [island.slot for island in cluster.islands]

    def agreed() -> bool:
        late = [
            {row["round"]: row["digest"] for row in rounds(island) if row["time"] > moment and row["members"] == everyone}
            for island in cluster.islands
        ]
        newest = set.intersection(*(set(heights) for heights in late))
        return bool(newest) and len({heights[max(newest)] for heights in late}) == 1

    cluster.wait_until(agreed, timeout)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two islands that train over 20 Mbit/s and 100 ms. The tests share them and run in order."""
    folder = tmp_path_factory.mktemp("pair")
    sizes = ["model.hidden_size=96", "model.intermediate_size=256"]  # enough that payload outweighs what surrounds it
    with WanLink(2, "20mbit", rtt_ms=100) as link:
        with Cluster(folder, 2, [*SETTINGS, *sizes], link=link, step_seconds=STEP_SECONDS) as cluster:
            cluster.wait_until_training()
            cluster.wait_until(lambda: all(rounds(island) for island in cluster.islands))
            yield cluster


def play(cluster: Cluster, plan: str, timeout: float = 30) -> list[Strike]:
    """Have faults happen, and see that they did."""
    player = FaultPlayer(cluster, parse_plan(plan))
    player.play(timeout)
    player.assert_all_fired()
    return player.strikes


@pytest.mark.timeout(90)
@pytest.mark.slow
def test_the_bytes_that_are_reported_are_those_on_the_link(pair: Cluster) -> None:
    """Counted between two moments right after a round: 15 % is room for headers, acknowledgements and signs of life."""

    def moment() -> tuple[list[int], list[int]]:
        pair.wait_until(lambda: len(set(island.height() for island in pair.islands)) == 1)
        counts = pair.link.counts()
        reported = [sum(row["bytes_sent"] for row in island.rows("round")) for island in pair.islands]
        return reported, [counts[0, 1].bytes, counts[1, 0].bytes]

    (reported, carried), until = moment(), pair.islands[0].height() + 8
    pair.wait_until(lambda: all(island.height() >= until for island in pair.islands))
    reported_later, carried_later = moment()
    for slot in (0, 1):
        told, seen = reported_later[slot] - reported[slot], carried_later[slot] - carried[slot]
        assert told > 2_000_000 and told <= seen <= 1.15 * told, f"island {slot} tells {told} bytes, the link {seen}"
    assert_one_model(pair.islands)
    assert all(row["exchange_seconds"] > 0.2 for row in rounds(pair.islands[0]))  # no round trip is free out here


@pytest.mark.timeout(90)
def test_a_cut_shorter_than_peer_timeout_costs_no_round(pair: Cluster) -> None:
    [cut] = play(pair, f"cut 1 for {PEER_TIMEOUT / 2}s")
    agree_after(pair, cut.ended, timeout=20)
    for island in pair.islands:
        assert not [row for row in rounds(island, "skipped") if row["time"] > cut.began]
        assert not events(island, "lost")
        assert max(row["stall_seconds"] for row in rounds(island) if row["time"] > cut.began) < 2 * PEER_TIMEOUT
    assert_one_model(pair.islands)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_after_a_cut_longer_than_peer_timeout_both_sides_hold_one_model_again(pair: Cluster) -> None:
    """Each side goes on alone in the meantime (``exchange.min_islands`` is 1), and one of them then follows the other."""
    [cut] = play(pair, f"cut 1 for {3 * PEER_TIMEOUT}s")
    lonely = [row for island in pair.islands for row in rounds(island) if cut.began < row["time"] < cut.ended]
    assert lonely and {len(row["members"]) for row in lonely[1:]} == {1}
    assert all(events(island, "lost") for island in pair.islands)
    for island in pair.islands:
        stalls = [row["stall_seconds"] for row in island.rows("round") if row["time"] > cut.began]
        assert max(stalls) < 2 * PEER_TIMEOUT + 1  # the silence is waited for once, and so is what comes after it
    agree_after(pair, cut.ended, timeout=40)


@pytest.mark.slow  # in test_faults without a link
@pytest.mark.timeout(120)
def test_two_halves_that_meet_again_become_one_swarm(tmp_path: Path) -> None:
    with WanLink(4, "50mbit", rtt_ms=40) as link, Cluster(tmp_path, 4, SETTINGS, link, step_seconds=0.25) as cluster:
        cluster.wait_until_training()
        [cut] = play(cluster, f"cut 0,1-2,3 for {3 * PEER_TIMEOUT}s @ round 3", timeout=60)
        for island, half in zip(cluster.islands, [[0, 1], [0, 1], [2, 3], [2, 3]]):
            assert any(row["members"] == half for row in rounds(island) if cut.began < row["time"] < cut.ended)
        agree_after(cluster, cut.ended, timeout=40)
        for island in cluster.islands:  # nobody lost an inner step over it; its number follows the swarm's
            taken = [row["position"] for row in island.rows("step")]
            assert taken == list(range(4, 4 * len(taken) + 1, 4)) and not events(island, "dropped")


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_the_side_that_trained_on_more_tokens_keeps_its_rounds(tmp_path: Path) -> None:
    """Not the one that committed more often: alone, with no distance to bridge, one gets through more rounds than three."""
    many, alone = [0, 1, 2], [3]
    settings = [*SETTINGS, "outer.sync_every=2"]
    with WanLink(4, "50mbit", rtt_ms=200) as link, Cluster(tmp_path, 4, settings, link, step_seconds=0.5) as cluster:
        cluster.wait_until_training()
        [cut] = play(cluster, f"cut 3 for {4 * PEER_TIMEOUT}s @ round 2", timeout=60)
        agree_after(cluster, cut.ended, timeout=40)
        done = [len(island.rows("step")) for island in cluster.islands]
        cluster.wait_until(lambda: all(len(island.rows("step")) > 2 + before for island, before in zip(cluster.islands, done)))
        apart = [[row for row in rounds(cluster.islands[side[0]]) if row["members"] == side] for side in (many, alone)]
        tokens = [len(rows[0]["members"]) * sum(row["weight"] for row in rows) for rows in apart]
        heights = [rows[-1]["round"] for rows in apart]
        assert tokens[0] > tokens[1] and heights[0] < heights[1], f"a poor experiment: tokens {tokens}, heights {heights}"
        assert not [row for island in cluster.islands[:3] for row in rounds(island, "left_out")]
        rows = cluster.islands[3].rows("round")
        assert any(after["round"] < before["round"] for before, after in zip(rows, rows[1:])), "it goes back to their height"
        lrs = [{row["step"]: row["lr"] for row in island.rows("step")} for island in cluster.islands]
        last = [island.rows("step")[-1]["step"] for island in cluster.islands]
        assert max(last) - min(last) <= 1 and lrs[0][min(last)] == lrs[3][min(last)], "and to their step"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_minutes_on_a_bad_line_nobody_is_taken_for_dead(tmp_path: Path) -> None:
    """10 Mbit/s, 150 ms and every 200th packet lost: slow is not gone."""
    sizes = ["model.hidden_size=96", "model.intermediate_size=256"]
    with WanLink(3, "10mbit", rtt_ms=150, loss=0.005) as link:
        with Cluster(tmp_path, 3, ["outer.sync_every=20", *sizes], link, step_seconds=0.25) as cluster:
            cluster.wait_until_training()
            until = time.monotonic() + 600
            cluster.wait_until(lambda: time.monotonic() > until, timeout=700)
            lost = [counts.lost for counts in link.counts().values()]
    assert min(lost) > 0 and sum(lost) > 200, f"packets lost by direction: {lost}"
    for island in cluster.islands:
        assert not events(island, "lost") and not rounds(island, "skipped")
        assert len(rounds(island)) > 15 and {tuple(row["members"]) for row in rounds(island)} == {(0, 1, 2)}
    assert_one_model(cluster.islands)
