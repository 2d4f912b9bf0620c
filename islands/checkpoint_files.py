"""Checkpoints as files: where they lie, what must be in them, which are whole and which may go.

``<root>/step-<8 digits>/island-<slot>/`` holds the files of torch.distributed.checkpoint and ``manifest.json``, which names them with
their sizes and SHA-256. A folder is written under a hidden name beside that, put on disk, and renamed: a visible one is whole, or was
damaged later, and :func:`verify` tells which. ``.metadata`` is a pickle, which can run anything: load checkpoints that you trust, and
only after :func:`verify`, so that at least it is the file which was written.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Sequence

#: Grows when older programs could not read, or would misread, what is written.
FORMAT = 1
MANIFEST = "manifest.json"

_HASHING_THREADS = 4
_STEP = re.compile(r"step-(\d{8,})")
_ISLAND = re.compile(r"island-(\d+)")
_REPLACED = re.compile(r"\.island-(\d+)\.replaced")


class BadCheckpoint(Exception):
    """A folder is not a whole checkpoint that this program can read. The message says what is wrong with it."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
        format: see ``FORMAT``.
        version: of the project that wrote it.
        progress: fields of :class:`~islands.train_loop.Progress`.
        config: resolved.
        schema: hash of the model's parameters, as in :func:`~islands.fragments.schema_hash`.
        corpus: what the text was, as :func:`~islands.data.base.fingerprint` tells.
        grid, world_size: of the ranks that wrote it; others can read it too.
        facts: of the :class:`~islands.checkpoint_part.CheckpointPart`; empty where there was none.
        files: name -> ``{"bytes": size, "sha256": hex}``.
    """

    format: int
    version: str
    step: int
    slot: int
    progress: dict[str, Any]
    config: dict[str, Any]
    schema: str
    corpus: dict[str, Any]
    grid: str
    world_size: int
    facts: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(file["bytes"] for file in self.files.values())


def folder_of(root: Path, step: int, slot: int) -> Path:
    """Where the checkpoint of an island lies."""
    return root / f"step-{step:08d}" / f"island-{slot}"


def find(root: Path, slot: int | None = None) -> list[Path]:
    """Checkpoints below ``root``, newest step first, whole or not; of all islands if ``slot`` is None."""
    found = [(step, island, path) for step in _steps(root) for island, path in _islands(step) if slot in (None, island)]
    return [path for _, _, path in sorted(found, key=lambda each: (-step_of(each[2]), each[1]))]


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's parent folder."""
    return int(_STEP.fullmatch(checkpoint.parent.name)[1])


def _steps(root: Path) -> list[Path]:
    return [path for path in _listed(root) if _STEP.fullmatch(path.name)]


def _islands(step: Path) -> list[tuple[int, Path]]:
    """Slot and folder of each checkpoint of one step. One that is being replaced stands in until the new one is there."""
    names = [path.name for path in _listed(step)]
    hidden = {int(match[1]): step / name for name in names if (match := _REPLACED.fullmatch(name))}
    visible = {int(match[1]): step / name for name in names if (match := _ISLAND.fullmatch(name))}
    return sorted((hidden | visible).items())


def _listed(folder: Path) -> list[Path]:
    """What lies in ``folder``; nothing, where that is no folder (or is one no more: islands share the folder of a step)."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


# -- write -------------------------------------------------------------------------------------------------------------


def start_folder(root: Path, step: int, slot: int) -> Path:
    """A new hidden folder to write the checkpoint into. Raises OSError where that can't be."""
    final = folder_of(root, step, slot)
    for attempt in (1, 2, 3):
        final.parent.mkdir(parents=True, exist_ok=True)
        hidden = final.with_name(f".island-{slot}.{uuid.uuid4().hex[:8]}")
        try:
            hidden.mkdir()
            return hidden
        except FileNotFoundError:  # another island has just removed the empty folder of an old step
            if attempt == 3:
                raise
    raise AssertionError("the loop returns or raises")


def describe(files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """Name, size and SHA-256 of ``files``, as a manifest has them."""
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        return {path.name: facts for path, facts in zip(files, threads.map(_describe, files), strict=True)}


def _describe(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it into ``folder``, with a checksum over itself, and onto the disk."""
    body = asdict(manifest)
    text = json.dumps({**body, "checksum": _checksum(body)}, indent=1, allow_nan=False)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _checksum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def publish(hidden: Path, slot: int) -> Path:
    """Give a complete hidden folder its name. One that has it already is replaced, and stays readable until then."""
    final = hidden.parent / f"island-{slot}"
    _sync(hidden)
    replaced = final.with_name(f".island-{slot}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    hidden.rename(final)
    for folder in (final.parent, final.parent.parent):
        _sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)  # else `sweep` will
    return final


def _sync(folder: Path) -> None:
    """Put the names in ``folder`` onto the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- read --------------------------------------------------------------------------------------------------------------


def read_manifest(folder: Path) -> Manifest:
    """The manifest in ``folder``, itself checked and its files not.

    Raises:
        BadCheckpoint: there is none, it is damaged, or another version of the format.
    """
    path = folder / MANIFEST
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        checksum = body.pop("checksum")
    except FileNotFoundError:
        raise BadCheckpoint(f"{folder}: there is no {MANIFEST}") from None
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{path}: can't be read ({type(error).__name__}: {error})") from error
    if body.get("format") != FORMAT:
        raise BadCheckpoint(
            f"{path}: format {body.get('format')!r}, written by version {body.get('version')!r}; this program reads format {FORMAT}"
        )
    if checksum != _checksum(body):
        raise BadCheckpoint(f"{path}: is damaged: its checksum is not that of what it says")
    if set(body) != {field.name for field in fields(Manifest)}:
        raise BadCheckpoint(f"{path}: has other keys than format {FORMAT}: {', '.join(sorted(body))}")
    return Manifest(**body)


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint of which every byte is as it was written.

    Raises:
        BadCheckpoint: naming the first file that is not.
    """
    manifest = read_manifest(folder)
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        for _ in threads.map(lambda item: _check_file(folder, *item), manifest.files.items()):
            pass
    return manifest


def _check_file(folder: Path, name: str, expected: dict[str, Any]) -> None:
    path = folder / name
    if Path(name).name != name:
        raise BadCheckpoint(f"{folder / MANIFEST}: names {name!r}, which is outside its folder")
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            raise BadCheckpoint(f"{path}: has {size} bytes and had {expected['bytes']} when it was written")
        found = _describe(path)
    except FileNotFoundError:
        raise BadCheckpoint(f"{path}: is missing") from None
    except OSError as error:
        raise BadCheckpoint(f"{path}: can't be read ({error})") from error
    if found["sha256"] != expected["sha256"]:
        raise BadCheckpoint(f"{path}: is damaged: its SHA-256 is not the one it was written with")


# -- tidy up -----------------------------------------------------------------------------------------------------------


def prune(root: Path, slot: int, last: int, keep: int, keep_every: int) -> None:
    """Remove old checkpoints of an island: all but the ``keep`` newest up to step ``last``, and those of steps that ``keep_every``
    (0: none) divides. Later ones belong to a run that was left behind, and are not touched."""
    mine = [folder for folder in find(root, slot) if step_of(folder) <= last]
    for folder in mine[keep:]:
        if not (keep_every and step_of(folder) % keep_every == 0):
            _remove(folder)


def sweep(root: Path, slot: int) -> None:
    """Remove what a writer of this island left hidden when it was killed. Call it while none is at work."""
    for step in _steps(root):
        in_use = {path for _, path in _islands(step)}
        for path in _listed(step):
            if path.name.startswith(f".island-{slot}.") and path not in in_use:
                _remove(path)


def set_aside(root: Path, slot: int | None, after: int) -> list[Path]:
    """Rename checkpoints of later steps than ``after``, so that nothing is resumed from a run that was left behind; those of all
    islands if ``slot`` is None.

    Returns:
        Their new paths.
    """
    moved = []
    for folder in find(root, slot):
        if step_of(folder) > after:
            name = folder.name.removeprefix(".").removesuffix(".replaced")
            free = next(path for number in range(1, 10**6) if not (path := folder.with_name(f"{name}.aside-{number}")).exists())
            moved.append(folder.rename(free))
    return moved


def discard(hidden: Path) -> None:
    """Remove a hidden folder whose writing failed. All ranks may do so at once; what can't be removed now is for :func:`sweep`."""
    shutil.rmtree(hidden, ignore_errors=True)
    _remove_if_empty(hidden.parent)


def _remove(folder: Path) -> None:
    """Remove a folder, under a hidden name so that nobody takes a half-removed one for damaged; and that of its step, if empty."""
    going = folder
    if not folder.name.startswith("."):
        going = folder.rename(folder.with_name(f".{folder.name}.{uuid.uuid4().hex[:8]}"))
    shutil.rmtree(going)
    _remove_if_empty(folder.parent)


def _remove_if_empty(step: Path) -> None:
    with contextlib.suppress(OSError):  # other islands have theirs in it
        step.rmdir()
