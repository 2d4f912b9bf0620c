"""The bytes of one attempt: every member reduces a share of the chunks and sends the encoded mean to all.

The mean is encoded once, by its reducer, and everyone (the reducer too) applies what that decodes to. Between two members
the chunks may go over several streams side by side, its lanes. That changes when bytes come, and nothing else: a chunk is
reduced when all have come, in the order of the members.

Nothing in here limits time. A member that sends no more, or little by little, is ended with the attempt: by its silence
after ``exchange.peer_timeout``, by the round's deadline after ``exchange.round_deadline``.
"""

import asyncio
from typing import Awaitable, Callable, Coroutine, Sequence

import torch
from torch import Tensor

from diloco.exchange.hivemind.messages import Evidence
from diloco.exchange.hivemind.stream import Stream, Traffic
from diloco.reduction import Codec, Seen, chunk_slice, reduce_chunk, reducer_chunks


class NotFinite(ValueError):
    """A mean that holds NaN or infinity, although every contribution was said to be finite."""


class ScatterReduce:
    """One member's part.

    Args:
        encoded: this member's own contribution, chunk by chunk.
        weights: of all members, in the order of reduction; ``position`` is this member's place in it.
        traffic: where the bytes are counted.
        num_lanes: how many streams to the member at a position are of use.
        open_stream: a stream to the member at a position, ready for the chunks of one lane of so many.
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
        num_lanes: Callable[[int], int],
        open_stream: Callable[[int, int, int], Awaitable[Stream]],
    ) -> None:
        self._codec, self._encoded, self._numel, self._dtype = codec, encoded, numel, dtype
        self._weights, self._position, self._traffic = weights, position, traffic
        self._num_lanes, self._open_stream = num_lanes, open_stream
        self._own = self._chunks_of(position)
        self._mean = torch.empty(numel, dtype=dtype)
        self._inbox: dict[int, list[Tensor | None]] = {chunk: [None] * len(weights) for chunk in self._own}
        self._seen = Seen(len(weights))
        self._served: dict[int, tuple[int, set[int]]] = {}  # by position: how many lanes it has, and which have come
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
        await all_or_none([self._reduce_own(), *(trade for at in partners for trade in self._trades_with(at))])
        return self._mean

    def evidence(self) -> tuple[float, tuple[Evidence, ...]]:
        """What this member saw in the chunks that it reduced: the mean's square, and of each member in order."""
        pairs = zip(self._seen.squares, self._seen.alongs, strict=True)
        return self._seen.mean_square, tuple(Evidence(square=square, along=along) for square, along in pairs)

    async def serve(self, position: int, lane: int, lanes: int, stream: Stream) -> None:
        """The other end of a member's stream: take its chunks of this member's share, give the means.

        Raises:
            ValueError: a second stream for the same lane, or not the number of lanes that the member said before.
        """
        said, came = self._served.setdefault(position, (lanes, set()))
        if lane >= lanes or lanes != said or lane in came:
            raise ValueError(f"stream {lane} of {lanes}, where {sorted(came)} of {said} came before")
        came.add(lane)
        self._traffic.received += stream.traffic.received  # its header
        stream.traffic = self._traffic
        chunks = self._own[lane::lanes]

        async def take() -> None:
            for chunk in chunks:
                self._put(chunk, position, await stream.receive_tensor(self._max_bytes(chunk)))

        async def give() -> None:
            for chunk in chunks:
                await stream.send_tensor(await asyncio.shield(self._reduced[chunk]))

        await all_or_none([take(), give()])
        await stream.wait_for_end()

    def _trades_with(self, position: int) -> list[Coroutine[None, None, None]]:
        chunks = self._chunks_of(position)
        lanes = min(self._num_lanes(position), len(chunks))
        return [self._trade(position, chunks[lane::lanes], lane, lanes) for lane in range(lanes)]

    async def _trade(self, position: int, chunks: range, lane: int, lanes: int) -> None:
        stream = await self._open_stream(position, lane, lanes)

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
