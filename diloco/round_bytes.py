"""What a round puts on the wire, by the rules that the exchange follows (:mod:`diloco.reduction`), before there is one."""

from dataclasses import dataclass

from diloco.link_model import ring_bytes
from diloco.reduction import Wire, num_chunks, reducer_chunks, sends_whole


@dataclass(frozen=True)
class RoundBytes:
    """Of one round of one fragment; about, for codecs whose size depends on the values.

    Attributes:
        sent: of an island, mean over the members.
        each_way: that go through the busiest member's link one after the other, up or down.
        chunks: in which they go.
    """

    sent: float
    each_way: float
    chunks: int


def round_bytes(wire: Wire, numel: int, islands: int) -> RoundBytes:
    """Of a fragment of ``numel`` elements among so many members."""
    contribution, mean = (codec.bits / 8 * numel for codec in (wire.contribution, wire.mean))
    others, chunks = islands - 1, num_chunks(numel)
    if sends_whole(wire, islands):
        return RoundBytes(others * contribution, others * contribution, chunks)
    shares = [len(reducer_chunks(numel, islands, position)) / chunks for position in range(islands)]
    sent = [(1 - share) * contribution + others * share * mean for share in shares]
    received = [others * share * contribution + (1 - share) * mean for share in shares]
    each_way = max(*sent, *received)
    if chunks < islands:  # all of a chunk has come before the first byte of its mean leaves
        each_way = others * max(shares) * (contribution + mean)
    return RoundBytes(sum(sent) / islands, each_way, chunks)


def all_reduce_bytes(wire: Wire, numel: int, islands: int, copies: int) -> RoundBytes:
    """Of a fragment that the ranks of one job average, each the shards that it holds.

    Args:
        copies: ranks of an island that hold the same shard, each of which sends it.
    """
    ring = ring_bytes(copies * wire.contribution.bits / 8 * numel, islands)
    return RoundBytes(ring, ring, num_chunks(numel))
