"""Weights in folders in the form of Hugging Face: ``config.json`` and ``*.safetensors``, read by parts of parameters.

Nothing in them is run or unpickled: a folder made by strangers can at worst be refused, or hold poor weights.
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Callable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from islands import plugins
from islands.config import ModelSection
from islands.config_file import ConfigError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

#: What can be read into any dtype of parameters; others are quantized, and mean nothing without their scales.
_FLOATS = ("F64", "F32", "F16", "BF16")
#: Older files hold it, one a layer; what it is follows from config.json.
_BUFFER = "rotary_emb.inv_freq"
_MOST_NAMED = 5


FromHuggingFace = Callable[[dict[str, Any]], dict[str, Any]]


def fill_keys(raw: dict[str, Any], from_hugging_face: FromHuggingFace) -> dict[str, Any]:
    """The section ``model`` as given, and beside it the keys that only the folder ``init_from`` tells.

    Args:
        from_hugging_face: gives the family's keys for the content of a ``config.json``.

    Raises:
        ConfigError: the folder can't be read, or is of a model that the family can't be.
    """
    folder = Path(raw["init_from"]).expanduser().absolute()
    given = {key: value for key, value in raw.items() if not _is_left_out(value)}
    return _keys_of(folder, from_hugging_face) | given | {"init_from": str(folder)}


def refuse_differences(section: ModelSection, from_hugging_face: FromHuggingFace) -> None:
    """Raises ConfigError: a key of ``section`` is not what its folder ``init_from`` tells."""
    for key, value in _keys_of(Path(section.init_from), from_hugging_face).items():
        if getattr(section, key) != value:
            raise ConfigError(
                f"model.{key}={getattr(section, key)} is not what model.init_from={section.init_from} has, {value}; leave the key out"
            )


def _is_left_out(value: Any) -> bool:
    return value is None or value == {} or (type(value) is int and value == 0)


def _keys_of(folder: Path, from_hugging_face: FromHuggingFace) -> dict[str, Any]:
    raw = _read_object(folder, CONFIG_FILE)
    try:
        return from_hugging_face(raw)
    except ConfigError as error:
        raise ConfigError(f"model.init_from={folder}: {error}") from None


def stored_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes that files have for the parameters of the whole ``model``, by our names: without rows that padding added."""
    return {
        name: (model.rows_in_use.get(name, parameter.shape[0]), *parameter.shape[1:])
        for name, parameter in model.named_parameters()
    }


def open_weights(section: ModelSection, model: nn.Module) -> "Weights | None":
    """What the parameters of the whole ``model`` begin with; None without ``model.init_from``.

    Args:
        model: may be on the meta device.

    Raises:
        ConfigError: a tensor is missing, superfluous or of another shape; or the files can't be read.
    """
    if not section.init_from:
        return None
    return Weights(Path(section.init_from), plugins.load("islands.models", section.type).hugging_face_name, model)


class Weights:
    """The tensors of a folder, as the parameters of a model. Files are mapped, and only what is asked for is read.

    Args:
        name_in_files: gives the name that Hugging Face has for a parameter.
        model: whole.

    Raises:
        ConfigError: see :func:`open_weights`.
    """

    def __init__(self, folder: Path, name_in_files: Callable[[str], str], model: nn.Module) -> None:
        self._shapes, self._name_in_files = stored_shapes(model), name_in_files
        self._padded = {name for name, parameter in model.named_parameters() if tuple(parameter.shape) != self._shapes[name]}
        stored = _slices(folder)
        copies = {name_in_files(name) for name in model.aliases}
        self._check(folder, {name: each for name, each in stored.items() if name not in copies and not name.endswith(_BUFFER)})
        self._slices = {name: stored[name_in_files(name)] for name in self._shapes}

    def cover(self, name: str) -> bool:
        """Whether they fill the whole parameter; else padding has added rows to it."""
        return name not in self._padded

    def read(self, name: str, offset: tuple[int, ...], out: Tensor) -> None:
        """Fill ``out``, the part of parameter ``name`` that begins at ``offset``, as far as there is something stored for it."""
        ends = [min(start + size, whole) for start, size, whole in zip(offset, out.shape, self._shapes[name], strict=True)]
        box = tuple(slice(start, end) for start, end in zip(offset, ends, strict=True))
        if all(part.start < part.stop for part in box):
            found = self._slices[name][box]
            out[tuple(map(slice, found.shape))].copy_(found)

    def fingerprint(self) -> str:
        """SHA-256 (hex) of names, shapes, and the first and last rows of all tensors: equal where the weights are, however they
        are divided into files; changed values in between stay unseen."""
        digest = hashlib.sha256()
        for name, stored in sorted(self._slices.items()):
            digest.update(f"{name} {stored.get_dtype()} {stored.get_shape()}".encode())
            for rows in (stored[:1], stored[-1:]) if len(self._shapes[name]) > 1 else (stored[:],):
                digest.update(rows.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _check(self, folder: Path, stored: dict[str, Any]) -> None:
        wanted = {self._name_in_files(name): shape for name, shape in self._shapes.items()}
        problems = {
            "has no": [name for name in wanted if name not in stored],
            "has tensors that the model doesn't have:": [name for name in stored if name not in wanted],
            "has other shapes than its config.json tells:": [
                f"{name} is {tuple(stored[name].get_shape())} instead of {shape}"
                for name, shape in wanted.items()
                if name in stored and tuple(stored[name].get_shape()) != shape
            ],
            "has tensors that are not floating-point numbers of 16 bits or more:": [
                f"{name} is {stored[name].get_dtype()}"
                for name in wanted
                if name in stored and stored[name].get_dtype() not in _FLOATS
            ],
        }
        told = [f"{problem} {_some(names)}" for problem, names in problems.items() if names]
        if told:
            raise ConfigError(
                f"model.init_from={folder} " + "; and it ".join(told) + ". Give a folder whose weights belong to its config.json"
            )


def _slices(folder: Path) -> dict[str, Any]:
    """The tensors of all files of weights in ``folder``, by name, none of them read yet."""
    slices: dict[str, Any] = {}
    for file, names in _files(folder).items():
        try:
            opened = safe_open(folder / file, framework="pt")
            present = set(opened.keys())
            missing = sorted(names - present)
            if missing:
                raise ConfigError(f"model.init_from={folder}: {INDEX_FILE} says that {file} has {_some(missing)}, and it has not")
            slices |= {name: opened.get_slice(name) for name in sorted(names or present)}
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model.init_from={folder}: {file} can't be read: {error}. Copy or download it again") from error
    return slices


def _files(folder: Path) -> dict[str, set[str]]:
    """Files of weights, and the names that the index promises in each; without an index none."""
    if (folder / INDEX_FILE).exists():
        places = _read_object(folder, INDEX_FILE).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(file, str) and Path(file).name == file for file in places.values()):
            raise ConfigError(f"model.init_from={folder}: {INDEX_FILE} has no weight_map of names to files beside it")
        files: dict[str, set[str]] = {}
        for name, file in places.items():
            files.setdefault(file, set()).add(name)
        return files
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if WEIGHTS_FILE in found or len(found) == 1:
        return {WEIGHTS_FILE if WEIGHTS_FILE in found else found[0]: set()}
    if found:
        raise ConfigError(f"model.init_from={folder} has {_some(found)} and no {INDEX_FILE} that tells which to read")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        raise ConfigError(
            f"model.init_from={folder} has {_some(pickled)} and no safetensors. Such files are pickles, which can run code when they "
            "are read, so they are not. If you trust their origin, convert them: "
            f"AutoModelForCausalLM.from_pretrained({str(folder)!r}).save_pretrained('converted') with transformers"
        )
    raise ConfigError(f"model.init_from={folder} has no {WEIGHTS_FILE}; give a folder that has config.json and weights")


def _read_object(folder: Path, file: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"model.init_from={folder}: {file} can't be read: {error.strerror}. Give a folder with config.json and *.safetensors"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model.init_from={folder}: {file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.init_from={folder}: {file} should hold an object with keys, and holds {type(found).__name__}")
    return found


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
