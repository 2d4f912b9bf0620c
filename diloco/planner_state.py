"""Bytes that the outer state takes on the host of an island's first rank, part by part, before any of it is there."""

from dataclasses import asdict, dataclass
from typing import Sequence

from diloco.link_model import Pace, landings_in_flight
from diloco.outer_state import Layout
from diloco.reduction import Wire


@dataclass(frozen=True)
class HostBytes:
    """Of rank 0's host, beside what training itself takes there.

    Attributes:
        anchor: the agreed one and the one before, or the next.
        optimizer: the outer optimizer's state, as often.
        residual: what encoding lost, as often; 0 without error feedback.
        local: parameters of the island at launch, which become its contribution.
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


def host_bytes(layout: Layout, wire: Wire, islands: int, pace: Pace) -> HostBytes:
    """Of an island among ``islands`` whose rounds come at this pace."""
    model = sum(layout.sizes) * layout.dtype.itemsize
    return HostBytes(
        anchor=2 * model,
        optimizer=2 * model * len(layout.optimizer.state_names),
        residual=2 * model if layout.error_feedback else 0,
        local=model,
        mean=model if layout.keeps_mean else 0,
        buffers=_buffers(layout.sizes, wire, islands, landings_in_flight(pace)),
    )


def _buffers(sizes: Sequence[int], wire: Wire, islands: int, in_flight: int) -> int:
    """The largest fragments are in flight, and each has received all that it will before any of it is reduced."""
    encoded = sorted((round(wire.contribution.bits / 8 * numel) for numel in sizes), reverse=True)
    return islands * sum(encoded[:in_flight])
