"""The bytes of an attempt over any number of lanes: the same bits, in the same order, whatever comes first."""

import asyncio
import random

import pytest
import torch
from torch import Tensor

from diloco.codecs.none import NoCodec
from diloco.exchange.hivemind.scatter_reduce import ScatterReduce
from diloco.exchange.hivemind.stream import Traffic
from diloco.reduction import CHUNK, chunk_slice, num_chunks, weighted_mean

pytestmark = pytest.mark.timeout(60)


class Pipe:
    """One end of a stream in memory, on which everything takes its own time."""

    def __init__(self, out: asyncio.Queue, into: asyncio.Queue, pace: random.Random) -> None:
        self._out, self._into, self._pace, self.traffic = out, into, pace, Traffic(received=7)

    async def send_tensor(self, values: Tensor) -> None:
        """As a stream does."""
        await asyncio.sleep(self._pace.random() / 1000)
        self._out.put_nowait(values.clone())

    async def receive_tensor(self, max_bytes: int) -> Tensor:
        """As a stream does."""
        values = await self._into.get()
        assert values.numel() <= max_bytes
        return values

    async def wait_for_end(self) -> None:
        """Nothing is lost in memory."""

    def close(self) -> None:
        """Nothing to close."""


def run_members(numel: int, weights: list[float], lanes: int, seed: int) -> tuple[list[Tensor], list[int], Tensor]:
    """Each member's mean; how many lanes each pair used; the mean computed plainly."""
    pace, codec = random.Random(seed), NoCodec()
    values = [torch.randn(numel, generator=torch.Generator().manual_seed(member)) for member in range(len(weights))]
    used: list[int] = []

    async def run() -> list[Tensor]:
        members: list[ScatterReduce] = []
        serving: list[asyncio.Task] = []

        def opener(own: int):
            async def open_stream(position: int, lane: int, of: int) -> Pipe:
                there, back = asyncio.Queue(), asyncio.Queue()
                await asyncio.sleep(pace.random() / 100)
                served = members[position].serve(own, lane, of, Pipe(back, there, pace))
                serving.append(asyncio.ensure_future(served))
                used.append(of)
                return Pipe(there, back, pace)

            return open_stream

        for own, mine in enumerate(values):
            encoded = [codec.encode(mine[chunk_slice(numel, chunk)]) for chunk in range(num_chunks(numel))]
            members.append(
                ScatterReduce(
                    codec, encoded, numel, torch.float32, weights, own, Traffic(), lambda at: lanes, opener(own)
                )
            )
        means = await asyncio.gather(*(member.run() for member in members))
        await asyncio.gather(*serving)
        return means

    return asyncio.run(run()), used, weighted_mean(values, weights)


@pytest.mark.parametrize("lanes", [1, 2, 3, 16])
@pytest.mark.parametrize(("members", "numel"), [(2, 5 * CHUNK + 1), (3, 4 * CHUNK), (3, 5)])
def test_lanes_change_no_bit(members: int, numel: int, lanes: int) -> None:
    means, used, expected = run_members(numel, [1.0, 3.0, 0.5][:members], lanes, seed=lanes)
    for mean in means:
        assert torch.equal(mean, expected)
    assert used and max(used) <= min(lanes, -(-num_chunks(numel) // members)), "no lane without a chunk"


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
        reduce = ScatterReduce(NoCodec(), [], 5, torch.float32, [1.0, 1.0], 0, Traffic(), lambda at: 1, lambda *a: None)
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
