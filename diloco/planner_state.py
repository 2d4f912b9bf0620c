"""Bytes that the outer state takes, part by part, before any of it is there: on the host of an island's first rank, or on every rank
where the islands are one job.
"""

from dataclasses import asdict, dataclass
from typing import Sequence

from diloco.link_model import Pace, landings_in_flight
from diloco.outer_state import Layout
from diloco.reduction import Wire


@dataclass(frozen=True)
class OuterBytes:
    """Beside what training itself takes.

    Attributes:
        anchor: the agreed one and the one before, or the next.
        optimizer: the outer optimizer's state, as often.
        residual: what encoding lost, as often; 0 without error feedback.
        local: parameters at launch, which become the contribution.
        mean: the last mean, which eager overlap goes by; else 0.
        buffers: encoded contributions, own and received, of as many rounds as may be in flight.
    """

    anchor: int
    optimizer: int
    residual: int
    local: int
    mean: int
    buffers: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(asdict(self).values())

    @property
    def shared_memory(self) -> int:
        """What lies in :class:`~diloco.outer_state.OuterState`'s block, but for some bytes for each fragment."""
        return self.total - self.buffers


def host_bytes(layout: Layout, wire: Wire, islands: int, pace: Pace) -> OuterBytes:
    """On the host of rank 0, of an island among ``islands`` whose rounds come at this pace."""
    model = sum(layout.sizes) * layout.dtype.itemsize
    return OuterBytes(
        anchor=2 * model,
        optimizer=2 * model * len(layout.optimizer.state_names),
        residual=2 * model if layout.error_feedback else 0,
        local=model,
        mean=model if layout.keeps_mean else 0,
        buffers=_buffers(layout.sizes, wire, islands, landings_in_flight(pace)),
    )


def shard_bytes(layout: Layout, shards: int, pace: Pace) -> OuterBytes:
    """On each rank of a job of islands, where one island's ranks hold ``shards`` different ones. The step is done in place."""
    largest = sorted(layout.sizes, reverse=True)[: landings_in_flight(pace)]
    model, flying = (numel * layout.dtype.itemsize // shards for numel in (sum(layout.sizes), sum(largest)))
    return OuterBytes(model, model * len(layout.optimizer.state_names), residual=0, local=flying, mean=0, buffers=flying)


def _buffers(sizes: Sequence[int], wire: Wire, islands: int, in_flight: int) -> int:
    """The largest fragments are in flight, and each has received all that it will before any of it is reduced."""
    encoded = sorted((round(wire.contribution.bits / 8 * numel) for numel in sizes), reverse=True)
    return islands * sum(encoded[:in_flight])
