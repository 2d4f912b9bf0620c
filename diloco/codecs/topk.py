"""Only the largest values of each 4096, two bits each, and where they are: about 0.15 bits for each parameter.

For use with error feedback, which sends later what is left out here: Deep Gradient Compression, arXiv 1712.01887; with few
bits and outer steps, as here, SparseLoCo, arXiv 2508.15706.
"""

import math
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from diloco import bits as packing
from diloco.blocks import HEADER_BYTES, check_byte_order, decode_scales, encode_scales, from_blocks, not_finite, to_blocks
from diloco.config import CodecSection
from diloco.rice import Rice
from diloco.two_levels import two_levels

_ROW = 4096


class Config(CodecSection):
    """``outer.codec.type: topk``"""

    type: Literal["topk"] = "topk"
    k: int = Field(64, ge=32, le=128, multiple_of=8, description="values that are kept of each 4096")


class TopK:
    """Of each 4096 values the ``k`` largest in magnitude become plus or minus one of two levels; all others become zero.

    Between equals the first one is kept. The levels are the mean magnitudes of the smaller and of the larger ones kept (see
    :func:`diloco.two_levels.two_levels`), a byte each. So a value that is kept is off by at most 33/32 of the largest of its
    4096, and one that is not by itself; 2^-15 of the largest level of all, and 2^-126, may be added to a level. Neither the
    values nor the error have a larger norm than the input, but for the 1/32 that a level is rounded by.

    Places are sent by :class:`diloco.rice.Rice`: with k = 64, 0.118 bits for each parameter where the least is 0.115.
    """

    def __init__(self, k: int) -> None:
        self._k, self._places = k, Rice(_ROW, k)
        gap_bits = self._places.low_bits + 0.5 + _ROW / k / (1 << self._places.low_bits)
        self.bits = (k * (2 + gap_bits) + 16) / _ROW

    def encode(self, values: Tensor) -> Tensor:
        """See :class:`diloco.reduction.Codec`. Raises ValueError where a value is not finite."""
        rows = to_blocks(values, _ROW)
        columns = _columns_of_largest(rows, self._k)
        kept = torch.gather(rows, 1, columns)
        levels, is_large = two_levels(kept.abs())
        raw, _ = encode_scales(levels.view(-1), round_up=False)
        codes = (kept < 0).to(torch.uint8) * 2 + is_large.to(torch.uint8)
        return torch.cat([raw, packing.pack(codes.view(-1), 2), self._places.encode(columns)])

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`diloco.reduction.Codec`. Raises ValueError as well where it writes no such places or scales."""
        rows = -(-numel // _ROW)
        start = HEADER_BYTES + 2 * rows
        end = start + rows * self._k // 4
        smallest, largest = end + self._places.least_bytes(rows), self.encoded_bytes(numel, dtype)
        if not smallest <= encoded.numel() <= largest:
            raise ValueError(f"{numel} values of {dtype} take {smallest} to {largest} bytes, got {encoded.numel()}")
        columns = self._places.decode(encoded[end:], rows)
        levels, limit = decode_scales(encoded[:start])
        signed = torch.cat([levels.view(-1, 2), -levels.view(-1, 2)], dim=1)
        codes = packing.unpack(encoded[start:end], 2).view(rows, self._k)
        blocks = torch.zeros(rows, _ROW)
        blocks.scatter_(1, columns, torch.gather(signed, 1, codes.long()))
        return from_blocks(blocks, numel, dtype, limit)

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """See :class:`diloco.reduction.Codec`. How many it is depends on where the largest are."""
        rows = -(-numel // _ROW)
        return HEADER_BYTES + 2 * rows + rows * self._k // 4 + self._places.most_bytes(rows)


def _columns_of_largest(rows: Tensor, k: int) -> Tensor:
    """(rows, k), rising: where the magnitudes of each row are largest; of equal ones the first."""
    magnitudes = rows.abs()
    if rows.numel() and not math.isfinite(float(magnitudes.max())):
        raise not_finite()
    sizes = magnitudes.numpy()
    least = np.partition(sizes, _ROW - k, axis=1)[:, _ROW - k, None]  # several times as fast as torch.topk
    chosen = sizes >= least
    if np.count_nonzero(chosen) > k * len(sizes):
        above, equal = sizes > least, sizes == least
        room = k - above.sum(axis=1, keepdims=True)
        chosen = above | equal & (np.cumsum(equal, axis=1) <= room)
    return torch.from_numpy(np.flatnonzero(chosen).reshape(-1, k) % _ROW)


def build(config: Config) -> TopK:
    """The codec. Raises RuntimeError on a big-endian machine."""
    check_byte_order("topk")
    return TopK(config.k)
