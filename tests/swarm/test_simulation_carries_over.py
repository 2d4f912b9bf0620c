"""What is simulated in one process is what real processes do over a network: the same anchors, bit for bit, in every round."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster

from diloco.run_files import read_rows

Rows = list[dict[str, Any]]

STREAMING = ["outer.fragments=2", "outer.overlap=2", "outer.merge_alpha=0.5"]
INT4 = ["outer.codec.type=int4", "outer.error_feedback=true"]

RECIPES: dict[str, list[str]] = {
    "none": [],
    "int4": INT4,
    "streaming": STREAMING,
    "eager": ["outer.overlap=eager", "outer.codec.type=statistical2"],
    "contiguous, adam": [*STREAMING, "outer.separate_embeddings=true", "outer.optimizer.type=adam", "outer.optimizer.lr=0.001"],
}


def both(folder: Path, islands: int, settings: list[str], steps: int) -> tuple[list[Rows], list[Rows]]:
    """Rows of each island of the same run: over hivemind, and simulated."""
    swarm = Cluster(folder, islands, [*settings, "exchange.peer_timeout=60"], steps=steps)  # a busy machine is no reason to leave one out
    simulated = [f"swarm.islands={islands}", "exchange.type=in_memory", f"run.dir={folder}/simulated", "exchange.peer_timeout=60"]
    process = subprocess.Popen(
        [sys.executable, "-m", "diloco", str(folder / "tiny.yaml"), *settings, *simulated],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        with swarm:
            swarm.wait_until(lambda: all(island.lives[-1].process.poll() == 0 for island in swarm.islands), timeout=280)
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, output
    return tuple(
        [read_rows(folder / run / f"island-{slot}" / "metrics.jsonl") for slot in range(islands)] for run in ("run", "simulated")
    )


def of(rows: Rows, kind: str, *keys: str) -> list[tuple]:
    return sorted(tuple(row[key] for key in keys) for row in rows if row["kind"] == kind)


def check(folder: Path, islands: int, settings: list[str], steps: int) -> None:
    real, simulated = both(folder, islands, settings, steps)
    for one, other in zip(real, simulated, strict=True):
        keys = ("fragment", "round", "step", "landed", "outcome", "members", "weight", "digest", "pseudo_gradient_norm", "encoded_bytes")
        assert of(one, "round", *keys) == of(other, "round", *keys)
        assert of(one, "step", "step", "loss", "lr", "position") == of(other, "step", "step", "loss", "lr", "position")
        assert of(one, "eval", "step", "loss") == of(other, "eval", "step", "loss")
        cosines = [[value for *_, value in of(rows, "round", "fragment", "round", "cosine")] for rows in (one, other)]
        assert cosines[0] == pytest.approx(cosines[1], abs=1e-6)
    digests = of(real[0], "round", "digest")
    assert len(set(digests)) == len(digests) >= steps // 5  # rounds took place, and each moved an anchor


@pytest.mark.timeout(400)
def test_a_simulation_has_the_anchors_of_a_real_swarm_bit_for_bit(tmp_path: Path) -> None:
    check(tmp_path, 2, [*STREAMING, *INT4], steps=10)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recipe", RECIPES)
def test_so_it_has_with_three_islands_whatever_the_recipe(tmp_path: Path, recipe: str) -> None:
    check(tmp_path, 3, RECIPES[recipe], steps=20)
