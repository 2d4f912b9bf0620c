"""What a checkpoint tells, beside tensors, of the rounds of islands that share a job."""

from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from diloco.exchange.base import Work

_KEY = "cluster"  # tells them from those of an island of a swarm


@dataclass(frozen=True)
class FragmentFacts:
    """Of a :class:`~diloco.shard_state.ShardState`."""

    height: int
    step: int
    tokens: int
    digest: str


@dataclass(frozen=True)
class FlightFacts:
    """A round that is averaged and has not landed.

    Attributes:
        own, sums: the square of what the island moved by, and the tokens that it did so with; and the sums over all islands. As text, since
            JSON knows no infinity.
    """

    fragment: int
    work: Work
    inner_step: int
    height: int
    own: tuple[str, str]
    sums: tuple[str, str]


@dataclass(frozen=True)
class ClusterFacts:
    """All of it; ``fragments``, and the uncounted ``work`` (start, tokens) of each, in their order."""

    fragments: tuple[FragmentFacts, ...]
    work: tuple[tuple[int, int], ...]
    inner_step: int
    flights: tuple[FlightFacts, ...]

    def to_json(self) -> dict[str, Any]:
        """Values that JSON holds exactly."""
        return {_KEY: asdict(self)}

    @staticmethod
    def from_json(values: dict[str, Any]) -> "ClusterFacts | None":
        """The inverse of :meth:`to_json`; None where they are of another kind of run. Raises ``pydantic.ValidationError``."""
        return TypeAdapter(ClusterFacts).validate_python(values[_KEY]) if _KEY in values else None
