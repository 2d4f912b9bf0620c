"""Go on from a checkpoint: which one, whether it fits, and its tensors back in their places.

The metadata of torch.distributed.checkpoint is a pickle, which can run any program when it is read. So resume only from folders whose
writers you trust. Checksums are compared before anything is unpickled; that finds damage, not malice.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from islands import checkpoint_files as files
from islands.checkpoint_files import BadCheckpoint, Manifest
from islands.checkpoint_state import random_states, set_random_states
from islands.config import IslandConfig
from islands.config_changes import Change, changes
from islands.config_file import ConfigError
from islands.data.base import Corpus, fingerprint
from islands.fragments import schema_hash, schema_of
from islands.initialize import named_parameters
from islands.island import Island, meta_model
from islands.progress import Progress

_AFRESH = "to start afresh, set train.resume=never, and another run.dir if this run is to be kept"


@dataclass(frozen=True)
class Chosen:
    """The checkpoint to go on from; whole, and of the same model.

    Attributes:
        changes: keys of the configuration that have another value now, and may.
    """

    folder: Path
    manifest: Manifest
    changes: list[Change]

    @property
    def event(self) -> dict[str, object]:
        """Detail of the event ``resumed``."""
        return dict(step=self.manifest.step, folder=str(self.folder), changes=[str(change) for change in self.changes])


def choose(
    config: IslandConfig, slot: int | None, told: Callable[[str], None], restarted: bool = False, at_most: int | None = None
) -> Chosen | None:
    """The checkpoint that ``train.resume`` leads to; None to start afresh. It reads every byte; on one rank, before any collective.

    Args:
        slot: of the island; None, where it does not know that yet: all checkpoints there count as its own.
        told: takes a line for each thing that a person should know: damaged checkpoints, and what is resumed.
        restarted: torchrun has started the ranks again; what they have written themselves comes first, whatever ``train.resume`` says.
        at_most: only checkpoints up to this step.

    Raises:
        ConfigError: there is no whole checkpoint at the path, or it does not fit the configuration.
    """
    resume, root = config.train.resume, config.checkpoint_root
    candidates = files.find(root, slot) if resume == "auto" or restarted else []
    if resume not in ("auto", "never"):
        candidates += _below(Path(resume).expanduser(), slot)
    found = _newest_whole([each for each in candidates if at_most is None or files.step_of(each) <= at_most], told)
    if found is None and resume not in ("auto", "never") and at_most is None:
        whose = "" if slot is None else f" of island {slot}"
        raise ConfigError(
            f"train.resume={resume}: there is no whole checkpoint{whose} there; give a folder island-<slot>, one step-<number>, one that "
            "holds such folders, or a run.dir; or auto, or never"
        )
    chosen = found and _checked(config, *found)
    if chosen:
        what = "".join(f"\n  {change}" for change in chosen.changes)
        told(f"resuming from {chosen.folder}" + (f"; changed since:{what}" if what else ""))
    return chosen


def _below(path: Path, slot: int | None) -> list[Path]:
    """The checkpoints that ``path`` can mean, newest first."""
    if (path / files.MANIFEST).exists():
        return [path]
    step = files.find(path.parent, slot)  # path may be the folder of one step
    return [each for each in step if each.parent == path] or files.find(path, slot) or files.find(path / "checkpoints", slot)


def _newest_whole(candidates: list[Path], told: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    problems: list[str] = []
    found = None
    for folder in candidates:
        try:
            found = folder, files.verify(folder)
            break
        except BadCheckpoint as problem:
            problems.append(str(problem))
    instead = f"taking {found[0]} instead" if found else "and there is no other checkpoint"
    for problem in problems:
        told(f"skipped a checkpoint: {problem}; {instead}")
    return found


def _checked(config: IslandConfig, folder: Path, manifest: Manifest) -> Chosen:
    different = changes(manifest.config, json.loads(config.model_dump_json()))
    if harmful := [f"  {change}: {change.harm}" for change in different if change.harm]:
        told = "\n".join([f"{folder} can't be resumed with what has changed since:", *harmful])
        raise ConfigError(f"{told}\nTo go on, set these keys back; {_AFRESH}")
    if manifest.schema != schema_hash(schema_of(meta_model(config))):
        raise ConfigError(f"{folder} can't be resumed: its model has other parameters than the one configured. Else {_AFRESH}")
    return Chosen(folder, manifest, different)


def leave_behind(
    config: IslandConfig,
    slot: int | None,
    chosen: Chosen | None,
    told: Callable[[str], None],
    restarted: bool = False,
    together: bool = False,
) -> None:
    """Called on one rank before training: an island that was told to start afresh, or from a path, sets aside what later checkpoints it
    has in ``config.checkpoint_root``; else the next start would go on from them. Arguments as for :func:`choose`.

    Args:
        together: so does one of several that share a job, whatever it was told, as others have no such checkpoints.
    """
    root = config.checkpoint_root
    if not together and (config.train.resume == "auto" or restarted):
        return
    is_own = chosen is not None and chosen.folder.resolve().is_relative_to(root.resolve())
    try:
        for path in files.set_aside(root, slot, after=chosen.manifest.step if is_own else -1):
            told(f"set aside a checkpoint of an earlier run: it is now {path}")
    except OSError as error:  # then checkpoints of this run will fail too, and say so
        told(f"checkpoints of an earlier run in {root} can't be set aside: {error}")


def check_corpus(chosen: Chosen, corpus: Corpus) -> None:
    """Whether positions in the checkpoint mean the same text here.

    Raises:
        ConfigError: they don't.
    """
    before, now = chosen.manifest.corpus, fingerprint(corpus)
    if before != now:
        was, has = (f"{each['train_tokens']} tokens to train on and {each['held_out_tokens']} held out" for each in (before, now))
        other = f"{was} there, {has} here" if was != has else f"as many tokens ({was}), but others"
        raise ConfigError(
            f"{chosen.folder} can't be resumed: the text is another one ({other}), and the data position means nothing in it. Give the "
            f"same text in data.paths; {_AFRESH}"
        )


def stored_names(chosen: Chosen) -> set[str]:
    """Keys of all tensors in the checkpoint."""
    return set(_metadata(chosen).state_dict_metadata)


def load(island: Island, chosen: Chosen, extra: dict[str, Tensor] | None = None) -> Progress:
    """Read the checkpoint into the island, whatever grid wrote it; called on all ranks alike.

    Args:
        extra: key -> whole tensor on the CPU to read into; keys that are not in the checkpoint are an error. On any ranks.

    Returns:
        Where the island stands in the run.

    Raises:
        ConfigError: the checkpoint is of another text.
    """
    check_corpus(chosen, island.corpus)
    stored = _metadata(chosen).state_dict_metadata
    parameters = named_parameters(island.model.parts)
    wanted = {f"model.{name}": parameter.detach() for name, parameter in parameters.items()}
    state: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for key, entry in stored.items():
        section, _, rest = key.partition(".")
        name, _, what = rest.rpartition(".")
        if section == "optimizer" and name in parameters:
            wanted[key] = state[name][what] = _empty(entry, parameters[name])
    generators = {key: now for key, now in random_states(island.process).items() if key in stored}
    alone, reader = island.process.world_size == 1, dcp.FileSystemReader(chosen.folder)
    try:
        dcp.load(wanted | generators | (extra or {}), storage_reader=reader, process_group=island.process.group, no_dist=alone)
    except CheckpointException as error:  # not an Exception, so most would not catch it
        raise RuntimeError(f"{chosen.folder} can't be read: {error}") from error
    for name, values in state.items():
        if values:
            island.optimizer.state[parameters[name]] = values
    set_random_states(island.process, generators)
    return Progress(**chosen.manifest.progress)


def _empty(entry: TensorStorageMetadata, parameter: Tensor) -> Tensor:
    """Room for a tensor of optimizer state: cut up like its parameter where it has that shape, else whole on every rank."""
    if entry.size == parameter.shape:
        return torch.zeros_like(parameter.detach(), dtype=entry.properties.dtype)
    return torch.zeros(entry.size, dtype=entry.properties.dtype)


def _metadata(chosen: Chosen) -> Metadata:
    return dcp.FileSystemReader(chosen.folder).read_metadata()
