"""Half precision, with one power of two for all values, so that neither small nor large ones are lost."""

import math
from typing import Literal

import torch
from torch import Tensor

from diloco.blocks import check_byte_order, check_size, from_blocks, not_finite, to_blocks
from diloco.config import CodecSection

_SMALLEST_SHIFT, _LARGEST_SHIFT = -113, 126  # fp32's largest becomes less than 2^15; 2^126 and its inverse are fp32 numbers
_INFINITY = 0x7C00  # bits of fp16; NaN is above


class Config(CodecSection):
    """``outer.codec.type: fp16``"""

    type: Literal["fp16"] = "fp16"


class Half:
    """Values as fp16, times the power of two that brings the largest magnitude to 2^14 or above; its exponent is a byte.

    Pseudo-gradients of 1e-6 would have 5 bits left in plain fp16. Here a value is off by at most 2^-11 of itself or, where
    that is more, 2^-39 of the largest magnitude, or 2^-149.
    """

    bits = 16.0

    def encode(self, values: Tensor) -> Tensor:
        """See :class:`diloco.reduction.Codec`. Raises ValueError where a value is not finite."""
        blocks = to_blocks(values, 1)
        scratch = blocks.abs()
        largest = float(scratch.max()) if blocks.numel() else 0.0
        if not math.isfinite(largest):
            raise not_finite()
        shift = min(max(15 - math.frexp(largest)[1], _SMALLEST_SHIFT), _LARGEST_SHIFT)
        halves = torch.mul(blocks, 2.0**shift, out=scratch).half()
        return torch.cat([halves.view(-1).view(torch.uint8), torch.tensor([shift], dtype=torch.int8).view(torch.uint8)])

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`diloco.reduction.Codec`. Raises ValueError as well where a value is not finite."""
        check_size(encoded, self.encoded_bytes(numel, dtype), numel, dtype)
        shift = int(encoded[-1:].view(torch.int8))
        if not _SMALLEST_SHIFT <= shift <= _LARGEST_SHIFT:
            raise ValueError(f"values times 2^{shift}: the exponent is from {_SMALLEST_SHIFT} to {_LARGEST_SHIFT}")
        words = encoded[:-1].clone().view(torch.int16)  # the middle of a message may not be aligned
        if numel and int((words & 0x7FFF).max()) >= _INFINITY:
            raise ValueError(f"one of {numel} values is not finite")
        return from_blocks(words.view(torch.half).float().mul_(2.0**-shift), numel, dtype, largest=2.0 ** (16 - shift))

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """See :class:`diloco.reduction.Codec`. Always exactly as many."""
        return 2 * numel + 1


def build(config: Config) -> Half:
    """The codec. Raises RuntimeError on a big-endian machine."""
    check_byte_order("fp16")
    return Half()
