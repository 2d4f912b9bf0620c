"""The upper half of fp32: all of its range, and 8 bits of precision."""

from typing import Literal

import torch
from torch import Tensor

from diloco.blocks import check_byte_order, check_size, from_blocks, not_finite, to_blocks
from diloco.config import CodecSection

_INFINITY = 0x7F80  # bits of bf16; NaN is above
_LARGEST = torch.finfo(torch.bfloat16).max


class Config(CodecSection):
    """``outer.codec.type: bf16``"""

    type: Literal["bf16"] = "bf16"


class BrainFloat:
    """Values rounded, half to even, to bfloat16: each is off by at most 2^-8 of itself, or 2^-134 where that is more.

    What is larger than bfloat16's largest number (3.39e38) becomes that.
    """

    bits = 16.0

    def encode(self, values: Tensor) -> Tensor:
        """See :class:`diloco.reduction.Codec`. Raises ValueError where a value is not finite."""
        blocks = to_blocks(values, 1).view(-1)
        words = blocks.bfloat16().view(torch.int16)
        if blocks.numel() and _largest_bits(words) >= _INFINITY:  # rare: a number as large, or not one
            if not bool(torch.isfinite(blocks).all()):
                raise not_finite()
            words = blocks.clamp(-_LARGEST, _LARGEST).bfloat16().view(torch.int16)
        return words.view(torch.uint8)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`diloco.reduction.Codec`. Raises ValueError as well where a value is not finite."""
        check_size(encoded, self.encoded_bytes(numel, dtype), numel, dtype)
        words = encoded.clone().view(torch.int16)  # the middle of a message may not be aligned
        if numel and _largest_bits(words) >= _INFINITY:
            raise ValueError(f"one of {numel} values is not finite")
        return from_blocks(words.view(torch.bfloat16).float(), numel, dtype, largest=_LARGEST)

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """See :class:`diloco.reduction.Codec`. Always exactly as many."""
        return 2 * numel


def _largest_bits(words: Tensor) -> int:
    """Of the magnitudes; where one is not finite, at least those of infinity."""
    return int((words & 0x7FFF).max())


def build(config: Config) -> BrainFloat:
    """The codec. Raises RuntimeError on a big-endian machine."""
    check_byte_order("bf16")
    return BrainFloat()
