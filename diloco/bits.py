"""Small codes packed into bytes, the first one in the lowest bits. Needs a little-endian machine. torch only."""

from functools import cache

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def pack(codes: Tensor, bits: int) -> Tensor:
    """Flat uint8 ``codes`` below ``2^bits`` as bytes; ``bits`` is 1, 2 or 4, and the codes fill whole bytes."""
    while bits < 8:
        pairs = codes.view(torch.int16)
        codes = (pairs | pairs >> 8 - bits).to(torch.uint8)  # what lies above the low byte is cut off
        bits *= 2
    return codes


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of :func:`pack`: ``8 / bits`` codes for every byte, as uint8."""
    return _spread(packed, _table(bits, None))


def look_up(packed: Tensor, bits: int, values: tuple[float, ...]) -> Tensor:
    """What codes of 2 or 4 bits stand for: ``values[code]`` as fp32, for all codes that were packed."""
    return _spread(packed, _table(bits, values))


def _spread(packed: Tensor, table: Tensor) -> Tensor:
    """Rows of ``table`` (256, n), one for each byte, each moved as one word."""
    words = table.view(_WORDS[table.shape[1] * table.itemsize]).view(-1)
    return torch.index_select(words, 0, packed.int()).view(table.dtype)


@cache
def _table(bits: int, values: tuple[float, ...] | None) -> Tensor:
    """(256, 8 / bits): the codes that a byte holds, or what they stand for."""
    codes = torch.arange(256)[:, None] >> torch.arange(0, 8, bits) & (1 << bits) - 1
    return codes.to(torch.uint8) if values is None else torch.tensor(values)[codes]
