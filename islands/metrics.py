"""What a run tells: rows in metrics.jsonl, lines on the console, TensorBoard."""

import contextlib
import errno
import itertools
import json
import math
import time
from pathlib import Path
from typing import Any, Iterator

from islands.config_file import ConfigError

#: Steps may be many in a second; their lines come no closer than this. Every step has its row.
_SECONDS_BETWEEN_STEP_LINES = 5.0


class Metrics:
    """Writes rows of one island; on ranks other than the first it does nothing.

    Every row carries ``kind``, ``island`` and ``time`` (Unix seconds); a number that is not finite is null there.

    Args:
        console: also print lines.
    """

    def __init__(self, folder: Path, island: int, enabled: bool, tensorboard: bool = False, console: bool = True) -> None:
        self._island, self._file, self._board, self._last_step_line = island, None, None, -_SECONDS_BETWEEN_STEP_LINES
        self._console = console
        if not enabled:
            return
        if tensorboard:
            self._board = _summary_writer(folder.parent / "tensorboard" / folder.name)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        if path.exists():
            path.rename(_unused(folder, "metrics", ".jsonl"))
        self._file, self._unwritten = path.open("xb", buffering=0), b""  # a reader sees whole lines

    def write(self, kind: str, **values: Any) -> None:
        """Append a row and, for the person who watches, a line."""
        if self._file is None:
            return
        row = {"kind": kind, "island": self._island, "time": time.time(), **values}
        finite = {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        self._unwritten += (json.dumps(finite, allow_nan=False) + "\n").encode()
        self._flush()
        if self._console:
            with _full_disk_borne():  # the console may be a file
                self._show(kind, values)
        if self._board and "step" in values:
            for name, value in values.items():
                if isinstance(value, (int, float)) and name != "step":
                    self._board.add_scalar(f"{kind}/{name}", value, values["step"])

    def _flush(self) -> None:
        with _full_disk_borne():  # what is left is written when there is room
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def _show(self, kind: str, values: dict[str, Any]) -> None:
        if kind == "step":
            if time.monotonic() - self._last_step_line < _SECONDS_BETWEEN_STEP_LINES:
                return
            self._last_step_line = time.monotonic()
        line = _console_line(kind, values)
        if line:
            print(line, flush=True)

    def close(self) -> None:
        """Flush everything to disk."""
        if self._file:
            self._flush()
            self._file.close()
        if self._board:
            self._board.close()


@contextlib.contextmanager
def _full_disk_borne() -> Iterator[None]:
    """A full disk is no reason to stop training; a checkpoint that did not fit goes, and then there is room."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


def _unused(folder: Path, stem: str, suffix: str) -> Path:
    """A free name for what an earlier run left: nothing is overwritten."""
    return next(path for number in itertools.count(1) if not (path := folder / f"{stem}.{number}{suffix}").exists())


def _console_line(kind: str, values: dict[str, Any]) -> str:
    if kind == "step":
        return (
            f"step {values['step']:>6}  loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
            f"grad norm {values['grad_norm']:.3f}  {values['tokens_per_second']:,.0f} tokens/s"
        )
    if kind == "eval":
        return f"step {values['step']:>6}  held-out loss {values['loss']:.4f}"
    if kind == "round":
        fragment = f" of fragment {values['fragment']}" if values["fragments"] > 1 else ""
        text = f"step {values['step']:>6}  round {values['round']}{fragment} {values['outcome']}"
        return f"{text}: {values['reason']}" if values["reason"] else f"{text} by islands {values['members']}"
    return f"{values['what']}: {values['detail']}" if kind == "event" and isinstance(values["detail"], str) else ""


def _summary_writer(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # an extra, and slow to import
    except ImportError as error:
        raise ConfigError("run.tensorboard: true needs the extra: pip install 'diloco[tensorboard]'") from error
    return SummaryWriter(str(folder))
