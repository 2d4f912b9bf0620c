"""Checkpoints of an island, written in the background: training waits for a copy in memory only."""

import importlib.metadata
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Callable, Self

from torch import Tensor

from islands.checkpoint_files import FORMAT, Manifest
from islands.checkpoint_part import CheckpointPart, Saved
from islands.checkpoint_state import Staging, random_states, tensors_of
from islands.checkpoint_writer import CheckpointFailed, CheckpointWriter
from islands.data.base import fingerprint
from islands.fragments import schema_hash, schema_of
from islands.island import Island, meta_model
from islands.metrics import Metrics
from islands.progress import Progress, crosses
from islands.sharing import FirstRankSays

#: Until a checkpoint that is being written counts as lost. Disks may be slow; that a rank has died is noticed at once.
_WRITE_SECONDS = 3600.0


@dataclass
class _Writing:
    """A checkpoint on its way to the disk.

    Attributes:
        stall_seconds: for which training waited.
        write_seconds: that it took in the background.
        result: where it is and what it says, once it is there; or why it will not be.
    """

    progress: Progress
    thread: threading.Thread | None = None
    stall_seconds: float = 0.0
    write_seconds: float = 0.0
    result: tuple[Path, Manifest] | BaseException | None = None


class Checkpointer:
    """Saves an island between inner steps. Made, and called, on all ranks alike; as a context manager it waits for the last write.

    A checkpoint that fails, on whichever rank, becomes an event and leaves nothing behind; training goes on.

    Args:
        part: what is saved beside model and inner optimizer. Names of its tensors are keys in the checkpoint as they are.
        saved: how far the island was in the checkpoint that it was resumed from: one of the same moment is not written again.
        skips: a checkpoint that is due while the one before is still being written is left out; else training waits for that one, so
            that islands which share a job have those of the same steps.
    """

    def __init__(
        self,
        island: Island,
        metrics: Metrics,
        part: CheckpointPart | None = None,
        saved: Progress | None = None,
        skips: bool = True,
    ) -> None:
        config, process = island.config, island.process
        self._island, self._metrics, self._part, self._skips = island, metrics, part, skips
        self._saved, self._step = saved and replace(saved), saved and saved.step
        self._staging = Staging(process.device)
        self._write = CheckpointWriter(process, config.checkpoint_root, config.checkpoint, _WRITE_SECONDS)
        self._rank_0_says = FirstRankSays(process, "state of the checkpoint being written")
        self._facts = dict(
            format=FORMAT,
            version=_version(),
            config=config.model_dump(mode="json"),
            schema=schema_hash(schema_of(meta_model(config))),
            corpus=fingerprint(island.corpus),
            grid=str(island.grid),
            world_size=process.world_size,
        )
        self._writing: _Writing | None = None
        self._stall_seconds = 0.0

    def after_step(self, progress: Progress) -> None:
        """Tell what has become of the checkpoint being written; begin the next where ``checkpoint.every`` says so."""
        self._wait(0.0)
        before, self._step = self._step, progress.step
        if crosses(progress.step - 1 if before is None else before, progress.step, self._island.config.checkpoint.every):
            self.save(progress)

    def save(self, progress: Progress) -> None:
        """Begin a checkpoint, unless the one before is still being written."""
        started = time.monotonic()
        is_writing = self._skips and self._writing is not None and self._writing.thread.is_alive()
        if self._rank_0_says(is_writing, self._island.process.timeout):
            told = f"step {progress.step}: the one before is still being written; raise checkpoint.every, or use a faster disk"
            self._metrics.write("event", what="checkpoint_skipped", detail=told)
            self._stall_seconds += time.monotonic() - started
        else:
            self._begin(progress, started)

    def save_last(self, progress: Progress) -> None:
        """Write a checkpoint, unless the last one is of the same moment, and wait until it is on the disk."""
        if self._wait(_WRITE_SECONDS) and self._saved != progress:
            self._begin(progress, time.monotonic())
            self._wait(_WRITE_SECONDS)

    def measurements(self) -> dict[str, float]:
        """For the row of a step: seconds that training has waited for checkpoints since the row before."""
        stall, self._stall_seconds = self._stall_seconds, 0.0
        return {"checkpoint_seconds": stall}

    def close(self) -> None:
        """Wait for the checkpoint being written, for up to ``checkpoint.grace`` seconds; :meth:`save_last` leaves none."""
        self._wait(self._island.config.checkpoint.grace)

    def __enter__(self) -> Self:
        """Nothing: it is ready."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """See :meth:`close`."""
        self.close()

    def _wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the checkpoint being written, and tell what has become of it. Returns whether none is left."""
        writing = self._writing
        if writing is None:
            return True
        writing.thread.join(seconds)
        if not writing.thread.is_alive():
            self._writing = None
            self._tell(writing)
        elif seconds:
            told = f"step {writing.progress.step}: it was not on the disk after another {seconds:g} s"
            self._metrics.write("event", what="checkpoint_failed", detail=told)
        return self._writing is None

    def _begin(self, progress: Progress, started: float) -> None:
        self._wait(_WRITE_SECONDS)  # it is written, as rank 0 said; another rank may notice a moment later
        tensors = self._staging.copy(tensors_of(self._island)) | random_states(self._island.process)
        collect = self._part.snapshot() if self._part else Saved
        writing = self._writing = _Writing(replace(progress))
        writing.thread = threading.Thread(target=self._run, args=(writing, tensors, collect), name="checkpoint", daemon=True)
        writing.thread.start()
        writing.stall_seconds = time.monotonic() - started
        self._stall_seconds += writing.stall_seconds

    def _run(self, writing: _Writing, tensors: dict[str, Tensor], collect: Callable[[], Saved]) -> None:
        """In the background."""
        started = time.monotonic()
        try:
            writing.result = self._write(writing.progress, tensors, collect, self._facts)
        except BaseException as error:  # told between steps
            writing.result = error
        writing.write_seconds = time.monotonic() - started

    def _tell(self, writing: _Writing) -> None:
        step, result = writing.progress.step, writing.result
        if isinstance(result, BaseException):
            reason = str(result) if isinstance(result, CheckpointFailed) else f"{type(result).__name__}: {result}"
            self._metrics.write("event", what="checkpoint_failed", detail=f"step {step}: {reason}")
            return
        self._saved, (folder, manifest) = writing.progress, result
        detail = dict(
            step=step,
            folder=str(folder),
            bytes=manifest.num_bytes,
            stall_seconds=writing.stall_seconds,
            write_seconds=writing.write_seconds,
        )
        self._metrics.write("event", what="checkpoint", detail=detail)


def _version() -> str:
    try:
        return importlib.metadata.version("diloco")
    except importlib.metadata.PackageNotFoundError:
        return "unknown: run from a folder that was not installed"
