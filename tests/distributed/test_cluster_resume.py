"""Islands of one job that stop and go on: from the same step, bit for bit on the same grid, and on another one."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from outer_loop import Recorded
from rank_pool import RankPool
from small import small_config, small_corpus, whole_parameters

from diloco.cluster import check_cluster, cluster_round, train_islands
from islands.config_file import ConfigError
from islands.island import build_island
from islands.process import Process, one_of
from islands.progress import Progress
from islands.train_loop import train
from test_cluster import in_one_job_config

TOLERANCE = 1e-10
STEPS = 11
OUTER = dict(sync_every=4, fragments=2, overlap=2, merge_alpha=0.5, optimizer=dict(lr=0.7, momentum=0.9))


class StopAfter:
    """A wish to stop after so many steps of this process; 0: none."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.meets: Callable[[int], int] = lambda step: step

    def ranks_meet(self, known_after: Callable[[int], int]) -> None:
        self.meets = known_after

    def agreed(self, step: int) -> bool:
        return step == self._steps


def stretch(process: Process, folder: str, stop_after: int, sections: dict[str, Any]) -> bool | str:
    """Train from what is in ``folder``; whether it came to the end, or why it was refused."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "0"  # a person started it, not torchrun again
    steps = dict(steps=STEPS, micro_batch_size=2)
    config = in_one_job_config(2, dict(dict(run=dict(dir=folder), outer=OUTER, train=steps), **sections))
    try:
        return train_islands(config, check_cluster(config, process.world_size), small_corpus(), process, StopAfter(stop_after))
    except ConfigError as error:
        return str(error)


def rows_in(folder: Path, kind: str, *keys: str) -> dict[int, list[tuple]]:
    """Of each island all rows of a kind, from all processes that it had, in order."""
    found = {}
    for island in (0, 1):
        files = sorted((folder / f"island-{island}").glob("metrics*.jsonl"), key=lambda path: json.loads(path.open().readline())["time"])
        rows = [json.loads(line) for path in files for line in path.open()]
        found[island] = [tuple(row[key] for key in keys) for row in rows if row["kind"] == kind]
    return found


LOSSES = "step", "step", "loss", "position"
ROUNDS = "round", "step", "fragment", "round", "start", "position", "tokens", "landed", "digest"


def test_it_goes_on_bit_for_bit_with_rounds_in_flight_and_on_another_grid(ranks: RankPool, tmp_path: Path) -> None:
    whole, parts, other = tmp_path / "whole", tmp_path / "parts", tmp_path / "other"
    assert ranks.run(stretch, 4, str(whole), 0, {}) == [True] * 4
    assert ranks.run(stretch, 4, str(parts), 5, {}) == [False] * 4  # a round was launched at 4 and has not landed
    shutil.copytree(parts, other)
    assert ranks.run(stretch, 4, str(parts), 0, {}) == [True] * 4
    for kind in (LOSSES, ROUNDS):
        assert rows_in(parts, *kind) == rows_in(whole, *kind)
    digests = [[row[-1] for row in rows] for rows in rows_in(whole, *ROUNDS).values()]
    assert digests[0] == digests[1] and len(set(digests[0])) == len(digests[0]) == 7
    assert ranks.run(stretch, 2, str(other), 0, dict(parallel=dict(data_parallel_strategy="zero1"))) == [True] * 2
    for island, rows in rows_in(other, *LOSSES).items():
        expected = rows_in(whole, *LOSSES)[island]
        assert [row[1] for row in rows] == pytest.approx([row[1] for row in expected], abs=TOLERANCE)
        assert len(rows) == STEPS


def test_all_islands_go_on_from_the_newest_step_that_all_have(ranks: RankPool, tmp_path: Path) -> None:
    whole, parts, every = tmp_path / "whole", tmp_path / "parts", dict(checkpoint=dict(every=2, keep=4))
    assert ranks.run(stretch, 2, str(whole), 0, dict(every)) == [True] * 2
    assert ranks.run(stretch, 2, str(parts), 6, dict(every)) == [False] * 2
    shutil.rmtree(parts / "checkpoints/step-00000006/island-1")  # a crash left it without
    assert ranks.run(stretch, 2, str(parts), 0, dict(every)) == [True] * 2
    steps = [row[0] for row in rows_in(parts, *LOSSES)[0]]
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8, 9, 10, 11]
    assert rows_in(parts, *LOSSES)[1][6:] == rows_in(whole, *LOSSES)[1][4:]
    assert [path.parent.name for path in (parts / "checkpoints").glob("*/island-0.aside-1")] == ["step-00000006"]  # of the other timeline
    other = tmp_path / "other"
    assert ranks.run(stretch, 2, str(other), 0, dict(every, optimizer=dict(lr=1e-3, warmup_steps=2))) == [True] * 2
    ours, theirs = (folder / "checkpoints/step-00000011/island-1" for folder in (parts, other))
    shutil.rmtree(ours)
    shutil.copytree(theirs, ours)
    refused = ranks.run(stretch, 2, str(parts), 0, dict(every))
    assert refused[0] == refused[1] and "the anchors of islands 1 are not that of island 0" in refused[0]
    for folder in (parts / "checkpoints").glob("*/island-1"):
        shutil.rmtree(folder)
    refused = ranks.run(stretch, 2, str(parts), 0, dict(every))
    assert refused[0] == refused[1] and "islands 0 have checkpoints and islands 1 have none" in refused[0]


def test_a_round_in_flight_lands_though_another_period_launches_before(ranks: RankPool, tmp_path: Path) -> None:
    before, after = (dict(outer=dict(OUTER, overlap=3, sync_every=k)) for k in (4, 6))
    assert ranks.run(stretch, 2, str(tmp_path), 5, before) == [False] * 2  # fragment 0 was launched at 4, to land at 7
    assert ranks.run(stretch, 2, str(tmp_path), 0, after) == [True] * 2
    rounds = rows_in(tmp_path, "round", "fragment", "step", "landed", "round")
    of_fragment_0 = [row[1:] for row in rounds[0] if row[0] == 0]
    assert of_fragment_0 == [(4, 6, 1), (6, 9, 2), (11, 11, 3)] and rounds[0] == rounds[1]


class Spoil:
    """Makes a parameter of one island useless after a step."""

    def __init__(self, parameter: torch.Tensor, step: int) -> None:
        self._parameter, self._step = parameter, step

    def after_step(self, progress: Progress, tokens: int) -> float:
        if progress.step == self._step:
            with torch.no_grad():
                self._parameter.to_local().fill_(float("nan"))
        return 0.0


def spoiled(process: Process) -> dict[str, Any]:
    config = in_one_job_config(2, dict(outer=dict(sync_every=2, optimizer=dict(lr=1.0, momentum=0.0)), train=dict(steps=6)))
    grid, mine = check_cluster(config, process.world_size), one_of(process, 2)
    slot, metrics = process.rank // grid.world_size, Recorded()
    island = build_island(config, mine, small_corpus(), replace(grid, islands=2), process)
    hook = cluster_round(config, island, metrics)
    spoil = [Spoil(next(island.model.parts[0].parameters()), 4)] if process.rank == process.world_size - 1 else []
    train(island, island.batches(2), metrics, [*spoil, hook], hook.start(Progress(slot=slot)))
    return dict(rows=metrics.rows, parameters=whole_parameters(island), slot=slot)


def test_parameters_that_are_not_finite_never_reach_another_island(ranks: RankPool) -> None:
    results = ranks.run(spoiled, 4)
    for rank in results:
        rounds = [row for row in rank["rows"] if row["kind"] == "round"]
        assert [row["outcome"] for row in rounds] == ["committed", "skipped", "committed"]
        dropped = [row["detail"] for row in rank["rows"] if row.get("what") == "dropped"]
        if rank["slot"] == 1:  # its other rank holds what is fine, and knows all the same
            assert dropped == ["16 sequences of fragment 0: the parameters were not finite at step 4"]
            assert (rounds[2]["start"], rounds[2]["weight"]) == (32, 2 * 8 * 16)
        else:
            assert not dropped and (rounds[2]["start"], rounds[2]["weight"]) == (16, 4 * 8 * 16)
        for name, parameter in rank["parameters"].items():
            assert bool(parameter.isfinite().all()) and torch.equal(parameter, results[0]["parameters"][name])
