"""What the committed rounds of a fragment have counted: whose work, up to where. Pure, and part of what members agree on."""

import struct
from dataclasses import dataclass
from statistics import median
from typing import Sequence

from diloco.adaptation import Adaptation, Pace

_NEW_SHARE = 0.25  # of the last round's norm in what counts as typical


@dataclass(frozen=True)
class Counted:
    """What a committed round counts of one member."""

    slot: int
    tokens: int
    position: int
    step: int
    norm: float
    pace: Pace = Pace()


@dataclass(frozen=True)
class Ledger:
    """What the committed rounds of a fragment have counted; agreed on like the anchor.

    Attributes:
        positions: sequences of each slot, up to which its work counted.
        tokens: of all members and rounds.
        step: the furthest inner step of a member.
        typical_norm: of a member's pseudo-gradient, averaged over the last rounds; 0 before the first.
        rung: of the ladder, where the next round stands (:class:`~diloco.adaptation.Adaptation`).
    """

    positions: tuple[int, ...]
    tokens: int = 0
    step: int = 0
    typical_norm: float = 0.0
    rung: int = 0

    def after(self, counted: Sequence[Counted], adaptation: Adaptation | None = None) -> "Ledger":
        """The ledger after one more round. Plain arithmetic in a fixed order: the same bits on every machine."""
        if not counted:
            return self
        positions = list(self.positions)
        for one in counted:
            positions[one.slot] = one.position
        norm = median(one.norm for one in counted)
        typical = norm if self.typical_norm == 0 else self.typical_norm + _NEW_SHARE * (norm - self.typical_norm)
        tokens = self.tokens + sum(one.tokens for one in counted)
        rung = adaptation.after(self.rung, [one.pace for one in counted]) if adaptation else self.rung
        return Ledger(tuple(positions), tokens, max(self.step, *[one.step for one in counted]), typical, rung)

    def to_bytes(self) -> bytes:
        """For hashing, and for sending."""
        rest = self.tokens, self.step, self.rung, self.typical_norm
        return struct.pack(f"<{len(self.positions)}qqqqd", *self.positions, *rest)

    @staticmethod
    def from_bytes(raw: bytes) -> "Ledger":
        """The inverse of :meth:`to_bytes`. Raises struct.error where the size is wrong."""
        *positions, tokens, step, rung, norm = struct.unpack(f"<{len(raw) // 8 - 4}qqqqd", raw)
        return Ledger(tuple(positions), tokens, step, norm, rung)
