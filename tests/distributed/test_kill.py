"""Kill -9 at any moment, start again: the losses are those of a run that nobody killed, bit for bit."""

import importlib
import json
import multiprocessing
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from small import small_config

from islands import checkpoint_files as files
from islands.run import run_alone

STEPS, EVERY = 10, 2

#: Moments: a function that is called then, and whether the kill comes after the call. Items of a file, parameters that are read.
PHASES = {
    "step": ("islands.train_step.clip_gradient", False),
    "write": ("torch.distributed.checkpoint.filesystem._write_item", False),
    "manifest": ("islands.checkpoint_files.write_manifest", False),
    "published": ("islands.checkpoint_files.publish", True),
    "resume": ("torch.distributed.checkpoint.filesystem.narrow_tensor_by_index", False),
}

ITEMS = 21 * 4 + 1  # of one checkpoint: 21 parameters with three tensors of optimizer state each, and a random generator


def config_in(folder: Path) -> Any:
    text = folder.parent / "text"
    text.write_bytes(random.Random(0).randbytes(20_000))
    return small_config(
        run=dict(dir=str(folder), device="cpu"),
        data=dict(type="text", paths=[str(text)], held_out=0.1),
        train=dict(steps=STEPS, precision="fp32"),
        checkpoint=dict(every=EVERY),
    )


def island_process(config: Any, phase: str, count: int, marker: Path) -> None:
    """A process that trains, and kills itself at the ``count``-th call (from 1) of that phase."""
    torch.set_num_threads(1)
    if phase:
        name, after = PHASES[phase]
        module_name, _, attribute = name.rpartition(".")
        module, calls = importlib.import_module(module_name), 0
        function = getattr(module, attribute)

        def killed(*arguments: Any, **keywords: Any) -> Any:
            nonlocal calls
            calls += 1
            result = function(*arguments, **keywords) if after or calls < count else None
            if calls == count:
                marker.write_text(phase)
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(module, attribute, killed)
    run_alone(config)


def start(folder: Path, phase: str = "", count: int = 0) -> None:
    """Run an island until its end, or until it is killed as asked: then this proves that it was, in that phase."""
    marker = folder.parent / "marker"
    marker.unlink(missing_ok=True)
    process = multiprocessing.get_context("forkserver").Process(target=island_process, args=(config_in(folder), phase, count, marker))
    process.start()
    process.join(60.0)
    if process.is_alive():
        process.kill()
        pytest.fail("the island did not end")
    if not phase:
        assert process.exitcode == 0
        return
    assert process.exitcode == -signal.SIGKILL and marker.read_text() == phase
    hidden = list((folder / "checkpoints").glob("*/.island-0.*"))
    if phase in ("write", "manifest"):  # the killed one is there in part, and nobody finds it
        assert hidden and not set(hidden) & set(files.find(folder / "checkpoints"))


def losses(folder: Path) -> dict[int, set[float]]:
    """By step: all that any of the processes recorded."""
    found: dict[int, set[float]] = {}
    for path in sorted((folder / "island-0").glob("metrics*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if row["kind"] == "step":
                found.setdefault(row["step"], set()).add(row["loss"])
    return found


def last_checkpoint(folder: Path) -> str:
    """Hash of all tensors at the end: model, optimizer, random generators."""
    newest = files.find(folder / "checkpoints")[0]
    manifest = files.verify(newest)
    assert manifest.step == STEPS and not list((folder / "checkpoints").glob("*/.*"))
    return manifest.files["__0_0.distcp"]["sha256"]


@pytest.fixture(scope="session")
def uninterrupted(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody killed; the pool has started the server that processes are forked from."""
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    start(folder)
    assert sorted(losses(folder)) == list(range(1, STEPS + 1))
    return folder


def check_kills(uninterrupted: Path, folder: Path, kills: list[tuple[str, int]]) -> None:
    for phase, count in kills:
        start(folder, phase, count)
    start(folder)
    assert losses(folder) == losses(uninterrupted)
    assert last_checkpoint(folder) == last_checkpoint(uninterrupted)


@pytest.mark.parametrize("kills", [[("step", 7), ("write", ITEMS + 40)], [("published", 2), ("resume", 30)]], ids=str)
def test_a_killed_run_is_the_run_that_nobody_killed(uninterrupted: Path, tmp_path: Path, kills: list[tuple[str, int]]) -> None:
    check_kills(uninterrupted, tmp_path / "run", kills)


def random_kills(seed: int) -> list[tuple[str, int]]:
    """One or two moments; each comes for certain, since a run writes two checkpoints at least."""
    draw = random.Random(seed)
    moments = dict(step=STEPS, write=2 * ITEMS, manifest=2, published=2)
    first = draw.choice([*moments, "resume"])
    if first == "resume":
        return [("published", draw.randint(1, 2)), ("resume", draw.randint(1, ITEMS))]
    return [(first, draw.randint(1, moments[first]))]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_random(uninterrupted: Path, tmp_path: Path, seed: int) -> None:
    check_kills(uninterrupted, tmp_path / "run", random_kills(seed))
