"""The file with the key of a private swarm: whoever has it can take part. Standard library only."""

import os
import secrets
import stat
from pathlib import Path

KEY_BYTES = 32

_FIRST_LINE = "diloco swarm key 1"
_LONGEST_FILE = 1024


class KeyFileError(ValueError):
    """The key file can't be used; says which, why, and what to do."""


def write_new_key(path: Path) -> None:
    """Make a key file that only its owner can read. Raises KeyFileError where something is there already, or can't be."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise KeyFileError(
            f"{path} exists already and is left as it is. Give another path; or, if no swarm needs that key any more, "
            "remove the file first"
        ) from None
    except OSError as error:
        raise KeyFileError(f"{path} can't be written: {error.strerror}. Give a path in a folder that exists") from None
    with open(descriptor, "w", encoding="ascii") as file:
        os.fchmod(descriptor, 0o600)
        file.write(f"{_FIRST_LINE}\n{secrets.token_hex(KEY_BYTES)}\n")


def read_key(path: str) -> bytes:
    """The key in a file. Raises KeyFileError where there is none, or where others than its owner could read it."""
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_LONGEST_FILE)
    except OSError as error:
        raise KeyFileError(
            f"{path}: {error.strerror}. Copy the key file of this swarm here, or make the first one: diloco key new {path}"
        ) from None
    if not stat.S_ISREG(mode):
        raise KeyFileError(f"{path} is not a regular file. Give the file that 'diloco key new' made")
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileError(
            f"{path} has mode {stat.S_IMODE(mode):04o}: others than its owner can use it. Run: chmod 600 {path}"
        )
    lines = raw.decode("ascii", errors="replace").split()
    first, key = " ".join(lines[:-1]), "".join(lines[-1:])
    if first != _FIRST_LINE or len(key) != 2 * KEY_BYTES or not set(key) <= set("0123456789abcdef"):
        raise KeyFileError(
            f"{path} is not a swarm key: it should hold the line {_FIRST_LINE!r} and one of {2 * KEY_BYTES} hex digits. "
            "Copy it again from an island that has it, or make a new one for all: diloco key new PATH"
        )
    return bytes.fromhex(key)
