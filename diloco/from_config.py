"""What the configuration of a run comes to: when rounds are, what they need to agree on, and how they are encoded."""

from typing import Sequence

from diloco.adaptation import Adaptation
from diloco.codecs import build_wire
from diloco.config import RunConfig
from diloco.outer_lr import outer_lr
from diloco.outer_state import Layout
from diloco.reduction import Wire
from diloco.schedule import Schedule, StepSchedule, TimedSchedule
from islands import plugins
from islands.initialize import parameter_dtype


def make_schedule(config: RunConfig, num_fragments: int) -> Schedule:
    """When the rounds of a run begin, and when the run ends."""
    train, seconds = config.train, config.outer.sync_seconds
    if seconds is None:
        return StepSchedule(train.steps, int(config.outer.sync_every), num_fragments)
    total = train.steps * train.global_batch_size * config.data.seq_len * config.swarm.islands
    return TimedSchedule(train.steps, seconds, total, num_fragments)


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
        outer_lr=outer_lr(config),
        adaptation=make_adaptation(config),
    )


def make_wire(config: RunConfig) -> Wire:
    """The codecs that a round may use: that of the run, and those that it may fall back to."""
    outer = config.outer
    return build_wire(outer.codec, outer.adaptive.codecs if outer.adaptive.target else ())


def make_adaptation(config: RunConfig) -> Adaptation | None:
    """How period and codec follow what was measured; None where they stay as they are."""
    outer, wire = config.outer, make_wire(config)
    if not outer.adaptive.target:
        return None
    bits = tuple(one.contribution.bits for one in (wire, *wire.cheaper))
    return Adaptation(outer.adaptive.target, int(outer.sync_every), outer.adaptive.max_sync_every, bits, outer.fragments)
