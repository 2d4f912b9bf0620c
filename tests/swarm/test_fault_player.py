"""That each planned fault really happens, shown by what the islands themselves record of it."""

import time
from pathlib import Path

import pytest
from cluster import Cluster
from fault_player import FaultPlayer
from faults import parse_plan


def events(cluster: Cluster, slot: int) -> list[str]:
    """What an island has recorded of itself and the others."""
    return [row["what"] for row in cluster.islands[slot].rows("event")]


@pytest.mark.slow  # of the test equipment; chaos uses all of it
@pytest.mark.timeout(120)
def test_every_fault_leaves_its_trace_and_the_swarm_goes_on(tmp_path: Path) -> None:
    plan = parse_plan(
        """
        nan 1 @ round 2
        corrupt 2 @ round 3
        kill exchange 1 @ 4s
        stranger @ 5s
        freeze 2 for 2s @ round 12 during vote
        slow 4x 0 for 4s @ 13s
        kill 2 @ round 20 during transfer
        """
    )
    with Cluster(tmp_path, 3, ["exchange.peer_timeout=5"], step_seconds=0.1) as cluster:
        cluster.wait_until_training()
        player = FaultPlayer(cluster, plan)
        player.play(timeout=90)
        player.assert_all_fired()
        killed = time.time()
        survivors = cluster.islands[:2]
        cluster.wait_until(lambda: all(island.rows("round")[-1]["members"] == [0, 1] for island in survivors))
    _, _, _, stranger, freeze, slow, kill = player.strikes
    assert "dropped" in events(cluster, 1)
    assert any("disagreement" in events(cluster, island) for island in range(3)), "and the next attempt agrees"
    assert "restarted" in events(cluster, 1)
    assert "refused" in events(cluster, 0)
    assert "answered" in stranger.proof
    assert longest_gap(cluster, 2, freeze.began, freeze.ended) > 1.9
    thawed = [row for row in cluster.islands[2].rows("round") if freeze.ended < row["time"] < freeze.ended + 4]
    assert thawed  # it was let go of where it had been held
    assert longest_gap(cluster, 0, slow.began, slow.ended) > 1.4
    assert not [row for row in cluster.islands[2].rows("step") if row["time"] > kill.began]
    lost = [row for row in cluster.islands[0].rows("event") if row["what"] == "lost" and row["time"] > kill.began]
    assert lost and lost[0]["detail"].startswith("island 2") and lost[0]["time"] < killed + 10


def longest_gap(cluster: Cluster, slot: int, began: float, ended: float) -> float:
    """The longest time between two steps of an island that reaches into a span."""
    times = [row["time"] for row in cluster.islands[slot].rows("step")]
    return max(after - before for before, after in zip(times, times[1:]) if after > began and before < ended)
