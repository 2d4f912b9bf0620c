"""The two configurations of one cluster: one key tells them apart, and by torchrun both begin as one process does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from small import plain_training

from diloco.config import RunConfig
from islands.config_file import load_config
from islands.data.base import Sampler, num_samples, windows
from islands.island import load_corpus
from islands.learning_rate import learning_rate

EVERY_STEP, EVERY_K = (Path(__file__).parents[2] / "configs" / f"{name}.yaml" for name in ("hybrid_shard", "hybrid_shard_every_k"))
SHORT = ["train.steps=3", "optimizer.warmup_steps=1", "train.eval_sequences=4", "train.resume=never", "run.device=cpu"]
TOLERANCE = 1e-5  # fp32


def test_the_files_differ_in_one_key_and_the_name() -> None:
    every_step, every_k = (yaml.safe_load(path.read_text()) for path in (EVERY_STEP, EVERY_K))
    assert every_step["outer"].pop("sync_every") == 1 and every_k["outer"].pop("sync_every") > 1
    assert every_step["run"].pop("name") != every_k["run"].pop("name")
    assert every_step == every_k


def losses(config: Path, folder: Path, *overrides: str) -> list[list[float]]:
    """Of the steps of each island, as a user runs them."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "-m", "diloco"]
    command = [sys.executable, *torchrun, str(config), *SHORT, f"run.dir={folder}", *overrides]
    done = subprocess.run(command, env=os.environ | dict(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    found = []
    for path in sorted(folder.glob("island-*/metrics.jsonl")):
        rows = map(json.loads, path.read_text().splitlines())
        found.append([row["loss"] for row in rows if row["kind"] == "step"])
    return found


def in_one_process() -> list[float]:
    """The batches of both replicas joined, in a plain loop."""
    config = load_config(RunConfig, EVERY_STEP, SHORT)
    corpus, train, islands = load_corpus(config), config.train, config.swarm.islands
    order, size = Sampler(num_samples(corpus.train, config.data.seq_len), config.run.seed), islands * train.global_batch_size
    steps = [order(torch.arange(size * step, size * (step + 1)).numpy()) for step in range(train.steps)]
    rates = [learning_rate(config.optimizer, step, train.steps, train.global_batch_size) for step in range(train.steps)]
    return plain_training(config, [windows(corpus.train, samples, config.data.seq_len) for samples in steps], rates)["losses"]


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_both_begin_as_one_process_and_the_key_makes_one_the_other(tmp_path: Path) -> None:
    expected, (every_step,) = in_one_process(), losses(EVERY_STEP, tmp_path / "every step")
    assert every_step[0] == pytest.approx(expected[0], abs=TOLERANCE)
    assert every_step == pytest.approx(expected, abs=10 * TOLERANCE)  # rounding has been through the optimizer
    islands = losses(EVERY_K, tmp_path / "every k")
    assert sum(island[0] for island in islands) / 2 == pytest.approx(every_step[0], abs=TOLERANCE)
    (switched,) = losses(EVERY_K, tmp_path / "switched", "outer.sync_every=1")
    assert switched == pytest.approx(every_step, abs=TOLERANCE)
