"""Islands of one run as a user starts them, on loopback or in a network of their own."""

import os
import signal
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, Sequence

import faulty_island
from harness import free_port, is_gone
from island_process import MARK, IslandProcess, marked
from wan import WanLink

from diloco.launch import make_identity

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

_PORT = 31337  # in a namespace of its own, every island can have the same
_END_SECONDS = 15.0


def write_text(folder: Path) -> None:
    """The text that :data:`TINY` trains on."""
    (folder / "text").mkdir()
    for index in range(20):
        words = " ".join(f"word{(index * number) % 97}" for number in range(1, 1500))
        (folder / "text" / f"{index}.txt").write_text(words)


class Cluster:
    """Islands of one run. Use it in a ``with``: after the block nothing of it lives on, and if it ended well that is proved.

    Island i has slot i, a lasting identity and a known address, so it can come back by the command line that it left with.

    Args:
        islands: how many are started; ``room`` more can be added.
        settings: overrides for all of them, such as ``"outer.sync_every=10"``.
        link: their network; without one they share loopback. A stranger comes from its last place, so give it one more.
        step_seconds: the least that an inner step takes.
        script: what an island runs.

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
        script: str = faulty_island.__file__,
    ) -> None:
        if link and link.count < islands + room:
            raise ValueError(f"a link with {link.count} places is too small for {islands} islands and {room} newcomers")
        self.folder, self.link, self._count, self._script = folder, link, islands, script
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
        host, port = (WanLink.address(slot), _PORT) if self.link else ("127.0.0.1", free_port())
        return f"/ip4/{host}/tcp/{port}/p2p/{peer}"

    def _make_island(self, slot: int, settings: Sequence[str], ranks: int, step_seconds: float) -> IslandProcess:
        _, _, host, _, port, _, _ = self.addresses[slot].split("/")
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        own = [f"swarm.slot={slot}", f"swarm.listen={host}:{port}", f"swarm.identity_file={self.folder}/identity-{slot}"]
        public = ["swarm.public=true"] if self.link else []
        arguments = [sys.executable, *torchrun, self._script, str(self._config), *settings, *own, *public]
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
        return IslandProcess(
            self.folder, slot, self.link.command(slot, arguments) if self.link else arguments, environment
        )

    def _stand(self) -> str:
        return "\n".join(
            f"island {island.slot}: life {len(island.lives)}, {'alive' if island.alive() else 'not alive'}, "
            f"{len(island.rows('step'))} steps, height {island.height()}"
            for island in self.islands
        )
