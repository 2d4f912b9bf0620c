"""All rounds of this island, and what it answers to the other members."""

import asyncio
from collections import OrderedDict
from typing import Callable, Iterator

from diloco.exchange.base import RoundOutcome
from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.attempt import Attempt
from diloco.exchange.hivemind.catch_up import serve_state
from diloco.exchange.hivemind.ipc import Ended
from diloco.exchange.hivemind.membership import Member
from diloco.exchange.hivemind.messages import (
    Ack,
    Ballot,
    ContributionHeader,
    Header,
    Leave,
    Offer,
    Proposal,
    Refused,
    Reply,
    Request,
    Settle,
    Settled,
    StateRequest,
    Status,
    Tip,
    Vote,
)
from diloco.exchange.hivemind.network import Stream
from diloco.exchange.hivemind.round import Round
from diloco.exchange.hivemind.surroundings import Surroundings
from diloco.outer_state import OuterState

_ATTEMPTS_KEPT = 64
_DONATIONS_AT_ONCE = 2


class Rounds:
    """Launches rounds and passes every message of a member to the round that it is about."""

    def __init__(self, around: Surroundings, state: OuterState, end: Callable[[Ended], None]) -> None:
        self._around, self._state, self._end = around, state, end
        self._rounds: dict[int, Round] = {}
        self._attempts: OrderedDict[bytes, Attempt] = OrderedDict()
        self._given_up: OrderedDict[bytes, None] = OrderedDict()
        self._launched: set[int] = set()
        self._new_attempt = asyncio.Event()
        self._donations = asyncio.Semaphore(_DONATIONS_AT_ONCE)
        around.membership.standing = lambda: (self._tips(), self._offers())
        around.membership.on_change = self._notice
        around.membership.on_lost = self._member_lost

    async def launch(self, fragment: int, weight: float) -> None:
        """Run the next round of a fragment to its end, and report it."""
        state = self._state.fragments[fragment]
        self._launched.add(fragment)
        current = self._rounds[fragment] = Round(self._around, state, weight, self._keep)
        outcome: RoundOutcome = await current.run()
        del self._rounds[fragment]
        self._around.membership.publish()
        self._end(Ended(outcome))

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
            case Vote():
                attempt = self._attempts.get(request.proposal)
                if attempt is None or not attempt.names(member.slot):
                    return Refused(reason="no such proposal is open here")
                taken = attempt.vote(member.slot, request.digest)
                return Ack() if taken else Refused(reason="this island has given that attempt up")
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
                members, weights = self._around.last_round.get(header.fragment, ((), ()))
                async with self._donations:
                    await serve_state(stream, header, self._state.fragments[header.fragment], members, weights)
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
        roster = {other.slot: other.peer for other in self._around.membership.members.values()}
        roster[self._around.membership.slot] = self._around.network.peer
        slots = [share.slot for share in proposal.shares]
        if proposal.run != self._around.run:
            return Refused(reason=f"this is run {self._around.run!r}")
        if slots != sorted(set(slots)) or any(roster.get(share.slot) != share.peer for share in proposal.shares):
            return Refused(reason="its members are not those of the member list, in slot order")
        if slots[0] != member.slot:
            return Refused(reason="only the first of its members may make a proposal")
        if proposal.id() in self._given_up:
            return Refused(reason="this island has given that attempt up")
        if current is None:
            return Refused(reason="nothing is offered to this round now")
        reason = current.consider(proposal)
        return Refused(reason=reason) if reason else Ack()

    def _settle(self, member: Member, question: Settle) -> Reply:
        attempt = self._attempts.get(question.proposal)
        if attempt is None:
            _remember(self._given_up, question.proposal, None)
            return Settled(committed=False, ballots=())
        if not attempt.names(member.slot):
            return Refused(reason="it takes no part in that proposal")
        attempt.fail(f"island {member.slot} gave up: {question.reason}", question.final)
        ballots = tuple(Ballot(slot=slot, digest=digest) for slot, digest in sorted(attempt.ballots.items()))
        return Settled(committed=attempt.committed, ballots=ballots)

    def _keep(self, attempt: Attempt) -> None:
        _remember(self._attempts, attempt.id, attempt)
        self._new_attempt.set()

    def _tips(self) -> Iterator[Tip]:
        for fragment in self._state.fragments:
            # Before its first launch the trainer may still be writing a fragment's first anchor.
            if fragment.index in self._launched or fragment.height:
                lineage, digest = bytes.fromhex(fragment.lineage), bytes.fromhex(fragment.digest)
                yield Tip(fragment=fragment.index, height=fragment.height, lineage=lineage, digest=digest)

    def _offers(self) -> Iterator[Offer]:
        return (current.offer() for current in self._rounds.values() if current.offering)

    def _notice(self) -> None:
        for current in self._rounds.values():
            current.notice()

    def _member_lost(self, member: Member, reason: str) -> None:
        for current in self._rounds.values():
            current.member_lost(member.slot, reason)


def _remember(memory: OrderedDict, key: bytes, value: object) -> None:
    """Keep the latest few of what would otherwise grow for ever."""
    memory[key] = value
    while len(memory) > _ATTEMPTS_KEPT:
        memory.popitem(last=False)
