"""A run that stops and goes on, on the same grid or another, is the run that never stopped. And a disk that fails stops nothing."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Callable, Iterator

import pytest
import torch
from outer_loop import Recorded
from rank_pool import RankPool
from small import small_config, small_corpus, whole_parameters
from torch import Tensor

from islands import checkpoint_files as files
from islands import resume
from islands.checkpoint import Checkpointer
from islands.checkpoint_part import CheckpointPart, Saved
from islands.island import Island, build_island
from islands.metrics import Metrics
from islands.process import Process
from islands.progress import Progress
from islands.sharing import FirstRankSays
from islands.train_loop import StepHook, train

#: In fp64: grids add in other orders.
TOLERANCE = 1e-10


class StopAfter:
    """Someone wants to stop after so many steps; 0: nobody does."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def agreed(self, step: int) -> bool:
        return step == self._steps


def trained(
    process: Process,
    folder: str,
    stop_after: int = 0,
    part: Callable[[Island], CheckpointPart] | None = None,
    hooks: Callable[[Any], list[StepHook]] = lambda part: [],
    **sections: Any,
) -> dict[str, Any]:
    """A run of its own in ``folder``, from the checkpoint that it finds; what rank 0 recorded, and all parameters at the end."""
    config = small_config(run=dict(dir=folder), **sections)
    island, metrics = build_island(config, process, small_corpus()), Recorded()
    chosen = resume.choose(config, 0, print) if process.rank == 0 else None
    chosen = FirstRankSays(process, "checkpoint")(chosen, 30.0)
    progress, made = resume.load(island, chosen) if chosen else None, part and part(island)
    with Checkpointer(island, metrics, made, saved=progress) as checkpointer:
        arguments = hooks(made), progress, checkpointer, StopAfter(stop_after)
        finished = train(island, island.batches(), metrics, *arguments)
    return dict(
        losses={row["step"]: row["loss"] for row in metrics.of("step")},
        evaluations=[row["step"] for row in metrics.of("eval")],
        stalls=[row["checkpoint_seconds"] for row in metrics.of("step")],
        events={what: [row["detail"] for row in metrics.of("event") if row["what"] == what] for what in EVENTS},
        parameters=whole_parameters(island),
        finished=finished,
    )


EVENTS = ("checkpoint", "checkpoint_failed", "checkpoint_skipped")


class Patient:
    """A hook that lets each checkpoint come to its end: none is skipped."""

    def after_step(self, progress: Progress, tokens: int) -> float:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(20.0)
        return 0.0


def patient(part: Any) -> list[StepHook]:
    return [Patient()]


def run(ranks: RankPool, world_size: int, folder: Path, stop_after: int = 0, *more: Any, **sections: Any) -> dict[str, Any]:
    """What :func:`trained` tells on rank 0."""
    return ranks.run(_trained, world_size, str(folder), stop_after, more, sections)[0]


def _trained(process: Process, folder: str, stop_after: int, more: tuple, sections: dict[str, Any]) -> dict[str, Any]:
    return trained(process, folder, stop_after, *more, **sections)


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(
    ("world_size", "sections"),
    [
        (2, dict(parallel=dict(data_parallel_strategy="zero3"))),
        (2, dict(parallel=dict(data_parallel_strategy="ddp"), optimizer=dict(type="sgd", momentum=0.9, lr=0.1))),
        (2, dict(parallel=dict(data_parallel_strategy="zero1"), optimizer=dict(type="sgd", lr=0.1))),  # which has no state
    ],
    ids=["zero3 2", "ddp 2 momentum", "zero1 2 sgd"],
)
def test_on_the_same_grid_it_is_the_same_to_the_bit(
    ranks: RankPool, tmp_path: Path, world_size: int, sections: dict[str, Any]
) -> None:
    sections |= dict(train=dict(precision="fp32", steps=6))
    whole = run(ranks, world_size, tmp_path / "whole", 0, None, patient, checkpoint=dict(every=2, keep=9), **sections)
    first = run(ranks, world_size, tmp_path / "parts", 3, **sections)
    second = run(ranks, world_size, tmp_path / "parts", **sections)
    third = run(ranks, world_size, tmp_path / "parts", **sections)
    assert (first["finished"], second["finished"]) == (False, True)
    assert third["finished"] and not third["losses"] and not any(third["events"].values())  # nothing was left to do
    assert difference(third["parameters"], second["parameters"]) == 0.0
    assert first["losses"] | second["losses"] == whole["losses"] and sorted(second["losses"]) == [4, 5, 6]
    assert difference(second["parameters"], whole["parameters"]) == 0.0
    assert (first["evaluations"], second["evaluations"]) == ([0], [6])  # it went on: no evaluation at the start
    steps = [files.step_of(folder) for folder in files.find(tmp_path / "whole/checkpoints")]
    assert steps == [detail["step"] for detail in reversed(whole["events"]["checkpoint"])] == [6, 4, 2]
    for detail in whole["events"]["checkpoint"]:
        assert files.verify(Path(detail["folder"])).num_bytes == detail["bytes"]
        assert 0 < detail["stall_seconds"] and 0 < detail["write_seconds"]
    assert [stall > 0 for stall in whole["stalls"]] == [False, False, True, False, True, False]  # in the row that follows


#: Ranks and sections, one after another: each goes on from the checkpoint of the one before.
CHAINS: dict[str, list[tuple[int, dict[str, Any]]]] = {
    "zero3, tensor, ddp, one": [
        (4, dict(data_parallel_strategy="zero3")),
        (4, dict(data_parallel_strategy="zero3", tensor_parallel_size=2)),
        (2, dict(data_parallel_strategy="ddp")),
        (1, dict(data_parallel_strategy="zero3")),
        (4, dict(data_parallel_strategy="zero3")),
    ],
    "pipeline, zero1": [
        (2, dict(data_parallel_strategy="ddp", pipeline_parallel_size=2)),
        (2, dict(data_parallel_strategy="zero1")),
        (2, dict(data_parallel_strategy="ddp", pipeline_parallel_size=2)),
    ],
    "pipeline x zero3, hybrid": [
        (4, dict(data_parallel_strategy="zero3", pipeline_parallel_size=2)),
        (4, dict(data_parallel_strategy="hybrid_shard", shard_size=2)),
        (4, dict(data_parallel_strategy="zero3", pipeline_parallel_size=2)),
    ],
}


@pytest.mark.parametrize("chain", [pytest.param(name, marks=[pytest.mark.slow] * ("hybrid" in name)) for name in CHAINS])
def test_on_another_grid_it_is_the_same_run(ranks: RankPool, tmp_path: Path, chain: str) -> None:
    links = CHAINS[chain]
    sections = dict(
        model=dict(pad_vocab_to_multiple_of=2, tied_embeddings=chain.startswith("pipeline")),
        train=dict(steps=2 * len(links), micro_batch_size=1),
    )
    world_size, parallel = links[0]
    whole = run(ranks, world_size, tmp_path / "whole", parallel=parallel, **sections)
    losses, seen = {}, []
    for world_size, parallel in links:
        part = run(ranks, world_size, tmp_path / "parts", 2, parallel=parallel, **sections)
        losses |= part["losses"]
        seen.append(sorted(part["losses"]))
    assert seen == [[2 * link + 1, 2 * link + 2] for link in range(len(links))]
    assert losses == pytest.approx(whole["losses"], abs=TOLERANCE, rel=0)
    assert difference(part["parameters"], whole["parameters"]) < TOLERANCE


class Slow:
    """A part that is collected only when it may: after ``step``."""

    def __init__(self, process: Process, step: int) -> None:
        self._first, self._step, self._released = process.rank == 0, step, threading.Event()
        self.round = 0

    def snapshot(self) -> Callable[[], Saved]:
        number = self.round

        def collect() -> Saved:
            assert self._released.wait(20.0)
            tensors = {"outer.anchor.x": torch.full((3, 2), float(number))} if self._first else {}
            return Saved(facts=dict(round=number), tensors=tensors)

        return collect

    def after_step(self, progress: Progress, tokens: int) -> float:
        """As a hook."""
        self.round += 1
        if progress.step > self._step:
            self._released.set()
            time.sleep(0.3)  # lets the disk have its turn
        return 0.0


def slow(island: Island) -> Slow:
    return Slow(island.process, step=3)


def alone(part: Slow) -> list[StepHook]:
    return [part]


def read_part(process: Process, folder: str) -> tuple[dict[str, Any], Tensor, bool]:
    config = small_config(run=dict(dir=folder + "-other"), train=dict(precision="fp32", resume=folder))
    island, anchor = build_island(config, process, small_corpus()), torch.zeros(3, 2)
    chosen = resume.choose(config, 0, print)
    resume.load(island, chosen, {"outer.anchor.x": anchor} if process.rank == 0 else {})
    names = resume.stored_names(chosen)
    return chosen.manifest.facts, anchor, {"outer.anchor.x", "model.norm.weight", "rng.1.cpu"} <= names


def test_what_is_written_late_is_what_was_there_and_a_second_one_is_not_begun(ranks: RankPool, tmp_path: Path) -> None:
    sections = dict(train=dict(precision="fp32", steps=6), checkpoint=dict(every=1, keep=9))
    late = run(ranks, 2, tmp_path / "late", 0, slow, alone, **sections)
    assert [detail["step"] for detail in late["events"]["checkpoint"]][0] == 1
    skipped = [detail.partition(":")[0] for detail in late["events"]["checkpoint_skipped"]]
    assert skipped[:2] == ["step 2", "step 3"]
    folder = files.folder_of(tmp_path / "late/checkpoints", 1, 0)
    facts, anchor, has_all = ranks.run(read_part, 2, str(folder))[0]
    assert facts == dict(round=1) and anchor.eq(1.0).all() and has_all
    again = run(ranks, 2, tmp_path / "again", **dict(sections, train=dict(precision="fp32", steps=6, resume=str(folder))))
    assert again["losses"] == {step: loss for step, loss in late["losses"].items() if step > 1}
    assert difference(again["parameters"], late["parameters"]) == 0.0


class Failing:
    """A part that one rank can't collect."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def snapshot(self) -> Callable[[], Saved]:
        def collect() -> Saved:
            if self._rank == 1:
                raise ValueError("the outer state is gone")
            return Saved()

        return collect


def failing(island: Island) -> Failing:
    return Failing(island.process.rank)


def test_a_rank_that_fails_ends_the_checkpoint_everywhere_and_training_nowhere(ranks: RankPool, tmp_path: Path) -> None:
    found = run(ranks, 2, tmp_path, 0, failing, patient, checkpoint=dict(every=2))
    reason = "rank 1: ValueError: the outer state is gone"
    assert found["events"]["checkpoint_failed"] == [f"step {step}: {reason}" for step in (2, 4, 5)]
    assert found["finished"] and not list((tmp_path / "checkpoints").glob("*"))


def test_a_folder_that_can_not_be_written_to_is_an_event(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    found = run(ranks, 2, tmp_path, 0, None, patient, checkpoint=dict(every=2, dir=str(tmp_path / "file")))
    assert [detail.partition(": ")[0] for detail in found["events"]["checkpoint_failed"]] == ["step 2", "step 4", "step 5"]
    assert "rank 0: NotADirectoryError" in found["events"]["checkpoint_failed"][0] and found["finished"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """3 MB, of which 300 kB are free."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], capture_output=True, text=True, timeout=10)
    if done.returncode:
        pytest.skip(f"needs leave to mount a file system: {done.stderr.strip()}")
    try:
        (folder / "ballast").write_bytes(bytes(2_700_000))
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True, timeout=10)


class Space:
    """Comes with step 3."""

    def __init__(self, folder: Path) -> None:
        self._ballast = folder / "ballast"

    def after_step(self, progress: Progress, tokens: int) -> float:
        if progress.step == 3:
            self._ballast.unlink(missing_ok=True)
        return 0.0


def _space(process: Process, folder: str, disk: str) -> dict[str, Any]:
    return trained(process, folder, 0, None, lambda part: [Patient(), Space(Path(disk))], checkpoint=dict(every=2, dir=disk, keep=1))


def test_rows_outlast_a_full_disk(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics(small_disk / "island-0", 0, enabled=True)
    with (small_disk / "log").open("w") as log:
        monkeypatch.setattr(sys, "stdout", log)
        with (small_disk / "filling").open("wb", buffering=0) as filling, contextlib.suppress(OSError):
            while filling.write(bytes(4096)):
                pass
        for number in range(300):  # more than the room that the row's own file has
            metrics.write("event", what="news", detail=f"{number} of 300")
        (small_disk / "ballast").unlink()
        metrics.write("event", what="news", detail="there is room")
        metrics.close()
    monkeypatch.undo()
    rows = [json.loads(line) for line in (small_disk / "island-0/metrics.jsonl").read_text().splitlines()]
    assert [row["detail"] for row in rows] == [*(f"{number} of 300" for number in range(300)), "there is room"]


def test_a_full_disk_is_an_event_and_the_next_checkpoint_is_whole(ranks: RankPool, tmp_path: Path, small_disk: Path) -> None:
    found = ranks.run(_space, 2, str(tmp_path), str(small_disk))[0]
    (failed,) = found["events"]["checkpoint_failed"]
    assert re.match(rf"step 2: rank .*; 0\.\d MB are free on the disk of {small_disk}$", failed)
    assert [detail["step"] for detail in found["events"]["checkpoint"]] == [4, 5] and found["finished"]
    (left,) = files.find(small_disk)
    assert files.verify(left).step == 5 and [path.name for path in small_disk.iterdir()] == ["step-00000005"]
