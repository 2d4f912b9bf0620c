"""What every codec in diloco/codecs promises: values come back within the error that it states, the same bytes come out
everywhere, and whatever comes in from the network is refused or decodes to numbers."""

import hashlib
import random
from typing import Callable

import pytest
import torch
from torch import Tensor

from diloco.blocks import to_blocks
from diloco.contributions import LARGEST_CLAIM_RATIO
from diloco.reduction import CHUNK, Codec
from islands import plugins

NAMES = plugins.available("diloco.codecs")
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

#: Around the blocks of 32, 64 and 128, the rows of 4096, and a chunk.
NUMELS = [0, 1, 2, 3, 31, 32, 33, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, 8191, 10_000]


def build(name: str) -> Codec:
    module = plugins.load("diloco.codecs", name)
    return module.build(module.Config())


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def codec(name: str) -> Codec:
    return build(name)


def normal(numel: int, seed: int = 0) -> Tensor:
    return torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def heavy(numel: int, seed: int = 0) -> Tensor:
    """Normal divided by the root of uniform: its variance is infinite."""
    return normal(numel, seed) / torch.rand(numel, generator=torch.Generator().manual_seed(seed)).clamp(min=1e-6).sqrt()


CASES: dict[str, Callable[[], Tensor]] = {
    "zero": lambda: torch.zeros(5000),
    "constant": lambda: torch.full((5000,), -0.37),
    "normal": lambda: normal(5000) * 1e-3,
    "heavy": lambda: heavy(5000) * 1e-5,
    "one block of many sizes": lambda: normal(5000) * torch.logspace(-12, 0, 5000, dtype=torch.float64),
    "one outlier": lambda: torch.cat([normal(4999) * 1e-6, torch.tensor([1000.0])]),
    "mostly zero": lambda: normal(5000) * (normal(5000, 1) > 2.5),
    "halfway": lambda: torch.arange(-2500, 2500) * 0.5,
    "huge": lambda: normal(5000) * 1e30,
    "tiny": lambda: normal(5000) * 1e-30,
    "denormal": lambda: normal(5000) * 1e-40,
    "denormal beside normal": lambda: torch.cat([normal(2500) * 1e-40, normal(2500)]),
}


def case(name: str, dtype: torch.dtype) -> Tensor:
    values = CASES[name]().double()
    return (values / 1e26 if name == "huge" and dtype == torch.float16 else values).to(dtype)


def largest(values: Tensor, block: int) -> Tensor:
    """For each value, the largest magnitude of its block."""
    return to_blocks(values.abs(), block).double().amax(1, keepdim=True).expand(-1, block).reshape(-1)[: len(values)]


def of_block(values: Tensor, block: int, share: float) -> Tensor:
    """``share`` of the largest magnitude of the block, or of 2^-15 of the largest of all; and 2^-126."""
    return share * torch.maximum(largest(values, block), values.double().abs().max() * 2.0**-15) + 2.0**-126


#: The error that each codec's class states: for finite fp32 values, how far each may be off.
BOUNDS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: torch.zeros_like(x),
    "bf16": lambda x: (x.abs() * 2.0**-8).clamp(min=2.0**-134),
    "fp16": lambda x: torch.maximum(x.abs() * 2.0**-11, x.abs().max() * 2.0**-39).clamp(min=2.0**-149),
    "int8": lambda x: of_block(x, 64, 17 / 32 / 127),
    "int4": lambda x: of_block(x, 32, 17 / 32 / 7),
    "e3m0": lambda x: torch.maximum(x.abs() / 3, (largest(x, 32) * 4 / 3).clamp(min=2.0**-119) / 128),
    "statistical2": lambda x: of_block(x, 128, 33 / 32),
    "topk": lambda x: of_block(x, 4096, 33 / 32),
}


def assert_within_bound(name: str, values: Tensor) -> None:
    """Encode and decode; the dtype's own rounding is on top of what the codec states."""
    codec, dtype = build(name), values.dtype
    decoded = codec.decode(codec.encode(values), len(values), dtype)
    assert decoded.dtype == dtype and decoded.shape == values.shape and torch.isfinite(decoded).all()
    if not len(values):
        return
    error, bound = (decoded.double() - values.double()).abs(), BOUNDS[name](values.double())
    if name != "none":
        info = torch.finfo(dtype if dtype.itemsize < 4 else torch.float32)
        bound = bound * (1 + 1e-4) + decoded.double().abs() * info.eps + info.smallest_normal * info.eps
    assert (error <= bound).all(), f"{float((error - bound).max())} above the bound at {int((error - bound).argmax())}"


# What comes back.


def test_every_codec_has_a_bound_here() -> None:
    assert set(NAMES) == set(BOUNDS), "a codec states its error, and it is written into BOUNDS"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CASES)
def test_values_come_back_within_the_stated_error(name: str, kind: str, dtype: torch.dtype) -> None:
    assert_within_bound(name, case(kind, dtype))


@pytest.mark.parametrize("numel", [*NUMELS, CHUNK - 1, CHUNK, CHUNK + 1])
def test_any_number_of_values_comes_back(name: str, numel: int) -> None:
    assert_within_bound(name, normal(numel).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_finite_numbers_stay_finite(codec: Codec, dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    values = torch.tensor([most, -most, most / 2, -most / 3, 1.0, 0.0] * 50, dtype=dtype)
    decoded = codec.decode(codec.encode(values), len(values), dtype)
    assert torch.isfinite(decoded).all()
    assert (decoded[values.abs() > 1] * values[values.abs() > 1].sign() >= 0).all()


@pytest.mark.parametrize("name", sorted({*NAMES} - {"none"}), indirect=True)  # its bytes are the values; the reducer looks
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_is_refused(codec: Codec, dtype: torch.dtype, poison: float) -> None:
    values = normal(5000).to(dtype)
    values[4321] = poison
    with pytest.raises(ValueError, match="values that are not finite can't be encoded"):
        codec.encode(values)


@pytest.mark.parametrize("k", range(32, 129, 8))
def test_magnitudes_that_are_equal_are_kept(k: int) -> None:
    module = plugins.load("diloco.codecs", "topk")
    codec = module.build(module.Config(k=k))
    for magnitude in torch.rand(50, generator=torch.Generator().manual_seed(k)).tolist():
        values = torch.full((4096,), magnitude)
        decoded = codec.decode(codec.encode(values), 4096, torch.float32)
        assert torch.allclose(decoded[:k], values[:k], rtol=1 / 32) and not decoded[k:].any()


def test_zeros_stay_zeros_and_signs_stay(codec: Codec) -> None:
    assert not codec.decode(codec.encode(torch.zeros(5000)), 5000, torch.float32).any()
    values = normal(5000).float()
    assert (codec.decode(codec.encode(values), 5000, torch.float32) * values >= 0).all()


@pytest.mark.parametrize("kind", [kind for kind in CASES if "denormal" not in kind])
def test_the_norm_grows_less_than_a_member_may_understate_it(codec: Codec, kind: str) -> None:
    values = case(kind, torch.float32)
    decoded = codec.decode(codec.encode(values), len(values), torch.float32)
    assert decoded.double().norm() <= (LARGEST_CLAIM_RATIO - 0.1) * values.double().norm()


# Bytes.


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CASES)
def test_no_encoding_is_longer_than_a_receiver_allows(codec: Codec, kind: str, dtype: torch.dtype) -> None:
    values = case(kind, dtype)
    encoded = codec.encode(values)
    assert encoded.dtype == torch.uint8 and encoded.dim() == 1
    assert encoded.numel() <= codec.encoded_bytes(len(values), dtype)


def test_bits_are_what_a_parameter_takes(codec: Codec) -> None:
    num_bits = codec.encode(normal(CHUNK).float()).numel() * 8 / CHUNK
    assert codec.bits == pytest.approx(num_bits, rel=0.01)


@pytest.mark.parametrize("kind", CASES)
def test_bytes_and_values_do_not_depend_on_threads(codec: Codec, kind: str) -> None:
    values = case(kind, torch.float32).repeat(60)[: CHUNK + 1]
    before, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            encoded = codec.encode(values.clone())
            results.append((encoded.numpy().tobytes(), codec.decode(encoded, len(values), torch.float32).numpy().tobytes()))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1]


#: SHA-256 over the bytes and what they decode to: another machine, or another version that calls itself compatible, agrees.
DIGESTS: dict[str, str] = {
    "bf16": "dd7166c0dcefc63f",
    "e3m0": "de12085ddeb54c8d",
    "fp16": "01ff3b8494a8afcf",
    "int4": "a46d7b8a294f5b66",
    "int8": "2b77a0231b9b252e",
    "none": "eff0f922ca63ac08",
    "statistical2": "13bbdfd57cf4a491",
    "topk": "22736bfb09af03a3",
}


def test_bytes_are_those_of_every_machine(name: str, codec: Codec) -> None:
    whole = (torch.arange(20_000) * 48_271 % 65_537 - 32_768).float()  # exact anywhere, unlike random numbers
    values = whole * whole.abs() / 1024 + whole
    encoded = codec.encode(values)
    decoded = codec.decode(encoded, len(values), torch.float32)
    digest = hashlib.sha256(encoded.numpy().tobytes() + decoded.numpy().tobytes()).hexdigest()
    assert digest[:16] == DIGESTS[name]


def test_input_is_left_alone_and_may_lie_anywhere(codec: Codec) -> None:
    values = normal(10_000).float()
    spread = torch.stack([values, values], dim=1)[:, 1]  # not in one piece
    encoded = codec.encode(values)
    assert torch.equal(values, normal(10_000).float()) and torch.equal(codec.encode(spread), encoded)
    decoded = codec.decode(encoded, 10_000, torch.float32).clone()
    for offset in range(1, 9):
        message = torch.cat([torch.full((offset,), 255, dtype=torch.uint8), encoded])
        assert torch.equal(codec.decode(message[offset:], 10_000, torch.float32), decoded)
        assert torch.equal(message[offset:], encoded)


# What others may send.


def assert_refused_or_finite(codec: Codec, name: str, encoded: Tensor, numel: int, dtype: torch.dtype) -> None:
    try:
        decoded = codec.decode(encoded, numel, dtype)
    except ValueError as error:
        assert str(error)
        return
    assert decoded.shape == (numel,) and decoded.dtype == dtype
    assert name == "none" or torch.isfinite(decoded).all()


@pytest.mark.parametrize("numel", [0, 1, 5000])
def test_a_wrong_size_is_refused_and_named(codec: Codec, numel: int) -> None:
    encoded = codec.encode(normal(numel).float())
    for size in {0, 1, 2, 3, encoded.numel() // 2, encoded.numel() - 1, encoded.numel() + 1, 2 * encoded.numel() + 9}:
        if size != encoded.numel():
            message = torch.cat([encoded, encoded, torch.zeros(9, dtype=torch.uint8)])[:size]
            with pytest.raises(ValueError, match=r"\d"):
                codec.decode(message, numel, torch.float32)


@pytest.mark.parametrize("numel", [1, 5000])
def test_damaged_bytes_are_refused_or_decode_to_numbers(name: str, codec: Codec, numel: int) -> None:
    draw, encoded = random.Random(0), codec.encode(normal(numel).float() * 1e-3)
    for trial in range(300):
        damaged = encoded.clone()
        for _ in range(1 + trial % 3):
            place = draw.randrange(min(damaged.numel(), 2 if trial % 4 == 0 else damaged.numel()))  # headers, too
            damaged[place] ^= 1 << draw.randrange(8)
        assert_refused_or_finite(codec, name, damaged, numel, DTYPES[trial % 4])


@pytest.mark.parametrize("numel", [0, 1, 33, 5000])
def test_any_bytes_are_refused_or_decode_to_numbers(name: str, codec: Codec, numel: int) -> None:
    draw = torch.Generator().manual_seed(0)
    limit = codec.encoded_bytes(numel, torch.float32)
    for trial in range(100):
        size = limit if trial % 2 else int(torch.randint(0, limit + 2, (), generator=draw))
        for junk in (torch.randint(0, 256, (size,), generator=draw), torch.full((size,), (0, 255, 128)[trial % 3])):
            assert_refused_or_finite(codec, name, junk.to(torch.uint8), numel, DTYPES[trial // 4 % 4])


# With error feedback.


def test_what_is_lost_is_sent_later(name: str, codec: Codec) -> None:
    """Sum of what was decoded = sum of what went in, less the residual that is left; and that does not grow for ever."""
    residual, sent, given, rounds = torch.zeros(8192).double(), torch.zeros(8192).double(), torch.zeros(8192).double(), 100
    for seed in range(rounds):
        values = normal(8192, seed) + normal(8192, 1000)  # a direction that stays, and noise
        given += values
        decoded = codec.decode(codec.encode(values + residual), 8192, torch.float64)
        residual = values + residual - decoded
        sent += decoded
    torch.testing.assert_close(sent, given - residual, rtol=0, atol=1e-10)
    assert residual.norm() <= (40 if name == "topk" else 1) * normal(8192).norm()
