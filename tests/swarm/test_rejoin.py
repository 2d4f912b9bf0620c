"""Whole islands that are killed and started again in the middle of a run, as a user would."""

from pathlib import Path

import pytest
from cluster import Cluster

from diloco.report import summarize

pytestmark = pytest.mark.timeout(240)


def test_a_restarted_island_goes_on_where_the_swarm_is(tmp_path: Path) -> None:
    """Anchor, learning rate and data position are those of the swarm, and the optimizer state that of its last checkpoint; no sample
    counts twice; losses fall; all end together."""
    steps = 120
    with Cluster(tmp_path, 3, ["exchange.peer_timeout=5", "checkpoint.every=5"], steps=steps, step_seconds=0.2) as cluster:
        cluster.wait_until_training()
        cluster.wait_until(lambda: len(cluster.islands[1].rows("step")) >= 13)  # some after its second round
        cluster.islands[1].kill()
        killed_at = cluster.islands[1].height()
        cluster.start(1)
        cluster.wait_until(lambda: cluster.islands[1].rows("step"), 90)
        cluster.wait_until(lambda: all(island.lives[-1].process.poll() == 0 for island in cluster.islands), 150)
        for island in cluster.islands:
            island.read()
        lives = [island.lives[-1] for island in cluster.islands]
    (resumed,) = [row["detail"] for row in lives[1].of_kind("event") if row["what"] == "resumed"]
    assert 5 <= resumed["step"] <= 15
    again = lives[1].of_kind("step")
    crashed_at = cluster.islands[1].lives[0].of_kind("step")[-1]["loss"]
    assert all(life.of_kind("eval")[-1]["loss"] < crashed_at - 1 for life in lives)
    first, others = again[0], {row["step"]: row["lr"] for row in lives[0].of_kind("step")}
    assert first["step"] > 5 * killed_at, "it goes on at the swarm's step"
    assert all(others[row["step"]] == row["lr"] for row in again if row["step"] in others)
    digests = {row["round"]: row["digest"] for row in lives[0].of_kind("round")}
    mine = [row for row in lives[1].of_kind("round") if row["outcome"] == "committed"]
    assert len(mine) >= 3 and all(digests[row["round"]] == row["digest"] for row in mine)
    assert [row["step"] for row in lives[0].of_kind("step")] == list(range(1, steps + 1)), "no step of the others was lost"
    summary = summarize(tmp_path / "run")
    assert summary["digests_agree"] and summary["samples_repeated"] == 0
    assert 0 < summary["samples_lost"] < summary["samples_trained"] / 10
    assert lives[1].of_kind("round")[-1]["digest"] == lives[0].of_kind("round")[-1]["digest"]
