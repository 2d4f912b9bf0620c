"""The weighted mean of encoded contributions, in one fixed order: the same bits wherever it is computed. torch only.

A fragment is cut into chunks of :data:`CHUNK` elements, by its size alone, so any member can reduce any chunk.
"""

import math
from dataclasses import dataclass
from typing import Protocol, Sequence

import torch
from torch import Tensor

from diloco.pseudo_gradient import blocks

#: Elements in a chunk: 1 MiB in fp32, large enough that a message per chunk costs nothing on the wire.
CHUNK = 1 << 18

_BOUNDLESS = 1e300


class Codec(Protocol):
    """How a flat tensor becomes bytes. Deterministic: equal input gives equal bytes on every machine.

    Attributes:
        bits: about how many a parameter takes, the same number everywhere: members choose by it how they send.
    """

    bits: float

    def encode(self, values: Tensor) -> Tensor:
        """A flat floating-point tensor as a uint8 tensor; it may share the input's memory."""

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The ``numel`` values that ``encoded`` (uint8) stands for. Raises ValueError when its size is wrong."""

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The most bytes that ``numel`` values may take: what a receiver allows before it allocates."""


@dataclass(frozen=True)
class Wire:
    """How a run's tensors become bytes.

    Attributes:
        contribution: what a member sends of itself.
        mean: what a reducer sends of the mean of all, at 8 bits at least: nobody keeps what is lost there.
        cheaper: what rounds may fall back to where links are slow, from the richest to the cheapest.
    """

    contribution: Codec
    mean: Codec
    cheaper: tuple["Wire", ...] = ()

    def choose(self, index: int) -> "Wire":
        """This one (0), or the ``index``-th of the cheaper ones."""
        return (self, *self.cheaper)[index]


def sends_whole(wire: Wire, num_members: int) -> bool:
    """Whether each of so many members sends its contribution to every other, and all reduce all of it.

    Else each reduces a share of the chunks and sends the encoded mean on. Chosen by the bytes that a member sends of each
    parameter: ``(n-1) c`` against ``(n-1)/n (c + m)``; where they are equal, one hop is better than two, and exact.
    """
    return num_members * wire.contribution.bits <= wire.contribution.bits + wire.mean.bits


def num_chunks(numel: int) -> int:
    """Number of chunks in a fragment of ``numel`` elements; the last may be shorter."""
    return -(-numel // CHUNK)


def chunk_slice(numel: int, index: int) -> slice:
    """Elements of chunk ``index``."""
    return slice(index * CHUNK, min((index + 1) * CHUNK, numel))


def reducer_chunks(numel: int, num_members: int, position: int) -> range:
    """Chunks that the member at ``position`` (in the round's order) reduces: equal runs, the first ones longer."""
    share, extra = divmod(num_chunks(numel), num_members)
    start = position * share + min(position, extra)
    return range(start, start + share + (position < extra))


def weighted_mean(contributions: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """``sum(w_i x_i) / sum(w)``, member by member in the given order.

    Multiplication and addition are separate operations: a fused multiply-add rounds once where other machines (or the
    tail of a vector loop) round twice.

    Raises:
        ValueError: no member, not a weight for each, a negative weight, or a sum that is not positive and finite.
    """
    total = sum(weights)
    if len(contributions) != len(weights) or not 0 < total < math.inf or min(weights) < 0:
        raise ValueError(f"can't average {len(contributions)} contributions of weights {list(weights)}")
    mean = contributions[0] * (weights[0] / total)
    for values, weight in zip(contributions[1:], weights[1:], strict=True):
        mean.add_(values * (weight / total))
    return mean


class Seen:
    """What a reducer saw of each contribution, summed over its chunks in fp64: squares, and products with the mean."""

    def __init__(self, num_members: int) -> None:
        self.squares, self.alongs, self.mean_square = [0.0] * num_members, [0.0] * num_members, 0.0

    def add(self, contributions: Sequence[Tensor], mean: Tensor) -> None:
        """Take in one chunk."""
        for piece in blocks(mean.numel()):
            wide_mean = mean[piece].double()
            self.mean_square = _bounded(self.mean_square + float(wide_mean @ wide_mean))
            for index, values in enumerate(contributions):
                wide = values[piece].double()
                self.squares[index] = _bounded(self.squares[index] + float(wide @ wide))
                self.alongs[index] = _bounded(self.alongs[index] + float(wide @ wide_mean))


def reduce_chunk(
    codec: Codec,
    encoded: Sequence[Tensor],
    weights: Sequence[float],
    numel: int,
    dtype: torch.dtype,
    seen: Seen | None = None,
) -> Tensor:
    """The mean of one chunk's contributions, as ``codec`` encoded them.

    One that is not finite, or stands for nothing, counts as zero.

    Args:
        seen: told what went into it; what is not finite is seen as boundless, so that it is found out by all alike.
    """
    contributions = [_decoded(codec, values, numel, dtype) for values in encoded]
    mean = weighted_mean(contributions, weights)
    if all_finite(mean):  # then so is all that went in: no weight makes a number of a NaN or an infinity
        if seen:
            seen.add(contributions, mean)
        return mean
    sound = [values if all_finite(values) else torch.zeros_like(values) for values in contributions]
    mean = weighted_mean(sound, weights)
    if seen:
        seen.add(sound, mean)
        for index, values in enumerate(contributions):
            if values is not sound[index]:
                seen.squares[index] = _BOUNDLESS
    return mean


def _decoded(codec: Codec, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """One that its member has made wrongly is that member's fault alone, so it is no error here."""
    try:
        return codec.decode(encoded, numel, dtype)
    except ValueError:
        return torch.full((numel,), math.nan, dtype=dtype)


def all_finite(values: Tensor) -> bool:
    """Whether no element is NaN or infinite. The sum, which is so if one is, takes a tenth of the time that a look at each does."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def through(codec: Codec, mean: Tensor) -> Tensor:
    """What a mean is after a reducer has sent it on: every member applies that, the reducer too."""
    return codec.decode(codec.encode(mean), mean.numel(), mean.dtype)


def _bounded(value: Tensor | float) -> float:
    """A finite number, whatever it was: it goes into a message."""
    value = float(value)
    return min(max(value, -_BOUNDLESS), _BOUNDLESS) if value == value else _BOUNDLESS
