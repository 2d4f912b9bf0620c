"""Messages and byte streams between islands, counted and bounded.

Peers are named by their libp2p id (base58), which the connection's encryption has proven.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Awaitable, Callable

import torch
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError
from torch import Tensor

from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.daemon import Daemon
from diloco.exchange.hivemind.messages import BadMessage, Header, Reply, Request

_CONTROL = "diloco/control/1"
_BULK = "diloco/bulk/1"
_PIECE_BYTES = 1 << 20
_LENGTH_BYTES = 4
_MAX_HEADER_BYTES = 64 << 10
_MAX_OPEN_STREAMS = 256

RequestHandler = Callable[[str, Request], Awaitable[Reply]]
StreamHandler = Callable[[str, Header, "Stream"], Awaitable[None]]


class Unreachable(ConnectionError):
    """A peer that can't be talked to. ``gone``: nothing listens there; otherwise it only did not answer in time."""

    def __init__(self, reason: str, gone: bool = True) -> None:
        super().__init__(reason)
        self.gone = gone


@dataclass
class Traffic:
    """Bytes of one round on the wire, headers included."""

    sent: int = 0
    received: int = 0


class Network:
    """This island's end of every connection.

    Attributes:
        refused: number of malformed messages, and of those of strangers.
        heard: called with a peer's id whenever anything came from it.
    """

    def __init__(self, daemon: Daemon, heard: Callable[[str], None]) -> None:
        self._daemon, self.heard = daemon, heard
        self.peer = daemon.peer_id.to_base58()
        self.refused: Counter[str] = Counter()
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._open_streams = 0

    async def serve(self, on_request: RequestHandler, on_stream: StreamHandler) -> None:
        """Start to answer. Handlers get only well-formed messages; what they raise becomes a refusal."""

        async def control(raw: bytes, remote: PeerID) -> bytes:
            return messages.encode(await self._answer(raw, remote.to_base58(), on_request))

        async def bulk(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._accept(Stream(self, info.peer_id.to_base58(), reader, writer), on_stream)

        await self._daemon.add_handler(_CONTROL, control)
        await self._daemon.add_binary_stream_handler(_BULK, bulk)

    def know(self, peer: str, addresses: tuple[str, ...]) -> None:
        """Remember where a peer listens, for when its connection breaks."""
        self._addresses[peer] = tuple(address for address in addresses if address.endswith(f"/p2p/{peer}"))

    async def connect(self, peer: str) -> None:
        """Make sure there is a connection. Raises Unreachable."""
        problem = "no address of it is known"
        for address in self._addresses.get(peer, ()):
            try:
                return await self._daemon.dial(address)
            except (P2PDaemonError, OSError) as error:
                problem = str(error)
        raise Unreachable(f"no connection to {peer}: {problem}")

    async def call(self, peer: str, request: Request, timeout: float) -> Reply:
        """Send a request, dialing once more where the connection is gone.

        Raises:
            Unreachable: no answer within ``timeout`` seconds, or not one of ours.
        """
        raw = messages.encode(request)
        try:
            async with asyncio.timeout(timeout):
                try:
                    answer = await self._daemon.request(peer, _CONTROL, raw)
                except (P2PDaemonError, P2PHandlerError, OSError):
                    await self.connect(peer)
                    answer = await self._daemon.request(peer, _CONTROL, raw)
        except TimeoutError:
            raise Unreachable(f"no answer to {request.kind!r} within {timeout:g} s", gone=False) from None
        except (P2PDaemonError, P2PHandlerError, OSError) as error:
            raise Unreachable(str(error)) from None
        try:
            reply = messages.decode(answer)
        except BadMessage as error:
            self.refused["malformed"] += 1
            raise Unreachable(f"an answer that is not ours: {error}") from None
        self.heard(peer)
        return reply

    def lanes(self, peer: str) -> int:
        """How many streams to a peer are worth having side by side."""
        return 1

    async def open_stream(self, peer: str, header: Header, traffic: Traffic, lane: int = 0) -> "Stream":
        """Open a byte stream and send its header. Raises Unreachable."""
        try:
            _, reader, writer = await self._daemon.call_binary_stream_handler(PeerID.from_base58(peer), _BULK)
        except (P2PDaemonError, P2PHandlerError, OSError) as error:
            raise Unreachable(str(error)) from None
        stream = Stream(self, peer, reader, writer, traffic)
        await stream.send(header)
        return stream

    async def _answer(self, raw: bytes, peer: str, handler: RequestHandler) -> Reply:
        try:
            message = messages.decode(raw)
            if not isinstance(message, Request):
                raise BadMessage(f"{message.kind!r} is not a request")
        except BadMessage as error:
            self.refused["malformed"] += 1
            return messages.Refused(reason=f"bad message: {error}"[:1000])
        self.heard(peer)
        return await handler(peer, message)

    async def _accept(self, stream: "Stream", handler: StreamHandler) -> None:
        self._open_streams += 1
        try:
            if self._open_streams > _MAX_OPEN_STREAMS:
                raise BadMessage(f"more than {_MAX_OPEN_STREAMS} open streams")
            async with asyncio.timeout(10):
                header = await stream.receive()
            self.heard(stream.peer)
            await handler(stream.peer, header, stream)
        except BadMessage:
            self.refused["malformed"] += 1
        except (OSError, EOFError, TimeoutError):
            pass  # the other end is gone; whoever needed the bytes has been told by then
        finally:
            self._open_streams -= 1
            stream.close()


class Stream:
    """A two-way byte stream to a peer. Everything on it has its length in front."""

    def __init__(
        self,
        network: Network,
        peer: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        traffic: Traffic | None = None,
    ) -> None:
        self.peer, self.traffic = peer, traffic or Traffic()
        self._network, self._reader, self._writer = network, reader, writer

    async def send(self, header: Header) -> None:
        """Send a message."""
        raw = messages.encode(header)
        self._writer.write(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)
        await self._writer.drain()
        self.traffic.sent += _LENGTH_BYTES + len(raw)

    async def receive(self) -> Header:
        """The next message. Raises BadMessage, or EOFError where the stream ended."""
        raw = await self._read_exactly(await self._read_length(_MAX_HEADER_BYTES))
        message = messages.decode(bytes(raw))
        if not isinstance(message, Header):
            raise BadMessage(f"{message.kind!r} does not belong on a stream")
        return message

    async def send_tensor(self, values: Tensor) -> None:
        """Send a flat uint8 tensor, piece by piece."""
        self._writer.write(values.numel().to_bytes(_LENGTH_BYTES, "little"))
        self.traffic.sent += _LENGTH_BYTES
        await self.send_plain(values)

    async def receive_tensor(self, max_bytes: int) -> Tensor:
        """The next uint8 tensor. Raises BadMessage, before anything is allocated, where it is longer than it may be."""
        return torch.frombuffer(await self._read_exactly(await self._read_length(max_bytes)), dtype=torch.uint8)

    async def receive_into(self, target: Tensor) -> None:
        """Fill a flat uint8 tensor, whose size is agreed on, so none is sent."""
        await self._fill(memoryview(target.numpy()))

    async def send_plain(self, values: Tensor) -> None:
        """What :meth:`receive_into` reads: a flat uint8 tensor without its length."""
        memory = memoryview(values.numpy())
        for start in range(0, len(memory), _PIECE_BYTES):
            piece = memory[start : start + _PIECE_BYTES]
            self._writer.write(piece)
            await self._writer.drain()
            self.traffic.sent += len(piece)

    async def wait_for_end(self) -> None:
        """Wait until the other end has all it needs and closes: the daemon drops what is unread after our own close."""
        await self._reader.read(1)

    def close(self) -> None:
        """Close both directions."""
        self._writer.close()

    async def _read_length(self, max_bytes: int) -> int:
        length = int.from_bytes(await self._read_exactly(_LENGTH_BYTES), "little")
        if length == 0 or length > max_bytes:
            raise BadMessage(f"{length} bytes announced where 1 to {max_bytes} may come")
        return length

    async def _read_exactly(self, size: int) -> bytearray:
        buffer = bytearray(size)
        await self._fill(memoryview(buffer))
        return buffer

    async def _fill(self, memory: memoryview) -> None:
        filled = 0
        while filled < len(memory):
            data = await self._reader.read(min(len(memory) - filled, _PIECE_BYTES))
            if not data:
                raise EOFError(f"stream from {self.peer} ended {len(memory) - filled} bytes early")
            memory[filled : filled + len(data)] = data
            filled += len(data)
            self.traffic.received += len(data)
            self._network.heard(self.peer)
