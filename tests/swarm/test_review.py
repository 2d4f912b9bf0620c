"""What a review found: each of these was wrong once."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from harness import Island, Swarm, assert_same, eventually, running, settings, status

from diloco.reduction import CHUNK

SIZES = [CHUNK + 77]

pytestmark = pytest.mark.timeout(200)


def test_one_that_stood_still_before_its_vote_does_not_commit_what_the_others_gave_up(tmp_path: Path) -> None:
    """It holds all votes and nobody has its own: the others went on without it, and it follows them."""
    def island(slot: int, peers: list[str]) -> Island:
        return Island(tmp_path / str(slot), settings(swarm={"islands": 3, "slot": slot, "initial_peers": peers}), SIZES)

    first = island(0, [])
    first.ask("join")
    address = eventually(first.address)
    with running([first]) as islands:
        islands += [island(slot, [address]) for slot in (1, 2)]
        islands[1].ask("join")
        islands[2].ask("join")
        for each in islands:
            each.answer()
        swarm, victim = Swarm(islands), islands[2]
        victim.arm("stop_before_vote")
        pid = victim.exchange_pid()
        swarm.launch(0, 10, [1000.0] * 3)
        victim.wait_until_fired("stop_before_vote")
        eventually(lambda: status(pid) == "T")
        others = swarm.outcomes(0, only=[0, 1])
        os.kill(pid, signal.SIGCONT)
        [outcome] = swarm.outcomes(0, only=[2])
        print(others, outcome, sep="\n")
        assert [(each.kind, each.members) for each in others] == [("committed", (0, 1))] * 2
        assert outcome.kind == "left_out", outcome
        assert_same(swarm)
