"""The bytes of an attempt over any number of lanes: the same bits, in the same order, whatever comes first."""

import asyncio
import random
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Awaitable, Callable

import pytest
import torch
from torch import Tensor

from diloco.codecs.none import NoCodec
from diloco.exchange.hivemind.scatter_reduce import ScatterReduce
from diloco.exchange.hivemind.raw_socket import RawSocket
from diloco.exchange.hivemind.seal import Seal
from diloco.exchange.hivemind.stream import Ends, Stream, Traffic
from diloco.reduction import CHUNK, Wire, chunk_slice, num_chunks, sends_whole, through, weighted_mean

pytestmark = pytest.mark.timeout(60)


class Pipe:
    """One end of a stream in memory, on which everything takes its own time."""

    def __init__(self, out: asyncio.Queue, into: asyncio.Queue, pace: random.Random) -> None:
        self._out, self._into, self._pace, self.traffic = out, into, pace, Traffic(received=7)
        self.sent: list[int] = []

    async def send_chunk(self, number: int, values: Tensor) -> None:
        """As a stream does."""
        await asyncio.sleep(self._pace.random() / 1000)
        self._out.put_nowait((number, values.clone()))
        self.sent.append(number)

    async def send_end(self) -> None:
        """As a stream does."""
        self._out.put_nowait(None)

    async def receive_chunk(self, max_bytes: Callable[[int], int]) -> tuple[int, Tensor] | None:
        """As a stream does."""
        came = await self._into.get()
        assert came is None or came[1].numel() <= max_bytes(came[0])
        return came

    async def wait_for_end(self) -> None:
        """Nothing is lost in memory."""

    def close(self) -> None:
        """Nothing to close."""


class Exactly(NoCodec):
    """Nothing is lost, and ``bits`` says how it is to be sent."""

    def __init__(self, bits: float) -> None:
        self.bits = bits


class Coarse:
    """A byte a value, of which it says that it is far less: so that members send all of it."""

    bits = 2.0

    def encode(self, values: Tensor) -> Tensor:
        """See :class:`diloco.reduction.Codec`."""
        scale = values.abs().max().reshape(1)
        return torch.cat([scale.view(torch.uint8), (values / scale * 3).round().to(torch.int8).view(torch.uint8)])

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`diloco.reduction.Codec`."""
        return encoded[4:].view(torch.int8).to(dtype) * (encoded[:4].clone().view(dtype) / 3)

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """See :class:`diloco.reduction.Codec`."""
        return numel + dtype.itemsize


EXACT, WHOLE, SHARES = Wire(NoCodec(), NoCodec()), Wire(Coarse(), NoCodec()), Wire(Coarse(), Coarse())


@dataclass
class Run:
    """What members got."""

    members: list[ScatterReduce]
    means: list[Tensor]
    used: list[int] = field(default_factory=list)
    pipes: list[Pipe] = field(default_factory=list)  # the ends that opened them


def run_members(wire: Wire, values: list[Tensor], weights: list[float], lanes: int, seed: int) -> Run:
    """Each member's mean, and how many lanes each pair used."""
    pace, numel, result = random.Random(seed), values[0].numel(), Run([], [])

    async def run() -> None:
        serving: list[asyncio.Task] = []

        def opener(own: int) -> Callable[[int, int, int], Awaitable[Pipe]]:
            async def open_stream(position: int, lane: int, of: int) -> Pipe:
                there, back = asyncio.Queue(), asyncio.Queue()
                await asyncio.sleep(pace.random() / 100)
                served = result.members[position].serve(own, lane, of, Pipe(back, there, pace))
                serving.append(asyncio.ensure_future(served))
                result.used.append(of)
                result.pipes.append(Pipe(there, back, pace))
                return result.pipes[-1]

            return open_stream

        for own, mine in enumerate(values):
            encoded = [wire.contribution.encode(mine[piece]) for piece in pieces(numel)]
            result.members.append(
                ScatterReduce(
                    wire, encoded, numel, torch.float32, weights, own, Traffic(), lambda at: lanes, opener(own)
                )
            )
        applied: list[dict[int, Tensor]] = [{} for _ in values]
        await asyncio.gather(*(member.run(mine.__setitem__) for member, mine in zip(result.members, applied)))
        result.means += [torch.cat([mine[chunk] for chunk in range(num_chunks(numel))]) for mine in applied]
        await asyncio.gather(*serving)

    asyncio.run(run())
    return result


def pieces(numel: int) -> list[slice]:
    """Of each chunk."""
    return [chunk_slice(numel, chunk) for chunk in range(num_chunks(numel))]


def random_values(members: int, numel: int) -> list[Tensor]:
    """Of each member."""
    return [torch.randn(numel, generator=torch.Generator().manual_seed(member)) for member in range(members)]


def plain_mean(wire: Wire, values: list[Tensor], weights: list[float]) -> Tensor:
    """What all have to apply, computed in one place."""
    means = []
    for piece in pieces(values[0].numel()):
        numel = piece.stop - piece.start
        sent = [wire.contribution.decode(wire.contribution.encode(each[piece]), numel, each.dtype) for each in values]
        mean = weighted_mean(sent, weights)
        means.append(mean if sends_whole(wire, len(values)) else through(wire.mean, mean))
    return torch.cat(means)


@pytest.mark.parametrize("lanes", [1, 2, 3, 16])
@pytest.mark.parametrize("wire", [EXACT, WHOLE, SHARES])
@pytest.mark.parametrize(("members", "numel"), [(2, 5 * CHUNK + 1), (3, 4 * CHUNK), (3, 5)])
def test_lanes_change_no_bit(members: int, numel: int, wire: Wire, lanes: int) -> None:
    values, weights = random_values(members, numel), [1.0, 3.0, 0.5][:members]
    run = run_members(wire, values, weights, lanes, seed=lanes)
    expected = plain_mean(wire, values, weights)
    for mean in run.means:
        assert torch.equal(mean, expected)
    most = num_chunks(numel) if sends_whole(wire, members) else -(-num_chunks(numel) // members)
    assert run.used and max(run.used) <= min(lanes, most), "no lane without a chunk"
    assert all(pipe.sent for pipe in run.pipes), "a lane that is open early takes not the first chunk of another"


def test_all_is_there_before_the_others_have_it() -> None:
    """So that a member may vote while its own bytes are on the wire; and by votes the other may commit and leave, before it says so."""
    numel = 2 * CHUNK + 1
    values = random_values(2, numel)
    ours, theirs = ([WHOLE.contribution.encode(mine[piece]) for piece in pieces(numel)] for mine in values)
    applied: dict[int, Tensor] = {}

    class Slow(Pipe):
        async def wait_for_end(self) -> None:
            await gone.wait()
            raise EOFError("it has committed, and left")

    gone = asyncio.Event()

    async def run() -> None:
        pipes = [Slow(asyncio.Queue(), asyncio.Queue(), random.Random(0)) for _ in range(2)]

        async def open_stream(position: int, lane: int, of: int) -> Pipe:
            return pipes[0]

        member = ScatterReduce(WHOLE, ours, numel, torch.float32, [1.0, 3.0], 0, Traffic(), lambda at: 1, open_stream)
        works = [asyncio.ensure_future(work) for work in (member.run(applied.__setitem__), member.serve(1, 0, 1, pipes[1]))]
        for came in [*enumerate(theirs), None]:
            assert not member.complete.is_set()
            pipes[1]._into.put_nowait(came)
        await member.complete.wait()
        assert not works[0].done(), "the other one has not said that all came"
        gone.set()
        await asyncio.gather(*works)

    asyncio.run(run())
    mean = torch.cat([applied[chunk] for chunk in range(num_chunks(numel))])
    assert torch.equal(mean, plain_mean(WHOLE, values, [1.0, 3.0]))


@pytest.mark.parametrize(("works", "members"), [("reduce", 2), ("apply", 2), ("apply", 3)])
def test_no_thread_goes_on_after_the_end(works: str, members: int) -> None:
    """An attempt that failed writes nothing into what the next one stages."""
    began, finish, ended = threading.Event(), threading.Event(), []

    def slow(*_: object) -> None:
        began.set()
        finish.wait(10)
        ended.append(works)

    class Slow(NoCodec):
        def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
            """See :class:`diloco.reduction.Codec`."""
            slow()
            return super().decode(encoded, numel, dtype)

    async def run() -> None:
        wire = Wire(Slow(), NoCodec()) if works == "reduce" else EXACT
        weights, mine = [1.0] * members, torch.ones(5)
        reduce = ScatterReduce(wire, [mine.view(torch.uint8)], 5, torch.float32, weights, 0, Traffic(), lambda at: 1, never)
        for position in range(1, members):
            reduce._put(0, position, mine.view(torch.uint8))
        running = asyncio.ensure_future(reduce.run(lambda chunk, mean: slow() if works == "apply" else None))
        await asyncio.to_thread(began.wait, 10)
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=0.05)
        assert not done and not ended
        finish.set()
        await asyncio.wait({running})
        assert ended and running.cancelled()

    asyncio.run(run())


async def never(*_: int) -> Pipe:
    """A stream that is not opened."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("wire", [EXACT, WHOLE, SHARES])
def test_what_is_seen_of_a_contribution_is_seen_once(wire: Wire) -> None:
    """Whoever reduces what: the members' evidence adds up to each contribution as it was sent."""
    values, weights = random_values(3, 4 * CHUNK + 3), [1.0, 2.0, 1.0]
    run = run_members(wire, values, weights, lanes=2, seed=0)
    evidence = [member.evidence() for member in run.members]
    codec = wire.contribution
    for position, mine in enumerate(values):
        sent = [codec.decode(codec.encode(mine[piece]), piece.stop - piece.start, mine.dtype) for piece in pieces(len(mine))]
        square = sum(seen[position].square for _, seen in evidence)
        assert square == pytest.approx(float(torch.cat(sent).double().square().sum()), rel=1e-9)


@pytest.mark.parametrize("wire", [EXACT, Wire(Exactly(2.0), NoCodec())])
def test_what_is_not_finite_counts_as_zero_and_is_seen(wire: Wire) -> None:
    values, weights = random_values(3, 3 * CHUNK), [1.0, 2.0, 1.0]
    values[1][CHUNK + 5] = float("nan")
    run = run_members(wire, values, weights, lanes=2, seed=0)
    sound = [each.clone() for each in values]
    sound[1][CHUNK : 2 * CHUNK] = 0.0
    assert all(torch.equal(mean, weighted_mean(sound, weights)) for mean in run.means)
    assert max(seen[1].square for _, seen in (member.evidence() for member in run.members)) > 1e299


@pytest.mark.parametrize(
    ("streams", "told"),
    [
        ([(0, 1), (0, 1)], r"stream 0 of 1, where \[0\] of 1 came before"),
        ([(0, 2), (1, 2), (0, 2)], r"stream 0 of 2, where \[0, 1\] of 2 came before"),
        ([(0, 2), (1, 3)], "stream 1 of 3, where"),
        ([(2, 2)], "stream 2 of 2, where"),
    ],
)
def test_a_lane_comes_once_and_is_one_of_those_announced(streams: list[tuple[int, int]], told: str) -> None:
    async def run() -> None:
        reduce = ScatterReduce(EXACT, [], 5, torch.float32, [1.0, 1.0], 0, Traffic(), lambda at: 1, lambda *a: None)
        serving = []
        try:
            for lane, lanes in streams:
                pipe = Pipe(asyncio.Queue(), asyncio.Queue(), random.Random(0))
                serving.append(asyncio.ensure_future(reduce.serve(1, lane, lanes, pipe)))
                done, _ = await asyncio.wait(serving, timeout=0.02)
                for task in done:
                    task.result()
        finally:
            for task in serving:
                task.cancel()

    with pytest.raises(ValueError, match=told):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("sent", "told"),
    [
        ([(1, 4)], "chunk 1 came, which is not to come"),
        ([(0, 4), (0, 4)], "chunk 0 came, which is not to come or came before"),
        ([(0, 21)], "chunk 0 has 21 bytes, and may have 20 at most"),
        ([], "1 chunks did not come, the first of them 0"),
    ],
)
def test_a_chunk_comes_once_and_is_no_larger_than_it_may_be(sent: list[tuple[int, int]], told: str) -> None:
    async def run() -> None:
        there, here = socket.socketpair()
        stream = Stream(Ends("peer", "here", "there"), RawSocket(here), Seal(b""), lambda peer: None)
        with there:
            for number, length in [*sent, (0, 0)]:
                there.sendall(struct.pack("<II", number, length) + bytes(length))
        reduce = ScatterReduce(EXACT, [], 5, torch.float32, [1.0, 1.0], 0, Traffic(), lambda at: 1, lambda *a: None)
        try:
            await reduce.serve(1, 0, 1, stream)
        finally:
            stream.close()

    with pytest.raises((ValueError, EOFError), match=told):
        asyncio.run(run())
