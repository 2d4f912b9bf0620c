"""Who belongs to the swarm, and who of them shows signs of life."""

import asyncio
import secrets
import time
from dataclasses import dataclass, field
from typing import Callable, Iterable

from diloco.exchange.base import ExchangeEvent
from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.ipc import Place
from diloco.exchange.hivemind.messages import Offer, Status, Tip
from diloco.exchange.hivemind.network import Network, Unreachable

_LONGEST_INTERVAL_SECONDS = 5.0
_LEAVE_SECONDS = 1.0
_TELL_AGAIN_SECONDS = 0.5


@dataclass
class Member:
    """Another island, as this one sees it.

    Attributes:
        alive: something came from it within ``peer_timeout``, it can be reached, and it did not leave.
        tips: where its agreed state stands, by fragment.
        offers: what it offers to the rounds in progress, by fragment.
    """

    slot: int
    peer: str
    alive: bool = True
    heard: float = field(default_factory=time.monotonic)
    tips: dict[int, Tip] = field(default_factory=dict)
    offers: dict[int, Offer] = field(default_factory=dict)
    incarnation: bytes = b""
    sequence: int = -1


class Membership:
    """The member list of a swarm that has started, kept up by a status message to every member at an interval.

    Attributes:
        slot: this island's own.
        interval: seconds between two status messages.
        standing: gives what this island's status holds.
        on_change: called after anything in here changed.
        on_lost: called with a member that is not alive any more, and why.
    """

    def __init__(self, network: Network, slot: int, peer_timeout: float, tell: Callable[[ExchangeEvent], None]) -> None:
        self.slot, self.peer_timeout = slot, peer_timeout
        self.interval = min(peer_timeout / 5, _LONGEST_INTERVAL_SECONDS)
        self.members: dict[int, Member] = {}
        self.on_change: Callable[[], None] = lambda: None
        self.on_lost: Callable[[Member, str], None] = lambda member, reason: None
        self.standing: Callable[[], tuple[Iterable[Tip], Iterable[Offer]]] = lambda: ((), ())
        self._network, self._tell = network, tell
        self._by_peer: dict[str, Member] = {}
        self._incarnation, self._sequence = secrets.token_bytes(32), 0
        self._news: dict[int, asyncio.Event] = {}
        self._acquainted: dict[int, asyncio.Event] = {}

    def start(self, places: Iterable[Place]) -> None:
        """Begin with these members, all of them taken for alive."""
        for place in places:
            if place.slot == self.slot:
                continue
            member = Member(place.slot, place.peer)
            self.members[place.slot] = self._by_peer[place.peer] = member
            self._news[place.slot], self._acquainted[place.slot] = asyncio.Event(), asyncio.Event()
            self._network.know(place.peer, place.addresses)

    def live(self) -> list[Member]:
        """The other members that are alive, by slot."""
        return [self.members[slot] for slot in sorted(self.members) if self.members[slot].alive]

    def of_peer(self, peer: str) -> Member | None:
        """The member with this libp2p id."""
        return self._by_peer.get(peer)

    def heard(self, peer: str) -> None:
        """Something came from this peer."""
        member = self._by_peer.get(peer)
        if member is None:
            return
        member.heard = time.monotonic()
        if not member.alive:
            member.alive = True
            self._tell(ExchangeEvent("back", f"island {member.slot} is there again"))
            self.on_change()

    def lost(self, member: Member, reason: str, what: str = "lost") -> None:
        """Count a member as gone until something comes from it."""
        if not member.alive:
            return
        member.alive = False
        member.offers = {}
        self._tell(ExchangeEvent(what, f"island {member.slot} {reason}"))
        self.on_lost(member, reason)
        self.on_change()

    def receive_status(self, member: Member, status: Status) -> None:
        """Take over a member's status, unless a later one was here first."""
        if status.incarnation == member.incarnation and status.sequence <= member.sequence:
            return
        member.incarnation, member.sequence = status.incarnation, status.sequence
        member.tips = {tip.fragment: tip for tip in status.tips}
        member.offers = {offer.fragment: offer for offer in status.offers}
        self._network.learn_carriers(member.peer, status.carriers)
        self.on_change()

    async def exchange_status(self, member: Member) -> bool:
        """Send a member this island's status and take in its own, which it made after it was asked.

        Returns:
            False where there is no answer within an interval, or it does not take this island for a member yet.
        """
        try:
            reply = await self._network.call(member.peer, self.status(), self.interval)
        except Unreachable as error:
            if error.gone:
                self.lost(member, f"can't be reached: {error}")
            return False
        if not isinstance(reply, Status):
            return False
        self.receive_status(member, reply)
        self._network.learn_carriers(member.peer, reply.carriers, answered=True)
        return True

    def publish(self) -> None:
        """Send this island's status to everyone now, because it changed."""
        for event in self._news.values():
            event.set()

    async def run(self) -> None:
        """Send status messages and notice who has fallen silent, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            for member in self.members.values():
                tasks.create_task(self._keep_informed(member))

    async def wait_until_known(self) -> None:
        """Wait until every member has taken a status of this island, ``peer_timeout`` at most."""
        known = [asyncio.ensure_future(event.wait()) for event in self._acquainted.values()]
        if known:
            await asyncio.wait(known, timeout=self.peer_timeout)
        for waiting in known:
            waiting.cancel()

    async def leave(self) -> None:
        """Tell everyone, waiting a second at most."""
        calls = (self._network.call(member.peer, messages.Leave(), _LEAVE_SECONDS) for member in self.live())
        await asyncio.gather(*calls, return_exceptions=True)

    async def _keep_informed(self, member: Member) -> None:
        news = self._news[member.slot]
        while True:
            news.clear()
            if not await self.exchange_status(member):
                await asyncio.sleep(_TELL_AGAIN_SECONDS if member.alive else self.interval)
                continue
            self._acquainted[member.slot].set()
            try:
                async with asyncio.timeout(self.interval):
                    await news.wait()
            except TimeoutError:
                pass

    def status(self) -> Status:
        """Where this island stands now."""
        tips, offers = self.standing()
        self._sequence += 1
        return Status(
            incarnation=self._incarnation,
            sequence=self._sequence,
            tips=tuple(tips),
            offers=tuple(offers),
            carriers=self._network.carriers,
        )

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
