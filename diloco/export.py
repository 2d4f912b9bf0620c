"""Write the weights of a run as a folder of Hugging Face: ``config.json``, safetensors, and the tokenizer where there is one."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Iterator, Literal

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from diloco.saved_weights import SavedWeights
from islands import plugins
from islands.config_file import ConfigError
from islands.huggingface import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, stored_shapes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Dtype = Literal["fp32", "bf16", "fp16"]

#: Copied from the folder that a run began from: its tokens are those of the run.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export(saved: SavedWeights, target: Path, shard_bytes: int, dtype: Dtype = "fp32") -> Path:
    """Write ``target``, which is there whole or not at all. At most one shard is in memory, and one parameter beside it.

    Args:
        shard_bytes: most bytes of tensors in a file, unless a single one is larger.

    Raises:
        ConfigError: ``target`` exists or can't be written, or the checkpoint lacks a parameter.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already, and stays as it is. Name another folder with --out, or remove it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
            made = Path(scratch) / target.name
            made.mkdir()  # with the rights that the user's other folders have
            _write_config(made, saved, dtype)
            _write_weights(made, saved, shard_bytes, DTYPES[dtype])
            for file in tokenizer_files(saved):
                shutil.copyfile(file, made / file.name)
            made.rename(target)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{target} can't be written: {error}. Name another folder with --out") from error
    return target


def tokenizer_files(saved: SavedWeights) -> list[Path]:
    """Those in the folder that the run began from, if it is there still."""
    if saved.began_from is None:
        return []
    return [saved.began_from / name for name in TOKENIZER_FILES if (saved.began_from / name).is_file()]


def print_written(saved: SavedWeights, target: Path) -> None:
    """What was written, and how to load it."""
    size = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    numel = sum(torch.Size(shape).numel() for shape in stored_shapes(saved.build()).values())
    origin = "the anchor" if saved.source == "anchor" else f"island {saved.slot}'s own weights"
    print(f"wrote {target}: {origin} of step {saved.step}, {numel:,} parameters, {size / 1e6:,.1f} MB")
    print(f"load it: transformers.AutoModelForCausalLM.from_pretrained({str(target)!r})")
    if saved.began_from and not tokenizer_files(saved):
        print(f"without a tokenizer: there is none in model.init_from={saved.began_from} (any more)")
    elif not saved.began_from:
        print("tokens are bytes: input_ids = torch.tensor([list('some text'.encode())])")


def _write_config(folder: Path, saved: SavedWeights, dtype: Dtype) -> None:
    family = plugins.load("islands.models", saved.model.type)
    content = family.to_hugging_face(saved.model, saved.seq_len)
    content["torch_dtype"] = str(DTYPES[dtype]).removeprefix("torch.")
    if saved.began_from and (saved.began_from / CONFIG_FILE).is_file():
        theirs = json.loads((saved.began_from / CONFIG_FILE).read_text(encoding="utf-8"))
        content |= {key: theirs[key] for key in _TOKEN_IDS if key in theirs}
    _write_json(folder / CONFIG_FILE, content)


def _write_weights(folder: Path, saved: SavedWeights, shard_bytes: int, dtype: torch.dtype) -> None:
    shapes = stored_shapes(saved.build())
    name_in_files = plugins.load("islands.models", saved.model.type).hugging_face_name
    shards = list(_shards({name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}, shard_bytes))
    places: dict[str, str] = {}
    with Progress(console=Console(stderr=True), transient=True, disable=not Console(stderr=True).is_terminal) as progress:
        bar = progress.add_task("exporting", total=len(shapes))
        for number, names in enumerate(shards, start=1):
            file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors: dict[str, Tensor] = {}
            for name in names:
                tensors[name_in_files(name)] = _without_padding(saved.read(name), shapes[name][0]).to(dtype)
                progress.advance(bar)
            save_file(tensors, folder / file, metadata={"format": "pt"})
            shutil.copymode(folder / CONFIG_FILE, folder / file)  # the library leaves it readable by its owner alone
            places |= dict.fromkeys(tensors, file)
            del tensors  # before the next shard is read
    if len(shards) > 1:
        total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": places})


def _without_padding(whole: Tensor, rows: int) -> Tensor:
    return whole if len(whole) == rows else whole[:rows].clone()


def _shards(sizes: dict[str, int], most: int) -> Iterator[list[str]]:
    """Names in order, in groups of at most ``most`` bytes; a larger one is alone."""
    names: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if names and filled + size > most:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
