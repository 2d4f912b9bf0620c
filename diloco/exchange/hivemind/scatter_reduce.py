"""The bytes of one attempt, one of two ways (:func:`diloco.reduction.sends_whole`).

Whole: every member sends its contribution to every other, and each reduces all of it. By shares: each reduces a share of
the chunks and sends the encoded mean on; that is encoded once, and everyone (the reducer too) applies what it decodes to.

Between two members chunks go over several streams side by side, its lanes. Each begins with a chunk of its own, as few
chunks would else go over the one that is open first; then it takes the next when it has room, so that a slow one holds
up no other. That changes when bytes come, and nothing else: a chunk is reduced when all have come, in the order of the
members, and applied at once, while others are on the wire.

Nothing in here limits time. A member that sends no more, or little by little, is ended with the attempt: by its silence
after ``exchange.peer_timeout``, by the round's deadline after ``exchange.round_deadline``.
"""

import asyncio
import time
from typing import Awaitable, Callable, Coroutine, Iterator, Sequence, TypeVar

import torch
from torch import Tensor

from diloco.exchange.hivemind.messages import BadMessage, Evidence
from diloco.exchange.hivemind.stream import Stream, Traffic
from diloco.reduction import Seen, Wire, all_finite, chunk_slice, num_chunks, reduce_chunk, reducer_chunks, sends_whole

T = TypeVar("T")
Apply = Callable[[int, Tensor], None]  # a chunk's number, and its mean

_AT_ONCE = 4  # chunks that a thread reduces before it looks again: few enough that what it makes stays in cache


class NotFinite(ValueError):
    """A mean that holds NaN or infinity, although every contribution was said to be finite."""


class ScatterReduce:
    """One member's part.

    Args:
        encoded: this member's own contribution, chunk by chunk.
        weights: of all members, in the order of reduction; ``position`` is this member's place in it.
        traffic: where the bytes are counted.
        num_lanes: how many streams to the member at a position are of use.
        open_stream: a stream to the member at a position, number so much of so many lanes.

    Attributes:
        complete: set when all means are applied here. Others may miss some of this member's chunks then, and vote later.
        decode_seconds: of computing, from what came to the mean, without applying that.
    """

    def __init__(
        self,
        wire: Wire,
        encoded: Sequence[Tensor],
        numel: int,
        dtype: torch.dtype,
        weights: Sequence[float],
        position: int,
        traffic: Traffic,
        num_lanes: Callable[[int], int],
        open_stream: Callable[[int, int, int], Awaitable[Stream]],
    ) -> None:
        self._wire, self._encoded, self._numel, self._dtype = wire, encoded, numel, dtype
        self._weights, self._position, self._traffic = weights, position, traffic
        self._num_lanes, self._open_stream = num_lanes, open_stream
        self._whole = sends_whole(wire, len(weights))
        self._share = reducer_chunks(numel, len(weights), position)
        self._own = self._chunks_of(position)
        self._inbox: dict[int, list[Tensor | None]] = {chunk: [None] * len(weights) for chunk in self._own}
        self._full: asyncio.Queue[int] = asyncio.Queue()
        self._seen = Seen(len(weights))
        self._served: dict[int, _Lanes] = {}  # by position
        loop = asyncio.get_running_loop()
        self._reduced: dict[int, asyncio.Future[Tensor]] = {chunk: loop.create_future() for chunk in self._own}
        self.complete, self._to_apply = asyncio.Event(), num_chunks(numel)
        self.decode_seconds = 0.0

    async def run(self, apply: Apply) -> None:
        """Send, reduce, receive. When it ends, even cancelled, no thread of it goes on.

        Args:
            apply: takes each chunk's mean, decoded and finite, once and in any order; for threads, several at a time.

        Raises:
            NotFinite: a mean holds NaN or infinity.
            BadMessage, EOFError, OSError: a member broke off or sent what it may not.
        """
        for chunk in self._own:
            self._put(chunk, self._position, self._encoded[chunk])
        partners = [at for at in range(len(self._weights)) if at != self._position and self._chunks_of(at)]
        trades = [trade for at in partners for trade in self._trades_with(at, apply)]
        await all_or_none([self._reduce_own(apply), *trades])

    def evidence(self) -> tuple[float, tuple[Evidence, ...]]:
        """What this member saw in its share of the chunks: the mean's square, and of each member in order."""
        pairs = zip(self._seen.squares, self._seen.alongs, strict=True)
        return self._seen.mean_square, tuple(Evidence(square=square, along=along) for square, along in pairs)

    async def serve(self, position: int, lane: int, lanes: int, stream: Stream) -> None:
        """The other end of a member's stream: take its chunks, give the means where they are asked for.

        Raises:
            ValueError: a second stream for the same lane, or not the number of lanes that the member said before.
            BadMessage: a chunk that is not to come, or not now, or too large.
            EOFError: all its lanes have ended, and chunks are missing.
        """
        served = self._served.setdefault(position, _Lanes(self._own, lanes))
        served.begin(lane, lanes)
        self._traffic.received += stream.traffic.received  # its header
        stream.traffic = self._traffic

        async def take() -> None:
            while (came := await stream.receive_chunk(lambda chunk: served.awaited(chunk, self._contribution_bytes))) is not None:
                served.came(came[0])
                self._put(came[0], position, came[1])
            served.end()

        async def give() -> None:
            for chunk in served.to_give(lane):
                await stream.send_chunk(chunk, await asyncio.shield(self._reduced[chunk]))
            await stream.send_end()

        await all_or_none([take()] if self._whole else [take(), give()])
        if not self._whole:
            await stream.wait_for_end()

    def _trades_with(self, position: int, apply: Apply) -> list[Coroutine[None, None, None]]:
        chunks = self._chunks_of(position)
        lanes = min(self._num_lanes(position), len(chunks))
        shared = _Lanes(chunks, lanes)
        return [self._trade(position, lane, lanes, shared, apply) for lane in range(lanes)]

    async def _trade(self, position: int, lane: int, lanes: int, shared: "_Lanes", apply: Apply) -> None:
        stream, given = await self._open_stream(position, lane, lanes), asyncio.Event()

        async def give() -> None:
            for chunk in shared.to_give(lane):
                await stream.send_chunk(chunk, self._encoded[chunk])
            await stream.send_end()
            given.set()

        async def take() -> None:
            while (came := await stream.receive_chunk(lambda chunk: shared.awaited(chunk, self._mean_bytes))) is not None:
                shared.came(came[0])
                await self._take_mean(dict([came]), apply)
            shared.end()

        async def wait() -> None:
            try:
                await (stream.wait_for_end() if self._whole else take())
            except (OSError, EOFError):
                if not (given.is_set() and self.complete.is_set()):
                    raise
                # The votes decide: who misses something gives up, and tells so; who has voted with all others may be gone.

        try:
            await all_or_none([give(), wait()])
        finally:
            stream.close()

    async def _reduce_own(self, apply: Apply) -> None:
        left = len(self._own)
        while left:
            ready = [await self._full.get()]
            while not self._full.empty() and len(ready) < _AT_ONCE:
                ready.append(self._full.get_nowait())
            inboxes = [self._inbox.pop(chunk) for chunk in ready]
            seconds, means = await in_thread(self._reduce, ready, inboxes)
            self.decode_seconds += seconds
            for chunk, mean in means.items():
                self._reduced[chunk].set_result(mean)
            await self._take_mean(means, apply)  # the others have them on the wire already
            left -= len(ready)

    async def _take_mean(self, means: dict[int, Tensor], apply: Apply) -> None:
        self.decode_seconds += await in_thread(self._apply, means, apply)
        self._to_apply -= len(means)
        if not self._to_apply:
            self.complete.set()

    def _put(self, chunk: int, position: int, encoded: Tensor) -> None:
        places = self._inbox[chunk]
        places[position] = encoded
        if all(place is not None for place in places):
            self._full.put_nowait(chunk)

    def _reduce(self, chunks: list[int], inboxes: list[list[Tensor]]) -> tuple[float, dict[int, Tensor]]:
        """Seconds that it took, and the means: as they go to the others, or as they are where all send all."""
        started, means = time.monotonic(), dict[int, Tensor]()
        for chunk, encoded in zip(chunks, inboxes, strict=True):
            seen = self._seen if chunk in self._share else None  # else it would count in several votes
            codec, numel = self._wire.contribution, self._chunk_numel(chunk)
            mean = _finite(chunk, reduce_chunk(codec, encoded, self._weights, numel, self._dtype, seen))
            means[chunk] = mean if self._whole else self._wire.mean.encode(mean)
        return time.monotonic() - started, means

    def _apply(self, means: dict[int, Tensor], apply: Apply) -> float:
        """Apply means as :meth:`_reduce` returns them. Seconds that it took to decode them."""
        seconds = 0.0
        for chunk, mean in means.items():
            if not self._whole:
                started = time.monotonic()
                mean = _finite(chunk, self._wire.mean.decode(mean, self._chunk_numel(chunk), self._dtype))
                seconds += time.monotonic() - started
            apply(chunk, mean)
        return seconds

    def _chunks_of(self, position: int) -> range:
        """Those that the member at a position reduces."""
        return range(num_chunks(self._numel)) if self._whole else reducer_chunks(self._numel, len(self._weights), position)

    def _chunk_numel(self, chunk: int) -> int:
        piece = chunk_slice(self._numel, chunk)
        return piece.stop - piece.start

    def _contribution_bytes(self, chunk: int) -> int:
        return self._wire.contribution.encoded_bytes(self._chunk_numel(chunk), self._dtype)

    def _mean_bytes(self, chunk: int) -> int:
        return self._wire.mean.encoded_bytes(self._chunk_numel(chunk), self._dtype)


def _finite(chunk: int, mean: Tensor) -> Tensor:
    if not all_finite(mean):
        raise NotFinite(f"the mean of chunk {chunk} is not finite")
    return mean


class _Lanes:
    """What the lanes between this member and another share."""

    def __init__(self, chunks: range, lanes: int) -> None:
        self._firsts, self._others = chunks[:lanes], iter(chunks[lanes:])
        self._missing, self._lanes, self._begun, self._ended = set(chunks), lanes, set[int](), 0

    def begin(self, lane: int, lanes: int) -> None:
        """A stream has come. Raises ValueError where it is none of those announced, or has come before."""
        if lane >= lanes or lanes != self._lanes or lane in self._begun:
            raise ValueError(f"stream {lane} of {lanes}, where {sorted(self._begun)} of {self._lanes} came before")
        self._begun.add(lane)

    def to_give(self, lane: int) -> Iterator[int]:
        """Chunks that a lane is to send: its own, and then whichever is next when it asks."""
        yield from self._firsts[lane : lane + 1]
        yield from self._others

    def awaited(self, chunk: int, max_bytes: Callable[[int], int]) -> int:
        """The most bytes that a chunk may have. Raises BadMessage where it is not to come."""
        if chunk not in self._missing:
            raise BadMessage(f"chunk {chunk} came, which is not to come or came before")
        return max_bytes(chunk)

    def came(self, chunk: int) -> None:
        """All of a chunk is there. Raises BadMessage where it came over two lanes at once."""
        self.awaited(chunk, lambda number: 0)
        self._missing.discard(chunk)

    def end(self) -> None:
        """A lane brings nothing more. Raises EOFError where it was the last and chunks are missing."""
        self._ended += 1
        if self._ended == self._lanes and self._missing:
            raise EOFError(f"{len(self._missing)} chunks did not come, the first of them {min(self._missing)}")


async def in_thread(work: Callable[..., T], *args: object) -> T:
    """What ``work`` returns in a thread. It is waited for even when the caller is cancelled, so that it writes nothing after that."""
    thread = asyncio.ensure_future(asyncio.to_thread(work, *args))
    try:
        await asyncio.wait({thread})
    finally:
        if not thread.done():
            await asyncio.wait({thread})
            thread.exception()  # seen; the caller has another reason to end
    return thread.result()


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
