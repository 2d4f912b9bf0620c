"""Outer optimizers: what all of them promise, the plain formula of each, and the learning rate of each round."""

import math
import pickle
from typing import Any, Callable

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from small import small_config
from torch import Tensor

from diloco.ledger import Counted
from diloco.from_config import make_outer_lr
from diloco.outer_lr import OuterLr
from diloco.outer_optimizers.adam import power
from diloco.outer_optimizers.base import OuterOptimizer
from diloco.outer_state import FragmentState, Layout, OuterState
from islands import plugins
from islands.config_file import ConfigError

NAMES = plugins.available("diloco.outer_optimizers")
ROUNDS = 10

#: Each plug-in, and what else of it is worth a try.
KEYS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("sgd", dict(momentum=0.0)),
    ("sgd", dict(momentum=0.9, nesterov=False)),
    ("adam", dict(beta1=0.0, eps=1e-8)),
    ("delayed_nesterov", dict(buffer_rounds=1)),
    ("delayed_nesterov", dict(buffer_rounds=3, activation=0.2)),
    ("delayed_nesterov", dict(buffer_rounds=3, activation=1 / 3)),
]


def build(name: str, **keys: Any) -> OuterOptimizer:
    module = plugins.load("diloco.outer_optimizers", name)
    return module.build(module.Config(**keys))


def normal(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def trajectory(
    optimizer: OuterOptimizer, numel: int, dtype: torch.dtype, blocks: Callable[[], list[slice]], lr: float = 0.1
) -> list[Tensor]:
    """Anchor and state after some rounds, each stepped block by block."""
    anchor = normal(numel, 99, dtype)
    state = {name: torch.zeros(numel, dtype=dtype) for name in optimizer.state_names}
    for height in range(ROUNDS):
        gradient, out_anchor = normal(numel, height, dtype), torch.full_like(anchor, float("nan"))
        out_state = {name: torch.full_like(anchor, float("nan")) for name in state}
        inputs = [tensor.clone() for tensor in (anchor, gradient, *state.values())]
        for piece in blocks():
            old = {name: tensor[piece] for name, tensor in state.items()}
            new = {name: tensor[piece] for name, tensor in out_state.items()}
            optimizer.step(anchor[piece], gradient[piece], old, height, lr, out_anchor[piece], new)
        assert all(torch.equal(a, b) for a, b in zip(inputs, (anchor, gradient, *state.values()), strict=True))
        anchor, state = out_anchor, out_state
    return [anchor, *state.values()]


# What all of them promise.


@pytest.mark.parametrize(("name", "keys"), KEYS)
def test_blocks_in_any_order_give_the_same_bits_and_inputs_are_left_alone(name: str, keys: dict[str, Any]) -> None:
    whole = trajectory(build(name, **keys), 1003, torch.float32, lambda: [slice(0, 1003)])
    pieces = trajectory(build(name, **keys), 1003, torch.float32, lambda: [slice(700, 1003), slice(0, 1), slice(1, 700)])
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))
    assert all(torch.isfinite(tensor).all() for tensor in whole)


@pytest.mark.parametrize(("name", "keys"), KEYS)
def test_the_step_is_as_large_as_the_learning_rate_that_is_given(name: str, keys: dict[str, Any]) -> None:
    start = normal(1000, 99, torch.float64)
    moved, twice = (
        trajectory(build(name, **keys), 1000, torch.float64, lambda: [slice(0, 1000)], lr)[0] - start for lr in (0.1, 0.2)
    )
    torch.testing.assert_close(moved * 2, twice)


@pytest.mark.parametrize(("name", "keys"), KEYS)
def test_it_crosses_into_the_exchange_process(name: str, keys: dict[str, Any]) -> None:
    optimizer = build(name, **keys)
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.lr == optimizer.lr > 0 and again.state_names == optimizer.state_names


# The formula of each.


def torch_trajectory(optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Tensor:
    parameter = torch.nn.Parameter(normal(1000, 99, torch.float64))
    reference = optimizer([parameter])
    for height in range(ROUNDS):
        parameter.grad = normal(1000, height, torch.float64)
        reference.step()
    return parameter.detach()


@pytest.mark.parametrize(
    ("name", "keys", "reference"),
    [
        ("sgd", {}, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
        ("sgd", dict(nesterov=False), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        ("sgd", dict(momentum=0.0), lambda p: torch.optim.SGD(p, 0.1)),
        ("adam", {}, lambda p: torch.optim.Adam(p, 0.1, betas=(0.9, 0.95), eps=0.1)),
        ("adam", dict(beta1=0.0, beta2=0.5, eps=1e-8), lambda p: torch.optim.Adam(p, 0.1, betas=(0.0, 0.5), eps=1e-8)),
        ("delayed_nesterov", dict(buffer_rounds=1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True)),
    ],
)
def test_it_is_that_of_torch(name: str, keys: dict[str, Any], reference: Callable) -> None:
    """In fp64, where a formula that differs is told from one that only rounds otherwise."""
    ours = trajectory(build(name, **keys), 1000, torch.float64, lambda: [slice(0, 1000)])[0]
    torch.testing.assert_close(ours, torch_trajectory(reference), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("n", "c"), [(1, 0.0), (4, 0.0), (4, 0.25), (3, 0.1)])
def test_delayed_nesterov_is_algorithm_3(n: int, c: float) -> None:
    """arXiv 2401.09135, in its own letters: theta, g, m, Delta, beta, epsilon."""
    theta, beta, epsilon = normal(1000, 99, torch.float64), 0.9, 0.1
    m, delta = torch.zeros_like(theta), torch.zeros_like(theta)
    for t in range(ROUNDS):
        g = normal(1000, t, torch.float64)
        delta = delta + g
        if (t + 1) % n == 0:
            m = beta * m + delta / n
            theta = theta - epsilon * ((1 - c * n + c) * beta * m + g / n)
            delta = torch.zeros_like(theta)
        else:
            theta = theta - epsilon * (c * beta * m + g / n)
    optimizer = build("delayed_nesterov", buffer_rounds=n, activation=c)
    ours = trajectory(optimizer, 1000, torch.float64, lambda: [slice(0, 1000)])
    for tensor, reference in zip(ours, (theta, m, delta), strict=True):
        torch.testing.assert_close(tensor, reference, rtol=1e-12, atol=1e-12)


def test_the_momentum_is_never_more_than_all_of_it() -> None:
    with pytest.raises(ValidationError, match="activation=0.3 in each of buffer_rounds=4 .* give at most 0.25"):
        build("delayed_nesterov", buffer_rounds=4, activation=0.3)


def test_adam_rounds_every_product_and_sum_by_itself() -> None:
    """As numpy does: a fused multiply-add would make some machines differ in the last bit."""
    anchor, gradient, f = normal(1003, 99).numpy(), normal(1003, 0).numpy(), np.float32
    mean, square = gradient * f(1 - 0.9), gradient * gradient * f(1 - 0.95)
    divisor = np.sqrt(square) * f(1 / math.sqrt(1 - 0.95)) + f(0.1)
    expected = anchor - mean * f(0.25 / (1 - 0.9)) / divisor
    out, state = torch.empty(1003), {name: torch.zeros(1003) for name in ("mean", "square")}
    out_state = {name: torch.empty(1003) for name in state}
    build("adam").step(torch.from_numpy(anchor), torch.from_numpy(gradient), state, 0, 0.25, out, out_state)
    assert np.array_equal(out.numpy(), expected)


def test_a_power_is_its_products() -> None:
    for exponent in (0, 1, 2, 7, 100, 12_345):
        assert power(0.95, exponent) == pytest.approx(0.95**exponent, rel=1e-12)
    assert power(0.0, 0) == 1.0 and power(0.0, 3) == 0.0 and power(0.5, 30) == 2.0**-30


# The learning rate of each round.


def test_it_rises_over_the_first_rounds_to_the_full_rate() -> None:
    schedule = OuterLr(0.8, warmup_rounds=4)
    assert [schedule.at(height, 0, 0) for height in range(6)] == [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]
    assert OuterLr(0.7).at(0, 5, 5) == 0.7


@pytest.mark.parametrize("counts", ["steps", "tokens"])
def test_it_falls_with_what_the_swarm_has_done(counts: str) -> None:
    def rates(decay: Any) -> list[float]:
        schedule = OuterLr(0.8, 0, decay, 0.25, total=1000, counts=counts)
        return [schedule.at(9, *((done, 7) if counts == "steps" else (7, done))) for done in (0, 250, 500, 1000, 1300)]

    assert rates("constant") == [0.8] * 5
    assert rates("linear") == [0.8, 0.65, 0.5, 0.2, 0.2]
    assert rates("cosine") == [0.8, round(0.2 + 0.3 * (1 + math.sqrt(0.5)), 9), 0.5, 0.2, 0.2]


def test_it_has_nine_digits() -> None:
    """So a cosine that differs in its last bit is the same rate on every machine."""
    schedule = OuterLr(0.7, 3, "cosine", 0.1, total=997)
    for step in range(997):
        rate = schedule.at(1, step, 0)
        assert rate == float(f"{rate:.9g}")


def test_it_follows_steps_or_where_rounds_come_by_the_clock_tokens() -> None:
    keys = dict(type="sgd", lr=0.5, warmup_rounds=2, decay="linear", min_lr_ratio=0.2)
    train = dict(steps=30, global_batch_size=4)
    by_steps = make_outer_lr(small_config(outer=dict(optimizer=keys), train=train))
    assert by_steps == OuterLr(0.5, 2, "linear", 0.2, 30, "steps")
    config = small_config(outer=dict(optimizer=keys, sync_every="5s"), train=train, swarm=dict(islands=3))
    assert make_outer_lr(config) == OuterLr(0.5, 2, "linear", 0.2, 30 * 4 * config.data.seq_len * 3, "tokens")
    assert pickle.loads(pickle.dumps(by_steps)) == by_steps


@pytest.mark.parametrize("override", [dict(decay="step"), dict(warmup_rounds=-1), dict(min_lr_ratio=1.5)])
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_has_its_keys_and_refuses_others(name: str, override: dict[str, Any]) -> None:
    small_config(outer=dict(optimizer=dict(type=name, decay="cosine", warmup_rounds=3, min_lr_ratio=0.0)))
    with pytest.raises(ConfigError, match=next(iter(override))):
        small_config(outer=dict(optimizer=dict(type=name, **override)))


def fragment(outer_lr: OuterLr | None, **keys: Any) -> FragmentState:
    optimizer = build("sgd", momentum=0.0, **keys)
    state = OuterState(Layout([10], optimizer, outer_lr=outer_lr)).fragments[0]
    state.anchor.zero_()
    state.initialize()
    return state


def test_a_round_is_stepped_by_the_rate_of_its_height_and_of_what_was_agreed_before_it() -> None:
    state = fragment(OuterLr(1.0, 2, "linear", 0.0, total=100))
    for rate, step in ((0.5, 40), (0.6, 80), (0.2, 100), (0.0, 100)):
        before, ahead = state.anchor.clone(), torch.empty(10)
        state.look_ahead(torch.ones(10), ahead)
        state.stage(torch.ones(10), [Counted(0, 1, 1, step, 1.0)])
        state.commit(0)
        torch.testing.assert_close(state.anchor, before - rate)
        assert torch.equal(state.anchor, ahead)


def test_without_a_schedule_it_is_the_optimizers_own() -> None:
    state = fragment(None, lr=0.25)
    state.stage(torch.ones(10))
    state.commit(0)
    assert torch.equal(state.anchor, torch.full((10,), -0.25))
