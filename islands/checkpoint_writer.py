"""Puts one checkpoint onto the disk: all ranks together, in a thread of their own, and all of it or nothing."""

import shutil
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from islands import checkpoint_files as files
from islands.checkpoint_files import Manifest
from islands.checkpoint_part import Saved
from islands.config import CheckpointSection
from islands.process import Process, background_group
from islands.progress import Progress

Result = TypeVar("Result")

# With one rank, torch would tell each time that it saves in a single process, as it was asked to.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class CheckpointFailed(Exception):
    """A checkpoint could not be written, on whichever rank; raised on all of them."""


class CheckpointWriter:
    """Made, and called, on all ranks alike.

    Args:
        seconds: until a rank that does not come is an error.
    """

    def __init__(self, process: Process, root: Path, section: CheckpointSection, seconds: float) -> None:
        self._rank, self._root, self._section = process.rank, root, section
        self._group = background_group(process, seconds) if process.world_size > 1 else None

    def __call__(
        self, progress: Progress, tensors: dict[str, Tensor], collect: Callable[[], Saved], facts: dict[str, Any]
    ) -> tuple[Path, Manifest]:
        """Write a checkpoint, and remove those that are not kept any longer.

        Args:
            tensors: on the CPU, whole or shards, by key.
            collect: gives what else belongs to it.
            facts: other fields of the manifest.

        Raises:
            CheckpointFailed: nothing of it is left on the disk.
        """
        saved = self._on_each(collect)  # before anything that a slow disk holds up: training may soon wait for it
        folder = self._together(lambda: self._start(progress))[0]
        try:
            self._save(folder, tensors | saved.tensors)
            written: dict[str, dict[str, Any]] = {}
            for mine in self._together(lambda: self._describe(folder)):
                written |= mine
            manifest = Manifest(
                step=progress.step, slot=progress.slot, progress=asdict(progress), facts=saved.facts, files=written, **facts
            )
            return self._together(lambda: self._finish(folder, manifest))[0], manifest
        except BaseException:
            files.discard(folder)
            raise

    def _start(self, progress: Progress) -> Path | None:
        if self._rank:
            return None
        files.sweep(self._root, progress.slot)
        return files.start_folder(self._root, progress.step, progress.slot)

    def _save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        try:
            dcp.save(tensors, storage_writer=writer, process_group=self._group, no_dist=self._group is None)
        except CheckpointException as error:
            reasons = [f"rank {rank}: {_told(reason)}" for rank, (reason, _) in error.failures.items()]
            # Of a full disk torch may say anything. All ranks look before any of them makes room.
            free = min(self._together(lambda: shutil.disk_usage(folder).free)) / 1e6
            raise CheckpointFailed(f"{'; '.join(reasons)}; {free:.1f} MB are free on the disk of {self._root}") from error

    def _describe(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Sizes and hashes of the files that this rank has written."""
        mine = sorted(folder.glob(f"__{self._rank}_*"))
        return files.describe([*mine, folder / ".metadata"] if self._rank == 0 else mine)

    def _finish(self, folder: Path, manifest: Manifest) -> Path | None:
        if self._rank:
            return None
        if missing := [name for name in manifest.files if not (folder / name).exists()]:
            raise FileNotFoundError(
                f"{', '.join(missing)} is not in {folder} as rank 0 sees it, though the rank that wrote it does: all ranks of an "
                "island need to see the same folder; set checkpoint.dir to one that they share"
            )
        files.write_manifest(folder, manifest)
        published = files.publish(folder, manifest.slot)
        files.prune(self._root, manifest.slot, manifest.step, self._section.keep, self._section.keep_every)
        return published

    def _on_each(self, function: Callable[[], Result]) -> Result:
        """What ``function`` returned on this rank, if it did so on all."""
        mine: list[Result] = []
        self._together(lambda: mine.append(function()))
        return mine[0]

    def _together(self, function: Callable[[], Result]) -> list[Result]:
        """What ``function`` returned on every rank, by rank; if it raised on any, this raises on all."""
        try:
            mine = function(), ""
        except Exception as error:  # raised below, here too
            mine, caught = (None, _told(error)), error
        else:
            caught = None
        everyone = [mine]
        if self._group:
            everyone = [mine] * self._group.size()
            dist.all_gather_object(everyone, mine, group=self._group)
        failures = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(everyone) if failure]
        if failures:
            raise CheckpointFailed("; ".join(failures)) from caught
        return [value for value, _ in everyone]


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
