"""Which contributions count, and how much."""

import pytest
import torch

from diloco.contributions import Measured, Size, capped_weights, most_opposite, too_large, understated


def test_weights_are_tokens_up_to_a_multiple_of_their_median() -> None:
    assert capped_weights([100, 200, 300], 10.0) == (100.0, 200.0, 300.0)
    assert capped_weights([100, 200, 5000], 10.0) == (100.0, 200.0, 2000.0)
    assert capped_weights([100, 5000], 10.0) == (100.0, 1000.0), "of two the smaller one sets the limit"
    assert capped_weights([7], 1.0) == (7.0,)


def sizes(*norms: float, tokens: tuple[int, ...] = ()) -> dict[int, Size]:
    return {slot: Size(tokens[slot] if tokens else 100, norm) for slot, norm in enumerate(norms)}


@pytest.mark.parametrize(
    ("norms", "typical", "expected"),
    [
        ((1.0, 1.2, 0.8), 0.0, set()),
        ((1.0, 1e9, 0.8), 0.0, {1}),
        ((1.0, 1.1, 0.9, 50.0, 60.0), 0.0, {3, 4}),
        ((1.0, 1e9), 1.0, {1}),
        ((1.0, 1e9), 0.0, set()),  # at the first round of two nobody knows what is usual
        ((20.0, 30.0), 1.0, set()),  # both grew: a warmup, not a fault
        ((30.0, 1.0), 10.0, set()),  # usual for this run
        ((14.0, 1.0, 1.0), 14.0, set()),  # two newcomers, who have lost nothing yet in encoding with few bits
        ((1e9, 1.0, 1.0), 14.0, {0}),
        ((1e9,), 1.0, set()),
        ((0.0, 0.0, 0.0), 0.0, set()),
    ],
)
def test_absurdly_large_ones_are_found(norms: tuple[float, ...], typical: float, expected: set[int]) -> None:
    assert too_large(sizes(*norms), typical) == expected


def test_an_island_that_did_more_may_have_moved_further() -> None:
    assert too_large(sizes(1.0, 8.0, 1.0, tokens=(100, 1000, 100)), 0.0) == set()
    assert too_large(sizes(1.0, 80.0, 1.0, tokens=(100, 1000, 100)), 0.0) == {1}


def test_bytes_larger_than_claimed_are_found() -> None:
    assert understated([1.0, 2.0], [Measured(1.0, 0.0), Measured(4.0, 0.0)]) is None
    assert understated([1.0, 2.0], [Measured(1.2, 0.0), Measured(100.0, 0.0)]) == 1


def test_the_cosine_with_the_mean() -> None:
    assert Measured(square=4.0, along=-3.0).cosine(mean_square=9.0) == -0.5
    assert Measured(0.0, 0.0).cosine(9.0) == Measured(4.0, 0.0).cosine(0.0) == 0.0


def test_unrelated_directions_are_no_reason() -> None:
    zero = [Measured(1.0, 1 / 3)] * 3  # three orthogonal ones of norm 1: each has 1/3 along the mean
    assert most_opposite([1.0] * 3, zero, 1 / 3, numel=10**6) is None


def test_sparse_ones_that_oppose_each_other_by_chance_are_no_reason() -> None:
    """Each holds the same 64 of 4096 values, in any direction: that many are independent, not 4096."""
    found = {64: 0, 4096: 0}
    for seed in range(300):
        sent = torch.randn(3, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        mean = sent.mean(dim=0)
        measured = [Measured(float(each @ each), float(each @ mean)) for each in sent]
        for numel in found:
            found[numel] += most_opposite([1.0] * 3, measured, float(mean @ mean), numel) is not None
    assert found[64] == 0 and found[4096] > 0, found
    opposed = [sent[0], -sent[0], sent[0]]
    mean = torch.stack(opposed).mean(dim=0)
    measured = [Measured(float(each @ each), float(each @ mean)) for each in opposed]
    assert most_opposite([1.0] * 3, measured, float(mean @ mean), 64) == 1
