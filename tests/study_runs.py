"""Folders of runs as islands would have left them, with rows from known vectors: for the tests of reports."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from small import small_config
from torch import Tensor

from islands.config import OUTER_SECTIONS
from islands.config_file import dump_config
from islands.island import num_parameters

STEPS, PARAMETER_BITS = 20, 32


def pseudo_gradients(islands: int, seed: int) -> Tensor:
    """(islands, 50): a common direction and what is each island's own."""
    generator = torch.Generator().manual_seed(seed)
    common, own = (torch.randn(count, 50, generator=generator, dtype=torch.float64) for count in (1, islands))
    return common + own


def write_run(folder: Path, islands: int = 2, sync_every: int = 5, loss: float = 3.0, seed: int = 0, outer: bool = True) -> Path:
    """A run that came to its end; without ``outer`` a data-parallel one, of one island."""
    config = small_config(
        run=dict(name=folder.name, dir=str(folder), seed=seed),
        train=dict(steps=STEPS),
        outer=dict(sync_every=sync_every),
        swarm=dict(islands=islands),
    )
    folder.mkdir(parents=True)
    text = dump_config(config)
    if not outer:
        text = text[: min(text.index(f"\n{section}:") for section in OUTER_SECTIONS) + 1]
    (folder / "config.resolved.yaml").write_text(text)
    parameters = num_parameters(config)
    for island in range(islands if outer else 1):
        rows = [dict(kind="event", time=100.0, what="start", detail=dict(parameters=parameters, global_batch_size=8))]
        rows.append(dict(kind="eval", time=100.0, step=0, loss=5.5))
        for step in range(1, STEPS + 1):
            timing = dict(step_seconds=0.05, stall_seconds=0.0, tokens=128, time=100.0 + step)
            rows.append(dict(kind="step", step=step, lr_step=step, loss=loss + math.exp(-step) + island / 100, **timing))
            if outer and step % sync_every == 0:
                rows.append(_round(step, step // sync_every, island, islands, parameters))
        rows.append(dict(kind="eval", time=121.0, step=STEPS, loss=loss + island / 100))
        rows.append(dict(kind="event", time=121.0, what="end", detail="all steps done"))
        (folder / f"island-{island}").mkdir()
        lines = "".join(json.dumps({"island": island, **row}) + "\n" for row in rows)
        (folder / f"island-{island}" / "metrics.jsonl").write_text(lines)
    return folder


def _round(step: int, number: int, island: int, islands: int, parameters: int) -> dict[str, Any]:
    vectors = pseudo_gradients(islands, number)
    mean = vectors.mean(0)
    return dict(
        kind="round",
        time=100.0 + step,
        round=number,
        fragment=0,
        fragments=1,
        step=step,
        members=list(range(islands)),
        outcome="committed",
        bytes_sent=0,
        bytes_received=0,
        encoded_bytes=parameters * PARAMETER_BITS // 8,
        bits_per_parameter=float(PARAMETER_BITS),
        exchange_seconds=0.1,
        encode_seconds=0.01,
        decode_seconds=0.02,
        step_seconds=0.005,
        gather_seconds=0.001,
        scatter_seconds=0.001,
        stall_seconds=0.0,
        pseudo_gradient_norm=float(vectors[island].norm()),
        cosine=float(torch.cosine_similarity(vectors[island], mean, dim=0)),
        digest="same",
    )
