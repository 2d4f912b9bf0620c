"""Data connections: further libp2p daemons of an island, its carriers, that move bulk bytes and nothing else.

One TCP connection on a long link that loses packets reaches a small part of its rate; several side by side reach more,
and leave the one for messages free. A carrier has a peer id of its own, made anew at every start. Which island it belongs
to is what that island says over its own authenticated connection, in every status message.
"""

import asyncio
import ipaddress
import time
from typing import Coroutine, Sequence

from diloco.exchange.hivemind import daemon as libp2p
from diloco.exchange.hivemind.daemon import Daemon
from diloco.exchange.hivemind.messages import MAX_CARRIER_ADDRESSES, Carrier

_TRY_AGAIN_SECONDS = 60.0


async def start_carriers(listen: str, announce: str, number: int) -> list[Daemon]:
    """Start ``number`` daemons at the ports after that of ``listen``, announced at those after that of ``announce``.

    They take any free ports where ``listen`` names none, and on loopback, where no firewall needs to know them.

    Raises:
        JoinError: a port is taken.
    """
    host, _, port = listen.rpartition(":")
    fixed = int(port) and (announce or not ipaddress.ip_address(host.strip("[]")).is_loopback)

    def start(index: int) -> Coroutine[None, None, Daemon]:
        at = _port_after(listen, index) if fixed else f"{host}:0"
        announced = announce and _port_after(announce, index)
        what = f"swarm.data_connections={number}: number {index} on swarm.listen"
        return libp2p.start_daemon(at, announced, None, what)

    started = await asyncio.gather(*map(start, range(1, number + 1)), return_exceptions=True)
    daemons = [one for one in started if isinstance(one, Daemon)]
    if len(daemons) < number:
        await asyncio.gather(*(one.shutdown() for one in daemons))
        raise next(one for one in started if isinstance(one, BaseException))
    return daemons


async def described(daemons: Sequence[Daemon]) -> tuple[Carrier, ...]:
    """What the others are told about them."""
    found = await asyncio.gather(*(libp2p.addresses(one) for one in daemons))
    return tuple(
        Carrier(peer=one.peer_id.to_base58(), addresses=addresses[:MAX_CARRIER_ADDRESSES])
        for one, addresses in zip(daemons, found, strict=True)
    )


class Carriers:
    """This island's carriers, and what it knows of the others'.

    Attributes:
        own: as the others are told.
    """

    def __init__(self, daemons: Sequence[Daemon] = (), own: tuple[Carrier, ...] = ()) -> None:
        self.daemons, self.own = tuple(daemons), own
        self._island: dict[str, str] = {}  # by the peer id of a carrier
        self._theirs: dict[str, tuple[Carrier, ...]] = {}  # by the peer id of an island
        self._acknowledged: set[str] = set()
        self._failed: dict[tuple[int, str], float] = {}

    def learn(self, island: str, carriers: tuple[Carrier, ...]) -> None:
        """Take over what an island says about its carriers: from now on they speak for it.

        One that belongs to another island already stays that island's.
        """
        if carriers == self._theirs.get(island, ()):
            return
        for carrier in self._theirs.pop(island, ()):
            if self._island.get(carrier.peer) == island:
                del self._island[carrier.peer]
        self._acknowledged.discard(island)
        self._failed = {key: at for key, at in self._failed.items() if key[1] != island}
        mine = tuple(carrier for carrier in carriers if self._island.setdefault(carrier.peer, island) == island)
        if mine:
            self._theirs[island] = mine

    def acknowledged(self, island: str) -> None:
        """The island has answered a message that named this one's carriers, so they may come to it now."""
        self._acknowledged.add(island)

    def island_of(self, carrier: str) -> str | None:
        """The island that a carrier speaks for."""
        return self._island.get(carrier)

    def lanes(self, island: str) -> int:
        """How many pairs of carriers there are between this island and another."""
        return min(len(self.daemons), len(self._theirs.get(island, ()))) if island in self._acknowledged else 0

    def pair(self, island: str, lane: int) -> tuple[int, Carrier] | None:
        """Number of the own carrier, and the other island's, for a lane; None where the control connection has to do."""
        lanes = self.lanes(island)
        if not lanes:
            return None
        index = lane % lanes
        failed = self._failed.get((index, island))
        if failed is not None and time.monotonic() < failed + _TRY_AGAIN_SECONDS:
            return None
        return index, self._theirs[island][index]

    def failed(self, island: str, index: int) -> bool:
        """This carrier can't reach that island's, and need not try for a while. Returns whether that is news."""
        first = (index, island) not in self._failed
        self._failed[index, island] = time.monotonic()
        return first


def _port_after(host_port: str, offset: int) -> str:
    host, _, port = host_port.rpartition(":")
    return f"{host}:{int(port) + offset}"
