"""A rank that does not come becomes a message that names it."""

import contextlib
import dataclasses
import io
import os
import signal
import time
from typing import Any, Callable

import pytest
import torch.distributed as dist
from rank_pool import RankError, RankPool
from small import small_config, small_corpus

from islands.agreement import check_agreement
from islands.config_file import ConfigError
from islands.island import Island, build_island
from islands.mesh import build_mesh, check_grid
from islands.metrics import Metrics
from islands.process import Process
from islands.train_loop import train
from islands.watchdog import RankLost, Watchdog

#: Seconds; ten signs of life fit into it.
TIMEOUT = 3.0

#: The rank, and the step, in which the fault happens.
FAULTY, FAULT_STEP = 1, 2


class Faulty:
    """A train step that does ``fault`` in place of the step ``FAULT_STEP``, if it is that of the faulty rank."""

    def __init__(self, island: Island, fault: Callable[[], Any]) -> None:
        self._island, self._fault, self._step = island, fault, 0

    def __call__(self, *arguments: Any) -> Any:
        self._step += 1
        if self._step == FAULT_STEP and self._island.process.rank == FAULTY:
            self._fault()
        return self._island.train_step(*arguments)


def late() -> None:
    time.sleep(2.5 * TIMEOUT)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def broken() -> None:
    raise ValueError("a fault of its own")


def faulty_training(process: Process, fault: Callable[[], Any], folder: str) -> tuple[str, float, str]:
    """The message with which training ended on this rank, the seconds that it took, and what it printed before."""
    process = dataclasses.replace(process, timeout=TIMEOUT)
    config = small_config(run=dict(dir=folder), train=dict(precision="fp32", global_batch_size=6))
    island = build_island(config, process, small_corpus())
    island = dataclasses.replace(island, train_step=Faulty(island, fault))
    metrics = Metrics(island.config.run.dir, 0, enabled=False)
    started, printed = time.monotonic(), io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            train(island, island.batches(), metrics)
    except (RankLost, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started, printed.getvalue()
    return "trained to the end", time.monotonic() - started, printed.getvalue()


def test_a_rank_that_skips_a_collective_is_named_within_the_timeout(ranks: RankPool, tmp_path: Any) -> None:
    answers = ranks.run(faulty_training, 3, late, str(tmp_path))
    for message, seconds, printed in (answers[0], answers[2]):
        assert message.startswith("RankLost: rank ") and "all_reduce failed: " in message
        assert f"rank {FAULTY} is missing: it is behind, and has been in data of step {FAULT_STEP} for " in message
        assert f"ranks 0, 2 waited in forward_backward of step {FAULT_STEP}" in message
        assert f"has been in forward_backward of step {FAULT_STEP} for 3 s:\nrank {FAULTY} is missing: " in printed
        assert seconds < 2 * TIMEOUT + 2  # before step 2 comes step 1
    assert {file.name for file in (tmp_path / "flight_recorder").iterdir()} == {"rank_0", "rank_1", "rank_2"}
    assert answers[FAULTY][0].startswith("RankLost: ")  # when it comes at last the others are gone


def test_a_rank_that_fails_is_named_with_its_reason(ranks: RankPool, tmp_path: Any) -> None:
    answers = ranks.run(faulty_training, 3, broken, str(tmp_path))
    assert answers[FAULTY][0] == "ValueError: a fault of its own"
    for message, *_ in (answers[0], answers[2]):
        reason = "it failed (ValueError: a fault of its own)"
        assert f"rank {FAULTY} is missing: {reason}, in data of step {FAULT_STEP}" in message


def outlived_training(process: Process, folder: str) -> None:
    """What training says, as an error that reaches the test beside the death of the other rank."""
    raise AssertionError(faulty_training(process, killed, folder)[0])


def test_a_rank_that_is_killed_is_named(ranks: RankPool, tmp_path: Any) -> None:
    with pytest.raises(RankError) as told:
        ranks.run(outlived_training, 3, str(tmp_path))
    assert "rank 1: died" in str(told.value)  # the fault fired
    assert str(told.value).count(f"rank {FAULTY} is missing: it died or is frozen, and was last seen in ") >= 2
    assert "ranks 0, 2 waited in forward_backward of step 2" in str(told.value)


def disagreement(process: Process, overrides: dict[str, Any]) -> str:
    """What a comparison says when the last rank has ``overrides``; each rank has its own folder, which may differ."""
    process = dataclasses.replace(process, timeout=TIMEOUT)
    odd = process.rank == process.world_size - 1
    sections = dict(run=dict(dir=f"runs/{process.rank}"), train=dict(global_batch_size=12)) | (overrides if odd else {})
    config = small_config(**sections)
    try:
        check_agreement(config, process)
    except ConfigError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize("world_size", [2, 3])
def test_another_configuration_on_one_rank_is_named_on_all(ranks: RankPool, world_size: int) -> None:
    odd = dict(train=dict(steps=7, global_batch_size=12), model=dict(intermediate_size=64))
    messages = ranks.run(disagreement, world_size, odd)
    assert len(set(messages)) == 1
    last = f"rank {world_size - 1}"
    assert f"{last}: train.steps is 7, and 5 on most others" in messages[0]
    assert f"{last}: model.intermediate_size is 64, and 72 on most others" in messages[0]
    assert f"{last}: the model's schema is" in messages[0]
    assert "rank 0:" not in messages[0] and "run.dir" not in messages[0]


def test_another_grid_on_one_rank_is_named(ranks: RankPool) -> None:
    messages = ranks.run(disagreement, 2, dict(parallel=dict(data_parallel_strategy="ddp")))
    assert "rank 1: the grid is 'pipeline 1 x replicate 2 x shard 1 x tensor 1', and" in messages[0]


def test_equal_configurations_agree(ranks: RankPool) -> None:
    assert ranks.run(disagreement, 2, {}) == ["agreed"] * 2


def absent(process: Process) -> str:
    if process.rank == 1:
        time.sleep(TIMEOUT)
        return ""
    try:
        check_agreement(small_config(), dataclasses.replace(process, timeout=TIMEOUT / 3))
    except RuntimeError as error:
        return str(error)
    return "agreed"


def test_a_rank_that_never_comes_is_named(ranks: RankPool) -> None:
    assert ranks.run(absent, 2)[0].startswith("rank 1 of 2 did not come within run.timeout=1 seconds")


def timeouts(process: Process, parallel: dict[str, Any]) -> list[float]:
    """Of every process group that a mesh made, in seconds."""
    config = small_config(parallel=parallel)
    build_mesh(check_grid(config, process.world_size), process)
    groups = dist.distributed_c10d._world.pg_map
    return [group._get_backend(process.device).options._timeout.total_seconds() for group in groups]


@pytest.mark.parametrize(
    "parallel", [dict(data_parallel_strategy="zero3"), dict(data_parallel_strategy="hybrid_shard", shard_size=2)]
)
def test_every_group_has_the_timeout_of_the_configuration(ranks: RankPool, parallel: dict[str, Any]) -> None:
    for seconds in ranks.run(timeouts, 4, parallel, timeout=31.0):
        assert len(seconds) > 1 and set(seconds) == {31.0}


def cost(process: Process) -> float:
    """Seconds that the notes of one step take."""
    with Watchdog(process, None) as watchdog:
        started = time.monotonic()
        for step in range(1000):
            for phase in ("data", "forward_backward", "clip", "optimizer", "hooks"):
                watchdog.enter(phase, step)
        return (time.monotonic() - started) / 1000


def test_noting_the_phases_of_a_step_costs_less_than_a_fifth_of_a_millisecond(ranks: RankPool) -> None:
    assert min(ranks.run(cost, 2)) < 2e-4
