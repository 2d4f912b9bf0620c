"""The local socket of a stream to a libp2p daemon, read and written without a copy in between.

hivemind hands out streams of asyncio, which copy every byte on its way out and twice on its way in. With two islands on one
machine, or a link of 1 Gbit/s, that is most of what an exchange process has to do.
"""

import asyncio
import os
import socket
from typing import Callable

_MOST_AT_ONCE = 1 << 20


class Stalled(ConnectionError):
    """The other end takes nothing any more."""


class RawSocket:
    """One end of a connected stream socket. One reader and one writer at a time."""

    def __init__(self, connected: socket.socket, writer: asyncio.StreamWriter | None = None, early: bytes = b"") -> None:
        connected.setblocking(False)
        self._socket, self._writer, self._early = connected, writer, memoryview(early)
        self._loop = asyncio.get_running_loop()

    @staticmethod
    async def of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> "RawSocket":
        """Take a stream over from asyncio, with what it has read already."""
        writer.transport.pause_reading()
        reader.feed_eof()  # so that the next line returns what is there, and waits for nothing
        early = await reader.read()
        writer.transport.pause_reading()  # the reader may have resumed it
        try:
            number = os.dup(writer.get_extra_info("socket").fileno())
        except OSError:  # no more descriptors
            writer.close()
            raise
        return RawSocket(socket.socket(fileno=number), writer, early)

    async def send(self, data: bytes | memoryview, stall_seconds: float) -> None:
        """Send all of it.

        Raises:
            Stalled: the other end took nothing at all for so long.
        """
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left[:_MOST_AT_ONCE]) :]
            except BlockingIOError:
                try:
                    async with asyncio.timeout(stall_seconds):
                        await self._ready(self._loop.add_writer, self._loop.remove_writer)
                except TimeoutError:
                    raise Stalled(f"no byte was taken for {stall_seconds:g} s") from None

    async def receive_into(self, target: memoryview) -> int:
        """Wait for bytes; returns how many came, 0 at the end."""
        if self._early:
            taken = self._early[: len(target)]
            target[: len(taken)], self._early = taken, self._early[len(taken) :]
            return len(taken)
        while True:
            try:
                return self._socket.recv_into(target[:_MOST_AT_ONCE])
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)

    def close(self) -> None:
        """Close both directions. May be called twice."""
        self._socket.close()
        if self._writer:
            self._writer.close()

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        ready, number = self._loop.create_future(), self._socket.fileno()
        add(number, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            remove(number)
