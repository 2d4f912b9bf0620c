"""All rounds of this island, and what it answers to the other members."""

import asyncio
import time
from collections import OrderedDict
from typing import Callable, Iterator, Literal

from diloco.exchange.base import RoundOutcome, Work
from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.attempt import Attempt
from diloco.exchange.hivemind.catch_up import tip_of, tip_to_adopt
from diloco.exchange.hivemind.donations import Donations
from diloco.exchange.hivemind.granting import Granting
from diloco.exchange.hivemind.ipc import Ended
from diloco.exchange.hivemind.membership import Member
from diloco.exchange.hivemind.messages import (
    Ack,
    Ballot,
    ContributionHeader,
    Grant,
    Header,
    Leave,
    Offer,
    Proposal,
    Refused,
    Reply,
    Request,
    RosterRequest,
    Settle,
    Settled,
    StateRequest,
    Status,
    Tip,
    Vote,
)
from diloco.exchange.hivemind.stream import Stream
from diloco.exchange.hivemind.offers import matching
from diloco.exchange.hivemind.round import Round
from diloco.exchange.hivemind.surroundings import LastRound, Surroundings
from diloco import outer_state
from diloco.outer_state import FragmentState, OuterState

_ATTEMPTS_KEPT = 64
_TRAINER_LOOK_SECONDS = 0.5


class Rounds:
    """Launches rounds and passes every message of a member to the round that it is about.

    Attributes:
        granting: what newcomers ask, and members vote on.
    """

    def __init__(
        self, around: Surroundings, state: OuterState, max_slots: int, end: Callable[[Ended], None], started: bool
    ) -> None:
        self._around, self._state, self._end, self._started = around, state, end, started
        self._rounds: dict[int, Round] = {}
        self._attempts: OrderedDict[bytes, Attempt] = OrderedDict()
        self._given_up: OrderedDict[bytes, None] = OrderedDict()
        self._new_attempt = asyncio.Event()
        self._donations = Donations()
        self._passing: dict[int, Offer] = {}  # rounds in which the others need not wait for this island
        self._late = around.membership.own.since > 0
        self._frozen = False
        self._called_since: dict[int, float] = {}
        self._behind_since: dict[int, float] = {}  # fragments of which the others have another state
        self.granting = Granting(around, max_slots, self._keep)
        around.membership.make_status = self._status
        around.membership.on_change = self._notice
        around.membership.on_lost = self._member_lost

    def start(self) -> None:
        """The trainer's outer state is the one that it trains on: from now on others may rely on it."""
        self._started = True
        self._around.membership.publish()

    async def launch(self, fragment: int, work: Work) -> None:
        """Run the next round of a fragment to its end, and report it."""
        state = self._state.fragments[fragment]
        self._state.called[fragment] = outer_state.NOT_CALLED
        current = self._rounds[fragment] = Round(self._around, state, work, self._keep)
        self._passing.pop(fragment, None)
        outcome: RoundOutcome = await current.run()
        del self._rounds[fragment]
        if current.passes:
            height, lineage = state.height + 1, bytes.fromhex(state.lineage)
            self._passing[fragment] = current.offer().model_copy(
                update={"height": height, "lineage": lineage, "passed": True}
            )
        self._around.membership.publish()
        self._end(Ended(outcome))

    def is_needed(self) -> bool:
        """Whether a member that takes part has less of some fragment than this island."""
        own = {state.index: state.ledger.tokens for state in self._state.fragments}
        tips = (tip for member in self._around.membership.awaited() for tip in member.tips.values())
        return any(tip.tokens < own[tip.fragment] for tip in tips if tip.fragment in own)

    async def watch_trainer(self) -> None:
        """Notice for ever whether the trainer stands still (stopped, swapped out): others need not wait for it then."""
        beat, last = int(self._state.beat), time.monotonic()
        while True:
            await asyncio.sleep(_TRAINER_LOOK_SECONDS)
            self._donations.forget_unused()
            now = time.monotonic()
            if int(self._state.beat) != beat:
                beat, last = int(self._state.beat), now
            self._look_for_calls()
            frozen = now - last > self._around.membership.peer_timeout
            if frozen != self._frozen:
                self._frozen = frozen
                self._around.membership.publish()

    async def answer(self, member: Member, request: Request) -> Reply:
        """What a member is answered."""
        match request:
            case Status():
                self._around.membership.receive_status(member, request)
                return self._around.membership.status()
            case Leave():
                self._around.membership.lost(member, "left the run", what="left")
                return Ack()
            case Proposal():
                return self._consider(member, request)
            case Grant():
                return self._consider_grant(member, request)
            case Vote():
                return self._take_vote(member, request)
            case RosterRequest():
                return self._around.membership.roster.to_message()
            case Settle():
                return self._settle(member, request)
            case _:
                return Refused(reason=f"a member has no reason to send {request.kind!r}")

    async def stream(self, member: Member, header: Header, stream: Stream) -> None:
        """Serve a stream that a member opened."""
        match header:
            case ContributionHeader():
                await self._take_contribution(member, header, stream)
            case StateRequest() if header.fragment < len(self._state.fragments):
                last = self._around.last_round.get(header.fragment, LastRound())
                await self._donations.serve(stream, header, self._state.fragments[header.fragment], last)
            case _:
                raise messages.BadMessage(f"{header.kind!r} opens no stream")

    async def _take_contribution(self, member: Member, header: ContributionHeader, stream: Stream) -> None:
        attempt = await self._find_attempt(header.proposal)
        if attempt is None or attempt.transfer is None or not attempt.names(member.slot):
            raise messages.BadMessage("a contribution to a proposal that is not open here")
        position = attempt.position(member.slot)
        try:
            await attempt.unless_failed(attempt.transfer.serve(position, header.lane, header.lanes, stream))
        except (OSError, EOFError, ValueError) as error:
            attempt.fail(f"lost the stream of island {member.slot}: {error}")
            raise

    async def _find_attempt(self, proposal: bytes) -> Attempt | None:
        """An accepted attempt. A stream may be faster than the proposal it belongs to, so wait for that a while."""
        try:
            async with asyncio.timeout(self._around.membership.peer_timeout):
                while proposal not in self._attempts and proposal not in self._given_up:
                    self._new_attempt.clear()
                    await self._new_attempt.wait()
        except TimeoutError:
            pass
        return self._attempts.get(proposal)

    def _consider(self, member: Member, proposal: Proposal) -> Reply:
        current = self._rounds.get(proposal.fragment)
        slots = [claim.slot for claim in proposal.claims]
        if proposal.run != self._around.run:
            return Refused(reason=f"this is run {self._around.run!r}")
        if slots != sorted(set(slots)) or len(slots) != len(proposal.weights):
            return Refused(reason="its members are not in slot order, or have no weight each")
        if slots[0] != member.slot:
            return Refused(reason="only the first of its members may make a proposal")
        if proposal.id() in self._given_up:
            return Refused(reason="this island has given that attempt up")
        if current is None:
            return Refused(reason="nothing is offered to this round now")
        reason = current.consider(proposal)
        return Refused(reason=reason) if reason else Ack()

    def _consider_grant(self, member: Member, grant: Grant) -> Reply:
        if grant.run != self._around.run or grant.voters[0] != member.slot:
            return Refused(reason="only the first of its voters may propose a grant, in its own run")
        if grant.id() in self._given_up:
            return Refused(reason="this island has given that attempt up")
        reason = self.granting.consider(grant)
        return Refused(reason=reason) if reason else Ack()

    def _take_vote(self, member: Member, vote: Vote) -> Reply:
        attempt = self._attempts.get(vote.proposal)
        if attempt is None or not attempt.names(member.slot):
            return Refused(reason="no such proposal is open here")
        if len(vote.evidence) != (len(attempt.members) if isinstance(attempt.proposal, Proposal) else 0):
            return Refused(reason="its evidence is not one for each member")  # without it nobody could be judged
        ballot = Ballot(
            slot=member.slot, digest=vote.digest, mean_square=vote.mean_square, evidence=vote.evidence
        )
        return Ack() if attempt.vote(ballot) else Refused(reason="this island has given that attempt up")

    def _settle(self, member: Member, question: Settle) -> Reply:
        attempt = self._attempts.get(question.proposal)
        if attempt is None:
            _remember(self._given_up, question.proposal, None)
            return Settled(committed=False, ballots=())
        if not attempt.names(member.slot):
            return Refused(reason="it takes no part in that proposal")
        attempt.asked_by.add(member.slot)
        attempt.fail(f"island {member.slot} gave up: {question.reason}", question.final)
        ballots = tuple(attempt.ballots[slot] for slot in sorted(attempt.ballots))
        return Settled(committed=attempt.committed, given_up=attempt.given_up, ballots=ballots)

    def _keep(self, attempt: Attempt) -> None:
        _remember(self._attempts, attempt.id, attempt)
        self._new_attempt.set()

    def _status(self, sequence: int, incarnation: bytes) -> Status:
        roster = self._around.membership.roster
        return Status(
            incarnation=incarnation,
            sequence=sequence,
            state=self._standing(),
            roster_height=roster.height,
            roster_lineage=roster.lineage,
            step=int(self._state.step),
            tokens_per_second=max(0.0, float(self._state.tokens_per_second)),
            tips=tuple(self._tips()),
            offers=tuple(self._offers()),
            carriers=self._around.network.carriers,
        )

    def _offers(self) -> Iterator[Offer]:
        yield from self._passing.values()
        yield from (current.offer() for current in self._rounds.values() if current.offering)

    def _standing(self) -> Literal["starting", "training", "recovering", "frozen"]:
        if not self._started:
            return "recovering" if self._late else "starting"
        if any(time.monotonic() > since + self._around.round_deadline for since in self._behind_since.values()):
            return "recovering"  # a whole round was not enough to take it over, and the next may not be either
        return "frozen" if self._frozen else "training"

    def _tips(self) -> Iterator[Tip]:
        """None before the trainer has started: it may still be writing the first anchor, or taking over another."""
        return (tip_of(state) for state in self._state.fragments if self._started)

    def _notice(self) -> None:
        self._look_for_calls()
        for current in self._rounds.values():
            current.notice()

    def _look_for_calls(self) -> None:
        """Tell the trainer whether the others wait for it to launch a fragment's round, or went on without it."""
        for state in self._state.fragments if self._started else ():
            if self._newer_tip(state):
                self._behind_since.setdefault(state.index, time.monotonic())
            else:
                self._behind_since.pop(state.index, None)
            idle = state.index not in self._rounds
            self._state.called[state.index] = self._urgency(state) if idle else outer_state.NOT_CALLED

    def _urgency(self, state: FragmentState) -> int:
        live = self._around.membership.live()
        if state.index in self._behind_since:
            return outer_state.LATE
        next_round = (state.index, state.height + 1, bytes.fromhex(state.lineage))
        if not any(matching(member.offers, *next_round) for member in live):
            self._called_since.pop(state.index, None)
            return outer_state.NOT_CALLED
        waiting = time.monotonic() - self._called_since.setdefault(state.index, time.monotonic())
        return outer_state.LATE if waiting >= self._around.membership.peer_timeout else outer_state.CALLED

    def _newer_tip(self, state: FragmentState) -> Tip | None:
        return tip_to_adopt(tip_of(state), self._around.membership.tips(state.index))

    def _member_lost(self, member: Member, reason: str) -> None:
        self.granting.member_lost(member.slot, reason)
        for current in self._rounds.values():
            current.member_lost(member.slot, reason)


def _remember(memory: OrderedDict, key: bytes, value: object) -> None:
    """Keep the latest few of what would otherwise grow for ever."""
    memory[key] = value
    while len(memory) > _ATTEMPTS_KEPT:
        memory.popitem(last=False)
