"""All that a plan says, as plain values: what ``diloco plan --json`` prints and its page shows."""

from dataclasses import asdict, dataclass
from typing import Any

from diloco.link_model import Link
from diloco.planner import Planner
from diloco.planner_choices import choices
from islands.strategies.pipeline_plan import num_micro_batches

#: What a table goes over where a question leaves it open: seconds of an inner step, bits a second.
STEP_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0)
BITS_PER_SECOND = (10e6, 50e6, 100e6, 300e6, 1e9)


@dataclass(frozen=True)
class Question:
    """What is known beside the configuration.

    Attributes:
        bits_per_second, step_seconds: None where they are open.
        rtt_from, step_from: who says so, in words.
        target: share of the time that is to be computing.
    """

    bits_per_second: float | None
    rtt: float
    rtt_from: str
    step_seconds: float | None
    step_from: str
    target: float


def answer(planner: Planner, question: Question) -> dict[str, Any]:
    """Numbers only, in bytes and seconds; ``choices`` is None where step time or bandwidth are open."""
    config, step = planner.config, question.step_seconds
    steps = STEP_SECONDS if step is None else (step,)
    rates = BITS_PER_SECOND if question.bits_per_second is None else (question.bits_per_second,)
    links = [Link(rate, question.rtt, max(1, config.swarm.data_connections)) for rate in rates]
    memory, outer, open_ends = planner.memory(), planner.outer(step or 1.0), len(steps) * len(links) > 1
    return {
        "run": config.run.name,
        "exchange": config.exchange.type,
        "parameters": planner.numel,
        "fragments": list(planner.sizes(config.outer.fragments)),
        "islands": planner.islands,
        "ranks": planner.ranks,
        "grid": str(planner.grid),
        "micro_batches": num_micro_batches(config, planner.grid.data),
        "pipeline_bubble": planner.bubble(),
        "question": asdict(question),
        "memory": {"rank": {**asdict(memory), "total": memory.total}, "outer": {**asdict(outer), "total": outer.total}},
        "traffic": _traffic(planner, step),
        "predictions": [_prediction(planner, link, seconds) for link in links for seconds in steps],
        "choices": None if open_ends else _choices(planner, links[0], steps[0], question.target),
    }


def _traffic(planner: Planner, step_seconds: float | None) -> dict[str, float | None]:
    """The bytes of an hour, and where rounds go by the clock those of a step, are known only with a step time."""
    by_steps = planner.config.outer.sync_seconds is None
    traffic = planner.traffic(planner.setting(step_seconds or 1.0))
    per_hour = traffic.bytes_per_step * 3600 / step_seconds if step_seconds else None
    return {**asdict(traffic), "bytes_per_step": traffic.bytes_per_step if by_steps or step_seconds else None, "bytes_per_hour": per_hour}


def _prediction(planner: Planner, link: Link, step_seconds: float) -> dict[str, Any]:
    setting = planner.setting(step_seconds)
    return {
        "bits_per_second": link.bits_per_second,
        "rtt": link.rtt,
        "inner_step_seconds": step_seconds,
        **asdict(setting),
        **asdict(planner.predict(setting, link, step_seconds)),
        "data_parallel_utilization": planner.data_parallel(link, step_seconds).utilization,
    }


def _choices(planner: Planner, link: Link, step_seconds: float, target: float) -> list[dict[str, Any]]:
    return [
        {**asdict(choice.setting), **asdict(choice.prediction), **asdict(choice.traffic)}
        for choice in choices(planner, link, step_seconds, target)
    ]
