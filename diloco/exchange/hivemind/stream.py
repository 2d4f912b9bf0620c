"""A byte stream between two islands: messages and tensors, each with its length in front, counted and bounded."""

import asyncio
import struct
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.messages import BadMessage, Header
from diloco.exchange.hivemind.raw_socket import RawSocket
from diloco.exchange.hivemind.seal import Seal

_PIECE_BYTES = 1 << 20
_LENGTH_BYTES = 4
_CHUNK_HEAD = struct.Struct("<II")  # its number, and how many bytes follow: none at the end
_MAX_HEADER_BYTES = 64 << 10
_STALL_SECONDS = 60.0  # without one byte taken by the other end: it does not read, or the link is dead
_END_SECONDS = 300.0  # for the last bytes, which the daemons still hold, on a slow link


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
        raw: RawSocket,
        seal: Seal,
        heard: Callable[[str], None],
        traffic: Traffic | None = None,
    ) -> None:
        self.peer, self.traffic = ends.peer, traffic or Traffic()
        self._ends, self._raw, self._seal, self._heard = ends, raw, seal, heard

    async def send(self, header: Header) -> None:
        """Send a message."""
        raw = self._seal.close("stream", self._ends.here, self._ends.there, messages.encode(header))
        await self._write(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)

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
        await self._write(_CHUNK_HEAD.pack(number, values.numel()))
        await self.send_plain(values)

    async def send_end(self) -> None:
        """No more chunks come."""
        await self._write(_CHUNK_HEAD.pack(0, 0))

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
        values = torch.empty(length, dtype=torch.uint8)
        await self.receive_into(values)
        return number, values

    async def receive_into(self, target: Tensor) -> None:
        """Fill a flat uint8 tensor, whose size is agreed on, so none is sent."""
        await self._fill(memoryview(target.numpy()), self._heard)

    async def send_plain(self, values: Tensor) -> None:
        """What :meth:`receive_into` reads: a flat uint8 tensor without its length."""
        memory = memoryview(values.numpy())
        await self._write(*(memory[start : start + _PIECE_BYTES] for start in range(0, len(memory), _PIECE_BYTES)))

    async def wait_for_end(self) -> None:
        """Wait until the other end has all it needs and closes: the daemon drops what is unread after our own close.

        Raises:
            TimeoutError: it keeps the stream open for minutes.
        """
        async with asyncio.timeout(_END_SECONDS):
            await self._raw.receive_into(memoryview(bytearray(1)))

    def close(self) -> None:
        """Close both directions."""
        self._raw.close()

    async def _write(self, *data: bytes | memoryview) -> None:
        for piece in data:
            await self._raw.send(piece, _STALL_SECONDS)
            self.traffic.sent += len(piece)

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
            came = await self._raw.receive_into(memory[filled:])
            if not came:
                raise EOFError(f"stream from {self.peer} ended {len(memory) - filled} bytes early")
            filled += came
            self.traffic.received += came
            heard(self.peer)
