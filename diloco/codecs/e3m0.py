"""Four-bit floats of a sign and three bits of exponent (E3M0), which Streaming DiLoCo sends (arXiv 2501.18512)."""

from typing import Literal

import torch
from torch import Tensor

from diloco import bits as packing
from diloco.blocks import check_byte_order, check_size, from_blocks, not_finite, to_blocks
from diloco.config import CodecSection

_BLOCK = 32  # values that share a scale of one byte: 4.25 bits for each parameter

#: What codes stand for, as shares of a block's scale; 8 to 15 are the same below zero.
TABLE = (0.0, 2.0**-6, 2.0**-5, 2.0**-4, 2.0**-3, 2.0**-2, 2.0**-1, 1.0)

_MANTISSA = 23  # bits of it in fp32
_INFINITY = 255 << _MANTISSA
_SMALLEST, _LARGEST = 8, 254  # exponents of a scale, as fp32 has them: nothing here needs its denormal numbers


class Config(CodecSection):
    """``outer.codec.type: e3m0``"""

    type: Literal["e3m0"] = "e3m0"


class E3M0:
    """Each value becomes the nearest of zero and plus or minus 1, 1/2 ... 1/64 of its block's scale.

    The scale is the power of two next to the block's largest magnitude, so that all this is done on the exponents of fp32,
    with no arithmetic that could round. Halfway goes to the even exponent, or to zero. A value is off by at most a third
    of itself or, where that is more, 1/128 of the scale, which is at most 4/3 of the block's largest magnitude, or 2^-119.
    Above 2^127 it may be half of itself.
    """

    bits = 4 + 8 / _BLOCK

    def encode(self, values: Tensor) -> Tensor:
        """See :class:`diloco.reduction.Codec`. Raises ValueError where a value is not finite."""
        words = to_blocks(values, _BLOCK).view(torch.int32)
        magnitudes = words & 0x7FFFFFFF
        if words.numel() and int(magnitudes.max()) >= _INFINITY:
            raise not_finite()
        odd = (magnitudes >> _MANTISSA).bitwise_and_(1)
        exponents = odd.add_(magnitudes).add_((1 << _MANTISSA - 1) - 1).bitwise_right_shift_(_MANTISSA)  # half to even
        scales = exponents.amax(1, keepdim=True).clamp_(_SMALLEST, _LARGEST)
        codes = exponents.sub_(scales - 7).clamp_(0, 7)
        above_half = magnitudes.gt_(scales - 7 << _MANTISSA)  # of the least number: there, the next one below is zero
        codes = torch.maximum(codes, above_half, out=codes)
        signs = torch.bitwise_right_shift(words, 28, out=magnitudes).bitwise_and_(8)
        codes = codes.bitwise_or_(signs).to(torch.uint8).view(-1)
        return torch.cat([scales.view(-1).to(torch.uint8), packing.pack(codes, 4)])

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`diloco.reduction.Codec`. Raises ValueError as well where a scale is out of range."""
        check_size(encoded, self.encoded_bytes(numel, dtype), numel, dtype)
        num_blocks = -(-numel // _BLOCK)
        exponents, packed = encoded[:num_blocks].int(), encoded[num_blocks:]
        least, most = (int(exponents.min()), int(exponents.max())) if numel else (_SMALLEST, _SMALLEST)
        if least < _SMALLEST or most > _LARGEST:
            raise ValueError(f"exponents of scales are from {least} to {most}, and may be from {_SMALLEST} to {_LARGEST}")
        scales = (exponents << _MANTISSA).view(torch.float32)
        blocks = packing.look_up(packed, 4, _SIGNED).view(-1, _BLOCK).mul_(scales[:, None])
        return from_blocks(blocks, numel, dtype, largest=2.0 ** (most - 127))

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """See :class:`diloco.reduction.Codec`. Always exactly as many."""
        return -(-numel // _BLOCK) * (1 + _BLOCK // 2)


_SIGNED = (*TABLE, *(-value for value in TABLE))


def build(config: Config) -> E3M0:
    """The codec. Raises RuntimeError on a big-endian machine."""
    check_byte_order("e3m0")
    return E3M0()
