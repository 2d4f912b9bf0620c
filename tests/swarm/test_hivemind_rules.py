"""The rules of the exchange one by one, without processes: messages, votes, whose state counts, who may come in."""

import asyncio
import random
from typing import Callable, Coroutine

import msgpack
import pytest
from harness import settings

from diloco.config import RunConfig
from diloco.codecs.none import NoCodec
from diloco.exchange.base import RoundOutcome
from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.catch_up import tip_to_adopt
from diloco.exchange.hivemind.door import Door
from diloco.exchange.hivemind.ipc import Place
from diloco.exchange.hivemind.membership import Membership
from diloco.exchange.hivemind.messages import Ballot, Proposal, Share, Tip
from diloco.exchange.hivemind.network import Unreachable
from diloco.exchange.hivemind.round import Round
from diloco.exchange.hivemind.settings import difference, shared_settings
from diloco.exchange.hivemind.surroundings import Surroundings
from diloco.outer_state import OuterState
from islands import plugins
from islands.config_file import parse_config

A, B = bytes([1]) * 32, bytes([2]) * 32


def proposal(num_members: int) -> Proposal:
    """Attempt 1 of round 1, of members 0 to ``num_members - 1``."""
    shares = tuple(Share(slot=slot, peer=f"peer{slot}", weight=1.0, norm=1.0) for slot in range(num_members))
    return Proposal(run="test", fragment=0, height=1, attempt=1, lineage=A, shares=shares)


class TestMessages:
    """What comes from the network is one of our messages to the letter, or refused."""

    def test_every_message_survives_the_wire(self) -> None:
        status = messages.Status(
            incarnation=A,
            sequence=3,
            tips=(Tip(fragment=0, height=1, lineage=A, digest=B),),
            offers=(messages.Offer(fragment=0, height=2, lineage=A, attempt=0, weight=1.5, norm=0.0, passed=True),),
        )
        for message in (status, proposal(3), messages.Settled(committed=True, ballots=(Ballot(slot=0, digest=A),))):
            assert messages.decode(messages.encode(message)) == message

    @pytest.mark.parametrize(
        "change",
        [
            {"attempt": 0},
            {"height": -1},
            {"height": True},
            {"fragment": 1 << 40},
            {"lineage": b"short"},
            {"lineage": "text" * 8},
            {"run": 7},
            {"run": "x" * 10_000},
            {"shares": ()},
            {"shares": ({"slot": 0, "peer": "p", "weight": float("nan"), "norm": 1.0},)},
            {"shares": ({"slot": 0, "peer": "p", "weight": -1.0, "norm": 1.0},)},
            {"shares": ({"slot": 0, "peer": "p", "weight": 1.0, "norm": float("inf")},)},
            {"unknown": 1},
            {"kind": "nonsense"},
        ],
    )
    def test_one_wrong_field_is_refused(self, change: dict) -> None:
        raw = msgpack.packb({**proposal(2).model_dump(), **change})
        with pytest.raises(messages.BadMessage):
            messages.decode(raw)

    def test_any_bytes_are_refused_and_nothing_else_is_raised(self) -> None:
        generator, good = random.Random(0), messages.encode(proposal(3))
        for _ in range(2000):
            raw = bytearray(good)
            for _ in range(generator.randrange(1, 4)):
                raw[generator.randrange(len(raw))] = generator.randrange(256)
            for junk in (bytes(raw), bytes(raw[: generator.randrange(len(raw))]), generator.randbytes(50)):
                try:
                    messages.decode(junk)
                except messages.BadMessage:
                    pass

    def test_length_is_checked_before_it_is_parsed(self) -> None:
        with pytest.raises(messages.BadMessage, match="bytes, and a message has at most"):
            messages.decode(bytes(messages.MAX_MESSAGE_BYTES + 1))

    def test_an_id_binds_everything(self) -> None:
        one = proposal(3)
        changes = [{"attempt": 2}, {"height": 2}, {"lineage": B}, {"fragment": 1}, {"run": "other"}]
        changes.append({"shares": one.shares[:2]})
        assert len({one.id(), *(one.model_copy(update=change).id() for change in changes)}) == len(changes) + 1


class TestAttempt:
    """Votes count until it is given up, and giving up is for good."""

    def run(self, check: Callable[[Attempt], Coroutine[None, None, None]]) -> None:
        async def with_loop() -> None:
            await check(Attempt(proposal(3), 0, transfer=None))

        asyncio.run(with_loop())

    def test_unanimous_only_with_all_votes_equal(self) -> None:
        async def check(attempt: Attempt) -> None:
            attempt.vote(0, A)
            attempt.vote(1, A)
            assert not attempt.unanimous()
            assert attempt.unanimous([Ballot(slot=2, digest=A)])
            assert not attempt.unanimous([Ballot(slot=2, digest=B)])
            assert not attempt.unanimous([Ballot(slot=2, digest=A), Ballot(slot=7, digest=A)])

        self.run(check)

    def test_no_vote_after_it_was_given_up(self) -> None:
        async def check(attempt: Attempt) -> None:
            attempt.fail("why")
            assert not attempt.vote(1, A) and attempt.frozen and attempt.ballots == {}

        self.run(check)

    def test_a_committed_attempt_can_not_be_given_up(self) -> None:
        async def check(attempt: Attempt) -> None:
            attempt.committed = True
            attempt.fail("too late")
            assert not attempt.frozen

        self.run(check)

    def test_failing_cancels_the_work_even_if_it_is_just_done(self) -> None:
        async def check(attempt: Attempt) -> None:
            with pytest.raises(AttemptFailed, match="why"):
                asyncio.get_running_loop().call_later(0.01, attempt.fail, "why")
                await attempt.unless_failed(asyncio.sleep(60))
            with pytest.raises(AttemptFailed, match="why"):
                await attempt.unless_failed(asyncio.sleep(0))

        self.run(check)


class TestTipToAdopt:
    """The swarm's state wins over this island's where the rule says so, and the rule is the same for all."""

    def tip(self, height: int, lineage: bytes = A, digest: bytes = A) -> Tip:
        return Tip(fragment=0, height=height, lineage=lineage, digest=digest)

    def test_same_or_ahead_stays(self) -> None:
        assert tip_to_adopt(self.tip(2), {1: self.tip(2), 2: self.tip(1)}) is None
        assert tip_to_adopt(self.tip(2), {}) is None

    def test_behind_adopts(self) -> None:
        assert tip_to_adopt(self.tip(1), {1: self.tip(2, B), 2: self.tip(1)}) == self.tip(2, B)

    def test_a_fork_is_decided_alike_on_all_sides(self) -> None:
        a, b = self.tip(2, A), self.tip(2, B)
        assert tip_to_adopt(a, {1: b, 2: b}) == b and tip_to_adopt(b, {0: a, 2: b}) is None
        assert tip_to_adopt(a, {1: b}) is None and tip_to_adopt(b, {0: a}) == a

    def test_a_digest_needs_most_of_those_who_stand_there(self) -> None:
        good, bad = self.tip(2, B, A), self.tip(2, B, B)
        assert tip_to_adopt(self.tip(1), {1: good, 2: bad}) is None
        assert tip_to_adopt(self.tip(1), {1: bad, 2: good, 3: good}) == good


class TestRound:
    """What a round does with members that say nothing."""

    class Network:
        """Answers every status with a given one, and opens no stream."""

        peer, carriers = "peer0", ()

        def __init__(self, reply: messages.Status | None) -> None:
            self.reply, self.asked = reply, 0

        def know(self, peer: str, addresses: tuple[str, ...]) -> None:
            """Nothing to know."""

        def learn_carriers(self, *arguments: object, **keywords: object) -> None:
            """Nothing to learn."""

        def lanes(self, peer: str) -> int:
            """One."""
            return 1

        async def call(self, peer: str, request: messages.Request, timeout: float) -> messages.Reply:
            """The reply, or none in time."""
            self.asked += 1
            if self.reply is None:
                raise Unreachable("no answer", gone=False)
            return self.reply

        async def open_stream(self, *arguments: object) -> None:
            """Not here."""
            raise Unreachable("no stream")

    def outcome(
        self, reply: messages.Status | None, deadline: float, passed_seconds: float
    ) -> tuple[RoundOutcome, int, int]:
        """Of a round launched that long ago, with one live member that offers nothing; times asked; height after it."""
        config = parse_config(RunConfig, settings())
        state = OuterState([4], plugins.build("diloco.outer_optimizers", config.outer.optimizer))
        state.fragments[0].initialize()
        network, said = self.Network(reply), []

        async def run() -> RoundOutcome:
            membership = Membership(network, 0, 10.0, said.append)
            membership.start([Place(0, "peer0", ()), Place(1, "peer1", ())])
            around = Surroundings(
                "test", network, membership, NoCodec(), deadline, 1, said.append, background=asyncio.ensure_future
            )
            current = Round(around, state.fragments[0], 1.0, keep=lambda attempt: None)
            current._started -= passed_seconds
            current._deadline -= passed_seconds
            return await current.run()

        return asyncio.run(run()), network.asked, state.fragments[0].height

    def status(self, height: int) -> messages.Status:
        tips = (Tip(fragment=0, height=height, lineage=B, digest=B),) if height else ()
        return messages.Status(incarnation=A, sequence=1, tips=tips, offers=())

    def test_goes_on_without_one_that_is_late_and_says_so(self) -> None:
        outcome, asked, height = self.outcome(self.status(0), deadline=40.0, passed_seconds=21.0)
        assert (outcome.kind, outcome.members, height) == ("committed", (0,), 1) and asked == 1

    def test_never_without_one_that_may_have_moved_on(self) -> None:
        """As after a freeze: the last thing heard of the other is old."""
        outcome, asked, height = self.outcome(self.status(1), deadline=3.0, passed_seconds=2.0)
        assert (outcome.kind, height) == ("skipped", 0) and asked >= 1 and "no state came" in outcome.reason
        outcome, asked, height = self.outcome(None, deadline=1.0, passed_seconds=0.6)
        assert (outcome.kind, height) == ("skipped", 0) and asked >= 1

    def test_waits_at_first(self) -> None:
        outcome, asked, height = self.outcome(None, deadline=1.0, passed_seconds=0.0)
        assert outcome.kind == "skipped" and "islands [1] offered nothing within 1 s" in outcome.reason


class TestDoor:
    """Slots are granted once, and a refusal says what differs."""

    def door(self, **changes: object) -> Door:
        arguments = {"run": "test", "settings": {"a": "1"}, "max_slots": 3, "expected": 3, "first": True}
        door = Door(**{**arguments, "tell": lambda event: None, **changes})
        door.enter("founder", ("/ip4/127.0.0.1/tcp/1/p2p/founder",), -1)
        return door

    def hello(self, slot: int = -1, **changes: object) -> messages.Hello:
        return messages.Hello(**{"run": "test", "settings": {"a": "1"}, "slot": slot, "addresses": (), **changes})

    def test_slots_are_given_out_when_all_are_there(self) -> None:
        door = self.door()
        assert door.answer("x", self.hello()) == messages.Wait(came=2, expected=3)
        assert door.answer("x", self.hello()) == messages.Wait(came=2, expected=3), "asking again changes nothing"
        door.answer("y", self.hello(1))
        welcome = door.answer("y", self.hello(1))
        assert [(entry.slot, entry.peer) for entry in welcome.members] == [(0, "founder"), (1, "y"), (2, "x")]
        assert "can't join any more" in door.answer("z", self.hello()).reason
        assert door.answer("x", self.hello()) == welcome, "a member that was restarted is let in again"

    def test_a_slot_is_granted_once(self) -> None:
        door = self.door()
        assert door.answer("x", self.hello(2)) == messages.Wait(came=2, expected=3)
        assert "slot 2 is taken by x" in door.answer("y", self.hello(2)).reason

    def test_refusals_name_what_differs(self) -> None:
        door = self.door()
        assert "not 'other'" in door.answer("x", self.hello(run="other")).reason
        assert "a is 1 there and 2 here" in door.answer("x", self.hello(settings={"a": "2"})).reason
        assert "swarm.max_slots=3" in door.answer("x", self.hello(5)).reason

    def test_others_point_to_the_first(self) -> None:
        door = Door("test", {"a": "1"}, 3, 3, first=False, tell=lambda event: None, first_addresses=("there",))
        assert door.answer("x", self.hello()) == messages.Elsewhere(addresses=("there",))


class TestSettings:
    """What must agree does, and what is an island's own affair does not matter."""

    def shared(self, schema: str = "s", **changes: dict) -> dict[str, str]:
        return shared_settings(parse_config(RunConfig, settings(**changes)), schema)

    def test_own_affairs_do_not_matter(self) -> None:
        assert self.shared() == self.shared(
            swarm={
                "slot": 3,
                "listen": "127.0.0.1:7",
                "join_timeout": 1.0,
                "identity_file": "f",
                "islands": 2,
                "data_connections": 3,
            },
            run={"dir": "elsewhere", "device": "cpu"},
            train={"micro_batch_size": 1},
            parallel={"data_parallel_size": 2},
        )

    def test_the_rest_does(self) -> None:
        changed = self.shared(outer={"sync_every": 7}, run={"seed": 1})
        expected = "outer.sync_every is 30 there and 7 here; run.seed is 0 there and 1 here"
        assert difference(self.shared(), changed) == expected
        assert "model schema is sha256" in difference(self.shared(), self.shared(schema="other"))

    def test_values_are_bounded(self) -> None:
        assert max(map(len, self.shared(run={"name": "x" * 5000}).values())) <= 256
