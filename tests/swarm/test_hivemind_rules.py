"""The rules of the exchange one by one, without processes: messages, votes, whose state counts, who may come in."""

import asyncio
import random
from types import SimpleNamespace
from typing import Callable, Coroutine

import msgpack
import pytest
import torch
from harness import settings
from torch import Tensor

from diloco.codecs.none import NoCodec
from diloco.config import RunConfig
from diloco.contributions import independent_values
from diloco.exchange.base import RoundOutcome, Work
from diloco.exchange.hivemind import messages, voting
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.catch_up import tip_to_adopt
from diloco.exchange.hivemind.door import Door, come_in
from diloco.exchange.hivemind.membership import Membership
from diloco.exchange.hivemind.messages import (
    Ballot,
    Claim,
    Entry,
    Evidence,
    Excluded,
    Hello,
    Offer,
    Proposal,
    Queued,
    Tip,
)
from diloco.exchange.hivemind.network import Unreachable
from diloco.exchange.hivemind.offers import claim_objection, judge, odd_ones, proposal_objection, select
from diloco.exchange.hivemind.roster import Roster, next_entry
from diloco.exchange.hivemind.round import Round
from diloco.exchange.hivemind.rounds import Rounds
from diloco.exchange.hivemind.settings import difference, shared_settings
from diloco.exchange.hivemind.surroundings import Surroundings
from diloco.ledger import Ledger
from diloco.outer_state import Layout, OuterState
from diloco.reduction import Seen, Wire, reduce_chunk
from islands import plugins
from islands.config_file import parse_config

A, B = bytes([1]) * 32, bytes([2]) * 32


def claim(slot: int, **changes: object) -> Claim:
    """Of the island in ``slot``: ten sequences of a hundred tokens, norm 1."""
    values = dict(slot=slot, epoch=0, peer=f"peer{slot}", tokens=100, start=0, position=10, step=5, norm=1.0)
    return Claim(**{**values, **changes})


def proposal(num_members: int) -> Proposal:
    """Attempt 1 of round 1, of members 0 to ``num_members - 1``."""
    return Proposal(
        run="test",
        fragment=0,
        height=1,
        attempt=1,
        lineage=A,
        claims=tuple(claim(slot) for slot in range(num_members)),
        weights=(100.0,) * num_members,
        excluded=(),
    )


def entry(slot: int, peer: str = "", **changes: object) -> Entry:
    """The first holder of a slot."""
    peer = peer or f"peer{slot}"
    values = dict(slot=slot, epoch=0, peer=peer, addresses=(), ticket=peer.encode().ljust(32), since=0)
    return Entry(**{**values, **changes})


def ballot(slot: int, digest: bytes = A, evidence: tuple[Evidence, ...] = (), mean_square: float = 0.0) -> Ballot:
    """A vote of the island in ``slot``."""
    return Ballot(slot=slot, digest=digest, mean_square=mean_square, evidence=evidence)


class TestMessages:
    """What comes from the network is one of our messages to the letter, or refused."""

    def test_every_message_survives_the_wire(self) -> None:
        status = messages.Status(
            incarnation=A,
            sequence=3,
            state="training",
            roster_height=2,
            roster_lineage=B,
            step=7,
            tokens_per_second=1.5,
            tips=(Tip(fragment=0, height=1, lineage=A, digest=B, tokens=300),),
            offers=(Offer(fragment=0, height=2, lineage=A, attempt=0, claim=claim(1), passed=True),),
        )
        settled = messages.Settled(committed=True, ballots=(ballot(0, A, (Evidence(square=1.0, along=-1.0),)),))
        roster = Roster.first([entry(0), entry(1)]).to_message()
        for message in (status, proposal(3), settled, roster, messages.Welcome(roster=roster)):
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
            {"claims": ()},
            {"claims": ({**claim(0).model_dump(), "norm": float("nan")},)},
            {"claims": ({**claim(0).model_dump(), "norm": float("inf")},)},
            {"claims": ({**claim(0).model_dump(), "tokens": 0},)},
            {"claims": ({**claim(0).model_dump(), "start": -1},)},
            {"weights": (float("nan"), 1.0)},
            {"weights": (-1.0, 1.0)},
            {"excluded": ({"claim": claim(0).model_dump(), "rule": "dislike"},)},
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
        changes += [{"claims": one.claims[:2]}, {"weights": one.weights[:2]}]
        assert len({one.id(), *(one.model_copy(update=change).id() for change in changes)}) == len(changes) + 1


class TestAttempt:
    """Votes count until it is given up, and giving up is for good."""

    def run(self, check: Callable[[Attempt], Coroutine[None, None, None]]) -> None:
        async def with_loop() -> None:
            await check(Attempt(proposal(3), (0, 1, 2), 0))

        asyncio.run(with_loop())

    def test_unanimous_only_with_all_votes_equal(self) -> None:
        async def check(attempt: Attempt) -> None:
            attempt.vote(ballot(0))
            attempt.vote(ballot(1))
            assert not attempt.unanimous()
            assert attempt.unanimous([ballot(2)]) and attempt.accepted([ballot(2)])
            assert not attempt.unanimous([ballot(2, B)])
            assert not attempt.unanimous([ballot(2), ballot(7)])

        self.run(check)

    def test_an_objection_stands_against_equal_votes(self) -> None:
        async def check(attempt: Attempt) -> None:
            attempt._judge = lambda ballots: Excluded(claim=claim(1), rule="claim")
            attempt.vote(ballot(0))
            attempt.vote(ballot(1))
            assert attempt.objection() is None, "not before all votes are known"
            assert attempt.unanimous([ballot(2)]) and not attempt.accepted([ballot(2)])

        self.run(check)

    def test_no_vote_after_it_was_given_up(self) -> None:
        async def check(attempt: Attempt) -> None:
            attempt.fail("why")
            assert not attempt.vote(ballot(1)) and attempt.frozen and attempt.ballots == {}

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


class TestSettle:
    """What an attempt counts as, by the votes that those who can be reached know of."""

    def settled(self, own: list[Ballot], replies: dict[int, messages.Settled]) -> str:
        """Of four islands, seen from island 0; those without a reply can't be reached."""

        async def run() -> str:
            attempt = Attempt(proposal(4), (0, 1, 2, 3), 0)
            for each in own:
                attempt.vote(each)
            return await voting.settle(Asked(replies), attempt, AttemptFailed("cut"))

        return asyncio.run(run())

    def answer(self, *slots: int, committed: bool = False) -> messages.Settled:
        return messages.Settled(committed=committed, ballots=tuple(ballot(slot) for slot in slots))

    def test_not_without_its_own_vote(self) -> None:
        assert self.settled([ballot(1)], {}) == "given_up"

    def test_what_another_has_committed(self) -> None:
        assert self.settled([ballot(0)], {1: self.answer(0, 1, 2, 3, committed=True)}) == "committed"

    def test_votes_that_are_complete_between_them(self) -> None:
        assert self.settled([ballot(0), ballot(1)], {1: self.answer(0, 1, 2), 2: self.answer(2, 3)}) == "committed"
        assert self.settled([ballot(0), ballot(1)], {1: self.answer(1, 2), 2: self.answer(2), 3: self.answer(3)}) == "committed"

    def test_one_that_is_gone_can_not_have_committed_alone(self) -> None:
        """Its vote is missing with one who answers, so that one has not acknowledged it."""
        answers = {1: self.answer(0, 1, 2), 2: self.answer(0, 1, 2)}
        assert self.settled([ballot(0), ballot(1)], answers) == "given_up"

    def test_two_that_are_gone_may_have(self) -> None:
        """Island 2 has this island's acknowledgement, and may have all votes; that of island 3 is not known here."""
        assert self.settled([ballot(0), ballot(1), ballot(2)], {1: self.answer(0, 1, 2)}) == "in_doubt"
        assert self.settled([ballot(0), ballot(1), ballot(2)], {1: self.answer(0, 1)}) == "given_up"

    def test_nobody_has_while_one_that_answers_has_not_voted(self) -> None:
        """Votes come while bytes of others are still on the wire, so those of two that are gone may be held by all."""
        assert self.settled([ballot(0), ballot(2), ballot(3)], {1: self.answer(0, 2, 3)}) == "given_up"


class Asked:
    """Surroundings in which some islands answer."""

    def __init__(self, replies: dict[int, messages.Settled]) -> None:
        self._replies = replies
        self.membership = self

    def live(self) -> list[Entry]:
        """Those who answer."""
        return [entry(slot) for slot in self._replies]

    async def call(self, slot: int, request: messages.Settle, timeout: float) -> messages.Settled:
        """The answer."""
        return self._replies[slot]


class TestTipToAdopt:
    """The swarm's state wins over this island's where the rule says so, and the rule is the same for all."""

    def tip(self, height: int, lineage: bytes = A, digest: bytes = A, tokens: int | None = None) -> Tip:
        tokens = 100 * height if tokens is None else tokens
        return Tip(fragment=0, height=height, lineage=lineage, digest=digest, tokens=tokens)

    def test_same_or_ahead_stays(self) -> None:
        assert tip_to_adopt(self.tip(2), {1: self.tip(2), 2: self.tip(1)}) is None
        assert tip_to_adopt(self.tip(2), {}) is None
        assert tip_to_adopt(None, {}) is None

    def test_behind_adopts(self) -> None:
        assert tip_to_adopt(self.tip(1), {1: self.tip(2, B), 2: self.tip(1)}) == self.tip(2, B)
        assert tip_to_adopt(None, {1: self.tip(2, B), 2: self.tip(1)}) == self.tip(2, B)

    def test_a_fork_is_decided_by_tokens_then_by_the_lower_hash_alike_on_all_sides(self) -> None:
        a, b = self.tip(5, A, tokens=100), self.tip(2, B, tokens=200)
        assert tip_to_adopt(a, {1: b, 2: b}) == b and tip_to_adopt(b, {0: a, 2: a, 3: a}) is None
        a, b = self.tip(2, A), self.tip(2, B)
        assert tip_to_adopt(a, {1: b, 2: b}) is None and tip_to_adopt(b, {0: a}) == a

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
        self,
        reply: messages.Status | None,
        deadline: float,
        passed_seconds: float,
        look: Callable[[Round], None] = lambda current: None,
        height: int = 0,
    ) -> tuple[RoundOutcome, int, int]:
        """Of a round launched that long ago, with one live member that offers nothing; times asked; height after it."""
        config = parse_config(RunConfig, settings())
        state = OuterState(Layout([4], plugins.build("diloco.outer_optimizers", config.outer.optimizer)))
        state.fragments[0].initialize()
        for _ in range(height):
            state.fragments[0].stage(torch.zeros(4))
            state.fragments[0].commit(slot=0)
        network, said = self.Network(reply), []

        async def run() -> RoundOutcome:
            roster = Roster.first([entry(0), entry(1)])
            membership = Membership(network, roster, entry(0).ticket, 10.0, said.append)
            membership.make_status = lambda sequence, incarnation: self.status(0)
            around = Surroundings(
                "test",
                network,
                membership,
                Wire(NoCodec(), NoCodec()),
                deadline,
                min_islands=1,
                max_weight_ratio=10.0,
                carry=True,
                report=said.append,
                background=asyncio.ensure_future,
            )
            current = Round(around, state.fragments[0], Work(100, 0, 10, 5), keep=lambda attempt: None)
            current._started -= passed_seconds
            current._deadline -= passed_seconds
            look(current)
            return await current.run()

        return asyncio.run(run()), network.asked, state.fragments[0].height

    def status(self, height: int) -> messages.Status:
        tips = (Tip(fragment=0, height=height, lineage=B, digest=B, tokens=100),) if height else ()
        roster = Roster.first([entry(0), entry(1)])
        return messages.Status(
            incarnation=A,
            sequence=1,
            state="training",
            roster_height=0,
            roster_lineage=roster.lineage,
            step=0,
            tokens_per_second=0.0,
            tips=tips,
            offers=(),
        )

    def test_goes_on_without_one_that_is_late_and_says_so(self) -> None:
        outcome, asked, height = self.outcome(self.status(0), deadline=40.0, passed_seconds=21.0)
        assert (outcome.kind, outcome.members, height) == ("committed", (0,), 1) and asked == 1

    def test_goes_on_sooner_without_one_that_has_not_begun(self) -> None:
        """The others have agreed on something, and it has no state yet: ``peer_timeout`` (10 s) is what it gets."""
        outcome, asked, _ = self.outcome(self.status(0), deadline=40.0, passed_seconds=11.0, height=1)
        assert (outcome.kind, outcome.members, asked) == ("committed", (0,), 1)
        outcome, _, _ = self.outcome(self.status(0), deadline=23.0, passed_seconds=11.0)
        assert outcome.exchange_seconds >= 0.4, "before the first round half of the deadline is what everyone gets"

    def test_never_without_one_that_may_have_moved_on(self) -> None:
        """As after a freeze: the last thing heard of the other is old."""
        outcome, asked, height = self.outcome(self.status(1), deadline=3.0, passed_seconds=2.0)
        assert (outcome.kind, height) == ("skipped", 0) and asked >= 1 and "no state came" in outcome.reason
        outcome, asked, height = self.outcome(None, deadline=1.0, passed_seconds=0.6)
        assert (outcome.kind, height) == ("skipped", 0) and asked >= 1

    def test_a_round_that_is_over_or_to_come_is_refused_and_so_is_an_old_attempt(self) -> None:
        """As when somebody sends an earlier round's proposal once more."""
        said: list[str] = []

        def look(current: Round) -> None:
            current._contribution.prepare()
            current.offering, claims = True, (current.offer().claim, claim(1, norm=0.0))
            right = dict(claims=claims, weights=(100.0, 100.0), lineage=current.offer().lineage)
            good = proposal(2).model_copy(update=right)
            for change in ({"height": 2}, {"lineage": B}, {"attempt": 2}, {"attempt": 2}, {"attempt": 1}):
                said.append(current.consider(good.model_copy(update=change)))

        self.outcome(self.status(0), deadline=1.0, passed_seconds=0.0, look=look)
        assert "next height is 1" in said[0] and "on lineage" in said[1]
        assert said[2:4] == ["", ""], "one that was accepted may be sent again, where the answer got lost"
        assert "not later than attempt 2" in said[4]

    def test_waits_at_first(self) -> None:
        outcome, asked, height = self.outcome(None, deadline=1.0, passed_seconds=0.0)
        assert outcome.kind == "skipped" and "islands [1] offered nothing within 1 s" in outcome.reason


class TestDoor:
    """Slots are granted once, and a refusal says what differs."""

    def door(self, **changes: object) -> Door:
        arguments = {"run": "test", "settings": {"a": "1"}, "max_slots": 3, "expected": 3, "first": True}
        door = Door(**{**arguments, "tell": lambda event: None, **changes})
        door.enter("founder", self.hello(addresses=("/ip4/127.0.0.1/tcp/1/p2p/founder",)))
        return door

    def hello(self, slot: int = -1, who: str = "", **changes: object) -> Hello:
        values = {"run": "test", "settings": {"a": "1"}, "slot": slot, "addresses": (), "ticket": who.encode().ljust(32)}
        return Hello(**{**values, **changes})

    def test_slots_are_given_out_when_all_are_there(self) -> None:
        door = self.door()
        assert door.answer("x", self.hello(who="x")) == messages.Wait(came=2, expected=3)
        assert door.answer("x", self.hello(who="x")) == messages.Wait(came=2, expected=3), "asking again changes nothing"
        door.answer("y", self.hello(1, "y"))
        welcome = door.answer("y", self.hello(1, "y"))
        assert [(each.slot, each.peer) for each in welcome.roster.entries] == [(0, "founder"), (1, "y"), (2, "x")]
        assert isinstance(door.answer("z", self.hello(who="z")), Queued)
        assert door.answer("x", self.hello(who="x")) == welcome
        assert isinstance(door.answer("x", self.hello(who="x again")), Queued), "a restarted trainer needs a new lease"

    def test_the_first_enters_although_others_came_while_it_asked_around(self) -> None:
        async def meet() -> Roster:
            door = Door("test", {"a": "1"}, 3, 2, first=True, tell=lambda event: None)
            for who in "xy":  # as many as there have to be
                assert door.answer(who, self.hello(0, who)) == messages.Wait(came=0, expected=2)
            nobody = SimpleNamespace(peer="founder")
            coming = asyncio.ensure_future(come_in(door, nobody, self.hello(0, who="founder"), [], timeout=5.0))
            await asyncio.sleep(0.1)
            assert "slot 0 is taken" in door.answer("x", self.hello(0, "x")).reason
            door.answer("y", self.hello(who="y"))
            return await coming

        assert [each.peer for each in asyncio.run(meet()).entries] == ["founder", "y"]

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


class TestMembership:
    """What members tell each other."""

    def test_what_changes_is_told_before_the_last_message_is_answered(self) -> None:
        """The launch of a round comes right after the landing of another, and must not wait a round trip for it."""

        class Silent(TestRound.Network):
            async def call(self, peer: str, request: messages.Request, timeout: float) -> messages.Reply:
                self.asked += 1
                return await asyncio.get_running_loop().create_future()

        async def asked() -> list[int]:
            network = Silent(None)
            membership = Membership(network, Roster.first([entry(0), entry(1)]), entry(0).ticket, 10.0, print)
            membership.make_status = lambda sequence, incarnation: TestRound().status(0)
            running, counts = asyncio.ensure_future(membership.run()), []
            for _ in range(3):
                for _ in range(20):
                    await asyncio.sleep(0)
                counts.append(network.asked)
                membership.publish()
            running.cancel()
            await asyncio.wait({running})
            assert len(asyncio.all_tasks()) == 1, "nobody asks any more"
            return counts

        assert asyncio.run(asked()) == [1, 2, 2], "two at once, and no more"


class TestVotes:
    """What is taken for a vote."""

    def answered(self, evidence: int) -> messages.Reply:
        """To a vote of island 1, on a proposal of two, with so many pieces of evidence."""
        config = parse_config(RunConfig, settings())
        state = OuterState(Layout([4], plugins.build("diloco.outer_optimizers", config.outer.optimizer)))

        async def run() -> messages.Reply:
            membership = Membership(TestRound.Network(None), Roster.first([entry(0), entry(1)]), entry(0).ticket, 10.0, print)
            around = Surroundings(
                "test", membership._network, membership, Wire(NoCodec(), NoCodec()), 40.0, 1, 10.0, True, report=print, background=print
            )
            rounds, attempt = Rounds(around, state, 8, print, started=True), Attempt(proposal(2), (0, 1), 0)
            rounds._keep(attempt)
            seen = (Evidence(square=1.0, along=1.0),) * evidence
            vote = messages.Vote(proposal=attempt.id, digest=A, mean_square=1.0, evidence=seen)
            return await rounds.answer(membership.members[1], vote)

        return asyncio.run(run())

    def test_one_without_evidence_of_each_member_is_none(self) -> None:
        """Nobody could be judged by the votes of such an attempt, so nobody may commit it."""
        assert isinstance(self.answered(2), messages.Ack)
        assert "evidence" in self.answered(0).reason and "evidence" in self.answered(3).reason


class TestRoster:
    """Slots are leases: who gets which, and which list comes before which."""

    def ask(self, peer: str, silent: dict[int, float], slot: int = -1, entries: tuple[int, ...] = (0, 1)) -> Entry | str:
        hello = Hello(run="test", settings={}, slot=slot, addresses=(), ticket=A)
        roster = Roster.first(entry(each) for each in entries)
        return next_entry(roster, peer, hello, max_slots=3, silent_seconds=silent, lease_seconds=60.0)

    def test_a_newcomer_gets_a_slot_that_nobody_had(self) -> None:
        granted = self.ask("new", {1: 1000.0})
        assert (granted.slot, granted.epoch, granted.since) == (2, 0, 1)

    def test_one_that_comes_back_gets_its_own_in_a_new_epoch(self) -> None:
        granted = self.ask("peer1", {1: 0.1})
        assert (granted.slot, granted.epoch) == (1, 1)

    def test_a_lease_ends_after_long_silence_or_a_leave(self) -> None:
        assert "all 3 slots are taken" in self.ask("new", {1: 59.0}, entries=(0, 1, 2))
        assert self.ask("new", {1: 61.0, 2: 99.0}, entries=(0, 1, 2)).slot == 2
        assert self.ask("new", {1: float("inf")}, entries=(0, 1, 2)).slot == 1

    def test_a_wanted_slot_is_taken_or_given(self) -> None:
        assert "slot 1 is taken by peer1" in self.ask("new", {}, slot=1)
        assert self.ask("new", {1: 0.1}, slot=1).epoch == 1
        assert "swarm.max_slots=3" in self.ask("new", {}, slot=3)

    def test_more_grants_win_then_the_lower_hash_and_never_both(self) -> None:
        start = Roster.first([entry(0), entry(1)])
        a, b = start.after(entry(2, "x", since=1)), start.after(entry(2, "y", since=1))
        assert start.comes_before(a.height, a.lineage) and not a.comes_before(start.height, start.lineage)
        assert a.comes_before(b.height, b.lineage) != b.comes_before(a.height, a.lineage)
        assert not a.comes_before(a.height, a.lineage)
        assert Roster.of(a.to_message()) == a


class TestOffers:
    """Who is proposed, with which weight, and what members check of a proposal."""

    ledger = Ledger((0, 20, 0))
    roster = Roster.first([entry(0), entry(1, epoch=2), entry(2)])

    def test_a_claim_needs_its_lease_and_new_sequences(self) -> None:
        good = claim(1, epoch=2, start=20, position=30)
        assert claim_objection(good, self.roster, self.ledger) == ""
        for change in ({"epoch": 1}, {"epoch": 3}, {"peer": "other"}, {"slot": 2}):
            assert "does not have that slot" in claim_objection(good.model_copy(update=change), self.roster, self.ledger)
        for change in ({"start": 10}, {"start": 30}, {"position": 20}):
            assert "20 have been counted" in claim_objection(good.model_copy(update=change), self.roster, self.ledger)

    def test_what_is_selected_is_accepted_and_nothing_else_is(self) -> None:
        claims = [claim(0, tokens=10), claim(1, tokens=5000), claim(2, norm=90.0), claim(3)]
        selection = select(claims, {}, typical_norm=1.0, max_weight_ratio=10.0)
        assert [each.slot for each in selection.claims] == [0, 1, 3]
        assert selection.weights == (10.0, 1000.0, 100.0)
        assert [(each.claim.slot, each.rule) for each in selection.excluded] == [(2, "norm")]
        parts = dict(claims=selection.claims, weights=selection.weights, excluded=selection.excluded)
        good = proposal(3).model_copy(update=parts)
        assert proposal_objection(good, {}, 1.0, 10.0) == ""
        bad = [
            {"weights": (10.0, 5000.0, 100.0)},
            {"excluded": (Excluded(claim=claim(2), rule="norm"),)},
            {"excluded": (Excluded(claim=claims[2], rule="opposite"),)},
            {"claims": tuple(claims), "weights": (10.0, 1000.0, 100.0, 100.0), "excluded": ()},
        ]
        for change in bad:
            assert proposal_objection(good.model_copy(update=change), {}, 1.0, 10.0), change

    def test_one_found_out_is_left_out_by_those_who_know_it(self) -> None:
        caught = {1: Excluded(claim=claim(1), rule="opposite")}
        selection = select([claim(0), claim(1), claim(2)], caught, 1.0, 10.0)
        assert [each.slot for each in selection.claims] == [0, 2] and selection.excluded == (caught[1],)
        assert len(select([claim(0), claim(1, position=20)], caught, 1.0, 10.0).claims) == 2, "a new claim is a new chance"
        assert select([claim(1)], caught, 1.0, 10.0) is None

    def test_votes_find_out_who_lied_and_who_works_against_the_others(self) -> None:
        generator = torch.Generator().manual_seed(0)
        common, numel = torch.randn(10_000, generator=generator), 10_000
        own = [common + torch.randn(numel, generator=generator) for _ in range(3)]
        assert self.judged(own) is None
        assert self.judged([own[0], -own[1], own[2]]) == (1, "opposite")
        assert self.judged([own[0], own[1] * 2, own[2]], claimed=own) == (1, "claim")
        assert self.judged([own[0], -own[1]]) is None, "two can't tell which of them is wrong"
        broken = own[2].clone()
        broken[5] = float("nan")
        assert self.judged([own[0], own[1], broken], claimed=own) == (2, "claim")

    def judged(self, contributions: list[Tensor], claimed: list[Tensor] | None = None) -> tuple[int, str] | None:
        """Reduced in two halves, each by another member."""
        codec, numel, seen = NoCodec(), contributions[0].numel(), []
        for half in (slice(0, numel // 2), slice(numel // 2, numel)):
            seen.append(Seen(len(contributions)))
            encoded = [codec.encode(each[half]) for each in contributions]
            reduce_chunk(codec, encoded, [100.0] * len(encoded), numel // 2, torch.float32, seen[-1])
        ballots = {
            slot: ballot(slot, A, evidence=tuple(map(as_evidence, half.squares, half.alongs)), mean_square=half.mean_square)
            for slot, half in enumerate(seen)
        }
        norms = [float(each.norm()) for each in claimed or contributions]
        claims = tuple(claim(slot, norm=norm) for slot, norm in enumerate(norms))
        judged = judge(proposal(len(claims)).model_copy(update={"claims": claims}), numel, ballots)
        return judged and (judged.claim.slot, judged.rule)

    def test_a_sparse_codec_has_few_values_that_are_independent(self) -> None:
        assert independent_values(32.0, 4096) == 4096
        assert independent_values(64.0, 4096) == 4096
        assert independent_values(0.25, 4096) == 32
        assert independent_values(0.25, 5) == 1

    def test_the_odd_digest_is_found_by_majority_only(self) -> None:
        votes = {0: ballot(0), 1: ballot(1, B), 2: ballot(2)}
        assert [each.claim.slot for each in odd_ones(proposal(3), votes)] == [1]
        assert odd_ones(proposal(2), {0: ballot(0), 1: ballot(1, B)}) == []


def as_evidence(square: float, along: float) -> Evidence:
    return Evidence(square=square, along=along)


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
            outer={"overlap": 5, "merge_alpha": 0.5, "late": "land_late"},
        )

    def test_the_rest_does(self) -> None:
        alike = ["error_feedback", "residual_decay", "fragments", "fragment_pattern", "separate_embeddings"]
        alike += ["codec.type", "optimizer.type", "optimizer.lr", "optimizer.momentum"]
        assert {f"outer.{key}" for key in alike} <= self.shared().keys()
        changed = self.shared(outer={"sync_every": 7}, run={"seed": 1})
        expected = "outer.sync_every is 30 there and 7 here; run.seed is 0 there and 1 here"
        assert difference(self.shared(), changed) == expected
        assert "model schema is sha256" in difference(self.shared(), self.shared(schema="other"))

    def test_values_are_bounded(self) -> None:
        assert max(map(len, self.shared(run={"name": "x" * 5000}).values())) <= 256
