"""What this island brings to a round: its pseudo-gradient, encoded, and what it says of it."""

from torch import Tensor

from diloco.exchange.base import Work
from diloco.exchange.hivemind.messages import Claim, Entry
from diloco.ledger import Counted
from diloco.outer_state import FragmentState
from diloco.pseudo_gradient import Health, agreeable, cosine, pseudo_gradient
from diloco.reduction import Codec, chunk_slice, num_chunks


class Contribution:
    """One island's. Its methods take long on a large fragment and are for a thread.

    Attributes:
        health: norm and finiteness, once prepared.
        encoded: chunk by chunk; empty where it is not finite.
        cosine: between it and the mean that was staged last.
    """

    def __init__(self, state: FragmentState, codec: Codec, work: Work) -> None:
        self.work, self.health, self.encoded, self.cosine = work, Health(0.0, False), list[Tensor](), 0.0
        self._state, self._codec = state, codec

    def prepare(self) -> None:
        """Make the pseudo-gradient of the island's parameters, in place, and encode it."""
        state = self._state
        self.health = pseudo_gradient(state.anchor, state.local, out=state.local)
        if self.health.finite:
            pieces = (chunk_slice(state.numel, chunk) for chunk in range(num_chunks(state.numel)))
            self.encoded = [self._codec.encode(state.local[piece]) for piece in pieces]

    def stage(self, mean: Tensor, counted: list[Counted]) -> bytes:
        """Step the outer optimizer by the mean of all, beside the agreed state; returns the digest to vote for."""
        self.cosine = cosine(self._state.local, mean)
        return bytes.fromhex(self._state.stage(mean, counted))

    def claim(self, own: Entry) -> Claim:
        """What the others are told about it."""
        return Claim(
            slot=own.slot,
            epoch=own.epoch,
            peer=own.peer,
            tokens=self.work.tokens,
            start=self.work.start,
            position=self.work.position,
            step=self.work.step,
            norm=agreeable(self.health.norm) if self.health.finite else 0.0,
        )
