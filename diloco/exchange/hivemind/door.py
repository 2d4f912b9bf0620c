"""Coming in: the first island grants slots until all are there; the others ask it. Also the way back in."""

import asyncio
import math
import os
import time
from dataclasses import dataclass, field
from typing import Callable, Mapping

from diloco.exchange.base import ExchangeEvent, JoinError
from diloco.exchange.hivemind.daemon import host_and_port
from diloco.exchange.hivemind.ipc import Place
from diloco.exchange.hivemind.messages import Elsewhere, Entry, Hello, Refused, Reply, Wait, Welcome
from diloco.exchange.hivemind.network import KeyDiffers, Network, Unreachable
from diloco.exchange.hivemind.settings import difference

_ASK_AGAIN_SECONDS = 0.25
_CALL_SECONDS = 5.0
_GUEST_SILENCE_SECONDS = 10.0


@dataclass
class _Guest:
    addresses: tuple[str, ...]
    wanted: int
    asked: float


@dataclass
class Door:
    """What this island answers to those who want to come in.

    Attributes:
        first: whether this island grants slots, or only points to the one that does (``first_addresses``).
        places: the member list, once ``opened``.
    """

    run: str
    settings: Mapping[str, str]
    max_slots: int
    expected: int
    first: bool
    tell: Callable[[ExchangeEvent], None]
    first_addresses: tuple[str, ...] = ()
    places: dict[int, Place] = field(default_factory=dict)
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    _guests: dict[str, _Guest] = field(default_factory=dict)

    @property
    def came(self) -> int:
        """Islands that are waiting in front of it, this one included."""
        return len(self._guests)

    def enter(self, peer: str, addresses: tuple[str, ...], slot: int) -> None:
        """The first island's own entry, before anyone else's; ``slot`` -1: any."""
        self._guests[peer] = _Guest(addresses, slot, asked=math.inf)
        self._open_if_complete()

    def complete(self, places: tuple[Place, ...]) -> None:
        """Everyone is there, as another island says."""
        self.places = {place.slot: place for place in places}
        self.opened.set()

    def answer(self, peer: str, hello: Hello) -> Reply:
        """Grant a slot, ask for patience, or refuse with a reason that says what to do."""
        reason = self._objection(hello)
        if not reason and not self.opened.is_set():
            if not self.first:
                return Elsewhere(addresses=self.first_addresses)
            self._forget_silent()
            reason = self._slot_objection(peer, hello.slot)
            if not reason:
                self._guests[peer] = _Guest(hello.addresses, hello.slot, time.monotonic())
                self._open_if_complete()
                return Wait(came=self.came, expected=self.expected)
        if not reason and all(place.peer != peer for place in self.places.values()):
            reason = f"run {self.run!r} has started with its {len(self.places)} islands; a new one can't join any more"
        if reason:
            self.tell(ExchangeEvent("refused", f"{peer}: {reason}"))
            return Refused(reason=reason)
        places = (self.places[slot] for slot in sorted(self.places))
        return Welcome(
            members=tuple(Entry(slot=place.slot, peer=place.peer, addresses=place.addresses) for place in places)
        )

    def _objection(self, hello: Hello) -> str:
        if hello.run != self.run:
            return f"this is run {self.run!r}, not {hello.run!r}; check run.name and swarm.initial_peers"
        if hello.settings != self.settings:
            differs = difference(self.settings, hello.settings)
            return f"run {self.run!r} has another configuration: {differs}. Use the same values on all islands"
        return ""

    def _slot_objection(self, peer: str, wanted: int) -> str:
        if wanted >= self.max_slots:
            return f"there is no slot {wanted}: swarm.max_slots={self.max_slots}, the last slot is {self.max_slots - 1}"
        for holder, guest in self._guests.items():
            if holder != peer and guest.wanted == wanted >= 0:
                where = guest.addresses[0] if guest.addresses else holder
                return f"slot {wanted} is taken by {where}; set swarm.slot to another one, or to -1 for any free one"
        return ""

    def _forget_silent(self) -> None:
        now = time.monotonic()
        self._guests = {
            peer: guest for peer, guest in self._guests.items() if now - guest.asked < _GUEST_SILENCE_SECONDS
        }

    def _open_if_complete(self) -> None:
        """Give out the slots when all are there: first those that were asked for, then the lowest that are free."""
        if self.came < self.expected:
            return
        order = sorted(self._guests.items(), key=lambda item: item[1].wanted < 0)
        for peer, guest in order:
            free = (slot for slot in range(self.max_slots) if slot not in self.places)
            slot = guest.wanted if guest.wanted >= 0 else next(free)
            self.places[slot] = Place(slot, peer, guest.addresses)
        self.opened.set()


async def wait_for_all(door: Door, address: str, timeout: float) -> None:
    """The first island's part in joining. Raises JoinError."""
    try:
        async with asyncio.timeout(timeout):
            await door.opened.wait()
    except TimeoutError:
        raise JoinError(
            f"only {door.came} of swarm.islands={door.expected} islands came within swarm.join_timeout={timeout:g} s; "
            f"check that the others run, that their swarm.initial_peers holds {address} and that they can reach it"
        ) from None


async def ask_to_join(network: Network, hello: Hello, initial_peers: list[str], timeout: float) -> tuple[Place, ...]:
    """Any other island's part: ask until all are there; returns the member list.

    Raises:
        JoinError: refused, nobody answers, or not all came in time.
    """
    deadline = time.monotonic() + timeout
    peers, came, problems = list(initial_peers), "", {}
    while time.monotonic() < deadline:
        for address in list(peers):
            try:
                reply = await _ask(network, hello, address)
            except KeyDiffers as error:
                raise JoinError(f"{address} answers, but {error}") from None
            except Unreachable as error:
                problems[address] = str(error)
                continue
            match reply:
                case Refused():
                    raise JoinError(f"refused by {address}: {reply.reason}")
                case Welcome():
                    return tuple(Place(entry.slot, entry.peer, entry.addresses) for entry in reply.members)
                case Elsewhere():
                    peers = [*reply.addresses, *initial_peers]
                case Wait():
                    came = f"{reply.came} of {reply.expected} islands came"
            break
        await asyncio.sleep(_ASK_AGAIN_SECONDS)
    if came:
        raise JoinError(
            f"only {came} within swarm.join_timeout={timeout:g} s; check that the others run and can reach the first"
        )
    found = "; ".join(f"{address}: {problem}" for address, problem in problems.items())
    raise JoinError(
        f"no island answered within swarm.join_timeout={timeout:g} s ({found}); check that the first island runs, that "
        "swarm.initial_peers is the address it printed, and that no firewall is between"
    )


async def _ask(network: Network, hello: Hello, address: str) -> Reply:
    peer = address.rpartition("/p2p/")[2]
    if peer == network.peer:
        raise Unreachable("this is the island's own identity; give every island its own swarm.identity_file")
    await _knock(address)
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
