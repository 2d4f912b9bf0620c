"""The loop: batch, step, hooks, metrics, evaluation."""

import time
from dataclasses import dataclass, replace
from typing import Protocol, Sequence

from islands.data.base import Batches
from islands.island import Island
from islands.learning_rate import learning_rate
from islands.metrics import Metrics
from islands.out_of_memory import explained_memory
from islands.performance import Performance

#: After so many gradients in a row that are not finite, no later step will be better.
_MOST_NON_FINITE = 10


@dataclass
class Progress:
    """How far an island is. The loop counts; a hook may move it, where the rest of the run went on without this island.

    Attributes:
        step: inner steps done, as rows tell them.
        slot: fixes which samples the island trains on.
        position: sequences of the slot that the island has taken.
        lr_step: where the learning rate stands, which is the step as long as the island is all there is; the end of the
            schedule is that of training.
    """

    step: int = 0
    slot: int = 0
    position: int = 0
    lr_step: int = 0


class StepHook(Protocol):
    """Something that happens between inner steps, on all ranks alike."""

    def after_step(self, progress: Progress, tokens: int) -> float:
        """Called when inner step ``progress.step`` (from 1), on ``tokens`` tokens of the island, is done.

        Returns:
            Seconds for which training waited.
        """


def train(
    island: Island,
    batches: Batches,
    metrics: Metrics,
    hooks: Sequence[StepHook] = (),
    progress: Progress | None = None,
) -> None:
    """Train from where ``progress`` stands (the start) to the last step.

    Raises:
        FloatingPointError: the gradient stayed non-finite.
        RankLost: a collective operation failed.
        OutOfMemory: this rank's device is full.
    """
    performance = Performance(island.config, island.process)
    with island.watchdog, explained_memory(island.config, island.grid, island.process), performance:
        _train(island, batches, metrics, hooks, progress or Progress(), performance)


def _train(
    island: Island,
    batches: Batches,
    metrics: Metrics,
    hooks: Sequence[StepHook],
    progress: Progress,
    performance: Performance,
) -> None:
    config, enter = island.config.train, island.watchdog.enter
    if progress.step == 0:
        _evaluate(island, metrics, step=0)
    non_finite, evaluated = 0, progress.step
    while progress.lr_step < config.steps:
        enter("data", progress.step + 1)
        performance.begin_step(progress.step + 1)
        started, lr_step = time.monotonic(), progress.lr_step
        inputs, targets = batches.at(progress.slot, progress.position)
        lr = learning_rate(island.config.optimizer, lr_step, config.steps, config.global_batch_size)
        result = island.train_step(inputs.to(island.process.device), targets.to(island.process.device), lr)
        seconds = time.monotonic() - started
        progress.step += 1
        progress.lr_step += 1
        progress.position += config.global_batch_size
        enter("hooks")
        reached = replace(progress)
        stall = sum(hook.after_step(progress, result.tokens) for hook in hooks)
        metrics.write(
            "step",
            step=reached.step,
            loss=result.loss,
            lr=lr,
            lr_step=reached.lr_step,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            slot=reached.slot,
            position=reached.position,
            tokens_per_second=result.tokens / seconds,
            step_seconds=seconds,
            stall_seconds=stall,
            **island.model.forward_backward.measurements(),
            **performance.end_step(reached.step, result.tokens / seconds),
        )
        non_finite = 0 if result.applied else _report_non_finite(metrics, reached.step, result.grad_norm, non_finite + 1)
        if progress.lr_step >= config.steps or _crosses(evaluated, progress.step, config.eval_every):
            evaluated = progress.step
            _evaluate(island, metrics, evaluated)


def _crosses(before: int, now: int, every: int) -> bool:
    """Whether a multiple of ``every`` lies between; not every step is met, where an island follows others."""
    return every > 0 and now // every > before // every


def _evaluate(island: Island, metrics: Metrics, step: int) -> None:
    island.watchdog.enter("evaluation")
    metrics.write("eval", step=step, loss=island.evaluate())


def _report_non_finite(metrics: Metrics, step: int, norm: float, in_a_row: int) -> int:
    metrics.write("event", what="non_finite", detail=f"gradient norm {norm} at step {step}; the step was not applied")
    if in_a_row >= _MOST_NON_FINITE:
        raise FloatingPointError(
            f"the gradient was not finite for {in_a_row} steps in a row, up to step {step}; lower optimizer.lr, "
            "lengthen optimizer.warmup_steps, or train in fp32"
        )
    return in_a_row
