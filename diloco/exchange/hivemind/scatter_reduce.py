"""The bytes of one attempt: every member reduces a share of the chunks and sends the encoded mean to all.

The mean is encoded once, by its reducer, and everyone (the reducer too) applies what that decodes to.
"""

import asyncio
from typing import Awaitable, Callable, Coroutine, Sequence

import torch
from torch import Tensor

from diloco.exchange.hivemind.messages import Evidence
from diloco.exchange.hivemind.network import Stream, Traffic
from diloco.reduction import Codec, Seen, chunk_slice, reduce_chunk, reducer_chunks


class NotFinite(ValueError):
    """A mean that holds NaN or infinity, although every contribution was said to be finite."""


class ScatterReduce:
    """One member's part.

    Args:
        encoded: this member's own contribution, chunk by chunk.
        weights: of all members, in the order of reduction; ``position`` is this member's place in it.
        traffic: where the bytes are counted.
        open_stream: a stream to the member at a position, ready for chunks.
    """

    def __init__(
        self,
        codec: Codec,
        encoded: Sequence[Tensor],
        numel: int,
        dtype: torch.dtype,
        weights: Sequence[float],
        position: int,
        traffic: Traffic,
        open_stream: Callable[[int], Awaitable[Stream]],
    ) -> None:
        self._codec, self._encoded, self._numel, self._dtype = codec, encoded, numel, dtype
        self._weights, self._position, self._traffic, self._open_stream = weights, position, traffic, open_stream
        self._own = self._chunks_of(position)
        self._mean = torch.empty(numel, dtype=dtype)
        self._inbox: dict[int, list[Tensor | None]] = {chunk: [None] * len(weights) for chunk in self._own}
        self._served: set[int] = set()
        self._seen = Seen(len(weights))
        loop = asyncio.get_running_loop()
        self._full: dict[int, asyncio.Future[None]] = {chunk: loop.create_future() for chunk in self._own}
        self._reduced: dict[int, asyncio.Future[Tensor]] = {chunk: loop.create_future() for chunk in self._own}

    async def run(self) -> Tensor:
        """Send, reduce, receive; returns the whole mean, decoded.

        Raises:
            NotFinite: it holds NaN or infinity.
            BadMessage, EOFError, OSError: a member broke off or sent what it may not.
        """
        for chunk in self._own:
            self._put(chunk, self._position, self._encoded[chunk])
        partners = [at for at in range(len(self._weights)) if at != self._position and self._chunks_of(at)]
        await all_or_none([self._reduce_own(), *(self._trade_with(at) for at in partners)])
        return self._mean

    def evidence(self) -> tuple[float, tuple[Evidence, ...]]:
        """What this member saw in the chunks that it reduced: the mean's square, and of each member in order."""
        pairs = zip(self._seen.squares, self._seen.alongs, strict=True)
        return self._seen.mean_square, tuple(Evidence(square=square, along=along) for square, along in pairs)

    async def serve(self, position: int, stream: Stream) -> None:
        """The other end of a member's stream: take its chunks of this member's share, give the means.

        Raises:
            ValueError: a second stream of the same member.
        """
        if position in self._served:
            raise ValueError("a second stream for the same contribution")
        self._served.add(position)
        stream.traffic = self._traffic

        async def take() -> None:
            for chunk in self._own:
                self._put(chunk, position, await stream.receive_tensor(self._max_bytes(chunk)))

        async def give() -> None:
            for chunk in self._own:
                await stream.send_tensor(await asyncio.shield(self._reduced[chunk]))

        await all_or_none([take(), give()])
        await stream.wait_for_end()

    async def _trade_with(self, position: int) -> None:
        chunks = self._chunks_of(position)
        stream = await self._open_stream(position)

        async def give() -> None:
            for chunk in chunks:
                await stream.send_tensor(self._encoded[chunk])

        async def take() -> None:
            for chunk in chunks:
                encoded = await stream.receive_tensor(self._max_bytes(chunk))
                await asyncio.to_thread(self._apply, chunk, encoded)

        try:
            await all_or_none([give(), take()])
        finally:
            stream.close()

    async def _reduce_own(self) -> None:
        for chunk in self._own:
            await self._full[chunk]
            encoded = await asyncio.to_thread(self._reduce, chunk, self._inbox.pop(chunk))
            await asyncio.to_thread(self._apply, chunk, encoded)
            self._reduced[chunk].set_result(encoded)

    def _put(self, chunk: int, position: int, encoded: Tensor) -> None:
        places = self._inbox[chunk]
        places[position] = encoded
        if all(place is not None for place in places) and not self._full[chunk].done():
            self._full[chunk].set_result(None)

    def _reduce(self, chunk: int, contributions: list[Tensor]) -> Tensor:
        numel = self._chunk_numel(chunk)
        return reduce_chunk(self._codec, contributions, self._weights, numel, self._dtype, self._seen)

    def _apply(self, chunk: int, encoded: Tensor) -> None:
        values = self._codec.decode(encoded, self._chunk_numel(chunk), self._dtype)
        if not torch.isfinite(values).all():
            raise NotFinite(f"the mean of chunk {chunk} is not finite")
        self._mean[chunk_slice(self._numel, chunk)] = values

    def _chunks_of(self, position: int) -> range:
        return reducer_chunks(self._numel, len(self._weights), position)

    def _chunk_numel(self, chunk: int) -> int:
        piece = chunk_slice(self._numel, chunk)
        return piece.stop - piece.start

    def _max_bytes(self, chunk: int) -> int:
        return self._codec.encoded_bytes(self._chunk_numel(chunk), self._dtype)


async def all_or_none(works: Sequence[Coroutine[None, None, None]]) -> None:
    """Run them side by side until all are done; when one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    failed = [task for task in tasks if not task.cancelled() and task.exception()]
    if failed:
        raise failed[0].exception()
    for task in tasks:
        task.result()
