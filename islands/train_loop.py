"""The loop: batch, step, hooks, metrics, evaluation, checkpoint."""

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Protocol, Sequence

from islands.checkpoint import Checkpointer
from islands.data.base import Batches
from islands.island import Island
from islands.learning_rate import learning_rate
from islands.metrics import Metrics
from islands.out_of_memory import explained_memory
from islands.performance import Performance
from islands.progress import Progress, crosses

#: After so many gradients in a row that are not finite, no later step will be better.
_MOST_NON_FINITE = 10


class StepHook(Protocol):
    """Something that happens between inner steps, on all ranks alike."""

    def after_step(self, progress: Progress, tokens: int) -> float:
        """Called when inner step ``progress.step`` (from 1), on ``tokens`` tokens of the island, is done.

        Returns:
            Seconds for which training waited.
        """


class StopWish(Protocol):
    """Whether someone wants training to stop."""

    def agreed(self, step: int) -> bool:
        """Called on all ranks after the ``step``-th step of this process (from 1); all of them get the same answer."""


def train(
    island: Island,
    batches: Batches,
    metrics: Metrics,
    hooks: Sequence[StepHook] = (),
    progress: Progress | None = None,
    checkpointer: Checkpointer | None = None,
    stop: StopWish | None = None,
) -> bool:
    """Train from where ``progress`` stands (the start) to the last step, or until ``stop`` says so; then save a last time.

    Returns:
        Whether it came to the end.

    Raises:
        FloatingPointError: the gradient stayed non-finite.
        RankLost: a collective operation failed.
        OutOfMemory: this rank's device is full.
    """
    performance = Performance(island.config, island.process)
    progress = progress or Progress()
    with island.watchdog, explained_memory(island.config, island.grid, island.process), performance:
        _train(island, batches, metrics, hooks, progress, checkpointer, stop, performance)
        if checkpointer:
            island.watchdog.enter("checkpoint")
            checkpointer.save_last(progress)
    return progress.lr_step >= island.config.train.steps


def _train(
    island: Island,
    batches: Batches,
    metrics: Metrics,
    hooks: Sequence[StepHook],
    progress: Progress,
    checkpointer: Checkpointer | None,
    stop: StopWish | None,
    performance: Performance,
) -> None:
    config, enter = island.config.train, island.watchdog.enter
    if progress.step == 0:
        _evaluate(island, metrics, step=0)
    done, non_finite, evaluated = 0, 0, progress.step
    while progress.lr_step < config.steps:
        enter("data", progress.step + 1)
        performance.begin_step(progress.step + 1)
        started, lr_step = time.monotonic(), progress.lr_step
        inputs, targets = batches.at(progress.slot, progress.position)
        lr = learning_rate(island.config.optimizer, lr_step, config.steps, config.global_batch_size)
        with island.traffic.step() if island.traffic else nullcontext():
            result = island.train_step(inputs.to(island.process.device), targets.to(island.process.device), lr)
        seconds = time.monotonic() - started
        done += 1
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
            **(checkpointer.measurements() if checkpointer else {}),
            **(island.traffic.measurements() if island.traffic else {}),
        )
        non_finite = 0 if result.applied else _report_non_finite(metrics, reached.step, result.grad_norm, non_finite + 1)
        ends = progress.lr_step >= config.steps
        if ends or crosses(evaluated, progress.step, config.eval_every):
            evaluated = progress.step
            _evaluate(island, metrics, evaluated)
        if stop and stop.agreed(done):
            return
        if checkpointer and not ends:
            enter("checkpoint")
            checkpointer.after_step(progress)


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
