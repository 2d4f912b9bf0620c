"""Weights on disk for tests, made by hand: a folder of Hugging Face, and the checkpoints of a run."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from small import VOCAB, plain_model, small_config
from torch import Tensor

from diloco.config import RunConfig
from islands.checkpoint_files import FORMAT, Manifest, describe, publish, start_folder, write_manifest
from islands.models.llama import hugging_face_name, to_hugging_face

#: Keys of the small model that a folder tells; left out here, they come from it.
FROM_FOLDER = dict(vocab_size=0, hidden_size=0, num_layers=0, num_heads=0, num_kv_heads=0, intermediate_size=0)


def small_weights(seed: int = 5, **model: Any) -> tuple[RunConfig, dict[str, Tensor]]:
    """A configuration of the small model in fp32, and weights for it that differ from those of its own seed, norms included."""
    config = small_config(model=model, train=dict(precision="fp32"))
    generator = torch.Generator().manual_seed(seed)
    parameters = plain_model(config).named_parameters()
    return config, {name: torch.randn(parameter.shape, generator=generator) * 0.2 for name, parameter in parameters}


def write_folder(folder: Path, **model: Any) -> dict[str, Tensor]:
    """A folder of Hugging Face with weights for the small model. Returns them by our names."""
    config, weights = small_weights(**model)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hugging_face(config.model, config.data.seq_len)))
    save_file({hugging_face_name(name): weight for name, weight in weights.items()}, folder / "model.safetensors")
    return weights


def config_from(folder: Path, precision: str = "fp32", **model: Any) -> RunConfig:
    """The configuration of a run that begins from ``folder``."""
    keys = FROM_FOLDER | dict(init_from=str(folder)) | model
    return small_config(model=keys, train=dict(precision=precision))


def write_checkpoint(
    run_dir: Path,
    config: RunConfig,
    own: dict[str, Tensor],
    anchor: dict[str, Tensor] | None,
    step: int = 7,
    slot: int = 0,
    vocab: int = VOCAB,
) -> Path:
    """A checkpoint as islands write it, as far as weights are concerned. ``vocab``: of its text. Returns its folder."""
    tensors = {f"model.{name}": weight for name, weight in own.items()}
    tensors |= {f"outer.anchor.{name}": weight for name, weight in (anchor or {}).items()}
    folder = start_folder(run_dir / "checkpoints", step, slot)
    with warnings.catch_warnings(action="ignore"):
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    files = describe(sorted(folder.iterdir()))
    write_manifest(folder, Manifest(FORMAT, "0", step, slot, {}, config.model_dump(), "", {"vocab_size": vocab}, "", 1, {}, files))
    return publish(folder, slot)
