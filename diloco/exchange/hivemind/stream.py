"""A byte stream between two islands: messages and tensors, each with its length in front, counted and bounded."""

import asyncio
import struct
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.messages import BadMessage, Header
from diloco.exchange.hivemind.seal import Seal

_PIECE_BYTES = 1 << 20
_LENGTH_BYTES = 4
_CHUNK_HEAD = struct.Struct("<II")  # its number, and how many bytes follow: none at the end
_MAX_HEADER_BYTES = 64 << 10
_STALL_SECONDS = 60.0  # without one byte taken by the other end: it does not read, or the link is dead
_END_SECONDS = 300.0  # for the last bytes, which the daemons still hold, on a slow link


class Stalled(ConnectionError):
    """The other end takes nothing any more."""


@dataclass
class Traffic:
    """Bytes of one round on the wire, headers included."""

    sent: int = 0
    received: int = 0


@dataclass(frozen=True)
class Ends:
    """Who is at the ends of a stream.

    Attributes:
        peer: the island at the other end.
        here, there: the libp2p daemons that the connection is between; ``there`` is ``peer``'s own or one of its carriers.
    """

    peer: str
    here: str
    there: str


class Stream:
    """A two-way byte stream to a peer.

    Messages on it are sealed. Tensors are not: that they come from the same end as the message before them, and
    unchanged, is what the connection's encryption proves.
    """

    def __init__(
        self,
        ends: Ends,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        seal: Seal,
        heard: Callable[[str], None],
        traffic: Traffic | None = None,
    ) -> None:
        self.peer, self.traffic = ends.peer, traffic or Traffic()
        self._ends, self._reader, self._writer, self._seal, self._heard = ends, reader, writer, seal, heard

    async def send(self, header: Header) -> None:
        """Send a message."""
        raw = self._seal.close("stream", self._ends.here, self._ends.there, messages.encode(header))
        self._writer.write(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)
        await self._drain()
        self.traffic.sent += _LENGTH_BYTES + len(raw)

    async def receive(self) -> Header:
        """The next message. Raises BadMessage (NotSealed for a stranger's), or EOFError where the stream ended."""
        length = await self._read_length(_MAX_HEADER_BYTES + self._seal.size)
        raw = bytearray(length)
        await self._fill(memoryview(raw))
        message = messages.decode(self._seal.open("stream", self._ends.there, self._ends.here, bytes(raw)))
        if not isinstance(message, Header):
            raise BadMessage(f"{message.kind!r} does not belong on a stream")
        self._heard(self.peer)
        return message

    async def send_chunk(self, number: int, values: Tensor) -> None:
        """Send a flat uint8 tensor with its number, piece by piece."""
        self._writer.write(_CHUNK_HEAD.pack(number, values.numel()))
        self.traffic.sent += _CHUNK_HEAD.size
        await self.send_plain(values)

    async def send_end(self) -> None:
        """No more chunks come."""
        self._writer.write(_CHUNK_HEAD.pack(0, 0))
        self.traffic.sent += _CHUNK_HEAD.size
        await self._drain()

    async def receive_chunk(self, max_bytes: Callable[[int], int]) -> tuple[int, Tensor] | None:
        """The next chunk, flat uint8, with its number; None at the end.

        Args:
            max_bytes: of the chunk with a number; it may raise BadMessage where that is not to come.

        Raises:
            BadMessage: it is longer than it may be; nothing is allocated before that is known.
        """
        head = bytearray(_CHUNK_HEAD.size)
        await self._fill(memoryview(head))
        number, length = _CHUNK_HEAD.unpack(head)
        if length == 0:
            return None
        if length > (limit := max_bytes(number)):
            raise BadMessage(f"chunk {number} has {length} bytes, and may have {limit} at most")
        buffer = bytearray(length)
        await self._fill(memoryview(buffer), self._heard)
        return number, torch.frombuffer(buffer, dtype=torch.uint8)

    async def receive_into(self, target: Tensor) -> None:
        """Fill a flat uint8 tensor, whose size is agreed on, so none is sent."""
        await self._fill(memoryview(target.numpy()), self._heard)

    async def send_plain(self, values: Tensor) -> None:
        """What :meth:`receive_into` reads: a flat uint8 tensor without its length."""
        memory = memoryview(values.numpy())
        for start in range(0, len(memory), _PIECE_BYTES):
            piece = memory[start : start + _PIECE_BYTES]
            self._writer.write(piece)
            await self._drain()
            self.traffic.sent += len(piece)

    async def wait_for_end(self) -> None:
        """Wait until the other end has all it needs and closes: the daemon drops what is unread after our own close.

        Raises:
            TimeoutError: it keeps the stream open for minutes.
        """
        async with asyncio.timeout(_END_SECONDS):
            await self._reader.read(1)

    def close(self) -> None:
        """Close both directions."""
        self._writer.close()

    async def _drain(self) -> None:
        """Wait until the daemon has taken most of what was written.

        Raises:
            Stalled: it took nothing at all for a minute. However slow a link is, it takes something.
        """
        left = self._writer.transport.get_write_buffer_size()
        while True:
            try:
                async with asyncio.timeout(_STALL_SECONDS):
                    return await self._writer.drain()
            except TimeoutError:
                before, left = left, self._writer.transport.get_write_buffer_size()
                if left >= before:
                    raise Stalled(f"{self.peer} took no byte for {_STALL_SECONDS:g} s") from None

    async def _read_length(self, max_bytes: int) -> int:
        raw = bytearray(_LENGTH_BYTES)
        await self._fill(memoryview(raw))
        length = int.from_bytes(raw, "little")
        if length == 0 or length > max_bytes:
            raise BadMessage(f"{length} bytes announced where 1 to {max_bytes} may come")
        return length

    async def _fill(self, memory: memoryview, heard: Callable[[str], None] = lambda peer: None) -> None:
        filled = 0
        while filled < len(memory):
            data = await self._reader.read(min(len(memory) - filled, _PIECE_BYTES))
            if not data:
                raise EOFError(f"stream from {self.peer} ended {len(memory) - filled} bytes early")
            memory[filled : filled + len(data)] = data
            filled += len(data)
            self.traffic.received += len(data)
            heard(self.peer)
