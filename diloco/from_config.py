"""What the configuration of a run comes to: when rounds are, what they need to agree on, and how they are encoded."""

from typing import Sequence

from diloco.adaptation import Adaptation
from diloco.codecs import build_wire
from diloco.config import RunConfig
from diloco.outer_lr import OuterLr
from diloco.outer_state import Layout
from diloco.reduction import Wire
from diloco.schedule import Schedule, StepSchedule, TimedSchedule
from islands import plugins
from islands.fragments import Fragment, Schema, cut
from islands.initialize import parameter_dtype


def make_fragments(config: RunConfig, schema: Schema) -> list[Fragment]:
    """The parts of the model that take turns in rounds.

    Raises:
        ConfigError: the model can't be cut into so many.
    """
    outer = config.outer
    return cut(schema, outer.fragments, outer.fragment_pattern, outer.separate_embeddings)


def make_schedule(config: RunConfig, num_fragments: int) -> Schedule:
    """When the rounds of a run begin, and when the run ends."""
    steps, seconds = config.train.steps, config.outer.sync_seconds
    if seconds is None:
        return StepSchedule(steps, int(config.outer.sync_every), num_fragments)
    return TimedSchedule(steps, seconds, total_tokens(config), num_fragments)


def total_tokens(config: RunConfig) -> int:
    """Of all islands that a run begins with, by which it ends where rounds go by the clock."""
    return config.train.steps * config.train.global_batch_size * config.data.seq_len * config.swarm.islands


def make_outer_lr(config: RunConfig) -> OuterLr:
    """The outer learning rate follows inner steps, or tokens where rounds go by the clock, as the inner one does."""
    section, by_steps = config.outer.optimizer, config.outer.sync_seconds is None
    total = config.train.steps if by_steps else total_tokens(config)
    counts = "steps" if by_steps else "tokens"
    return OuterLr(section.lr, section.warmup_rounds, section.decay, section.min_lr_ratio, total, counts)


def make_layout(config: RunConfig, sizes: Sequence[int]) -> Layout:
    """The outer state for fragments of these sizes."""
    outer = config.outer
    return Layout(
        sizes,
        plugins.build("diloco.outer_optimizers", outer.optimizer),
        parameter_dtype(config),
        config.swarm.max_slots,
        outer.error_feedback,
        keeps_mean=outer.overlap == "eager",
        outer_lr=make_outer_lr(config),
        adaptation=make_adaptation(config),
    )


def make_wire(config: RunConfig) -> Wire:
    """The codecs that a round may use: that of the run, and those that it may fall back to."""
    outer = config.outer
    return build_wire(outer.codec, outer.adaptive.codecs if outer.adaptive.target else ())


def make_adaptation(config: RunConfig) -> Adaptation | None:
    """How period and codec follow what was measured; None where they stay as they are."""
    outer = config.outer
    if not outer.adaptive.target:
        return None
    wire = make_wire(config)
    bits = tuple(one.contribution.bits for one in (wire, *wire.cheaper))
    return Adaptation(outer.adaptive.target, int(outer.sync_every), outer.adaptive.max_sync_every, bits, outer.fragments)
