"""The loop: batch, step, hooks, metrics, evaluation."""

import time
from typing import Protocol, Sequence

from islands.data.base import Batches
from islands.island import Island
from islands.learning_rate import learning_rate
from islands.metrics import Metrics
from islands.out_of_memory import explained_memory
from islands.performance import Performance

#: After so many gradients in a row that are not finite, no later step will be better.
_MOST_NON_FINITE = 10


class StepHook(Protocol):
    """Something that happens between inner steps, on all ranks alike."""

    def after_step(self, step: int, tokens: int) -> float:
        """Called when inner step ``step`` (from 1), on ``tokens`` tokens of the island, is done.

        Returns:
            Seconds for which training waited.
        """


def train(island: Island, batches: Batches, metrics: Metrics, hooks: Sequence[StepHook] = ()) -> None:
    """Train from the first step to the last.

    Raises:
        FloatingPointError: the gradient stayed non-finite.
        RankLost: a collective operation failed.
        OutOfMemory: this rank's device is full.
    """
    performance = Performance(island.config, island.process)
    with island.watchdog, explained_memory(island.config, island.grid, island.process), performance:
        _train(island, batches, metrics, hooks, performance)


def _train(
    island: Island, batches: Batches, metrics: Metrics, hooks: Sequence[StepHook], performance: Performance
) -> None:
    train_config, device, enter = island.config.train, island.process.device, island.watchdog.enter
    enter("evaluation")
    metrics.write("eval", step=0, loss=island.evaluate())
    non_finite = 0
    for step in range(1, train_config.steps + 1):
        enter("data", step)
        performance.begin_step(step)
        started = time.monotonic()
        inputs, targets = batches[step - 1]
        lr = learning_rate(island.config.optimizer, step - 1, train_config.steps, train_config.global_batch_size)
        result = island.train_step(inputs.to(device), targets.to(device), lr)
        seconds = time.monotonic() - started
        enter("hooks")
        stall = sum(hook.after_step(step, result.tokens) for hook in hooks)
        metrics.write(
            "step",
            step=step,
            loss=result.loss,
            lr=lr,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            tokens_per_second=result.tokens / seconds,
            step_seconds=seconds,
            stall_seconds=stall,
            **island.model.forward_backward.measurements(),
            **performance.end_step(step, result.tokens / seconds),
        )
        non_finite = 0 if result.applied else _report_non_finite(metrics, step, result.grad_norm, non_finite + 1)
        if step == train_config.steps or (train_config.eval_every and step % train_config.eval_every == 0):
            enter("evaluation")
            metrics.write("eval", step=step, loss=island.evaluate())


def _report_non_finite(metrics: Metrics, step: int, norm: float, in_a_row: int) -> int:
    metrics.write("event", what="non_finite", detail=f"gradient norm {norm} at step {step}; the step was not applied")
    if in_a_row >= _MOST_NON_FINITE:
        raise FloatingPointError(
            f"the gradient was not finite for {in_a_row} steps in a row, up to step {step}; lower optimizer.lr, "
            "lengthen optimizer.warmup_steps, or train in fp32"
        )
    return in_a_row
