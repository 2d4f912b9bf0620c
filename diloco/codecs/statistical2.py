"""Two bits: a sign and one of two magnitudes, which are means over the block and sent with it."""

from typing import Literal

import torch
from torch import Tensor

from diloco import bits as packing
from diloco.blocks import HEADER_BYTES, check_byte_order, check_size, decode_scales, encode_scales, from_blocks, to_blocks
from diloco.config import CodecSection
from diloco.two_levels import two_levels

_BLOCK = 128  # values that share two magnitudes of one byte each: 2.125 bits for each parameter


class Config(CodecSection):
    """``outer.codec.type: statistical2``"""

    type: Literal["statistical2"] = "statistical2"


class Statistical2:
    """Each value becomes plus or minus the mean magnitude of the small or of the large ones of its block.

    See :func:`diloco.two_levels.two_levels` for what is small. As levels are means, the square of what is lost is that of
    the block less that of what is sent (but for the 1/32 that a level is rounded by): for a Gaussian a third of the norm is
    lost, and never more than by sending nothing. A value is off by at most 33/32 of its block's largest magnitude, or 2^-15
    of the largest of all where that is more; and 2^-126.
    """

    bits = 2 + 16 / _BLOCK

    def encode(self, values: Tensor) -> Tensor:
        """See :class:`diloco.reduction.Codec`. Raises ValueError where a value is not finite."""
        blocks = to_blocks(values, _BLOCK)
        scratch = blocks.abs()
        levels, is_large = two_levels(scratch)
        raw, _ = encode_scales(levels.view(-1), round_up=False)
        signs = torch.bitwise_right_shift(blocks.view(torch.int32), 30, out=scratch.view(torch.int32)).bitwise_and_(2)
        ones = is_large.view(torch.int32).bitwise_right_shift_(29)  # the bits of 1.0 are 0x3f800000
        return torch.cat([raw, packing.pack(signs.bitwise_or_(ones).to(torch.uint8).view(-1), 2)])

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`diloco.reduction.Codec`."""
        check_size(encoded, self.encoded_bytes(numel, dtype), numel, dtype)
        num_blocks = -(-numel // _BLOCK)
        start = HEADER_BYTES + 2 * num_blocks
        levels, largest = decode_scales(encoded[:start])
        small, large = levels.view(-1, 2, 1).unbind(1)
        blocks = packing.look_up(encoded[start:], 2, (1.0, 0.0, -1.0, 0.0)).view(-1, _BLOCK).mul_(small)
        blocks += packing.look_up(encoded[start:], 2, (0.0, 1.0, 0.0, -1.0)).view(-1, _BLOCK).mul_(large)
        return from_blocks(blocks, numel, dtype, largest)

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """See :class:`diloco.reduction.Codec`. Always exactly as many."""
        return HEADER_BYTES + -(-numel // _BLOCK) * (2 + _BLOCK // 4)


def build(config: Config) -> Statistical2:
    """The codec. Raises RuntimeError on a big-endian machine."""
    check_byte_order("statistical2")
    return Statistical2()
