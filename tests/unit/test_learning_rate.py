"""The learning rate of each inner step."""

import math

import pytest

from islands.config_file import ConfigError, parse_config
from islands.learning_rate import learning_rate
from islands.optimizers.adamw import Config

PEAK = 2e-3


def rates(steps: int, batch_size: int = 8, **keys: object) -> list[float]:
    """The rate of every step of a run."""
    config = parse_config(Config, {"lr": PEAK, **keys})
    return [learning_rate(config, step, steps, batch_size) for step in range(steps)]


def test_a_warmup_rises_in_equal_parts_and_reaches_the_peak() -> None:
    assert rates(20, warmup_steps=4)[:4] == [PEAK * part / 4 for part in (1, 2, 3, 4)]


def test_without_a_warmup_the_first_step_has_the_peak() -> None:
    assert rates(20)[0] == PEAK


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 1 / 3, 1.0])
def test_cosine_ends_at_its_share_of_the_peak_in_the_last_step_to_the_bit(warmup: int, ratio: float) -> None:
    found = rates(20, warmup_steps=warmup, final_lr_ratio=ratio)
    assert found[-1] == PEAK * ratio
    falling = found[warmup:]
    assert falling == sorted(falling, reverse=True)
    assert ratio == 1.0 or found[-2] > found[-1]


def test_cosine_is_a_cosine() -> None:
    found = rates(24, warmup_steps=3, final_lr_ratio=0.1)
    for step in range(3, 24):
        share = 0.5 + 0.5 * math.cos(math.pi * (step - 3) / 20)
        assert found[step] == pytest.approx(PEAK * (0.1 + 0.9 * share), rel=1e-12)
    assert found[13] == pytest.approx(PEAK * 0.55)  # half of the way


def test_constant_stays_at_the_peak_after_the_warmup() -> None:
    assert rates(6, warmup_steps=2, schedule="constant") == [PEAK / 2, *[PEAK] * 5]


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (5, 5), (5, 4)])
def test_a_run_without_room_to_fall_keeps_the_peak(steps: int, warmup: int) -> None:
    assert rates(steps, warmup_steps=warmup)[-1] == PEAK


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_a_larger_batch_raises_all_rates_alike(scaling: str, factor: int) -> None:
    keys = {} if scaling == "none" else dict(batch_scaling=scaling, reference_batch_size=8)
    before, scaled = rates(10, warmup_steps=3), rates(10, batch_size=32, warmup_steps=3, **keys)
    assert scaled == pytest.approx([factor * rate for rate in before], rel=1e-12)


@pytest.mark.parametrize("keys", [{"batch_scaling": "linear"}, {"reference_batch_size": 8}])
def test_scaling_without_a_reference_is_refused(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="batch_scaling=.* and reference_batch_size=.* go together"):
        rates(10, **keys)
