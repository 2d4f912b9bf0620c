"""Coming in: how islands meet at the start, and how a newcomer, or one that was restarted, gets into a run in progress.

The first island (without ``swarm.initial_peers``, or the first one in it) gives out slots until all are there. From
then on all members grant slots together, see :mod:`diloco.exchange.hivemind.granting`, and any of them may be asked.
"""

import asyncio
import math
import os
import time
from dataclasses import dataclass, field
from typing import Callable, Mapping

from diloco.exchange.base import ExchangeEvent, JoinError
from diloco.exchange.hivemind.daemon import host_and_port
from diloco.exchange.hivemind.granting import Granting
from diloco.exchange.hivemind.membership import Membership
from diloco.exchange.hivemind.messages import Elsewhere, Entry, Hello, Queued, Refused, Reply, Wait, Welcome
from diloco.exchange.hivemind.network import KeyDiffers, Network, Unreachable
from diloco.exchange.hivemind.roster import Roster
from diloco.exchange.hivemind.settings import difference

_ASK_AGAIN_SECONDS = 0.25
_CALL_SECONDS = 5.0
_GUEST_SILENCE_SECONDS = 10.0
_MOST_REFUSED_TOLD = 100


@dataclass
class _Guest:
    hello: Hello
    asked: float


@dataclass
class Door:
    """What this island answers to those who want to come in.

    Attributes:
        first: whether this island gives out the slots at the start, or only points to the one that does
            (``first_addresses``).
        roster: the members, once ``opened``.
        hints: peers that take this island for a member: a run of this name is in progress, with them in it.
    """

    run: str
    settings: Mapping[str, str]
    max_slots: int
    expected: int
    first: bool
    tell: Callable[[ExchangeEvent], None]
    first_addresses: tuple[str, ...] = ()
    roster: Roster | None = None
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    hints: set[str] = field(default_factory=set)
    _guests: dict[str, _Guest] = field(default_factory=dict)
    _refused: set[str] = field(default_factory=set)
    _inside: tuple[Membership, Granting] | None = None

    @property
    def came(self) -> int:
        """Islands that are waiting in front of it, this one included."""
        return len(self._guests)

    def enter(self, peer: str, hello: Hello) -> None:
        """The first island's own entry, before anyone else's."""
        self._guests[peer] = _Guest(hello, asked=math.inf)
        self._open_if_complete()

    def open(self, roster: Roster) -> None:
        """Everyone is there, or was long ago, as another island says."""
        self.first, self.roster = False, roster
        self.opened.set()

    def begin(self, membership: Membership, granting: Granting) -> None:
        """From now on this island is a member, and votes on who comes in."""
        self._inside = membership, granting

    def hint(self, peer: str) -> None:
        """A peer takes this island for a member: it may be one itself, of a run in progress."""
        if len(self.hints) < self.max_slots:
            self.hints.add(peer)

    def answer(self, peer: str, hello: Hello) -> Reply:
        """Grant a slot, ask for patience, or refuse with a reason that says what to do."""
        reason = self._objection(hello)
        if reason:
            return self._refuse(peer, reason)
        return self._answer_in_progress(peer, hello) if self.opened.is_set() else self._answer_at_start(peer, hello)

    def _answer_at_start(self, peer: str, hello: Hello) -> Reply:
        if not self.first:
            return Elsewhere(addresses=self.first_addresses)
        if not self._guests:  # this island itself is not in: no slots may be given out without it, nor the one that it wants
            return Wait(came=0, expected=self.expected)
        self._forget_silent()
        reason = self._slot_objection(peer, hello.slot)
        if not reason and peer not in self._guests and self.came >= self.max_slots:
            reason = f"{self.came} islands are waiting here, for the swarm.max_slots={self.max_slots} slots of the run"
        if reason:
            return self._refuse(peer, reason)
        self._guests[peer] = _Guest(hello, time.monotonic())
        self._open_if_complete()
        return Wait(came=self.came, expected=self.expected)

    def _answer_in_progress(self, peer: str, hello: Hello) -> Reply:
        roster = self._inside[0].roster if self._inside else self.roster
        assert roster is not None
        if roster.of_ticket(hello.ticket):
            return Welcome(roster=roster.to_message())
        addresses = tuple(address for entry in roster.entries if entry.peer != peer for address in entry.addresses[:1])
        if not self._inside:
            return Queued(addresses=addresses, reason="")
        membership, granting = self._inside
        if member := membership.of_peer(peer):
            membership.restarted(member, hello.ticket)
        return Queued(addresses=addresses, reason=granting.ask(peer, hello))

    def _refuse(self, peer: str, reason: str) -> Refused:
        """Told once a peer, however often it asks; and not for ever, as anyone can have many peer ids."""
        if peer not in self._refused and len(self._refused) < _MOST_REFUSED_TOLD:
            self._refused.add(peer)
            self.tell(ExchangeEvent("refused", f"{peer}: {reason}"))
        return Refused(reason=reason)

    def _objection(self, hello: Hello) -> str:
        if hello.run != self.run:
            return f"this is run {self.run!r}, not {hello.run!r}; check run.name and swarm.initial_peers"
        if hello.settings != self.settings:
            differs = difference(self.settings, hello.settings)
            return f"run {self.run!r} has another configuration: {differs}. Use the same values on all islands"
        if hello.slot >= self.max_slots:
            return f"there is no slot {hello.slot}: swarm.max_slots={self.max_slots}, the last slot is {self.max_slots - 1}"
        return ""

    def _slot_objection(self, peer: str, wanted: int) -> str:
        for holder, guest in self._guests.items():
            if holder != peer and guest.hello.slot == wanted >= 0:
                where = guest.hello.addresses[0] if guest.hello.addresses else holder
                return f"slot {wanted} is taken by {where}; set swarm.slot to another one, or to -1 for any free one"
        return ""

    def _forget_silent(self) -> None:
        now = time.monotonic()
        self._guests = {
            peer: guest for peer, guest in self._guests.items() if now - guest.asked < _GUEST_SILENCE_SECONDS
        }

    def _open_if_complete(self) -> None:
        """Give out the slots when all are there: those that were asked for, then preferred ones, then the lowest that are free."""
        if self.came < self.expected or self.opened.is_set():
            return
        entries: dict[int, Entry] = {}
        for peer, guest in sorted(self._guests.items(), key=lambda item: (item[1].hello.slot < 0, item[1].hello.prefers < 0)):
            hello, free = guest.hello, [slot for slot in range(self.max_slots) if slot not in entries]
            slot = hello.slot if hello.slot >= 0 else hello.prefers if hello.prefers in free else free[0]
            entries[slot] = Entry(
                slot=slot, epoch=0, peer=peer, addresses=hello.addresses, ticket=hello.ticket, since=0
            )
        self.roster = Roster.first(entries.values())
        self.opened.set()


async def come_in(door: Door, network: Network, hello: Hello, known: list[str], timeout: float) -> Roster:
    """Get a place: from the others, who may be in the middle of the run, or, for the first island, when all have come.

    Args:
        known: addresses to ask, none of them this island's own.

    Raises:
        JoinError: refused, nobody answers, or not all came in time.
    """
    asking = _Asking(door, network, hello, known)
    deadline, entered = time.monotonic() + timeout, False
    if door.first:
        await asking.once()  # is it in progress already?
    while not asking.roster and time.monotonic() < deadline:
        if door.first and not asking.in_progress:
            if not entered:  # after it has asked the others once; some may have come here by then
                door.enter(network.peer, hello)
                entered = True
            if door.opened.is_set():
                assert door.roster is not None
                return door.roster
        await asyncio.sleep(_ASK_AGAIN_SECONDS)
        await asking.once()
    if asking.roster:
        door.open(asking.roster)
        return asking.roster
    raise JoinError(asking.why_not(timeout))


class _Asking:
    """The others are asked again and again.

    Attributes:
        roster: once this island is in it.
        in_progress: a member said that the run has begun.
    """

    def __init__(self, door: Door, network: Network, hello: Hello, known: list[str]) -> None:
        self._door, self._network, self._hello, self._known = door, network, hello, known
        self._peers = list(known)
        self._said: dict[str, str] = {}
        self._came = ""
        self.roster: Roster | None = None
        self.in_progress = False

    async def once(self) -> None:
        """Ask them all once, or until one answers that all have to wait. Raises JoinError when refused."""
        hints = [f"/p2p/{peer}" for peer in sorted(self._door.hints)]
        for address in dict.fromkeys([*self._peers, *hints]):
            try:
                reply = await _ask(self._network, self._hello, address)
            except KeyDiffers as error:
                raise JoinError(f"{address} answers, but {error}") from None
            except Unreachable as error:
                self._said[address] = str(error)
                continue
            match reply:
                case Refused():
                    raise JoinError(f"refused by {address}: {reply.reason}")
                case Welcome():
                    self.roster = Roster.of(reply.roster)
                    return
                case Queued():
                    self.in_progress, self._came = True, ""
                    self._said[address] = reply.reason or "it has not granted a slot"
                    self._peers = list(dict.fromkeys([*self._peers, *reply.addresses]))
                case Elsewhere() if not self._door.first:
                    self._peers = list(dict.fromkeys([*reply.addresses, *self._known]))
                case Wait():
                    self._came = f"{reply.came} of {reply.expected} islands came"
                    return

    def why_not(self, timeout: float) -> str:
        """What to tell when the time is over."""
        limit = f"within swarm.join_timeout={timeout:g} s"
        said = "; ".join(f"{address}: {what}" for address, what in self._said.items())
        if self.in_progress:
            return f"run {self._hello.run!r} is in progress, and no slot was granted {limit} ({said})"
        if self._door.first:
            address = self._hello.addresses[0] if self._hello.addresses else "the address of this island"
            return (
                f"only {self._door.came} of swarm.islands={self._door.expected} islands came {limit}; check that the "
                f"others run, that their swarm.initial_peers holds {address} and that they can reach it"
            )
        if self._came:
            return f"only {self._came} {limit}; check that the others run and can reach the first"
        return (
            f"no island answered {limit} ({said}); check that an island of the run is there, that swarm.initial_peers is the "
            "address it printed, and that no firewall is between"
        )


async def _ask(network: Network, hello: Hello, address: str) -> Reply:
    transport, _, peer = address.rpartition("/p2p/")
    if peer == network.peer:
        raise Unreachable("this is the island's own identity; give every island its own swarm.identity_file")
    await _knock(address)
    if transport:
        network.know(peer, (address,))
    return await network.call(peer, hello, _CALL_SECONDS)


async def _knock(address: str) -> None:
    """See whether anything listens: after a dial that failed libp2p waits ever longer before it dials again."""
    place = host_and_port(address)
    if place is None:
        return
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            _, writer = await asyncio.open_connection(*place)
    except TimeoutError:
        raise Unreachable(f"no answer from {place[0]} port {place[1]}") from None
    except OSError as error:
        raise Unreachable(os.strerror(error.errno) if error.errno else str(error)) from None
    writer.close()
