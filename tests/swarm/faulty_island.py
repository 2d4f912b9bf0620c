"""``python -m diloco``, with faults that a test arms while it runs and, on request, steps of a fixed length.

A fault is armed by making a file in the folder ``TEST_FAULTS``, and leaves ``<fault>.fired`` when it has happened:

``hold_in_transfer``, ``hold_before_vote``: the exchange process stops there until ``<fault>.release`` appears.
``corrupt``: one element of the mean that it applies is another one. ``nan``: a weight of the model is not a number when it
is next gathered.

``TEST_STEP_SECONDS``: every inner step takes at least that long and sleeps for the rest, so that islands that share few
cores still show who waits for whom.
"""

import asyncio
import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable

import torch

from diloco import __main__ as diloco_main
from diloco.exchange.hivemind import process
from islands.parameter_mover import ParameterMover
from islands.train_step import TrainStep

_LOOK_SECONDS = 0.02
_process_main = process.main


def fires(fault: str) -> bool:
    """Whether this fault is armed; it is not any more afterwards."""
    folder = Path(os.environ["TEST_FAULTS"])
    try:
        (folder / fault).rename(folder / f"{fault}.fired")
    except FileNotFoundError:
        return False
    return True


async def hold_if_armed(fault: str) -> None:
    """Stop here, if it is armed, until the test says go on; the process can be killed or frozen meanwhile."""
    if fires(fault):
        release = Path(os.environ["TEST_FAULTS"]) / f"{fault}.release"
        while not release.exists():
            await asyncio.sleep(_LOOK_SECONDS)
        release.unlink()


def exchange_main(pipe: Connection, start: Any) -> None:
    """:func:`diloco.exchange.hivemind.process.main` with faults."""
    os.environ["HIVEMIND_LOGLEVEL"] = "CRITICAL"  # as process.main does, before hivemind is imported
    from diloco.exchange.hivemind import voting
    from diloco.exchange.hivemind.network import Stream
    from diloco.exchange.hivemind.scatter_reduce import ScatterReduce

    send_plain, cast_vote, reduce = Stream.send_plain, voting.cast_vote, ScatterReduce.run

    async def send_plain_or_hold(self: Stream, values: torch.Tensor) -> None:
        middle = values.numel() // 2
        await send_plain(self, values[:middle])
        await hold_if_armed("hold_in_transfer")
        await send_plain(self, values[middle:])

    async def vote_or_hold(*arguments: Any) -> None:
        await hold_if_armed("hold_before_vote")
        await cast_vote(*arguments)

    async def reduce_or_corrupt(self: ScatterReduce, apply: Callable[[int, torch.Tensor], None]) -> None:
        def apply_or_corrupt(chunk: int, mean: torch.Tensor) -> None:
            if chunk == 0 and fires("corrupt"):
                mean = mean.clone()
                mean[0] += 1.0
            apply(chunk, mean)

        await reduce(self, apply_or_corrupt)

    Stream.send_plain, voting.cast_vote, ScatterReduce.run = send_plain_or_hold, vote_or_hold, reduce_or_corrupt
    _process_main(pipe, start)


def _poison_weights() -> None:
    gather = ParameterMover.gather

    @torch.no_grad()
    def gather_or_poison(self: ParameterMover, *arguments: Any) -> Any:
        if fires("nan"):
            weights = next(self._parts[0].parameters())
            getattr(weights, "to_local", lambda: weights)().view(-1)[0] = float("nan")
        return gather(self, *arguments)

    ParameterMover.gather = gather_or_poison


def pad_steps(seconds: float) -> None:
    """Have every inner step take at least so long."""
    train = TrainStep.__call__

    def train_and_rest(self: TrainStep, *arguments: Any) -> Any:
        until = time.monotonic() + seconds
        result = train(self, *arguments)
        time.sleep(max(0.0, until - time.monotonic()))
        return result

    TrainStep.__call__ = train_and_rest


def main() -> None:
    """Arm, and run diloco."""
    process.main = exchange_main  # its process starts here instead
    _poison_weights()
    pad_steps(float(os.environ.get("TEST_STEP_SECONDS", "0")))
    sys.exit(diloco_main.run())


if __name__ == "__main__":
    main()
