"""The libp2p daemon of an exchange process, started and watched. Only this file knows the insides of hivemind's P2P."""

import asyncio
import errno
import ipaddress
import socket
import time

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from diloco.exchange.base import JoinError
from diloco.exchange.hivemind.lifetime import describe_exit, dying_with_me

_PORT_WAIT_SECONDS = 5.0
_START_SECONDS = 60.0
_MAX_REQUEST_BYTES = 1 << 20  # four times the longest message of ours; what is longer never leaves the daemon


class Daemon(P2P):
    """hivemind's P2P whose daemon process dies with this one."""

    @staticmethod
    def _make_process_args(*args, **kwargs) -> list[str]:
        # libp2p would dial from the port that it listens on. Two islands that dial each other within one round-trip time
        # would then make one TCP connection with two openers, and its handshake fails at both ends.
        environment = ["/usr/bin/env", "LIBP2P_TCP_REUSEPORT=false"]
        return dying_with_me([*environment, *P2P._make_process_args(*args, **kwargs)])

    async def died(self) -> str:
        """Wait until the daemon is of no use any more, which P2P itself doesn't notice; returns how it ended."""
        ended = asyncio.create_task(self._child.wait())
        await asyncio.wait({ended, self._client.control._read_task}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            return "its control connection broke"
        return describe_exit(ended.result())

    async def dial(self, peer: str, *addresses: str) -> None:
        """Connect to a peer at one of its addresses, full multiaddrs; others told them. Raises P2PDaemonError."""
        transports, problem = [], "no address of it is known"
        for address in addresses:
            try:
                target = PeerID.from_base58(peer)
                transports.append(Multiaddr(address.rpartition("/p2p/")[0]))
            except ValueError as error:
                problem = f"{address!r} is no address of a peer: {error}"
        if not transports:
            raise P2PDaemonError(problem)
        await self._client.connect(target, transports)

    def drop(self, peer: str) -> None:
        """Close the connection to a peer soon; it may come back. Nothing happens where there is none."""
        # Not waited for: a request that is being handled is cancelled when its connection closes.
        closing = asyncio.ensure_future(self._client.disconnect(PeerID.from_base58(peer)))
        closing.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def add_handler(self, name: str, handler) -> None:
        """Answer requests called ``name`` with ``await handler(raw, peer_id)``."""
        await self._client.add_unary_handler(name, handler)

    async def request(self, peer: str, name: str, raw: bytes) -> bytes:
        """The answer of ``peer`` to a request. May be cancelled. Raises P2PDaemonError or P2PHandlerError."""
        # A call of hivemind's that is cancelled while its answer arrives breaks the control connection for all others,
        # so it is left to end by itself.
        call = asyncio.ensure_future(self._client.call_unary_handler(PeerID.from_base58(peer), name, raw))
        call.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(call)


async def start_daemon(listen: str, announce: str, identity_path: str | None, key: str = "swarm.listen") -> Daemon:
    """Start libp2p on ``listen`` (host:port), with no relay and no hole punching: every peer is dialed directly.

    Args:
        identity_path: file with its private key, made when missing; None: a new one that is never written anywhere.
        key: of the configuration, to be named when it can't listen there.

    Raises:
        JoinError: the port is taken.
    """
    await _wait_for_port(listen, key)
    return await Daemon.create(
        host_maddrs=[_multiaddr(listen)],
        announce_maddrs=[_multiaddr(announce)] if announce else None,
        identity_path=identity_path,
        use_relay=False,
        use_auto_relay=False,
        auto_nat=False,
        nat_port_map=False,
        use_ipfs=False,
        startup_timeout=_START_SECONDS,
        persistent_conn_max_msg_size=_MAX_REQUEST_BYTES,
    )


async def start_client() -> Daemon:
    """Start libp2p that listens nowhere, under a new identity: it reaches others, and nobody reaches it."""
    return await Daemon.create(
        host_maddrs=None,
        no_listen=True,
        dht_mode="client",
        use_relay=False,
        use_auto_relay=False,
        auto_nat=False,
        nat_port_map=False,
        use_ipfs=False,
        startup_timeout=_START_SECONDS,
    )


async def addresses(daemon: Daemon) -> tuple[str, ...]:
    """Full multiaddrs of this peer, those that others are likeliest to reach first."""
    found = [str(address) for address in await daemon.get_visible_maddrs(latest=True)]
    return tuple(sorted(found, key=_is_loopback))


def host_and_port(address: str) -> tuple[str, int] | None:
    """Where a multiaddr of the form /ip4/HOST/tcp/PORT/… leads; None where a lookup would be needed first."""
    parts = address.split("/")
    if len(parts) > 4 and parts[1] in ("ip4", "ip6") and parts[3] == "tcp":
        return parts[2], int(parts[4])
    return None


def _is_loopback(address: str) -> bool:
    place = host_and_port(address)
    return place is not None and ipaddress.ip_address(place[0]).is_loopback


def _multiaddr(host_port: str) -> str:
    host, _, port = host_port.rpartition(":")
    ip = ipaddress.ip_address(host.strip("[]"))
    return f"/ip{ip.version}/{ip}/tcp/{port}"


async def _wait_for_port(listen: str, key: str) -> None:
    """The daemon would share a port that another daemon listens on, and take some of its connections: look first.

    Waits a little, because the daemon of a process that was just killed may not be gone yet.
    """
    host, _, port = listen.rpartition(":")
    ip = ipaddress.ip_address(host.strip("[]"))
    deadline = time.monotonic() + _PORT_WAIT_SECONDS
    while True:
        with socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((str(ip), int(port)))
                probe.listen()
                return
            except OSError as error:
                if error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                    await asyncio.sleep(0.2)
                    continue
                remedy = "stop the program that holds it or choose another port; port 0 takes any free one"
                if error.errno == errno.EADDRNOTAVAIL:
                    remedy = "it is not this machine's; listen on 0.0.0.0 and set swarm.announce to the one others use"
                problem = f"{key}={listen}: can't listen on port {port}: {error.strerror}"
                raise JoinError(f"{problem}; {remedy}") from None
