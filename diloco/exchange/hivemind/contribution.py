"""What this island brings to a round: its pseudo-gradient, encoded once, and what it says of it."""

import time

from torch import Tensor

from diloco.encoding import Encoded, encode_contribution
from diloco.exchange.base import Work
from diloco.exchange.hivemind.messages import Claim, Entry
from diloco.ledger import Counted
from diloco.outer_state import FragmentState
from diloco.pseudo_gradient import agreeable
from diloco.reduction import Codec


class Contribution:
    """One island's. Its methods take long on a large fragment and are for a thread.

    Args:
        decay: see :func:`~diloco.encoding.encode_contribution`.

    Attributes:
        own: the same bytes for every attempt, and for the round after one that went on without them; empty until prepared.
        encode_seconds, step_seconds: of computing; the second of all that was staged.
    """

    def __init__(self, state: FragmentState, codec: Codec, decay: float, work: Work) -> None:
        self.work, self.own = work, Encoded(0.0)
        self.encode_seconds = self.step_seconds = 0.0
        self._state, self._codec, self._decay = state, codec, decay

    def prepare(self) -> None:
        """Make the pseudo-gradient of the island's parameters, in place, and encode it."""
        started = time.monotonic()
        self.own = encode_contribution(self._state, self._codec, self.work.position, self._decay, self.work.resumed)
        self.encode_seconds = time.monotonic() - started

    def stage(self, mean: Tensor, counted: list[Counted]) -> bytes:
        """Step the outer optimizer by the mean of all, beside the agreed state; returns the digest to vote for."""
        started = time.monotonic()
        digest = bytes.fromhex(self._state.stage(mean, counted))
        self.step_seconds += time.monotonic() - started
        return digest

    def claim(self, own: Entry) -> Claim:
        """What the others are told about it. The norm is that of what they receive, so that they can compare the two."""
        return Claim(
            slot=own.slot,
            epoch=own.epoch,
            peer=own.peer,
            tokens=self.work.tokens,
            start=self.work.start,
            position=self.work.position,
            step=self.work.step,
            norm=agreeable(self.own.sent_norm),
            pace=tuple(self.work.pace),
        )
