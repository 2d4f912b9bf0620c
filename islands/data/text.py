"""The user's own text files, as bytes."""

import glob
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
    files: set[Path] = set()
    for pattern in config.paths:
        found = [Path(name) for name in glob.glob(str(Path(pattern).expanduser()), recursive=True)]
        matches = [path for path in found if path.is_file()]
        if not matches:
            raise ConfigError(f"data.paths: {pattern!r} matches no file; paths are relative to {Path.cwd()}")
        files.update(matches)
    return read_bytes(sorted(files), config.held_out, key="data.paths")
