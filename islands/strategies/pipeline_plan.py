"""What a pipeline needs, how its stages share the layers, and what it costs: worked out before anything starts."""

from itertools import accumulate, pairwise
from typing import Sequence

from islands.config import IslandConfig, ParallelSection
from islands.config_file import ConfigError

#: Schedules that put several stages on a rank.
INTERLEAVED = ("interleaved_1f1b", "zero_bubble")


def stages_per_rank(parallel: ParallelSection) -> int:
    """Stages that each rank of the pipeline holds."""
    return parallel.pipeline_stages_per_rank if parallel.pipeline_schedule in INTERLEAVED else 1


def num_micro_batches(config: IslandConfig, data_ranks: int) -> int:
    """Micro-batches in one step of a rank."""
    share = config.train.global_batch_size // data_ranks
    return share // (config.train.micro_batch_size or share)


def predicted_bubble(parallel: ParallelSection, micro_batches: int) -> float:
    """Share of a step in which a rank waits, were all stages equally long and messages free.

    (P - 1) / (M + P - 1) for P ranks and M micro-batches (arXiv 1811.06965): in a step a rank waits for P - 1 others.
    With v stages on a rank it waits for stages 1/v as long (arXiv 2104.04473). Zero bubble fills two thirds of it,
    when forward, backward for inputs and backward for weights take equally long (arXiv 2401.10241).
    """
    waits = (parallel.pipeline_parallel_size - 1) / stages_per_rank(parallel)
    if parallel.pipeline_schedule == "zero_bubble":
        waits /= 3
    return waits / (micro_batches + waits)


def partition(costs: Sequence[int], num_parts: int) -> list[range]:
    """Cut ``costs`` into ``num_parts`` runs, none empty, with the smallest largest sum; of such cuts the most even."""
    sums = [0, *accumulate(costs)]
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}  # end -> largest sum, squares, cuts so far
    for _ in range(num_parts):
        best = {
            end: min(
                (max(largest, sums[end] - sums[start]), squares + (sums[end] - sums[start]) ** 2, (*cuts, end))
                for start, (largest, squares, cuts) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, len(costs) + 1)
        }
    return [range(start, end) for start, end in pairwise(best[len(costs)][2])]


def check_pipeline(config: IslandConfig, share: int) -> None:
    """Check that the layers suffice for the stages and the micro-batches for the schedule.

    Args:
        share: sequences of each rank in a step; a multiple of the micro-batch size.

    Raises:
        ConfigError: with the sizes that would do.
    """
    parallel, train, layers = config.parallel, config.train, config.model.num_layers
    ranks, schedule, per_rank = parallel.pipeline_parallel_size, parallel.pipeline_schedule, stages_per_rank(parallel)
    if ranks * per_rank > layers:
        each = f"{ranks} ranks x {per_rank} stages each = " if per_rank > 1 else ""
        most = layers // per_rank
        fewer = f"use at most {most} ranks" if most > 1 else "choose another pipeline_schedule"
        raise ConfigError(
            f"parallel.pipeline_parallel_size: {each}{ranks * per_rank} stages of pipeline_schedule={schedule} are "
            f"more than model.num_layers={layers}; {fewer}, or a model with more layers"
        )
    uncut = "train.compile=true" if train.compile else f"train.recompute={train.recompute}"
    if schedule == "zero_bubble" and (train.compile or train.recompute == "selective"):
        raise ConfigError(
            "parallel.pipeline_schedule: zero_bubble takes the backward pass of a block apart, which torch can't do "
            f"with {uncut}; drop one of them, interleaved_1f1b is the schedule nearest to it"
        )
    data_ranks = train.global_batch_size // share
    micro_batches = num_micro_batches(config, data_ranks)
    if not _fills(schedule, ranks, micro_batches):
        raise ConfigError(
            f"train.micro_batch_size: {train.micro_batch_size or share} cuts the {share} sequences of each rank into "
            f"{micro_batches} micro-batches, and parallel.pipeline_schedule={schedule} with pipeline_parallel_size="
            f"{ranks} needs {_need(schedule, ranks)}; {_remedy(schedule, ranks, share, data_ranks)}"
        )


def _fills(schedule: str, ranks: int, micro_batches: int) -> bool:
    if schedule in INTERLEAVED:
        return micro_batches % ranks == 0
    return schedule == "gpipe" or micro_batches >= ranks


def _need(schedule: str, ranks: int) -> str:
    return f"a multiple of {ranks}" if schedule in INTERLEAVED else f"at least {ranks}"


def _remedy(schedule: str, ranks: int, share: int, data_ranks: int) -> str:
    fitting = [size for size in range(1, share + 1) if share % size == 0 and _fills(schedule, ranks, share // size)]
    if fitting:
        return f"sizes that do: {', '.join(map(str, fitting))}"
    return f"no size does; set train.global_batch_size to {data_ranks * ranks} or a multiple of it"
