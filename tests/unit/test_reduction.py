"""The weighted mean, how it is cut into chunks, and what goes over the wire."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from diloco.codecs import none
from diloco.pseudo_gradient import BLOCK, pseudo_gradient
from diloco.reduction import CHUNK, Seen, chunk_slice, num_chunks, reduce_chunk, reducer_chunks, weighted_mean

NUMELS = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 37, 10 * CHUNK]


def draw(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=dtype)


# The mean.


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [1000.0, 3000.0, 500.0], [float(n) for n in range(1, 17)]])
def test_the_mean_is_exact_within_its_rounding(weights: list[float]) -> None:
    """Each of n terms is rounded as a weight, as a product and in at most n - 1 sums: n + 1 times 2^-24 of its size."""
    contributions = [draw(1000, seed) for seed in range(len(weights))]
    shares = [weight / sum(weights) for weight in weights]
    exact = sum(share * values.double() for share, values in zip(shares, contributions, strict=True))
    sizes = sum(share * values.double().abs() for share, values in zip(shares, contributions, strict=True))
    error = (weighted_mean(contributions, weights).double() - exact).abs()
    assert (error <= (len(weights) + 1) * 2.0**-24 * 1.01 * sizes).all()  # 1 % for the products of errors
    if len(weights) > 2:
        assert error.any()  # in fp32 it is not exact, so the bound is not met by accident


def test_the_mean_is_a_product_and_a_sum_each_rounded_by_itself() -> None:
    weights = [1000.0, 3000.0, 500.0]
    contributions = [draw(1003, seed) for seed in range(3)]
    first, *others = (values.numpy() * np.float32(weight / 4500.0) for values, weight in zip(contributions, weights))
    for product in others:
        first = first + product
    assert np.array_equal(weighted_mean(contributions, weights).numpy(), first)


def test_the_order_of_members_counts_in_the_last_bit() -> None:
    contributions, weights = [draw(1000, seed) for seed in range(3)], [1.0, 2.0, 4.0]
    orders = {
        weighted_mean([contributions[i] for i in order], [weights[i] for i in order]).numpy().tobytes()
        for order in itertools.permutations(range(3))
    }
    assert len(orders) > 1  # which is why the order of a round is fixed


@pytest.mark.parametrize("numel", [CHUNK + 1, 2 * CHUNK + 37])
def test_the_mean_of_chunks_is_the_chunks_of_the_mean(numel: int) -> None:
    contributions, weights = [draw(numel, seed) for seed in range(3)], [1.0, 5.0, 3.0]
    whole = weighted_mean(contributions, weights)
    for index in range(num_chunks(numel)):
        piece = chunk_slice(numel, index)
        assert torch.equal(weighted_mean([values[piece] for values in contributions], weights), whole[piece])


def test_the_mean_of_one_member_is_what_it_gave_and_leaves_it_alone() -> None:
    values = draw(100, 0)
    mean = weighted_mean([values], [1234.5])
    assert torch.equal(mean, values)
    mean.zero_()
    assert torch.equal(values, draw(100, 0))


def test_a_member_of_weight_zero_changes_nothing() -> None:
    one, other = draw(100, 0), draw(100, 1)
    assert torch.equal(weighted_mean([one, other], [2.0, 0.0]), one)


@pytest.mark.parametrize(
    "weights", [[0.0, 0.0], [1.0, float("nan")], [1.0, float("inf")], [3.0, -1.0], [1.0], [1.0, 1.0, 1.0]]
)
def test_weights_that_make_no_mean_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="can't average 2 contributions of weights"):
        weighted_mean([draw(3, 0), draw(3, 1)], weights)


def test_nobody_has_no_mean() -> None:
    with pytest.raises(ValueError, match="can't average 0 contributions"):
        weighted_mean([], [])


# Chunks.


@pytest.mark.parametrize("numel", NUMELS)
def test_chunks_cover_a_fragment_once_and_in_order(numel: int) -> None:
    pieces = [chunk_slice(numel, index) for index in range(num_chunks(numel))]
    assert [piece.start for piece in pieces] == [0, *(piece.stop for piece in pieces[:-1])]
    assert pieces[-1].stop == numel
    assert all(piece.stop - piece.start == CHUNK for piece in pieces[:-1]) and pieces[-1].stop > pieces[-1].start


@pytest.mark.parametrize("numel", NUMELS)
def test_members_reduce_every_chunk_once_and_about_equally_many(numel: int) -> None:
    for num_members in range(1, 20):
        runs = [reducer_chunks(numel, num_members, position) for position in range(num_members)]
        assert list(itertools.chain(*runs)) == list(range(num_chunks(numel)))
        lengths = [len(run) for run in runs]
        assert lengths == sorted(lengths, reverse=True) and max(lengths) - min(lengths) <= 1


# The codec.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_codec_none_gives_back_the_same_bits(dtype: torch.dtype) -> None:
    codec = none.build(none.Config())
    values = draw(1001, 0, dtype)
    values[:4] = torch.tensor([0.0, -0.0, float("inf"), 1e-40], dtype=dtype)
    encoded = codec.encode(values)
    assert encoded.dtype == torch.uint8 and encoded.numel() == codec.encoded_bytes(1001, dtype) == 1001 * dtype.itemsize
    assert encoded.numpy().tobytes() == values.numpy().astype(values.numpy().dtype.newbyteorder("<")).tobytes()
    decoded = codec.decode(encoded, 1001, dtype)
    assert decoded.dtype == dtype and decoded.numpy().tobytes() == values.numpy().tobytes()


def test_codec_none_takes_tensors_that_are_not_in_one_piece() -> None:
    codec, values = none.NoCodec(), draw(20, 0)[::2]
    assert torch.equal(codec.decode(codec.encode(values), 10, torch.float32), values)


def test_codec_none_decodes_from_the_middle_of_a_message() -> None:
    codec, values = none.NoCodec(), draw(10, 0)
    message = torch.cat([torch.zeros(3, dtype=torch.uint8), codec.encode(values)])
    assert torch.equal(codec.decode(message[3:], 10, torch.float32), values)


@pytest.mark.parametrize("num_bytes", [0, 39, 41, 80])
def test_codec_none_refuses_a_wrong_size(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"10 values of torch.float32 take 40 bytes, got {num_bytes}"):
        none.NoCodec().decode(torch.zeros(num_bytes, dtype=torch.uint8), 10, torch.float32)


def test_a_reduced_chunk_is_the_mean_of_what_was_decoded() -> None:
    codec, weights = none.NoCodec(), [1.0, 2.0]
    contributions = [draw(10, seed) for seed in range(2)]
    reduced = reduce_chunk(codec, [codec.encode(values) for values in contributions], weights, 10, torch.float32)
    assert torch.equal(reduced, weighted_mean(contributions, weights))


def test_what_can_not_be_decoded_counts_as_zero_and_is_found_out() -> None:
    codec, sound, seen = none.NoCodec(), draw(10, 0), Seen(2)
    reduced = reduce_chunk(codec, [codec.encode(sound), torch.zeros(39, dtype=torch.uint8)], [1.0, 3.0], 10, torch.float32, seen)
    assert torch.equal(reduced, sound * 0.25)
    assert seen.squares[1] > 1e299 and seen.squares[0] == pytest.approx(float(sound.double() @ sound.double()))


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("weight", [0.0, 1e-300, 3.0])
def test_what_is_not_finite_counts_as_zero_whatever_its_weight(weight: float, poison: float) -> None:
    codec, sound, seen = none.NoCodec(), draw(10, 0), Seen(2)
    encoded = [codec.encode(sound), codec.encode(draw(10, 1).index_fill(0, torch.tensor([7]), poison))]
    reduced = reduce_chunk(codec, encoded, [1.0, weight], 10, torch.float32, seen)
    assert torch.equal(reduced, weighted_mean([sound, torch.zeros(10)], [1.0, weight])) and seen.squares[1] > 1e299


# The pseudo-gradient.


@pytest.mark.parametrize("numel", [1, 1000, BLOCK + 17])
def test_the_pseudo_gradient_is_anchor_minus_local_in_place_too(numel: int) -> None:
    anchor, local = draw(numel, 0), draw(numel, 1)
    expected, out = anchor - local, torch.empty(numel)
    health = pseudo_gradient(anchor, local, out)
    assert torch.equal(out, expected) and torch.equal(local, draw(numel, 1))
    assert health.finite and health.norm == pytest.approx(float(expected.double().norm()), rel=1e-12)
    assert pseudo_gradient(anchor, local, out=local) == health and torch.equal(local, expected)


def test_the_norm_leaves_an_fp64_pseudo_gradient_as_it_is() -> None:
    anchor, local = draw(1000, 0, torch.float64), draw(1000, 1, torch.float64)
    expected = anchor - local
    health = pseudo_gradient(anchor, local, out=local)
    assert torch.equal(local, expected) and health.norm == pytest.approx(float(expected.norm()), rel=1e-12)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, BLOCK - 1, BLOCK + 16])
def test_one_element_that_is_not_finite_is_seen(poison: float, place: int) -> None:
    anchor, local = torch.zeros(BLOCK + 17), torch.zeros(BLOCK + 17)
    assert pseudo_gradient(anchor, local, torch.empty_like(local)).finite
    local[place] = poison
    assert not pseudo_gradient(anchor, local, torch.empty_like(local)).finite


def test_the_largest_fp32_values_are_finite() -> None:
    largest = torch.full((BLOCK,), torch.finfo(torch.float32).max)
    assert pseudo_gradient(largest, torch.zeros(BLOCK), torch.empty(BLOCK)).finite
    assert not pseudo_gradient(largest, -largest, torch.empty(BLOCK)).finite  # their difference is not
