"""What this island brings to a round: its pseudo-gradient, encoded once, and what it says of it."""

import threading
import time

from torch import Tensor

from diloco.encoding import Encoded, encode_contribution
from diloco.exchange.base import Work
from diloco.exchange.hivemind.messages import Claim, Entry
from diloco.outer_state import FragmentState
from diloco.pseudo_gradient import agreeable
from diloco.reduction import Codec
from diloco.staging import Staging


class Contribution:
    """One island's. Its methods take long on a large fragment and are for a thread.

    Args:
        decay: see :func:`~diloco.encoding.encode_contribution`.

    Attributes:
        own: the same bytes for every attempt, and for the round after one that went on without them; empty until prepared.
        encode_seconds, step_seconds: of computing; the second of all that was staged, summed over threads.
    """

    def __init__(self, state: FragmentState, codec: Codec, decay: float, work: Work) -> None:
        self.work, self.own = work, Encoded(0.0)
        self.encode_seconds = self.step_seconds = 0.0
        self._state, self._codec, self._decay = state, codec, decay
        self._tallying = threading.Lock()

    def prepare(self) -> None:
        """Make the pseudo-gradient of the island's parameters, in place, and encode it."""
        started = time.monotonic()
        self.own = encode_contribution(self._state, self._codec, self.work.position, self._decay, self.work.resumed)
        self.encode_seconds = time.monotonic() - started

    def apply(self, staging: Staging, chunk: int, mean: Tensor) -> None:
        """Step the outer optimizer by the mean of all, beside the agreed state. Several chunks at once are welcome."""
        started = time.monotonic()
        staging.apply(chunk, mean)
        with self._tallying:
            self.step_seconds += time.monotonic() - started

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
