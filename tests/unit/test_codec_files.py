"""What each codec does in particular, against plain reckoning; and what they are made of: packing, scales, gaps."""

import math

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from diloco import bits as packing
from diloco.blocks import HEADER_BYTES, decode_scales, encode_scales, row_sums
from diloco.codecs import e3m0, fp16, int4, int8, statistical2, topk
from diloco.reduction import CHUNK, Codec
from diloco.rice import Rice
from diloco.two_levels import two_levels


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def heavy(numel: int) -> Tensor:
    return normal(numel) / torch.rand(numel, generator=torch.Generator().manual_seed(1)).clamp(min=1e-6).sqrt()


def through(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(codec.encode(values), values.numel(), values.dtype)


def relative_error(codec: Codec, values: Tensor) -> float:
    return float((through(codec, values) - values).norm() / values.norm())


# fp16.


@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 1e6, 1e37])
def test_fp16_keeps_eleven_bits_of_small_and_large_values(size: float) -> None:
    values = (normal(5000).abs() + 0.01) * size
    ratio = through(fp16.Half(), values).double() / values.double()
    assert (ratio - 1).abs().max() <= 2.0**-11
    if size == 1e-7:
        assert (values.half().double() / values.double() - 1).abs().max() > 0.5  # plain fp16 loses them


# Whole numbers.


def plain_int(values: list[float], levels: int) -> list[float]:
    """One block, reckoned in fp64: the step is rounded up to 5 bits, the values to multiples of it, half to even."""
    fraction, exponent = math.frexp(max(map(abs, values)) / levels)
    step = math.ldexp(math.ceil(fraction * 32), exponent - 5)
    return [round(value / step) * step for value in values]


@pytest.mark.parametrize(("codec", "block", "levels"), [(int4, 32, 7), (int8, 64, 127)])
def test_whole_numbers_are_those_of_a_plain_reckoning(codec: object, block: int, levels: int) -> None:
    values = normal(block * 50) * torch.logspace(-3, 0, 50).repeat_interleave(block)
    plain = [plain_int(values[start : start + block].tolist(), levels) for start in range(0, len(values), block)]
    assert through(codec.build(codec.Config()), values).tolist() == [value for row in plain for value in row]


def test_int4_rounds_half_to_even() -> None:
    values = torch.tensor([7.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.5, 0.0])
    assert through(int4.build(int4.Config()), values).tolist() == [7.0, 0.0, 2.0, 2.0, 0.0, -2.0, 4.0, 0.0]


@pytest.mark.parametrize(("codec", "most"), [(int8, 0.0062), (int4, 0.101)])
def test_whole_numbers_lose_what_uniform_rounding_does(codec: object, most: float) -> None:
    assert 0.9 * most < relative_error(codec.build(codec.Config()), normal(CHUNK)) < most


# E3M0.


def test_e3m0_values_are_exactly_the_table() -> None:
    codec, table = e3m0.E3M0(), torch.tensor(e3m0.TABLE)
    for exponent in (-100, -20, 0, 20, 120):
        values = torch.cat([table, -table]) * 2.0**exponent
        assert torch.equal(through(codec, values), values)
    blocks = normal(32 * 1000).view(-1, 32)
    decoded = through(codec, blocks.view(-1)).view(-1, 32).abs()
    scales = decoded.amax(1, keepdim=True)
    assert torch.isin(decoded / scales, table).all() and torch.equal(torch.log2(scales).round().exp2(), scales)


def test_e3m0_takes_the_nearest_of_its_table_and_halfway_the_even_one() -> None:
    values = torch.cat([torch.ones(1), torch.rand(31 * 1000, generator=torch.Generator().manual_seed(0)).exp2() - 1])
    values = torch.cat([torch.ones(1000, 1), values[1:].view(1000, 31).pow(3)], dim=1).view(-1)
    table = torch.tensor(e3m0.TABLE)
    nearest = (values[:, None] - table).abs().amin(1)
    assert torch.equal((through(e3m0.E3M0(), values) - values).abs(), nearest)
    halfway = torch.tensor([1.0, 0.75, 0.375, 0.1875, 3 / 128, 1 / 128, 1.01 / 128])
    assert through(e3m0.E3M0(), halfway).tolist() == [1.0, 0.5, 0.5, 0.125, 1 / 32, 0.0, 1 / 64]


# Two levels.


def uniform2(values: Tensor, block: int) -> Tensor:
    """Plain two bits: plus or minus 1 and 1/3 of the block's largest magnitude, whichever is nearer."""
    rows = values.view(-1, block)
    largest = rows.abs().amax(1, keepdim=True)
    return torch.where(rows.abs() > largest * 2 / 3, largest, largest / 3).mul(rows.sign()).view(-1)


@pytest.mark.parametrize(("draw", "most"), [(normal, 0.345), (heavy, 0.5)])
def test_statistical2_beats_plain_two_bits(draw: object, most: float) -> None:
    """For a Gaussian, the best that any two bits for each value can do is 0.3428 (J. Max, 1960)."""
    values = draw(CHUNK)
    plain = float((uniform2(values, 128) - values).norm() / values.norm())
    error = relative_error(statistical2.Statistical2(), values)
    assert error < most and error < 0.8 * plain


def test_levels_are_the_means_of_what_is_nearer_to_them() -> None:
    magnitudes = normal(128 * 200).abs().view(-1, 128)
    levels, is_large = two_levels(magnitudes.clone())
    for row, (small, large), mask in zip(magnitudes.double(), levels.double(), is_large.bool()):
        assert float(small) == pytest.approx(float(row[~mask].mean()), rel=1e-6)
        assert float(large) == pytest.approx(float(row[mask].mean()), rel=1e-6)
        assert row[mask].min() > row[~mask].max()


def test_levels_of_rows_that_are_special() -> None:
    outlier = torch.cat([torch.full((127,), 1e-3), torch.tensor([1e4])])
    rows = torch.stack([torch.zeros(128), torch.full((128,), 0.3), outlier, torch.full((128,), 3e38)])
    levels, is_large = two_levels(rows.clone())
    torch.testing.assert_close(levels[0], torch.zeros(2))
    torch.testing.assert_close(levels[1], torch.full((2,), 0.3))
    torch.testing.assert_close(levels[2], torch.tensor([1e-3, 1e4]), rtol=0.01, atol=1e-4)
    torch.testing.assert_close(levels[3], torch.full((2,), 3e38))
    assert is_large[2].tolist() == [0.0] * 127 + [1.0]


# Top-k.


@pytest.mark.parametrize("k", [32, 40, 64, 128])
@pytest.mark.parametrize("numel", [4096, 4096 * 3, 10_000])
def test_topk_keeps_the_k_largest_of_each_4096_and_their_signs(k: int, numel: int) -> None:
    values = normal(numel)
    decoded = through(topk.TopK(k), values)
    for start in range(0, numel, 4096):
        row, kept = values[start : start + 4096], decoded[start : start + 4096]
        largest = row.abs().topk(k).indices.sort().values
        assert torch.equal(kept.nonzero().view(-1), largest)
        assert torch.equal(kept[largest].sign(), row[largest].sign())
        assert len(kept[largest].abs().unique()) <= 2
        assert kept.abs().sum() == pytest.approx(float(row[largest].abs().sum()), rel=0.03)  # levels are means


def test_topk_takes_the_first_of_equal_ones() -> None:
    values = torch.ones(4096)
    values[[5, 4000]] = -2.0
    kept = through(topk.TopK(32), values).nonzero().view(-1).tolist()
    assert kept == [*range(31), 4000]
    assert through(topk.TopK(32), torch.tensor([3.0, 0.0, -3.0])).tolist() == [3.0, 0.0, -3.0]


def test_topk_takes_few_bits() -> None:
    """The least for 64 places of 4096, and two bits for each of them, is 0.1463 bits for each parameter."""
    num_bits = topk.TopK(64).encode(normal(CHUNK)).numel() * 8 / CHUNK
    assert 0.146 < num_bits < 0.153
    assert topk.TopK(128).bits < 0.28 and topk.TopK(32).bits < 0.09


def test_topk_needs_no_more_bytes_than_it_says_when_the_largest_come_last() -> None:
    for k in range(32, 129, 8):
        codec, values = topk.TopK(k), torch.zeros(64, 4096)
        values[:, -k:] = 1.0
        assert codec.encode(values.view(-1)).numel() == codec.encoded_bytes(64 * 4096, torch.float32)


@pytest.mark.parametrize("k", [24, 65, 136])
def test_topk_refuses_other_numbers(k: int) -> None:
    with pytest.raises(ValidationError, match="k"):
        topk.Config(k=k)


# What they are made of.


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_codes_are_packed_lowest_first_and_come_back(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (8000,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = packing.pack(codes.clone(), bits)
    per_byte = 8 // bits
    plain = [
        sum(code << place * bits for place, code in enumerate(codes[start : start + per_byte].tolist()))
        for start in range(0, 8000, per_byte)
    ]
    assert packed.tolist() == plain and torch.equal(packing.unpack(packed, bits), codes)
    if bits > 1:
        values = tuple(float(3 * code - 5) for code in range(1 << bits))
        assert torch.equal(packing.look_up(packed, bits, values), torch.tensor(values)[codes.long()])


def test_scales_come_back_within_what_a_byte_keeps() -> None:
    scales = torch.logspace(-4.5, 0, 1000) * 123.0
    for round_up, least, most in ((True, 1.0, 17 / 16), (False, 31 / 32, 33 / 32)):
        raw, rounded = encode_scales(scales, round_up)
        assert raw.numel() == HEADER_BYTES + 1000 and torch.equal(decode_scales(raw)[0], rounded)
        ratio = rounded.double() / scales.double()
        assert least * (1 - 1e-6) <= ratio.min() and ratio.max() <= most


def test_small_scales_are_rounded_up_or_to_the_nearest() -> None:
    scales = torch.tensor([1.0, 1e-30, 0.0])
    up, near = encode_scales(scales, round_up=True)[1], encode_scales(scales, round_up=False)[1]
    assert up[0] == 1.0 and 0 < up[1] < 2.0**-15 and up[2] == up[1]
    assert near.tolist() == [1.0, 0.0, 0.0]


def test_row_sums_of_any_width() -> None:
    for width in range(1, 130):
        rows = torch.randint(-9, 9, (3, width), generator=torch.Generator().manual_seed(width)).float()
        assert torch.equal(row_sums(rows.clone()), rows.sum(1, keepdim=True))


def places(rows: int, width: int, count: int) -> Tensor:
    draw = torch.rand(rows, width, generator=torch.Generator().manual_seed(0))
    return draw.argsort(1)[:, :count].sort(1).values


@pytest.mark.parametrize(("width", "count"), [(4096, 64), (4096, 32), (4096, 128), (100, 8), (16, 16)])
@pytest.mark.parametrize("rows", [0, 1, 64])
def test_places_come_back(rows: int, width: int, count: int) -> None:
    code, first = Rice(width, count), torch.arange(count).expand(rows, -1)
    for columns in (places(rows, width, count), first, first + width - count):
        encoded = code.encode(columns.clone())
        assert torch.equal(code.decode(encoded, rows), columns)
        assert code.least_bytes(rows) <= encoded.numel() <= code.most_bytes(rows)


def test_places_that_are_none_are_refused() -> None:
    code, columns = Rice(4096, 64), places(4, 4096, 64)
    encoded = code.encode(columns)
    outside = code.encode(columns + 4095 - columns[:, -1:].min() + 1)
    more, fewer, longer = encoded.clone(), encoded.clone(), torch.cat([encoded, encoded.new_zeros(1)])
    more[-1], fewer[-1] = 255, 0
    for bad in (outside, more, fewer, longer):
        with pytest.raises(ValueError, match=r"\d"):
            code.decode(bad, 4)
