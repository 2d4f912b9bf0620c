"""Messages and byte streams between islands, sealed, counted and bounded.

Peers are named by their libp2p id (base58), which the connection's encryption has proven.
"""

import asyncio
from collections import Counter
from typing import Awaitable, Callable

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError

from diloco.exchange.base import ExchangeEvent
from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.carriers import Carriers
from diloco.exchange.hivemind.daemon import Daemon
from diloco.exchange.hivemind.limits import OpenStreams, RequestRate
from diloco.exchange.hivemind.messages import BadMessage, Carrier, Header, Reply, Request
from diloco.exchange.hivemind.raw_socket import RawSocket
from diloco.exchange.hivemind.seal import NotSealed, Seal
from diloco.exchange.hivemind.stream import Ends, Stream, Traffic

_CONTROL = "diloco/control/1"
_BULK = "diloco/bulk/1"
_HEADER_SECONDS = 10.0
_CARRIER_SECONDS = 10.0
_FAILURES = (P2PDaemonError, P2PHandlerError, OSError)

#: What a stranger is told, whatever it said. The same bytes every time, so that it learns nothing and costs nothing.
REFUSAL = messages.encode(messages.Refused(reason="not a message of this swarm; see swarm.key_file"))

RequestHandler = Callable[[str, Request], Awaitable[Reply]]
StreamHandler = Callable[[str, Header, Stream], Awaitable[None]]


class Unreachable(ConnectionError):
    """A peer that can't be talked to. ``gone``: nothing listens there; otherwise it only did not answer in time."""

    def __init__(self, reason: str, gone: bool = True) -> None:
        super().__init__(reason)
        self.gone = gone


class KeyDiffers(Unreachable):
    """A peer that answers, and takes this island for a stranger, or is one itself."""


class Network:
    """This island's end of every connection.

    Args:
        seal: of the run.
        carriers: this island's data connections.
        tell: takes what the user should know.

    Attributes:
        refused: number of malformed messages, and of those of strangers.
        heard: called with a peer's id whenever anything came from it.
    """

    def __init__(
        self,
        daemon: Daemon,
        heard: Callable[[str], None],
        seal: Seal,
        carriers: Carriers,
        tell: Callable[[ExchangeEvent], None],
    ) -> None:
        self._daemon, self.heard, self._seal, self._carriers, self._tell = daemon, heard, seal, carriers, tell
        self.peer = daemon.peer_id.to_base58()
        self.refused: Counter[str] = Counter()
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._open_streams, self._rate = OpenStreams(), RequestRate()

    async def serve(self, on_request: RequestHandler, on_stream: StreamHandler) -> None:
        """Start to answer. Handlers get only well-formed messages; what they raise becomes a refusal."""

        async def control(raw: bytes, remote: PeerID) -> bytes:
            return await self._answer(raw, remote.to_base58(), on_request)

        await self._daemon.add_handler(_CONTROL, control)
        for daemon in (self._daemon, *self._carriers.daemons):
            await daemon.add_binary_stream_handler(_BULK, self._acceptor(daemon, on_stream))

    def know(self, peer: str, addresses: tuple[str, ...]) -> None:
        """Remember where a peer listens, for when its connection breaks."""
        self._addresses[peer] = tuple(address for address in addresses if address.endswith(f"/p2p/{peer}"))

    def forget(self, peer: str) -> None:
        """It is no member any more: it has a stranger's rights, and its carriers none."""
        self._addresses.pop(peer, None)
        self._carriers.learn(peer, ())

    async def connect(self, peer: str) -> None:
        """Make sure there is a connection. Raises Unreachable."""
        try:
            await self._daemon.dial(peer, *self._addresses.get(peer, ()))
        except _FAILURES as error:
            raise Unreachable(f"no connection to {peer}: {error}") from None

    async def call(self, peer: str, request: Request, timeout: float) -> Reply:
        """Send a request, dialing once more where the connection is gone.

        Raises:
            Unreachable: no answer within ``timeout`` seconds, or not one of ours.
            KeyDiffers: the answer is not one of this swarm.
        """
        raw = self._seal.close("request", self.peer, peer, messages.encode(request))
        try:
            async with asyncio.timeout(timeout):
                try:
                    answer = await self._daemon.request(peer, _CONTROL, raw)
                except _FAILURES:
                    await self.connect(peer)
                    answer = await self._daemon.request(peer, _CONTROL, raw)
        except TimeoutError:
            raise Unreachable(f"no answer to {request.kind!r} within {timeout:g} s", gone=False) from None
        except _FAILURES as error:
            raise Unreachable(str(error)) from None
        reply = self._read_answer(peer, answer)
        self.heard(peer)
        return reply

    # -- bulk ----------------------------------------------------------------------------------------------------------

    @property
    def carriers(self) -> tuple[Carrier, ...]:
        """This island's data connections, as the others have to be told."""
        return self._carriers.own

    def learn_carriers(self, peer: str, carriers: tuple[Carrier, ...], answered: bool = False) -> None:
        """A member has said which carriers are its own; ``answered``: to a message of this island that did the same."""
        islands = {self.peer, *self._addresses}  # which are no carriers of anybody
        self._carriers.learn(peer, tuple(carrier for carrier in carriers if carrier.peer not in islands))
        if answered:
            self._carriers.acknowledged(peer)

    def lanes(self, peer: str) -> int:
        """How many streams to a peer are of use side by side."""
        return max(1, self._carriers.lanes(peer))

    async def open_stream(self, peer: str, header: Header, traffic: Traffic, lane: int = 0) -> Stream:
        """Open a byte stream and send its header, over the carriers of that lane or else the control connection.

        Raises:
            Unreachable: there is no way to the peer.
        """
        stream = await self._open_by_carrier(peer, traffic, lane)
        try:
            stream = stream or await self._open(self._daemon, peer, peer, traffic)
        except _FAILURES as error:
            raise Unreachable(str(error)) from None
        await stream.send(header)
        return stream

    async def _open_by_carrier(self, peer: str, traffic: Traffic, lane: int) -> Stream | None:
        pair = self._carriers.pair(peer, lane)
        if pair is None:
            return None
        index, carrier = pair
        daemon = self._carriers.daemons[index]
        try:
            async with asyncio.timeout(_CARRIER_SECONDS):
                await daemon.dial(carrier.peer, *carrier.addresses)
                return await self._open(daemon, carrier.peer, peer, traffic)
        except (*_FAILURES, TimeoutError) as error:
            problem = str(error) or f"no answer within {_CARRIER_SECONDS:g} s"
        if self._carriers.failed(peer, index):
            where = f"data connection {index + 1} to {', '.join(carrier.addresses)}: {problem}"
            self._tell(ExchangeEvent("fallback", f"{where}; its bytes go over the control connection instead"))
        return None

    async def _open(self, daemon: Daemon, there: str, peer: str, traffic: Traffic) -> Stream:
        _, reader, writer = await daemon.call_binary_stream_handler(PeerID.from_base58(there), _BULK)
        raw = await RawSocket.of(reader, writer)
        return Stream(Ends(peer, daemon.peer_id.to_base58(), there), raw, self._seal, self.heard, traffic)

    # -- what others ask -----------------------------------------------------------------------------------------------

    async def _answer(self, raw: bytes, peer: str, handler: RequestHandler) -> bytes:
        """A sealed answer; the one refusal for what comes from a stranger."""
        try:
            self._check_rate(self._daemon, peer, peer)
            body = self._seal.open("request", peer, self.peer, raw)
        except NotSealed:
            self.refused["stranger"] += 1
            return REFUSAL
        try:
            message = messages.decode(body)
            if not isinstance(message, Request):
                raise BadMessage(f"{message.kind!r} is not a request")
        except BadMessage as error:
            self.refused["malformed"] += 1
            reply: Reply = messages.Refused(reason=f"bad message: {error}"[:1000])
        else:
            self.heard(peer)
            reply = await handler(peer, message)
        return self._seal.close("answer", self.peer, peer, messages.encode(reply))

    def _check_rate(self, daemon: Daemon, there: str, peer: str | None) -> None:
        """Close the connection of a stranger who asks too often. Raises NotSealed then."""
        if peer not in self._addresses and not self._rate.allows(there):
            daemon.drop(there)
            raise NotSealed("too many requests")

    def _read_answer(self, peer: str, answer: bytes) -> Reply:
        try:
            if answer == REFUSAL:
                raise NotSealed("it refused")
            return messages.decode(self._seal.open("answer", peer, self.peer, answer))
        except NotSealed:
            self.refused["stranger"] += 1
            raise KeyDiffers(
                "it does not take this island for one of its swarm, or is not of this one. Either the key differs, or only "
                "one of the two has one: use the same swarm.key_file and run.name on all islands",
                gone=False,
            ) from None
        except BadMessage as error:
            self.refused["malformed"] += 1
            raise Unreachable(f"an answer that is not ours: {error}") from None

    def _acceptor(self, daemon: Daemon, handler: StreamHandler) -> Callable[..., Awaitable[None]]:
        here = daemon.peer_id.to_base58()

        async def accept(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = info.peer_id.to_base58()
            peer = self._carriers.island_of(there) or (there if daemon is self._daemon else None)
            raw = await RawSocket.of(reader, writer)
            try:
                self._check_rate(daemon, there, peer)
                if peer is None:
                    raise NotSealed("a carrier of no member")
                stream = Stream(Ends(peer, here, there), raw, self._seal, self.heard)
                with self._open_streams.one_more(peer, is_member=peer in self._addresses):
                    async with asyncio.timeout(_HEADER_SECONDS):
                        header = await stream.receive()
                    await handler(peer, header, stream)
            except NotSealed:
                self.refused["stranger"] += 1
            except BadMessage:
                self.refused["malformed"] += 1
            except (OSError, EOFError, TimeoutError):
                pass  # the other end is gone; whoever needed the bytes has been told by then
            finally:
                raw.close()

        return accept
