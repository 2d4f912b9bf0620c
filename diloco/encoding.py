"""What an island contributes to a round: its pseudo-gradient and what earlier encodings lost, encoded once. torch only."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.outer_state import FragmentState
from diloco.pseudo_gradient import pseudo_gradient
from diloco.reduction import Codec, chunk_slice, num_chunks


@dataclass(frozen=True)
class Encoded:
    """A contribution as it goes to others, in every attempt the same bytes.

    Attributes:
        norm: L2 norm of the pseudo-gradient; not finite where the parameters are not, or nothing else can be sent of them.
        sent_norm: of what the bytes decode to, which others measure.
        chunks: uint8, one for each chunk of the fragment; empty where not all of it is finite.
    """

    norm: float
    sent_norm: float = 0.0
    chunks: list[Tensor] = field(default_factory=list)

    @property
    def finite(self) -> bool:
        """Whether there is anything to send."""
        return bool(self.chunks)

    @property
    def num_bytes(self) -> int:
        """Of all chunks."""
        return sum(chunk.numel() for chunk in self.chunks)


def encode_contribution(
    state: FragmentState, codec: Codec, position: int, decay: float = 1.0, resumed: bool = False
) -> Encoded:
    """Turn ``state.local`` into the contribution, in place, and encode that.

    With error feedback (``state.residual``) it is the pseudo-gradient plus ``decay`` times what was lost in encoding those
    contributions that counted; what is lost this time is written beside that, and takes its place if this one counts.

    Args:
        position: of the island's data; by it the agreed state tells whether this contribution has counted.
        resumed: ``state.local`` is the contribution already, of norm ``state.contribution_norm``: the bytes become the same again.
    """
    norm = state.contribution_norm if resumed else pseudo_gradient(state.anchor, state.local, out=state.local).norm
    encoded = _encode(state, codec, position, 0.0 if resumed else decay, norm) if math.isfinite(norm) else Encoded(norm)
    state.contributes(encoded.norm)
    return encoded


def _encode(state: FragmentState, codec: Codec, position: int, decay: float, norm: float) -> Encoded:
    state.offers(position)
    chunks, square = [], 0.0
    for piece in (chunk_slice(state.numel, index) for index in range(num_chunks(state.numel))):
        values = state.local[piece]
        if state.residual is not None and decay:
            values.add_(state.residual[piece] * decay)
        try:
            chunks.append(codec.encode(values))
        except ValueError:  # what it moved is a number, and what was lost is, and their sum is not
            return Encoded(math.inf)
        decoded = codec.decode(chunks[-1], values.numel(), values.dtype)
        if state.residual is not None:
            torch.sub(values, decoded, out=state.next_residual[piece])
        wide = decoded.double()
        square += float(wide @ wide)
    if not math.isfinite(square):  # the codec can't hold such values, which are as little use as parameters that are none
        return Encoded(square)
    return Encoded(norm, square**0.5, chunks)
