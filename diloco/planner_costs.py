"""What a round costs the processor: the exchange's own functions, timed on one chunk, here and now."""

import time
from dataclasses import dataclass
from typing import Callable

import torch
from torch import Tensor

from diloco.encoding import encode_contribution
from diloco.outer_state import Layout, OuterState
from diloco.reduction import CHUNK, Seen, Wire, num_chunks, reduce_chunk, reducer_chunks, sends_whole

_REPEATS = 5


@dataclass(frozen=True)
class ChunkCosts:
    """Seconds for one chunk of :data:`~diloco.reduction.CHUNK` elements, on one thread.

    Attributes:
        encode: from parameters to the encoded contribution.
        reduce: from the encoded contributions of all members to their mean.
        encode_mean, decode_mean: of the mean, where it is sent on; else 0.
        step: of the outer optimizer, and the digest.
        copy: of parameters out of the model, and back.
    """

    encode: float
    reduce: float
    encode_mean: float
    decode_mean: float
    step: float
    copy: float

    def decode_seconds(self, numel: int, islands: int) -> float:
        """From what came to the mean, for the member that reduces most."""
        share = len(reducer_chunks(numel, islands, 0)) / num_chunks(numel) if self.decode_mean else 1.0
        return numel / CHUNK * (share * (self.reduce + self.encode_mean) + self.decode_mean)


def measure_costs(wire: Wire, layout: Layout, islands: int) -> ChunkCosts:
    """Costs of a run with these codecs among ``islands``, on one thread. Takes some tens of milliseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(wire, layout, islands)
    finally:
        torch.set_num_threads(threads)


def _measure(wire: Wire, layout: Layout, islands: int) -> ChunkCosts:
    chunk = Layout((CHUNK,), layout.optimizer, layout.dtype, layout.max_slots, layout.error_feedback)
    state = OuterState(chunk).fragments[0]
    state.initialize()
    values = torch.randn(CHUNK, generator=torch.Generator().manual_seed(0)).to(layout.dtype)
    state.local.copy_(values)
    position = 0

    def encode() -> Tensor:
        nonlocal position
        position += 1
        return encode_contribution(state, wire.contribution, position).chunks[0]

    encoded = [encode().clone()] * islands
    weights, mean = [1.0] * islands, values
    goes_on = islands > 1 and not sends_whole(wire, islands)
    sent = wire.mean.encode(mean)
    return ChunkCosts(
        encode=_seconds(encode),
        reduce=_seconds(lambda: reduce_chunk(wire.contribution, encoded, weights, CHUNK, layout.dtype, Seen(islands))),
        encode_mean=_seconds(lambda: wire.mean.encode(mean)) if goes_on else 0.0,
        decode_mean=_seconds(lambda: wire.mean.decode(sent, CHUNK, layout.dtype)) if goes_on else 0.0,
        step=_seconds(lambda: state.begin_staging().apply(0, mean)),
        copy=2 * _seconds(lambda: state.local.copy_(values)),
    )


def _seconds(work: Callable[[], object]) -> float:
    """The least of some: what else runs here can only add to it."""
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
