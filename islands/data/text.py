"""The user's own text files, as bytes."""

import glob
import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from islands.config import DataSection
from islands.config_file import ConfigError
from islands.data.base import Corpus, read_bytes


class Config(DataSection):
    """``data.type: text``"""

    type: Literal["text"] = "text"
    paths: list[str] = Field(..., min_length=1, description="files, or patterns such as books/**/*.txt")


def build(config: Config) -> Corpus:
    """Read the files in sorted order, each once.

    Raises:
        ConfigError: a pattern matches no file, or a file can't be read.
    """
    files = {file for pattern in config.paths for file in _files(pattern)}
    return read_bytes(sorted(files), config.held_out, key="data.paths")


def _files(pattern: str) -> list[Path]:
    """Absolute, so that a file named in two ways is one. A name that exists is itself, whatever is in it."""
    wanted = os.path.abspath(os.path.expanduser(pattern))
    found = [wanted] if os.path.isfile(wanted) else glob.glob(wanted, recursive=True)
    files = [Path(name) for name in found if os.path.isfile(name)]
    if not files:
        raise ConfigError(f"data.paths: {pattern!r} matches no file; paths are relative to {Path.cwd()}")
    return files
