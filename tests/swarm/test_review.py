"""What a review found: each of these was wrong once."""

import asyncio
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import Island, Swarm, assert_same, eventually, running, settings, status

from test_hivemind_rules import Asked, ballot, proposal

from diloco.exchange.hivemind import voting
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.messages import Settled, Vote
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


class TestVerdict:
    """What an attempt counts as, beyond the cases of TestSettle in test_hivemind_rules."""

    def settled(self, own: list[int], replies: dict[int, Settled], acknowledged: tuple[int, ...] = ()) -> str:
        """Of three islands, seen from island 0; those without a reply can't be reached."""

        async def run() -> str:
            attempt = Attempt(proposal(3), (0, 1, 2), 0)
            for slot in own:
                attempt.vote(ballot(slot))
            attempt.acknowledged |= set(acknowledged)
            return await voting.settle(Asked(replies), attempt, AttemptFailed("cut"))

        return asyncio.run(run())

    def answer(self, *slots: int, given_up: bool = False) -> Settled:
        return Settled(committed=False, given_up=given_up, ballots=tuple(ballot(slot) for slot in slots))

    def test_what_others_gave_up_for_good_is_given_up_although_all_votes_are_known_here(self) -> None:
        given_up = {1: self.answer(1, 2, given_up=True), 2: self.answer(1, 2, given_up=True)}
        assert self.settled([0, 1, 2], given_up) == "given_up"
        assert self.settled([0, 1, 2], {1: self.answer(1, 2), 2: self.answer(1, 2)}) == "committed"

    def test_one_that_is_alone_with_its_vote_is_in_doubt(self) -> None:
        """The others can't know that it has all votes: without its own they have given it up, or soon will."""
        assert self.settled([0, 1, 2], {}) == "in_doubt"
        assert self.settled([0, 1, 2], {1: self.answer(1, 2)}) == "in_doubt"
        assert self.settled([0, 1, 2], {}, acknowledged=(1,)) == "committed"
        assert self.settled([0, 1, 2], {1: self.answer(0, 1, 2)}) == "committed"

    def test_no_vote_leaves_once_it_was_given_up(self) -> None:
        """It would complete the votes of others, who then commit what this member knows to be given up."""
        sent = []

        class Sending:
            async def call(self, slot: int, request: Vote, timeout: float) -> str:
                sent.append(request)
                return "no answer"

        async def run() -> None:
            attempt, around = Attempt(proposal(3), (0, 1, 2), 0), Sending()
            around.membership = SimpleNamespace(peer_timeout=1.0)
            attempt.fail("another gave up")
            with pytest.raises(AttemptFailed, match="another gave up"):
                await attempt.unless_failed(voting.cast_vote(around, attempt, ballot(0)))

        asyncio.run(run())
        assert sent == []
