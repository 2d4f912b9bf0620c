"""One island as a user starts it: a tree of processes that a test can kill, start again, and look into."""

import math
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import faulty_island
from harness import command

from diloco.exchange.hivemind.lifetime import dying_with_me
from diloco.run_files import Row, RowTail, metrics_file

MARK = "TEST_MARK"
_LAST_LINES = 25


def marked(mark: str) -> dict[int, str]:
    """Living processes whose environment holds ``TEST_MARK=<mark>…``, and their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it ended meanwhile
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found[int(entry.name)] = command(int(entry.name))
    return {pid: line for pid, line in found.items() if line}  # without a command line: waits to be reaped


@dataclass
class Life:
    """An island from one start to its end.

    Attributes:
        started, ended: Unix seconds; infinity while it lives.
        rows: what it has recorded so far; :meth:`IslandProcess.read` brings it up to date.
        ended_by_us: it was killed on purpose, so its end is no failure.
    """

    process: subprocess.Popen
    started: float
    ended: float = math.inf
    rows: list[Row] = field(default_factory=list)
    ended_by_us: bool = False

    def of_kind(self, kind: str) -> list[Row]:
        """Its rows of a kind."""
        return [row for row in self.rows if row["kind"] == kind]

    def ends(self, by_us: bool) -> None:
        """Note that it ends now."""
        self.ended, self.ended_by_us = min(self.ended, time.time()), self.ended_by_us or by_us


class IslandProcess:
    """One island of a :class:`Cluster`.

    Args:
        arguments: its command line.
        environment: of all its processes; holds a mark by which they are found.

    Attributes:
        lives: the last one is the present one.
        faults: the folder in which :mod:`faulty_island` looks for armed faults.
    """

    def __init__(self, folder: Path, slot: int, arguments: list[str], environment: dict[str, str]) -> None:
        self.slot, self.arguments, self.environment = slot, arguments, environment
        self.faults, self.log = Path(environment["TEST_FAULTS"]), folder / f"island-{slot}.log"
        self.lives: list[Life] = []
        self._metrics = metrics_file(folder / "run", slot)
        self._tail, self._before = RowTail(self._metrics), 0

    def start(self, *more: str) -> None:
        """Start it, or start it again with the same command line and, if need be, more overrides."""
        self.read()
        self._before = _inode(self._metrics)  # what lies there belongs to the life before
        self._tail = RowTail(self._metrics)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                dying_with_me([*self.arguments, *more]),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.lives.append(Life(process, time.time()))

    def read(self) -> list[Row]:
        """Rows of the present life, up to now."""
        if self.lives and _inode(self._metrics) not in (0, self._before):
            self.lives[-1].rows += self._tail.read()
        return self.lives[-1].rows if self.lives else []

    def rows(self, kind: str) -> list[Row]:
        """Rows of one kind, of the present life."""
        self.read()
        return self.lives[-1].of_kind(kind) if self.lives else []

    def height(self) -> int:
        """The last round that it has agreed on."""
        agreed = [row["round"] for row in self.rows("round") if row["outcome"] != "skipped"]
        return agreed[-1] if agreed else 0

    def alive(self) -> bool:
        """Whether its trainer runs."""
        return bool(self.lives) and self.lives[-1].process.poll() is None

    def pids(self) -> list[int]:
        """All its processes."""
        return list(marked(self.environment[MARK]))

    def exchange_pid(self) -> int | None:
        """Its exchange process, if there is one at the moment."""
        return self._pid_with("spawn_main")

    def daemon_pid(self) -> int | None:
        """Its libp2p daemon, if there is one at the moment."""
        return self._pid_with("p2pd")

    def trainer_pids(self) -> list[int]:
        """What trains: the process itself, or torchrun and its ranks."""
        script = faulty_island.__file__
        return [pid for pid, line in marked(self.environment[MARK]).items() if script in line and "spawn_main" not in line]

    def kill(self) -> None:
        """SIGKILL for what trains. The exchange process and the daemon are left to notice by themselves."""
        self.lives[-1].ends(by_us=True)
        for pid in self.trainer_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.lives[-1].process.wait()
        self.read()

    def last_lines(self) -> str:
        """The end of what it printed."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(f"  island {self.slot}: {line}" for line in lines[-_LAST_LINES:])

    def _pid_with(self, word: str) -> int | None:
        return next((pid for pid, line in marked(self.environment[MARK]).items() if word in line), None)


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0
