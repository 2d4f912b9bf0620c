"""What an exchange is: the means by which islands agree."""

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True)
class Seat:
    """An island's place in the swarm.

    Attributes:
        slot: fixes which samples this island trains on.
        address: what other islands give as ``swarm.initial_peers`` to join; empty where nothing listens.
    """

    slot: int
    address: str = ""


@dataclass(frozen=True)
class RoundOutcome:
    """How one round ended for this island.

    Attributes:
        kind: ``committed``: the agreed state was swapped, and holds exactly the named members' contributions.
            ``skipped``: nothing changed. ``left_out``: the others committed without this island, and their state was taken
            over and swapped in.
        height: rounds of this fragment committed so far, this one included.
        members: slots that took part, in the order in which they were added up; ``weights`` beside them (tokens).
        reason: why it was skipped or left out; empty when committed.
        digest: SHA-256 (hex) of the agreed anchor and outer-optimizer state after the round.
        pseudo_gradient_norm: L2 norm of this island's own contribution.
        cosine: between this island's contribution and the mean.
    """

    kind: Literal["committed", "skipped", "left_out"]
    fragment: int
    height: int
    members: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    reason: str = ""
    digest: str = ""
    bytes_sent: int = 0
    bytes_received: int = 0
    exchange_seconds: float = 0.0
    pseudo_gradient_norm: float = 0.0
    cosine: float = 0.0

    @property
    def finite(self) -> bool:
        """Whether this island's own parameters were numbers, all of them; else it took no part."""
        return math.isfinite(self.pseudo_gradient_norm)


@dataclass(frozen=True)
class ExchangeEvent:
    """Something that happened to the swarm: an island lost, a process started again. ``what`` is one word."""

    what: str
    detail: str = field(default="")


class JoinError(RuntimeError):
    """This island can't take part; the message says why and what to do. Programs exit with code 2."""


class Exchange(Protocol):
    """How the trainer's rank 0 talks to the other islands. Only ``join`` and ``outcome`` wait, and both have a limit.

    One round per fragment may be in flight. Before ``launch``, the island's parameters are written into
    ``state.fragments[i].local``, which is the exchange's until the outcome is known.
    """

    def join(self) -> Seat:
        """Wait until all islands of ``swarm.islands`` are there.

        Raises:
            JoinError: refused, or not all of them came in time.
        """

    def launch(self, fragment: int, weight: float) -> None:
        """Offer this island's parameters to the next round of ``fragment``, weighted by ``weight`` (tokens). Returns at once."""

    def outcome(self, fragment: int) -> RoundOutcome:
        """Wait for the launched round to end; an exchange that can't finish it in time says ``skipped``."""

    def events(self) -> list[ExchangeEvent]:
        """What happened since the last call."""

    def close(self) -> None:
        """Tell the others that this island leaves, and end every process that was started. May be called twice."""
