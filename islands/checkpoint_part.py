"""What else than model and inner optimizer belongs into a checkpoint: islands that are part of a swarm have more to keep."""

from dataclasses import dataclass, field
from typing import Any, Callable, Protocol

from torch import Tensor


@dataclass(frozen=True)
class Saved:
    """A part's share of a checkpoint.

    Attributes:
        facts: plain values that JSON holds exactly (no NaN, no infinity); those of rank 0 are kept.
        tensors: on the CPU, and not changed any more; each name on one rank only.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


class CheckpointPart(Protocol):
    """Something whose state goes into checkpoints."""

    def snapshot(self) -> Callable[[], Saved]:
        """Called between two inner steps, on all ranks alike, while training waits: copy what the next step may change.

        Returns:
            Collects the rest; called once, in another thread, while training goes on. What it raises fails the checkpoint.
        """
