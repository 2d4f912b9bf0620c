"""The sources of the running Python's standard library: real text that is already there."""

import hashlib
import os
import platform
import sysconfig
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np

from islands.config import DataSection
from islands.data.base import Corpus, read_bytes

_SKIP = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3", "ensurepip"}


class Config(DataSection):
    """``data.type: python_stdlib``"""

    type: Literal["python_stdlib"] = "python_stdlib"


def build(config: Config) -> Corpus:
    """All modules but their tests, in the order of their paths; about 11 MB. Cached where the home folder can be
    written to, and mapped into memory from there."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        (path for path in root.rglob("*.py") if not _SKIP.intersection(path.relative_to(root).parts)),
        key=lambda path: path.relative_to(root).as_posix(),
    )
    key = hashlib.sha256(f"{platform.python_version()} {root} {len(files)} {config.held_out}".encode()).hexdigest()[:16]
    folder = Path(os.path.expanduser("~/.cache/diloco")) / f"python-stdlib-{key}"
    if not (folder / "held_out.npy").exists():
        corpus = read_bytes(files, config.held_out, key="data.type=python_stdlib")
        try:
            _write(folder, corpus)
        except OSError:  # no home, or a full or read-only one: the text is there all the same
            return corpus
    train, held_out = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "held_out"))
    return Corpus(train, held_out, vocab_size=256)


def _write(folder: Path, corpus: Corpus) -> None:
    """Every rank may do this at once: each writes a folder of its own and the first rename wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "corpus"
        made.mkdir()
        np.save(made / "train.npy", corpus.train)
        np.save(made / "held_out.npy", corpus.held_out)
        try:
            made.rename(folder)
        except OSError:
            if not (folder / "held_out.npy").exists():
                raise
