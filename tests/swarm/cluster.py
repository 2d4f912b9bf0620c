"""Islands as a user starts them, each a tree of processes, which a test can kill, start again, look into, and add to."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Sequence

import faulty_island
from harness import command, is_gone
from wan import WanLink

from diloco.exchange.hivemind.lifetime import dying_with_me
from diloco.launch import make_identity
from diloco.run_files import Row, RowTail, metrics_file

#: A run of seconds: a tiny model on a text of the test's own.
TINY = """
run: {{name: tiny, dir: {folder}/run}}
model: {{hidden_size: 32, num_layers: 2, num_heads: 4, num_kv_heads: 2, intermediate_size: 64}}
data: {{type: text, paths: ["{folder}/text/*.txt"], seq_len: 32}}
parallel: {{data_parallel_size: {ranks}}}
optimizer: {{lr: 3.0e-3, warmup_steps: 5}}
train: {{steps: {steps}, global_batch_size: 4, eval_sequences: 4}}
outer: {{sync_every: 5}}
exchange: {{type: hivemind, peer_timeout: 8, round_deadline: 60}}
swarm: {{islands: {islands}, max_slots: 4}}
"""

MARK = "TEST_MARK"
_PORT = 31337  # in a namespace of its own, every island can have the same
_END_SECONDS = 15.0
_LAST_LINES = 25


def write_text(folder: Path) -> None:
    """The text that :data:`TINY` trains on."""
    (folder / "text").mkdir()
    for index in range(20):
        words = " ".join(f"word{(index * number) % 97}" for number in range(1, 1500))
        (folder / "text" / f"{index}.txt").write_text(words)


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
        rows: what it has recorded so far; :meth:`ClusterIsland.read` brings it up to date.
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


class ClusterIsland:
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


class Cluster:
    """Islands of one run. Use it in a ``with``: after the block nothing of it lives on, and a block that ended well proves so.

    Island i has slot i, a lasting identity and a known address, so it can come back by the command line that it left with.

    Args:
        islands: how many are started; ``room`` more can be added.
        settings: overrides for all of them, such as ``"outer.sync_every=10"``.
        link: their network; without one they share loopback. A stranger comes from its last place, so give it one more.
        step_seconds: the least that an inner step takes.

    Attributes:
        mark: what ``TEST_MARK`` begins with in the environment of all its processes.
        addresses: of each island, by slot.
    """

    def __init__(
        self,
        folder: Path,
        islands: int,
        settings: Sequence[str] = (),
        link: WanLink | None = None,
        steps: int = 100_000,
        step_seconds: float = 0.0,
        ranks: int = 1,
        room: int = 0,
    ) -> None:
        self.folder, self.link, self._count = folder, link, islands
        self.mark = uuid.uuid4().hex
        write_text(folder)
        self._config = folder / "tiny.yaml"
        self._config.write_text(TINY.format(folder=folder, islands=islands, ranks=ranks, steps=steps))
        self.addresses = [self._make_address(slot) for slot in range(islands + room)]
        self.islands = [self._make_island(slot, settings, ranks, step_seconds) for slot in range(islands + room)]

    def __enter__(self) -> "Cluster":
        for island in self.islands[: self._count]:
            self.start(island.slot)
        return self

    def __exit__(self, error: type[BaseException] | None, *more: object) -> None:
        self.end()
        if error is None:
            assert not self.living(), f"these live on: {self.living()}"
        else:
            print("\n".join(island.last_lines() for island in self.islands), file=sys.stderr)

    def start(self, slot: int) -> None:
        """Start an island: the first time, again, or as a newcomer. It may join through any other island's address."""
        founds = slot == 0 and not self.islands[0].lives
        others = [address for other, address in enumerate(self.addresses) if other != slot]
        self.islands[slot].start(f"swarm.initial_peers=[{'' if founds else ','.join(others)}]")

    def living(self) -> list[str]:
        """Command lines of all its processes."""
        return list(marked(self.mark).values())

    def wait_until(
        self, condition: Callable[[], Any], timeout: float = 60.0, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for a condition, and fail at once when an island ends that nobody killed."""
        deadline = time.monotonic() + timeout
        while not condition():
            meanwhile()
            self.check()
            assert time.monotonic() < deadline, f"still not so after {timeout:g} s\n{self._stand()}"
            time.sleep(0.02)

    def wait_until_training(self) -> None:
        """Wait for the first inner step of all islands that were started."""
        self.wait_until(lambda: all(island.rows("step") for island in self.islands if island.lives), timeout=120)

    def check(self) -> None:
        """No island has ended that nobody killed."""
        for island in self.islands:
            if island.lives and not island.lives[-1].ended_by_us and (code := island.lives[-1].process.poll()):
                raise AssertionError(f"island {island.slot} ended with exit code {code}:\n{island.last_lines()}")

    def end(self) -> None:
        """Ctrl-C for every island; what still lives some seconds later is killed."""
        for island in self.islands:
            if island.alive():
                island.lives[-1].ends(by_us=True)
                with suppress(ProcessLookupError):
                    os.kill(island.lives[-1].process.pid, signal.SIGINT)
        for pid in marked(self.mark):  # one that a test has stopped could not even end
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        deadline = time.monotonic() + _END_SECONDS
        while self.living() and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid in (left := marked(self.mark)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + _END_SECONDS
        while not all(is_gone(pid) for pid in left) and time.monotonic() < deadline:
            time.sleep(0.05)
        for island in self.islands:
            island.read()

    def _make_address(self, slot: int) -> str:
        peer = make_identity(self.folder / f"identity-{slot}")
        host, port = (WanLink.address(slot), _PORT) if self.link else ("127.0.0.1", _free_port())
        return f"/ip4/{host}/tcp/{port}/p2p/{peer}"

    def _make_island(self, slot: int, settings: Sequence[str], ranks: int, step_seconds: float) -> ClusterIsland:
        _, _, host, _, port, _, _ = self.addresses[slot].split("/")
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        own = [f"swarm.slot={slot}", f"swarm.listen={host}:{port}", f"swarm.identity_file={self.folder}/identity-{slot}"]
        public = ["swarm.public=true"] if self.link else []
        arguments = [sys.executable, *torchrun, faulty_island.__file__, str(self._config), *settings, *own, *public]
        faults = self.folder / f"faults-{slot}"
        faults.mkdir()
        environment = {
            **os.environ,
            MARK: f"{self.mark}-{slot}.",
            "TEST_FAULTS": str(faults),
            "TEST_STEP_SECONDS": str(step_seconds),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": "lo",  # inside an island; this machine's own name leads nowhere in a namespace
        }
        return ClusterIsland(
            self.folder, slot, self.link.command(slot, arguments) if self.link else arguments, environment
        )

    def _stand(self) -> str:
        return "\n".join(
            f"island {island.slot}: life {len(island.lives)}, {'alive' if island.alive() else 'not alive'}, "
            f"{len(island.rows('step'))} steps, height {island.height()}"
            for island in self.islands
        )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
