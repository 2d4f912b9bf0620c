"""Who belongs to the swarm, and who of them shows signs of life."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Callable, Coroutine

from diloco.exchange.base import ExchangeEvent
from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.messages import Entry, NotAMember, Offer, Status, Tip
from diloco.exchange.hivemind.network import Network, Unreachable
from diloco.exchange.hivemind.roster import Roster

_LONGEST_INTERVAL_SECONDS = 5.0
_LEAVE_SECONDS = 1.0
_TELL_AGAIN_SECONDS = 0.5
_NEW_SHARE = 0.25  # of the last answer's time in what counts as typical


@dataclass
class Member:
    """Another island, as this one sees it.

    Attributes:
        alive: something came from it within ``peer_timeout``, it can be reached, and it did not leave; else it is ``gone``.
        left: it said that it leaves.
        away: it was started again, and was not let in yet.
        status: the last one that came; None before the first.
        tips: where its agreed state stands, by fragment.
        offers: what it offers to the rounds in progress, by fragment.
        awaited: rounds wait for it: it trains or is about to, and does not take over state.
        rtt: seconds that its answers to a status take, smoothed; None before the first.
    """

    slot: int
    peer: str
    ticket: bytes
    awaited: bool
    alive: bool = True
    left: bool = False
    away: bool = False
    heard: float = field(default_factory=time.monotonic)
    rtt: float | None = None
    status: Status | None = None
    tips: dict[int, Tip] = field(default_factory=dict)
    offers: dict[int, Offer] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    acquainted: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    def forget(self) -> None:
        """It was started again: what it said before says nothing about it now."""
        self.away, self.awaited, self.status, self.tips, self.offers = True, False, None, {}, {}

    def answered_within(self, seconds: float) -> None:
        """So long an answer took just now."""
        self.rtt = seconds if self.rtt is None else self.rtt + _NEW_SHARE * (seconds - self.rtt)


class SeatLost(Exception):
    """The members have given this island's slot to another one."""


class Membership:
    """The member list, kept up by a status message to every member at an interval.

    Attributes:
        roster: who has which slot.
        slot: this island's own.
        interval: seconds between two status messages.
        make_status: gives what this island's status holds, but for what is known here.
        on_change: called after anything in here changed.
        on_lost: called with a member that is not alive any more, and why.
    """

    def __init__(
        self,
        network: Network,
        roster: Roster,
        ticket: bytes,
        peer_timeout: float,
        tell: Callable[[ExchangeEvent], None],
    ) -> None:
        own = roster.of_ticket(ticket)
        assert own is not None, "an island is let in by a roster that names it"
        self.roster, self.own, self.peer_timeout = roster, own, peer_timeout
        self.slot = own.slot
        self.interval = min(peer_timeout / 5, _LONGEST_INTERVAL_SECONDS)
        self.members: dict[int, Member] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[Member, str], None] = lambda member, reason: None
        self.make_status: Callable[[int, bytes], Status]
        self._network, self._tell = network, tell
        self._by_peer: dict[str, Member] = {}
        self._incarnation, self._sequence = secrets.token_bytes(32), 0
        self._tasks: asyncio.TaskGroup | None = None
        self._lost_seat: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._take_in(roster)

    def adopt(self, roster: Roster) -> None:
        """A grant was committed, here or while this island did not hear of it."""
        if not self.roster.comes_before(roster.height, roster.lineage):
            return
        before, self.roster = self.roster, roster
        self._take_in(roster)
        for entry in roster.entries:
            old = before.of_slot(entry.slot)
            if (old is None or old.ticket != entry.ticket) and entry.slot != self.slot:
                what = "joins" if old is None else "comes again" if old.peer == entry.peer else "takes over"
                self._tell(ExchangeEvent("joined", f"island {entry.slot} {what}, epoch {entry.epoch}"))
        if roster.of_ticket(self.own.ticket) is None:
            self._lose_seat()
        self.publish()
        self.on_change()

    def live(self) -> list[Member]:
        """The other members that are alive and take part, by slot."""
        members = (self.members[slot] for slot in sorted(self.members))
        return [member for member in members if member.alive and not member.away]

    def awaited(self) -> list[Member]:
        """Those of them for whom rounds wait."""
        return [member for member in self.live() if member.awaited]

    def tips(self, fragment: int) -> dict[int, Tip]:
        """Where the live members stand, by slot; without those that have no state yet."""
        return {member.slot: tip for member in self.live() if (tip := member.tips.get(fragment))}

    def silent_seconds(self) -> dict[int, float]:
        """Slots whose holder is not there, and for how long; one that left is gone for ever."""
        now = time.monotonic()
        gone = (member for member in self.members.values() if member.away or not member.alive)
        return {member.slot: float("inf") if member.left else now - member.heard for member in gone}

    def of_peer(self, peer: str) -> Member | None:
        """The member with this libp2p id."""
        return self._by_peer.get(peer)

    def heard(self, peer: str) -> None:
        """Something came from this peer."""
        member = self._by_peer.get(peer)
        if member is None:
            return
        member.heard = time.monotonic()
        if not member.alive and not member.left:
            member.alive = True
            member.gone.clear()
            self._tell(ExchangeEvent("back", f"island {member.slot} is there again"))
            self.on_change()

    def lost(self, member: Member, reason: str, what: str = "lost") -> None:
        """Count a member as gone until something comes from it, or for good where it ``left``."""
        member.left = member.left or what == "left"
        if not member.alive:
            return
        member.alive = False
        member.gone.set()
        member.offers = {}
        self._tell(ExchangeEvent(what, f"island {member.slot} {reason}"))
        self.on_lost(member, reason)
        self.on_change()

    def restarted(self, member: Member, ticket: bytes) -> None:
        """A member asks to come in again: what it did before it died is over."""
        if ticket != member.ticket and not member.away:
            member.forget()
            self.on_lost(member, "was started again")
            self.on_change()

    def receive_status(self, member: Member, status: Status) -> None:
        """Take over a member's status, unless a later one was here first."""
        before = member.status
        if before and status.incarnation == before.incarnation and status.sequence <= before.sequence:
            return
        member.status, member.awaited, member.away = status, status.state in ("starting", "training"), False
        member.tips = {tip.fragment: tip for tip in status.tips}
        member.offers = {offer.fragment: offer for offer in status.offers}
        self._network.learn_carriers(member.peer, status.carriers)
        if self.roster.comes_before(status.roster_height, status.roster_lineage):
            self._background(self._fetch_roster(member))
        self.on_change()

    async def exchange_status(self, member: Member) -> bool:
        """Send a member this island's status and take in its own, which it made after it was asked.

        Returns:
            False where there is no answer within an interval, or it does not take this island for a member yet.
        """
        asked = time.monotonic()
        try:
            reply = await self._network.call(member.peer, self.status(), self.interval)
        except Unreachable as error:
            if error.gone:
                self.lost(member, f"can't be reached: {error}")
            return False
        if isinstance(reply, NotAMember):
            self._check_seat(reply)
        if not isinstance(reply, Status):
            if member.status:  # it was started again, and is not a member yet
                self.restarted(member, b"")
            return False
        member.answered_within(time.monotonic() - asked)
        self.receive_status(member, reply)
        self._network.learn_carriers(member.peer, reply.carriers, answered=True)
        return True

    def publish(self) -> None:
        """Send this island's status to everyone now, because it changed."""
        for member in self.members.values():
            member.news.set()

    async def run(self) -> None:
        """Send status messages and notice who has fallen silent, for ever. Raises SeatLost."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._watch())
            for member in self.members.values():
                member.task = self._tasks.create_task(self._keep_informed(member))
            await self._lost_seat

    async def wait_until_known(self) -> None:
        """Wait until every member has taken a status of this island, ``peer_timeout`` at most."""
        known = [asyncio.ensure_future(member.acquainted.wait()) for member in self.members.values()]
        if known:
            await asyncio.wait(known, timeout=self.peer_timeout)
        for waiting in known:
            waiting.cancel()

    async def leave(self) -> None:
        """Tell everyone, waiting a second at most."""
        calls = (self._network.call(member.peer, messages.Leave(), _LEAVE_SECONDS) for member in self.live())
        await asyncio.gather(*calls, return_exceptions=True)

    def status(self) -> Status:
        """Where this island stands now."""
        self._sequence += 1
        return self.make_status(self._sequence, self._incarnation)

    def _check_seat(self, reply: NotAMember) -> None:
        if reply.roster_height == 0:
            return  # nothing was granted there, so no slot was given away: it began a run of its own
        if self.roster.comes_before(reply.roster_height, reply.roster_lineage):
            self._lose_seat()

    def _lose_seat(self) -> None:
        if not self._lost_seat.done():
            self._lost_seat.set_exception(SeatLost(f"slot {self.slot} was given to another island"))

    def _take_in(self, roster: Roster) -> None:
        """Have a member for every entry but this island's, and only for those."""
        for entry in roster.entries:
            member = self.members.get(entry.slot)
            if entry.ticket == self.own.ticket or (member and member.ticket == entry.ticket):
                continue
            if member:
                self._drop(member)
            self._add(entry)
        held = {entry.slot for entry in roster.entries}
        for member in [member for member in self.members.values() if member.slot not in held]:
            self._drop(member)

    def _add(self, entry: Entry) -> None:
        member = Member(entry.slot, entry.peer, entry.ticket, awaited=entry.since == 0)
        self.members[entry.slot] = self._by_peer[entry.peer] = member
        self._network.know(entry.peer, entry.addresses)
        if self._tasks:
            member.task = self._tasks.create_task(self._keep_informed(member))

    def _drop(self, member: Member) -> None:
        self.on_lost(member, "has lost its slot")
        if member.task:
            member.task.cancel()
        del self.members[member.slot]
        if self._by_peer.get(member.peer) is member:
            del self._by_peer[member.peer]
            self._network.forget(member.peer)

    def _background(self, work: Coroutine[None, None, None]) -> None:
        if self._tasks:
            self._tasks.create_task(work)
        else:
            work.close()

    async def _fetch_roster(self, member: Member) -> None:
        try:
            reply = await self._network.call(member.peer, messages.RosterRequest(), self.interval)
        except Unreachable:
            return  # its next status says so again
        if isinstance(reply, messages.Roster):
            self.adopt(Roster.of(reply))

    async def _keep_informed(self, member: Member) -> None:
        while True:
            member.news.clear()
            if member.left or not await self._inform(member):
                await asyncio.sleep(_TELL_AGAIN_SECONDS if member.alive else self.interval)
                continue
            member.acquainted.set()
            try:
                async with asyncio.timeout(self.interval):
                    await member.news.wait()
            except TimeoutError:
                pass

    async def _inform(self, member: Member) -> bool:
        """Exchange statuses; and once more beside that, where something changes before the answer is there.

        A round that is launched right after the landing of another must not wait a round trip for the answer to that.
        """
        news = asyncio.ensure_future(member.news.wait())
        first = asyncio.ensure_future(self.exchange_status(member))
        try:
            await asyncio.wait({first, news}, return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                return first.result()
            member.news.clear()
            return all([await self.exchange_status(member), await first])
        finally:
            news.cancel()
            first.cancel()

    async def _watch(self) -> None:
        tick = min(self.interval / 2, 1.0)
        last = time.monotonic()
        while True:
            await asyncio.sleep(tick)
            now = time.monotonic()
            # If this process itself stood still, the others' silence is its own fault: without this, an island that
            # wakes up would take itself for the only one left, and commit alone.
            stood_still = now - last - tick
            last = now
            for member in self.members.values():
                if stood_still > tick:
                    member.heard = min(now, member.heard + stood_still)
                if member.alive and now - member.heard > self.peer_timeout:
                    self.lost(member, f"was silent for {self.peer_timeout:g} s")
