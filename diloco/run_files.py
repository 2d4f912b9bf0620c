"""The files of a run: where they lie, and how rows are read while they are being written."""

import contextlib
import fcntl
import itertools
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from islands.config_file import ConfigError

Row = dict[str, Any]

#: Any of these, or a folder of an island, makes a folder that of a run.
_OF_A_RUN = ("config.resolved.yaml", "checkpoints")


def read_config(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration that lies in a run's folder, as it is; empty where there is none."""
    path = run_dir / "config.resolved.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}


def look_up(raw: dict[str, Any], key: str) -> Any:
    """The value of ``a.b`` in nested dicts; None if there is none."""
    for part in key.split("."):
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


def island_dir(run_dir: Path, island: int) -> Path:
    """The folder of one island."""
    return run_dir / f"island-{island}"


def island_dirs(run_dir: Path) -> dict[int, Path]:
    """The folders of all islands that the run has, by number."""
    found = {}
    for path in run_dir.glob("island-*"):
        number = path.name.removeprefix("island-")
        if path.is_dir() and number.isdecimal():
            found[int(number)] = path
    return dict(sorted(found.items()))


def metrics_file(run_dir: Path, island: int) -> Path:
    """One island's rows."""
    return island_dir(run_dir, island) / "metrics.jsonl"


def metrics_files(run_dir: Path, island: int) -> list[Path]:
    """The rows of all processes that the island was, in order: those of earlier ones were moved to ``metrics.<n>.jsonl``."""
    earlier = {}
    for path in island_dir(run_dir, island).glob("metrics.*.jsonl"):
        number = path.name.removeprefix("metrics.").removesuffix(".jsonl")
        if number.isdecimal():
            earlier[int(number)] = path
    return [*(earlier[number] for number in sorted(earlier)), metrics_file(run_dir, island)]


def log_file(run_dir: Path, island: int) -> Path:
    """All that one island printed, where the launcher started it."""
    return island_dir(run_dir, island) / "log.txt"


def set_aside(path: Path) -> None:
    """Free the name of a file that an earlier process left: nothing is overwritten. ``log.txt`` becomes ``log.<n>.txt``."""
    if path.exists():
        numbers = itertools.count(1)
        path.rename(next(free for number in numbers if not (free := path.with_stem(f"{path.stem}.{number}")).exists()))


class LineTail:
    """Reads the lines that a file has gained. A line without its end yet is left for later; a missing file has none. Where
    another file took its place, as when an island began again, that one is read from its start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset, self._inode = 0, -1

    def read(self) -> list[str]:
        """The complete lines since the last call."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._offset, self._inode = 0, inode
                file.seek(self._offset)
                gained = file.read()
        except FileNotFoundError:
            return []
        complete = gained[: gained.rfind(b"\n") + 1]
        self._offset += len(complete)
        return complete.decode(errors="replace").splitlines()


class RowTail:
    """Reads the rows that a ``metrics.jsonl`` has gained."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)

    def read(self) -> list[Row]:
        """The complete rows since the last call. A torn line, left by a crash and a restart, is no row."""
        rows = []
        for line in self._lines.read():
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                if isinstance(row, dict) and "kind" in row:
                    rows.append(row)
        return rows


def read_rows(path: Path) -> list[Row]:
    """All complete rows of a ``metrics.jsonl``; none if there is no such file."""
    return RowTail(path).read()


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` whole: a reader sees the old content or the new, whenever it looks."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_bytes(content)
    os.replace(staged, path)


def lock_run_dir(run_dir: Path, key: str = "run.dir") -> BinaryIO:
    """Keep others from starting a run in ``run_dir``, for as long as what this returns is open, here or in a process that inherited it.

    Args:
        key: that names the folder in the configuration.

    Raises:
        ConfigError: somebody has the lock, which lies beside the folder, or it can't be made.
    """
    run_dir = run_dir.resolve()
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        lock = run_dir.with_name(f".{run_dir.name}.lock").open("ab")
    except OSError as error:
        raise _unwritable(run_dir, error, key) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(f"{key}={run_dir} is in use: a run goes on in it, or is ending. Wait, or choose another folder") from None
    return lock


def keep_run_dir(run_dir: Path) -> None:
    """Make ``run_dir``, or leave it as it is where a run lies there that goes on.

    Raises:
        ConfigError: what lies there is not a run, or it can't be made.
    """
    try:
        if run_dir.exists():
            _refuse_others(run_dir)
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run_dir, error) from None


def make_run_dir(run_dir: Path) -> Path | None:
    """Make an empty ``run_dir``. An earlier run that lies there is moved aside.

    Returns:
        Where the earlier run lies now, or None if there was none.

    Raises:
        ConfigError: what lies there is not a run, or can't be moved.
    """
    moved = None
    try:
        if run_dir.exists():
            _refuse_others(run_dir)
            moved = _move_aside(run_dir) if any(run_dir.iterdir()) else None
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run_dir, error) from None
    return moved


def _refuse_others(run_dir: Path) -> None:
    is_run = run_dir.is_dir() and (
        not any(run_dir.iterdir()) or island_dirs(run_dir) or any((run_dir / name).exists() for name in _OF_A_RUN)
    )
    if not is_run:
        raise ConfigError(f"run.dir={run_dir} exists and holds no run, so it stays as it is. Choose another folder")


def _unwritable(run_dir: Path, error: OSError, key: str = "run.dir") -> ConfigError:
    return ConfigError(f"{key}={run_dir}: {error.strerror}. Choose a folder that can be written to")


def _move_aside(run_dir: Path) -> Path:
    source = run_dir.resolve()
    number = 1
    while (aside := source.with_name(f"{source.name}.{number}")).exists():
        number += 1
    source.rename(aside)
    return run_dir.with_name(aside.name)
