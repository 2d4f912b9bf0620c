"""What an island contributes to a round: its pseudo-gradient and what earlier encodings lost, encoded once. torch only."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.outer_state import FragmentState
from diloco.pseudo_gradient import pseudo_gradient, square_of
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
    pieces = [chunk_slice(state.numel, index) for index in range(num_chunks(state.numel))]
    if state.residual is not None and decay:
        for piece in pieces:
            state.local[piece].add_(state.residual[piece] * decay)
    try:
        chunks = [codec.encode(state.local[piece]) for piece in pieces]
    except ValueError:  # what it moved is a number, and what was lost is, and their sum is not
        return Encoded(math.inf)
    if state.residual is None and all(_is_at(chunk, state.local[piece]) for chunk, piece in zip(chunks, pieces, strict=True)):
        return Encoded(norm, norm, chunks)  # nothing is lost, so there is nothing to measure
    square = 0.0
    for chunk, piece in zip(chunks, pieces, strict=True):
        decoded = codec.decode(chunk, piece.stop - piece.start, state.dtype)
        if state.residual is not None:
            torch.sub(state.local[piece], decoded, out=state.next_residual[piece])
        square += square_of(decoded)
    if not math.isfinite(square):  # the codec can't hold such values, which are as little use as parameters that are none
        return Encoded(square)
    return Encoded(norm, square**0.5, chunks)


def _is_at(encoded: Tensor, values: Tensor) -> bool:
    """Whether bytes are the values' own memory."""
    return encoded.data_ptr() == values.data_ptr() and encoded.numel() == values.nbytes
