"""What the trainer and its exchange process say to each other, over a pipe between the two. Small, never tensors."""

from dataclasses import dataclass
from typing import Any

from diloco.exchange.base import ExchangeEvent, RoundOutcome, Seat, Work
from diloco.exchange.hivemind.roster import Roster
from diloco.outer_state import OuterState


@dataclass(frozen=True)
class Start:
    """All that an exchange process needs.

    Attributes:
        settings: the resolved configuration, as plain values.
        ticket: drawn by the trainer; by it the others tell a process that was started again from a trainer that was.
        rejoin: the member list that an earlier exchange process of this trainer had; None at the first start.
        listen: host:port; a process that is started again keeps the port of the first.
        started: the outer state is what the trainer trains on.
        any_slot: the configured slot was given to another island; take any.
        prefers: the slot that the island had before its trainer was started again; -1: none.
    """

    settings: dict[str, Any]
    state: OuterState
    schema: str
    identity_path: str
    listen: str
    parent_pid: int
    ticket: bytes
    rejoin: Roster | None = None
    started: bool = False
    any_slot: bool = False
    prefers: int = -1


@dataclass(frozen=True)
class Launch:
    """Trainer to exchange: take ``fragment``'s local parameters into a round."""

    fragment: int
    work: Work


@dataclass(frozen=True)
class Started:
    """Trainer to exchange: the outer state is what it trains on, from now on others may rely on it."""


@dataclass(frozen=True)
class Close:
    """Trainer to exchange: leave the swarm and end; in a ``hurry``, without waiting for members that are behind."""

    hurry: bool = False


@dataclass(frozen=True)
class Listening:
    """Exchange to trainer: others can reach this island at ``address``."""

    address: str


@dataclass(frozen=True)
class Joined:
    """Exchange to trainer: this island has its place. ``listen`` is the host:port really listened on."""

    seat: Seat
    roster: Roster
    listen: str


@dataclass(frozen=True)
class Taking:
    """Exchange to trainer: so many bytes of the swarm's state are there; a sign of life while joining takes long."""

    fragment: int
    num_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class SeatLost:
    """Exchange to trainer, before it ends: the others have given this island's slot away; start again as a newcomer."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Exchange to trainer: this island can't take part."""

    reason: str


@dataclass(frozen=True)
class Crashed:
    """Exchange to trainer: an error that nobody expected, just before the process ends."""

    traceback: str


@dataclass(frozen=True)
class Committing:
    """Exchange to trainer, before the swap: how the round ends if the swap turns out to have happened."""

    outcome: RoundOutcome


@dataclass(frozen=True)
class Ended:
    """Exchange to trainer: a round is over."""

    outcome: RoundOutcome


FromTrainer = Launch | Started | Close
FromExchange = Listening | Joined | Taking | SeatLost | Refused | Crashed | Committing | Ended | ExchangeEvent
