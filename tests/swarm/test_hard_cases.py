"""Races and corners of the exchange, each of which was wrong once."""

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from harness import PEER_TIMEOUT, Island, Swarm, assert_same, eventually, running, settings, status

from test_hivemind_rules import Asked, TestRound as RoundTests, ballot, claim, entry, proposal

import diloco.island
from diloco.codecs.none import NoCodec
from diloco.config import RunConfig
from diloco.contributions import Measured, understated
from diloco.exchange.base import RoundOutcome, Seat, Work
from diloco.exchange.hivemind import catch_up, ipc, voting
from diloco.exchange.hivemind.address_book import AddressBook
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.client import HivemindExchange
from diloco.exchange.hivemind.donations import Donations
from diloco.exchange.hivemind.door import Door, come_in
from diloco.exchange.hivemind.membership import Membership
from diloco.exchange.hivemind.messages import BadMessage, Elsewhere, Hello, NotAMember, Settled, StateHeader, StateRequest, Tip, Vote
from diloco.exchange.hivemind.roster import Roster
from diloco.exchange.hivemind.round import Round
from diloco.exchange.hivemind.rounds import Rounds
from diloco.exchange.hivemind.surroundings import LastRound, Surroundings
from diloco.ledger import Counted, Ledger
from diloco.outer_state import LATE, Layout, OuterState
from diloco.reduction import CHUNK, Wire
from islands import plugins
from islands.config_file import parse_config

SIZES = [CHUNK + 77]

pytestmark = pytest.mark.timeout(200)


@pytest.mark.slow
def test_one_that_stood_still_before_its_vote_does_not_commit_what_the_others_gave_up(tmp_path: Path) -> None:
    """It holds all votes and nobody has its own: the others went on without it, and it follows them."""
    first = island(tmp_path, 0, [], 3)
    first.ask("join")
    address = eventually(first.address)
    with running([first]) as islands:
        islands += [island(tmp_path, slot, [address], 3) for slot in (1, 2)]
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


class TestTrainersEnd:
    """The client, without a process behind it."""

    @pytest.fixture
    def client(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[HivemindExchange]:
        """With two fragments, in its place."""
        monkeypatch.setattr(HivemindExchange, "_keep", lambda self: None)
        config = parse_config(RunConfig, settings())
        state = OuterState(Layout([4, 4], plugins.build("diloco.outer_optimizers", config.outer.optimizer), max_slots=4))
        for fragment in state.fragments:
            fragment.initialize()
        client = HivemindExchange(config, state, "schema")
        client._pipe = SimpleNamespace(send=lambda message: None)
        client._receive(joined(0))
        yield client
        client.close()

    def outcome(self, client: HivemindExchange, kind: str) -> RoundOutcome:
        """Of the state that is staged."""
        staged = client._state.fragments[0].staged
        return RoundOutcome(kind, 0, staged.height, digest=staged.digest, rejected=kind == "left_out")

    def test_a_swap_to_a_lineage_that_is_no_higher_is_a_swap(self, client: HivemindExchange) -> None:
        """A fork that has more tokens may have less height; then the process dies."""
        state = client._state.fragments[0]
        state.stage(torch.ones(4))
        state.commit(slot=0)
        client.launch(0, WORK)
        state.staged_tensors()[0].fill_(7.0)
        state.seal_received(1, "ab" * 32, Ledger((0,) * 4, tokens=9))
        client._receive(ipc.Committing(self.outcome(client, "left_out")))
        state.commit(slot=0)
        client._end_launched()
        assert client.outcome(0).kind == "left_out"

    def test_a_swap_that_was_announced_and_did_not_happen_does_not_count(self, client: HivemindExchange) -> None:
        """It took over a state, went on to the next round, and died before it could swap that in."""
        state = client._state.fragments[0]
        client.launch(0, WORK)
        for kind in ("left_out", "committed"):
            state.stage(torch.ones(4))
            client._receive(ipc.Committing(self.outcome(client, kind)))
            if kind == "left_out":
                state.commit(slot=0)
        client._end_launched()
        assert client.outcome(0).kind == "left_out"

    def test_nobody_calls_while_there_is_no_process(self, client: HivemindExchange) -> None:
        """Otherwise a step would launch a round that is skipped at once, again and again."""
        client._state.called.fill_(LATE)
        assert client.is_late(0) and client.called(1)
        client._present = False
        assert not client.is_late(0) and not client.called(1)

    def test_a_new_seat_is_taken_once_and_soon(self, client: HivemindExchange) -> None:
        """The trainer takes all anchors with the first outcome that has it; what it does from then on is work in the new slot."""
        client._receive(ipc.SeatLost("gone"))
        client._receive(joined(2))
        assert client.is_late(0) and client.is_late(1)
        client.launch(0, WORK)
        assert client.outcome(0).seat.slot == 2
        assert not client.is_late(1)
        client.launch(1, WORK)
        assert 1 not in client._outcomes, "it went to the exchange process"

    def test_a_new_seat_is_taken_once_though_two_rounds_were_in_flight(self, client: HivemindExchange) -> None:
        client._receive(ipc.SeatLost("gone"))
        client._receive(joined(2))
        client.launch(0, WORK)
        client.launch(1, WORK)
        assert client.arrived(0) and client.arrived(1)
        assert client.outcome(1).seat.slot == 2
        assert client.outcome(0).kind == "skipped"

    def test_work_of_a_slot_that_is_lost_never_counts_in_another(self, client: HivemindExchange) -> None:
        """Its parameters were still being gathered when the trainer was told of the new seat with another fragment's round."""
        of_the_old = replace(WORK, lease=(0, 0))
        client.launch(1, of_the_old)
        assert 1 not in client._outcomes, "it went to the exchange process"
        client._receive(ipc.Ended(replace(self.outcome(client, "committed"), fragment=1)))
        assert client.outcome(1).kind == "committed"
        client._receive(ipc.SeatLost("gone"))
        client._receive(joined(2))
        client.launch(0, of_the_old)
        assert client.outcome(0).seat.slot == 2
        client.launch(1, of_the_old)
        assert client.outcome(1).seat.slot == 2
        client.launch(1, replace(WORK, lease=(2, 0)))
        assert 1 not in client._outcomes, "it went to the exchange process"

    def test_nobody_calls_before_the_outcome_is_taken(self, client: HivemindExchange) -> None:
        """It may be taken many steps after the round has ended, and until then nothing can be launched."""
        client.launch(0, WORK)
        assert not client.arrived(0)
        client._receive(ipc.Ended(self.outcome(client, "committed")))
        client._state.called.fill_(LATE)
        assert client.arrived(0) and not client.is_late(0) and client.is_late(1)
        client.outcome(0)
        assert client.is_late(0)

    def test_an_outcome_that_is_taken_late_builds_on_no_anchor_that_is_overwritten(self, client: HivemindExchange) -> None:
        client.launch(0, WORK)
        client._receive(ipc.Ended(replace(self.outcome(client, "left_out"), rejected=False)))
        client._receive(ipc.SeatLost("gone"))
        assert client.outcome(0).rejected


WORK = Work(100, 0, 10, 5)


def joined(slot: int) -> ipc.Joined:
    return ipc.Joined(Seat(slot), Roster.first([entry(slot)]), "127.0.0.1:0")


def test_an_island_has_one_slot() -> None:
    """Asked for by its old entry as well, it would refuse its own second vote: no slot could be granted any more."""
    grown = Roster.first([entry(0), entry(1)]).after(entry(3, "peer1", since=1))
    assert [(each.slot, each.peer) for each in grown.entries] == [(0, "peer0"), (3, "peer1")]


def test_a_run_that_has_granted_nothing_has_taken_no_seat() -> None:
    """The first island, started again and alone (islands: 1), is asked by the others of the run that goes on."""

    async def run(reply: NotAMember) -> bool:
        class Network:
            def know(self, *arguments: object) -> None:
                """Nothing."""

            async def call(self, *arguments: object) -> NotAMember:
                """The answer of another run."""
                return reply

        membership = Membership(Network(), Roster.first([entry(0), entry(1)]), entry(1).ticket, 10.0, lambda event: None)
        membership.make_status = lambda sequence, incarnation: None
        await membership.exchange_status(membership.members[0])
        return membership._lost_seat.done() and bool(membership._lost_seat.exception())

    assert not asyncio.run(run(NotAMember(roster_height=0, roster_lineage=bytes(32))))
    assert asyncio.run(run(NotAMember(roster_height=1, roster_lineage=bytes(32))))


def test_the_address_book_may_lie_where_nothing_can_be_written(tmp_path: Path) -> None:
    """As an identity that is mounted read-only does: it is a shortcut, and no reason to end the exchange process."""
    AddressBook(str(tmp_path / "missing" / "key"), "test").write(["/ip4/10.0.0.1/tcp/1/p2p/x"])


def test_a_claim_beyond_all_bounds_raises_nothing() -> None:
    assert understated([1e200], [Measured(1.0, 1.0)]) is None


def a_round(state: OuterState) -> Round:
    """Of island 1 of two, where nobody answers; called in a loop."""
    membership = Membership(RoundTests.Network(None), Roster.first([entry(0), entry(1)]), entry(1).ticket, 10.0, print)
    membership.make_status = lambda sequence, incarnation: None
    around = Surroundings(
        "test", membership._network, membership, Wire(NoCodec(), NoCodec()), 40.0, 1, 10.0, True, report=lambda told: None, background=asyncio.ensure_future
    )  # fmt: skip
    return Round(around, state.fragments[0], WORK, keep=lambda attempt: None)


def a_state() -> OuterState:
    config = parse_config(RunConfig, settings())
    state = OuterState(Layout([4], plugins.build("diloco.outer_optimizers", config.outer.optimizer)))
    state.fragments[0].initialize()
    return state


def taken_over(current: Round, state: OuterState) -> Tip:
    """What the others agreed on, with this island's work in it, lies beside the agreed state of ``current``."""
    part = state.fragments[0]
    part.stage(torch.ones(4), [Counted(1, WORK.tokens, WORK.position, WORK.step, 2.0)])
    staged = part.staged
    lineage, digest = bytes.fromhex(staged.lineage), bytes.fromhex(staged.digest)
    tip = Tip(fragment=0, height=staged.height, lineage=lineage, digest=digest, tokens=staged.ledger.tokens)
    current._overtaken._taken = tip, StateHeader(num_bytes=0, ledger=staged.ledger.to_bytes(), members=(), weights=(), excluded=())
    return tip


def test_a_state_that_was_taken_over_is_not_committed_once_it_is_written_over() -> None:
    """The one that had it is silent for a while, an attempt with the others stages its result there, and fails."""

    async def run() -> None:
        for written_over in ("", "all of it", "some of it"):
            state = a_state()
            current = a_round(state)
            tip = taken_over(current, state)
            if written_over == "all of it":
                state.fragments[0].stage(torch.full((4,), 2.0))
            elif written_over:
                state.fragments[0].begin_staging()
            assert isinstance(await current._overtaken.take_over(tip), str) == bool(written_over)

    asyncio.run(run())


@pytest.mark.parametrize("rung", [-1, 1, 1 << 40])
def test_a_ledger_below_the_ladder_is_refused_and_one_beyond_its_end_does_no_harm(rung: int) -> None:
    """Its digest may be right, and then every round after it would end the exchange process with an error."""
    donor, state = a_state().fragments[0], a_state().fragments[0]
    donor.stage(torch.ones(4))
    ledger = replace(donor.staged.ledger, rung=rung)
    digest = donor.seal_received(1, "ab" * 32, ledger)
    tip = Tip(fragment=0, height=1, lineage=bytes.fromhex("ab" * 32), digest=bytes.fromhex(digest), tokens=ledger.tokens)
    for mine, its in zip(state.staged_tensors(), donor.staged_tensors(), strict=True):
        mine.copy_(its)
    header = StateHeader(num_bytes=0, ledger=ledger.to_bytes(), members=(), weights=(), excluded=())
    if rung < 0:
        with pytest.raises(BadMessage, match=f"rung {rung}"):
            catch_up._seal(state, tip, header)
        return
    catch_up._seal(state, tip, header)
    state.commit(slot=0)
    state.stage(torch.ones(4))
    state.commit(slot=0)
    assert (state.codec, state.period, state.height) == (0, None, 2)


def test_an_island_that_went_on_from_a_round_takes_the_anchor_however_the_next_one_counts_it() -> None:
    """Its parameters lack the round in between, though it hears of the commit from another."""

    async def run() -> None:
        state = a_state()
        current = a_round(state)
        tip = taken_over(current, state)
        current._ending.left_out = RoundOutcome("left_out", 0, 0)
        outcome = current._overtaken.end(tip, await current._overtaken.take_over(tip), "")
        assert outcome.kind == "committed" and outcome.rejected

    asyncio.run(run())


def test_an_attempt_on_the_old_state_ends_when_another_is_taken_over() -> None:
    """Accepted while the state was on its way: its result would be staged on top of the new state, and disagree with all."""

    async def run() -> None:
        current = a_round(a_state())
        current._contribution.prepare()
        current.offering = True
        claims = (claim(0), current._standing.claim())
        old = proposal(2).model_copy(update={"claims": claims, "lineage": current._standing.lineage})
        assert current.consider(old) == ""
        current._go_on()
        assert current._attempt is None
        await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.slow
def test_a_donor_that_sends_no_more_is_followed_by_another(tmp_path: Path) -> None:
    """It is alive, and its stream is not: the newcomer has swarm.join_timeout for all of it, and must not spend that on one."""
    islands = [island(tmp_path, 0, [], 2)]
    islands[0].ask("join")
    address = eventually(islands[0].address)
    with running(islands) as started:
        started.append(island(tmp_path, 1, [address], 2))
        started[1].ask("join")
        for each in started:
            each.answer()
            each.arm("hang_donation")
        swarm = Swarm(list(started))
        swarm.launch(0, 10, [1000.0] * 2)
        swarm.outcomes(0)
        started.append(island(tmp_path, 2, [address], 2))
        started[2].ask("join")
        eventually(lambda: any(each.fired("hang_donation") for each in started[:2]))
        for each in started[:2]:
            each.disarm("hang_donation")
        assert started[2].answer(timeout=8 * PEER_TIMEOUT).late
        assert_same(Swarm(started))


def island(folder: Path, slot: int, peers: list[str], islands: int) -> Island:
    keys = {"islands": islands, "slot": slot, "initial_peers": peers}
    return Island(folder / str(slot), settings(swarm=keys), SIZES)


def test_ranks_wait_for_their_seat_as_long_as_rank_0_takes_over_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large state on a slow link takes longer than any limit on the time from one sign of life to the next."""
    store = dist.HashStore()
    monkeypatch.setattr(diloco.island, "_GRACE_SECONDS", 1.0)
    monkeypatch.setattr(diloco.island, "_WAITING_SECONDS", 0.2)

    class Slow:
        def join(self, waiting: Callable[[], None] = lambda: None) -> Seat:
            for _ in range(30):
                time.sleep(0.1)
                waiting()
            return Seat(3)

    def take(rank: int) -> Seat:
        process, nobody_asked = SimpleNamespace(rank=rank, world_size=2, store=store), SimpleNamespace(raise_if_asked=lambda: None)
        return diloco.island._take_seat(Slow() if rank == 0 else None, process, 0.5, nobody_asked)

    with ThreadPoolExecutor(2) as pool:
        assert [seat.slot for seat in pool.map(take, range(2))] == [3, 3]


@pytest.mark.slow
def test_a_newcomer_for_whom_the_state_takes_longer_than_a_round(tmp_path: Path) -> None:
    """By the time it has a state, the swarm has the next one: it comes in nevertheless, and is in a round with the others."""
    islands = [island(tmp_path, 0, [], 2)]
    islands[0].ask("join")
    address = eventually(islands[0].address)
    with running(islands) as started:
        started.append(island(tmp_path, 1, [address], 2))
        started[1].ask("join")
        for each in started:
            each.answer()
            each.arm("slow_donation", "1.5")  # twice a part: anchor and momentum
        swarm = Swarm(list(started))
        started.append(island(tmp_path, 2, [address], 2))
        started[2].ask("join")
        deadline, number = time.monotonic() + 60, 0
        while not started[2]._pipe.poll(1.0):  # two rounds at least in the time of a transfer
            assert time.monotonic() < deadline, f"{number} rounds, and it is not in yet"
            number += 1
            swarm.launch(0, 10 * number, [1000.0] * 2)
            assert {outcome.kind for outcome in swarm.outcomes(0)} == {"committed"}
        assert started[2].answer().late and number > 3
        everyone = Swarm(started)
        everyone.launch(0, 500, [1000.0] * 3)
        assert {(each.kind, each.members) for each in everyone.outcomes(0)} == {("committed", (0, 1, 2))}
        assert_same(everyone)


def test_one_that_takes_from_an_older_state_goes_on_when_another_asks_for_a_newer() -> None:
    """Else an island that is left out now and then has a newcomer on a slow link start again each time."""
    state = OuterState(Layout([4], plugins.build("diloco.outer_optimizers", parse_config(RunConfig, settings()).outer.optimizer)))
    part, donations, said = state.fragments[0], Donations(), []
    part.initialize()

    class To:
        def __init__(self, peer: str) -> None:
            self.peer = peer

        async def send(self, header: StateHeader) -> None:
            said.append((self.peer, header.kind))

        async def send_plain(self, values: torch.Tensor) -> None:
            """Sent."""

        async def wait_for_end(self) -> None:
            """Ended."""

    def request() -> StateRequest:
        return StateRequest(fragment=0, height=part.height, lineage=bytes.fromhex(part.lineage), start=0, stop=16)

    async def run() -> None:
        old = request()
        await donations.serve(To("slow"), old, part, LastRound())
        part.stage(torch.ones(4))
        part.commit(slot=0)
        await donations.serve(To("late"), request(), part, LastRound())
        await donations.serve(To("slow"), old, part, LastRound())

    asyncio.run(run())
    assert said == [("slow", "state_header"), ("late", "state_header"), ("slow", "state_header")]


def test_nobody_waits_for_one_that_could_not_catch_up_within_a_whole_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its link may never be fast enough, and each round would wait half of its deadline."""
    config = parse_config(RunConfig, settings())
    state = OuterState(Layout([4], plugins.build("diloco.outer_optimizers", config.outer.optimizer)))
    state.fragments[0].initialize()

    async def run() -> list[str]:
        membership = Membership(RoundTests.Network(None), Roster.first([entry(0), entry(1)]), entry(1).ticket, 10.0, print)
        around = Surroundings(
            "test", membership._network, membership, Wire(NoCodec(), NoCodec()), 40.0, 1, 10.0, True, report=print, background=asyncio.ensure_future
        )
        rounds, now, seen = Rounds(around, state, 8, print, started=True), time.monotonic(), []
        ahead = Tip(fragment=0, height=1, lineage=bytes(32), digest=bytes(32), tokens=100)
        own = Tip(**{**ahead.model_dump(), "height": 0, "tokens": 0, "lineage": bytes.fromhex(state.fragments[0].lineage)})
        for seconds, tip in ((0, ahead), (39, ahead), (41, ahead), (42, own)):
            monkeypatch.setattr(time, "monotonic", lambda: now + seconds)
            membership.members[0].tips = {0: tip}
            membership.on_change()
            seen.append(membership.status().state)
        return seen

    assert asyncio.run(run()) == ["training", "training", "recovering", "training"]


def test_the_first_island_counts_itself_although_another_came_before_it_had_looked_around() -> None:
    """It asks the others first whether the run is in progress, and is asked itself meanwhile."""

    def hello(who: str, slot: int = -1) -> Hello:
        return Hello(run="test", settings={}, slot=slot, addresses=(), ticket=who.encode().ljust(32))

    async def run() -> Roster:
        door = Door("test", {}, 3, 2, first=True, tell=print)

        class Network:
            peer = "first"

            async def call(self, peer: str, request: Hello, timeout: float) -> Elsewhere:
                door.answer("other", hello("other"))
                return Elsewhere(addresses=())

        return await come_in(door, Network(), hello("first"), ["/p2p/other"], 2.0)

    assert [each.peer for each in asyncio.run(run()).entries] == ["first", "other"]
