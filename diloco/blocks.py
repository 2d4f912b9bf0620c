"""Values in blocks, each with a scale of one byte: what the lossy codecs share. torch only, exact on every machine.

Only elementwise operations, maxima and sums in a fixed order: so neither threads nor the width of vector registers change
a bit.
"""

import math
import sys

import torch
from torch import Tensor

#: What precedes the bytes of scales: the code of the largest, little-endian.
HEADER_BYTES = 2

_SHIFT = 19  # fp32 without this many low bits: sign, 8 bits of exponent, 4 of mantissa
_SPAN = 255  # codes below the largest that a byte reaches: 2^-16 of it
_SMALLEST = (1 << 23 - _SHIFT) + _SPAN - 1  # then the least code but zero is 2^-126, which has an inverse
_LARGEST = (255 << 23 - _SHIFT) - 1  # the last one that is finite


def to_blocks(values: Tensor, size: int) -> Tensor:
    """``values`` as fp32 rows of ``size``, the last one filled up with zeros. It may share the input's memory.

    What fp32 can't hold becomes the largest number that it can. Raises ValueError where an fp64 value is not finite.
    """
    values = values.reshape(-1)
    if values.dtype == torch.float64:
        if not bool(torch.isfinite(values).all()):
            raise not_finite()
        largest = torch.finfo(torch.float32).max
        values = values.clamp(-largest, largest)
    values = values.float().contiguous()
    missing = -values.numel() % size
    if missing:
        values = torch.cat([values, values.new_zeros(missing)])
    return values.view(-1, size)


def from_blocks(blocks: Tensor, numel: int, dtype: torch.dtype, largest: float) -> Tensor:
    """The first ``numel`` values of fp32 ``blocks`` as ``dtype``. What that can't hold becomes its largest number.

    Args:
        blocks: overwritten.
        largest: a bound on the magnitudes: only where the dtype may not hold it are they looked at.
    """
    values = blocks.view(-1)[:numel]
    limit = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    if largest >= limit:
        values.clamp_(-limit, limit)
    return values.to(dtype)


def row_sums(rows: Tensor) -> Tensor:
    """(rows, 1). Halves onto halves: torch's own sum adds in an order that depends on the machine. Overwrites ``rows``."""
    width = rows.shape[1]
    while width > 1:
        half = -(-width // 2)  # the middle one of an odd number waits
        rows[:, : width - half].add_(rows[:, half:width])
        width = half
    return rows[:, :1].clone()


def encode_scales(scales: Tensor, round_up: bool) -> tuple[Tensor, Tensor]:
    """One byte for each scale: how far its fp32 bits, cut to 4 bits of mantissa, are below those of the largest.

    So a scale is kept to 1/16 where ``round_up``, else to 1/32, as long as it is at least 2^-15 of the largest (and 2^-126).
    A smaller one, zero too, becomes at most that where ``round_up``, else it may become zero.

    Args:
        scales: fp32, flat, not negative.

    Returns:
        The bytes, :data:`HEADER_BYTES` more than scales; and the scales as :func:`decode_scales` gives them.

    Raises:
        ValueError: one is NaN or infinite, as then a value was.
    """
    half = (1 << _SHIFT) - 1 if round_up else 1 << _SHIFT - 1
    top = _SMALLEST
    if scales.numel():
        largest = scales.max()
        if not math.isfinite(float(largest)):
            raise not_finite()
        top = min(max((int(largest.view(torch.int32)) + half) >> _SHIFT, _SMALLEST), _LARGEST)
    codes = (scales.view(torch.int32) + half).bitwise_right_shift_(_SHIFT)
    codes = codes.sub_(top - _SPAN).clamp_(int(round_up), _SPAN)
    header = torch.tensor([top & 0xFF, top >> 8], dtype=torch.uint8)
    return torch.cat([header, codes.to(torch.uint8)]), _scales_of(codes, top)


def decode_scales(raw: Tensor) -> tuple[Tensor, float]:
    """The scales that :func:`encode_scales` made ``raw`` of, all finite, and the largest that they may be.

    Raises:
        ValueError: the header is not one that it writes.
    """
    top = int(raw[0]) + (int(raw[1]) << 8)
    if not _SMALLEST <= top <= _LARGEST:
        raise ValueError(f"the largest scale has code {top}, and a finite one is from {_SMALLEST} to {_LARGEST}")
    largest = _scales_of(torch.tensor([_SPAN], dtype=torch.int32), top)
    return _scales_of(raw[HEADER_BYTES:].to(torch.int32), top), float(largest)


def check_size(encoded: Tensor, expected: int, numel: int, dtype: torch.dtype) -> None:
    """Raises ValueError where ``encoded`` has not the ``expected`` number of bytes."""
    if encoded.numel() != expected:
        raise ValueError(f"{numel} values of {dtype} take {expected} bytes, got {encoded.numel()}")


def check_byte_order(codec: str) -> None:
    """Raises RuntimeError on a big-endian machine, whose bytes others would misread."""
    if sys.byteorder != "little":
        raise RuntimeError(f"outer.codec.type={codec} sends little-endian words, and this machine is big-endian")


def not_finite() -> ValueError:
    """What encoding raises for values that no scale fits."""
    return ValueError("values that are not finite can't be encoded")


def _scales_of(codes: Tensor, top: int) -> Tensor:
    """Code 0 is zero, 255 the largest."""
    scales = (codes + (top - _SPAN)).bitwise_left_shift_(_SHIFT).view(torch.float32)
    return scales.masked_fill_(codes == 0, 0.0)
