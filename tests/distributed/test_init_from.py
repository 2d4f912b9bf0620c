"""Ranks read their parts of the weights that a model begins from, on any grid, and nothing else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_pool import RankError, RankPool
from safetensors.torch import load_file
from small import small_config, small_corpus, whole_parameters
from torch import Tensor
from weight_folders import FROM_FOLDER, write_folder

from diloco.export import export
from diloco.saved_weights import open_saved
from islands.agreement import check_agreement
from islands.checkpoint import Checkpointer
from islands.huggingface import Weights
from islands.island import build_island
from islands.models.llama import hugging_face_name
from islands.process import Process
from islands.run import open_metrics
from islands.train_loop import train

#: Ranks, `parallel`, and whether embeddings are tied.
GRIDS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "zero3": (2, dict(data_parallel_strategy="zero3"), False),
    "zero3 on 3 ranks, tied": (3, dict(data_parallel_strategy="zero3"), True),
    "tp2": (2, dict(tensor_parallel_size=2), False),
    "zero3 x tp2": (4, dict(data_parallel_strategy="zero3", tensor_parallel_size=2), True),
    "pipeline, tied": (2, dict(pipeline_parallel_size=2), True),
}


def begun(process: Process, folder: str, parallel: dict[str, Any]) -> tuple[dict[str, Tensor], int]:
    """The whole parameters, and how many elements this rank read."""
    elements = 0
    read = Weights.read

    def counting(weights: Weights, name: str, offset: tuple[int, ...], out: Tensor) -> None:
        nonlocal elements
        elements += out.numel()
        read(weights, name, offset, out)

    Weights.read = counting
    try:
        model = FROM_FOLDER | dict(init_from=folder, pad_vocab_to_multiple_of=2)
        train = dict(precision="fp32", global_batch_size=12, micro_batch_size=2)
        config = small_config(model=model, parallel=parallel, train=train)
        check_agreement(config, process)
        return whole_parameters(build_island(config, process, small_corpus())), elements
    finally:
        Weights.read = read


@pytest.mark.parametrize("grid", GRIDS)
def test_every_grid_begins_with_the_weights_of_the_folder(ranks: RankPool, tmp_path: Path, grid: str) -> None:
    world_size, parallel, tied = GRIDS[grid]
    weights = write_folder(tmp_path, tied_embeddings=tied)
    results = ranks.run(begun, world_size, str(tmp_path), parallel)
    for parameters, _ in results:
        assert parameters.keys() == weights.keys()
        assert all(torch.equal(parameters[name][: len(weights[name])], weights[name]) for name in weights)
    numel = sum(weight.numel() for weight in weights.values())
    assert all(elements < 0.75 * numel for _, elements in results)  # shares, and what all ranks have whole


def trained(process: Process, folder: str, run_dir: str) -> dict[str, Tensor]:
    """A few steps and a checkpoint; the whole parameters."""
    model = FROM_FOLDER | dict(init_from=folder, pad_vocab_to_multiple_of=2)
    config = small_config(run=dict(dir=run_dir), model=model, train=dict(precision="fp32", steps=3, global_batch_size=4))
    island = build_island(config, process, small_corpus())
    metrics = open_metrics(island, slot=0)
    with Checkpointer(island, metrics) as checkpointer:
        train(island, island.batches(), metrics, checkpointer=checkpointer)
    metrics.close()
    return whole_parameters(island)


def test_in_then_trained_then_out(ranks: RankPool, tmp_path: Path) -> None:
    weights = write_folder(tmp_path / "in", tied_embeddings=True)
    parameters = ranks.run(trained, 2, str(tmp_path / "in"), str(tmp_path / "run"))[0]
    saved = open_saved(tmp_path / "run")
    assert (saved.source, saved.step, saved.began_from) == ("own", 3, tmp_path / "in")
    found = load_file(export(saved, tmp_path / "out", shard_bytes=10**9) / "model.safetensors")
    assert found.keys() == {hugging_face_name(name) for name in weights}
    for name, weight in weights.items():
        assert torch.equal(found[hugging_face_name(name)], parameters[name][: len(weight)])
        assert not torch.equal(found[hugging_face_name(name)], weight)


def unlike(process: Process, folders: list[str]) -> None:
    model = FROM_FOLDER | dict(init_from=folders[process.rank])
    check_agreement(small_config(model=model), process)


def test_paths_may_differ_and_weights_may_not(ranks: RankPool, tmp_path: Path) -> None:
    for name, seed in (("a", 5), ("copy", 5), ("other", 6)):
        write_folder(tmp_path / name, seed=seed)
    ranks.run(unlike, 2, [str(tmp_path / "a"), str(tmp_path / "copy")])
    with pytest.raises(RankError, match=r"rank 1: the weights in model.init_from is "):
        ranks.run(unlike, 2, [str(tmp_path / "a"), str(tmp_path / "other")])
