"""The weights in a run's checkpoints, read parameter by parameter, without a process group."""

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from diloco.config import RunConfig
from islands import plugins
from islands.checkpoint_files import BadCheckpoint, Manifest, find, step_of, verify
from islands.config import CheckpointSection, ModelSection
from islands.config_file import ConfigError, Section, load_config, parse_config
from islands.data.base import NUM_BYTES

Source = Literal["anchor", "own"]

#: Before a parameter's name: of what the islands last agreed on, and of what the island itself has.
_PREFIXES: dict[Source, str] = {"anchor": "outer.anchor.", "own": "model."}


class _Reader(dcp.FileSystemReader):
    """Unpickles the list of all tensors once, and not again for each of them."""

    @cached_property
    def metadata(self) -> Metadata:
        """Of the checkpoint."""
        return super().read_metadata()

    def read_metadata(self, *arguments: Any, **keywords: Any) -> Metadata:
        """Called by torch for every load."""
        return self.metadata


@dataclass(frozen=True)
class SavedWeights:
    """Weights in a checkpoint whose bytes are as they were written.

    Attributes:
        source: which of those it has.
        model: sizes; ``init_from`` is empty.
        seq_len: positions that the model was trained on.
        began_from: folder of Hugging Face that the run began from, and whose tokens it trained on, or None; it may be gone.
    """

    folder: Path
    source: Source
    step: int
    slot: int
    model: ModelSection
    seq_len: int
    began_from: Path | None

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters, with rows that padding added."""
        return {name: tuple(parameter.shape) for name, parameter in self.build().named_parameters()}

    def build(self) -> nn.Module:
        """The whole model, on the meta device."""
        with torch.device("meta"):
            return plugins.build("islands.models", self.model, self.seq_len)

    def read(self, name: str) -> Tensor:
        """A whole parameter, on the CPU, in the dtype that it was saved in.

        Raises:
            ConfigError: the checkpoint has none of that name and shape, or can't be read (any more).
        """
        key, wanted = _PREFIXES[self.source] + name, self.shapes[name]
        stored = self._metadata.get(key)
        if stored is None or tuple(stored.size) != wanted:
            found = f"{tuple(stored.size)}" if stored else "nothing"
            raise ConfigError(f"{self.folder}: has {found} for {key}, and the model of its configuration has {wanted}")
        tensors = {key: torch.empty(wanted, dtype=stored.properties.dtype)}
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # it says that there is no process group
            try:
                dcp.load(tensors, storage_reader=self._reader, no_dist=True)
            except CheckpointException as error:  # not an Exception, so nobody else would catch it
                raise ConfigError(self._unreadable(error)) from error
        return tensors[key]

    def _unreadable(self, error: CheckpointException) -> str:
        if not self.folder.exists():
            return f"{self.folder} was removed while it was being read: its run keeps only the newest. Do it again"
        reasons = ", ".join(f"{type(reason).__name__}: {reason}" for reason, _ in error.failures.values())
        return f"{self.folder} can't be read: {reasons}"

    @property
    def has_anchor(self) -> bool:
        """Whether the islands of the run ever agreed on anything."""
        return any(key.startswith(_PREFIXES["anchor"]) for key in self._metadata)

    @cached_property
    def _reader(self) -> _Reader:
        return _Reader(self.folder)

    @property
    def _metadata(self) -> dict[str, Any]:
        return self._reader.metadata.state_dict_metadata


def open_saved(
    run_dir: Path,
    source: Source | None = None,
    island: int | None = None,
    step: int | None = None,
    tell: Callable[[str], None] = print,
) -> SavedWeights:
    """Weights from the newest whole checkpoint of a run, of the island that is furthest on. Checkpoints that are damaged are told
    and passed over. The list of tensors in a checkpoint is a pickle: open only runs of people whom you trust.

    Args:
        source: None: the anchor, or what the island itself has where there is none.
        island, step: only checkpoints of these.

    Raises:
        ConfigError: there is no such checkpoint, or it has no anchor and that was asked for.
    """
    root = _checkpoints_of(run_dir)
    for folder in find(root, island):
        if step in (None, step_of(folder)):
            try:
                manifest = verify(folder)
            except BadCheckpoint as error:
                tell(f"passed over a checkpoint: {error}")
            else:
                return _open(folder, manifest, source, tell)
    present = find(root)
    wanted = "".join(f" of {what} {which}" for what, which in (("island", island), ("step", step)) if which is not None)
    there = f"; there are {', '.join(str(path.relative_to(root)) for path in present[:5])}" if present else ""
    raise ConfigError(
        f"RUN_DIR={run_dir}: there is no whole checkpoint{wanted} in {root}{there}. A run writes one every checkpoint.every "
        "steps, and one at its end"
    )


class _Where(Section):
    """The part of a run's configuration that tells where its checkpoints lie."""

    checkpoint: CheckpointSection = CheckpointSection()


def _checkpoints_of(run_dir: Path) -> Path:
    """In the run's folder, which may have been moved here; else where its configuration says."""
    if not run_dir.is_dir():
        raise ConfigError(f"RUN_DIR={run_dir}: no such folder. Give the folder of a run, such as runs/quickstart")
    inside, resolved = run_dir / "checkpoints", run_dir / "config.resolved.yaml"
    if inside.is_dir() or not resolved.exists():
        return inside
    where = load_config(_Where, resolved, ignore=RunConfig.model_fields.keys() - _Where.model_fields.keys())
    return Path(where.checkpoint.dir or inside)


def _open(folder: Path, manifest: Manifest, source: Source | None, tell: Callable[[str], None]) -> SavedWeights:
    raw, seq_len = manifest.config["model"], manifest.config["data"]["seq_len"]
    family = plugins.load("islands.models", raw["type"])
    model = parse_config(family.Config, {**raw, "init_from": ""}, source=f"model in {folder}")
    is_bytes = manifest.corpus.get("vocab_size") == NUM_BYTES  # whatever tokens the weights were made for
    began_from = Path(raw["init_from"]) if raw.get("init_from") and not is_bytes else None
    saved = SavedWeights(folder, source or "anchor", manifest.step, manifest.slot, model, seq_len, began_from)
    if saved.source == "own" or saved.has_anchor:
        return saved
    if source == "anchor":
        raise ConfigError(f"{folder} has no anchor, because its island trained alone. Take its own weights: --weights own")
    tell("the island trained alone and has no anchor: taking its own weights")
    return replace(saved, source="own")
