"""An island of a swarm that is asked to stop, whatever the others do."""

import os
import signal
from pathlib import Path

import pytest
from cluster import Cluster

from islands.checkpoint_files import find, verify


@pytest.mark.timeout(180)
def test_an_island_that_waits_for_a_slow_one_saves_and_leaves_in_time(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, ["checkpoint.grace=12", "exchange.round_deadline=600"])
    fast, slow = cluster.islands
    slow.environment["TEST_STEP_SECONDS"] = "100"
    with cluster:
        cluster.wait_until(lambda: len(fast.rows("step")) == 4, timeout=120)  # after the fifth there is a round
        fast.lives[-1].ends(by_us=True)
        os.kill(fast.lives[-1].process.pid, signal.SIGTERM)
        assert fast.lives[-1].process.wait(20) == 0, fast.last_lines()
        fast.read()
        assert fast.rows("step")[-1]["step"] == 5
        (saved,) = find(tmp_path / "run" / "checkpoints", 0)
        (flight,) = verify(saved).facts["flights"]
        assert flight["work"]["step"] == 5 and flight["outcome"] is None and not fast.rows("round")
        slow.kill()  # it would not even notice a wish before its step ends
