"""Blocks as small whole numbers, symmetric about zero: what ``int8`` and ``int4`` have in common. torch only."""

import torch
from torch import Tensor

from diloco import bits as packing
from diloco.blocks import HEADER_BYTES, check_size, decode_scales, encode_scales, from_blocks, to_blocks


class WholeNumbers:
    """Each value is rounded, half to even, to a whole multiple of its block's step, which is sent as one byte.

    The step is the block's largest magnitude divided by ``levels``, made larger by at most 1/16 so that it fits its byte.
    So no value is cut off, and none is off by more than half a step: ``17/32 * max / levels``, where ``max`` is the largest
    magnitude of its block, or 2^-15 of the largest of all where the block's is less; and 2^-126 more for rounding at the
    lower end of fp32. A block of zeros stays one.

    Args:
        code_bits: 8, or 4 with two codes in a byte.
        block: values that share a step; even.
    """

    def __init__(self, code_bits: int, block: int) -> None:
        self._code_bits, self._block, self._levels = code_bits, block, (1 << code_bits - 1) - 1
        self.bits = code_bits + 8 / block

    def encode(self, values: Tensor) -> Tensor:
        """See :class:`diloco.reduction.Codec`. Raises ValueError where a value is not finite."""
        blocks = to_blocks(values, self._block)
        scratch = blocks.abs()  # one of this size: fresh memory costs more than arithmetic
        raw, steps = encode_scales(scratch.amax(1) / self._levels, round_up=True)
        codes = torch.mul(blocks, (1.0 / steps)[:, None], out=scratch).round_().to(torch.int8).view(-1)
        if self._code_bits == 8:
            return torch.cat([raw, codes.view(torch.uint8)])
        return torch.cat([raw, packing.pack(codes.view(torch.uint8).bitwise_and_(0xF), 4)])

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`diloco.reduction.Codec`. The code below the lowest that is written counts as what it says."""
        check_size(encoded, self.encoded_bytes(numel, dtype), numel, dtype)
        start = HEADER_BYTES + self._num_blocks(numel)
        steps, largest = decode_scales(encoded[:start])
        codes = encoded[start:].view(torch.int8)
        if self._code_bits == 4:
            codes = packing.unpack(encoded[start:], 4).view(torch.int8).bitwise_xor_(8).sub_(8)  # extends the sign
        blocks = codes.float().view(-1, self._block).mul_(steps[:, None])
        return from_blocks(blocks, numel, dtype, largest * (self._levels + 1))

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """See :class:`diloco.reduction.Codec`. Always exactly as many."""
        return HEADER_BYTES + self._num_blocks(numel) * (1 + self._block * self._code_bits // 8)

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self._block)
