"""Starts all islands of a run on this machine, shows them, and ends every one of their processes."""

import contextlib
import hashlib
import ipaddress
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Literal, Sequence

from diloco.config import RunConfig, SwarmSection
from diloco.live_view import IslandProgress, View, make_view
from diloco.report import print_summary, write_report
from diloco.run_files import LineTail, RowTail, island_dir, log_file, make_run_dir, metrics_file
from islands.config_file import ConfigError, load_config

POLL_SECONDS = 0.1
STOP_SECONDS = 5.0  # from asking processes to end until they are killed
KILL_SECONDS = 3.0  # from killing processes until we stop watching them go
LOG_LINES_AFTER_FAILURE = 20

INTERRUPTED = 130

#: Marks every process of a launch, whoever its parent is by now: torchrun's workers and the exchange's daemons have
#: sessions of their own, so neither a process group nor the tree of parents leads to all of them.
LAUNCH_MARK = "DILOCO_LAUNCH_ID"

#: Runs the rest of its arguments as a process that is told to end when its parent, the launcher, is gone (SIGKILL too).
#: In a process of its own, because code between fork and exec is unsafe once libraries have started threads.
_TIED_TO_PARENT = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM); "  # PR_SET_PDEATHSIG
    "os.getppid() == int(sys.argv[1]) or sys.exit('the launcher is gone'); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)

#: The line with which torchrun begins its account of how its ranks ended: pages that repeat what they said themselves,
#: but for the exit code of the rank that failed first.
_TORCHRUN_ENDS = re.compile(r"[WE]\d{4} \S+ \d+ \S*torch/distributed/elastic/multiprocessing/api\.py")
_FIRST_EXIT_CODE = re.compile(r"Root Cause.*?exitcode *: (-?\d+)", re.DOTALL)

#: Makes the command of one island: (ranks, configuration file, overrides) -> argv.
IslandCommand = Callable[[int, Path, Sequence[str]], list[str]]


def torchrun_command(ranks: int, config_file: Path, overrides: Sequence[str]) -> list[str]:
    """One island under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*torchrun, "-m", "diloco", str(config_file), *overrides]


@dataclass(frozen=True)
class LaunchPlan:
    """What will be started.

    Attributes:
        ranks: processes of each island.
        gpus: ids of the GPUs to divide among the islands; empty: all compute on the CPU.
    """

    config: RunConfig
    config_file: Path
    overrides: tuple[str, ...]
    ranks: int
    gpus: tuple[str, ...]

    @property
    def run_dir(self) -> Path:
        """Where the run writes."""
        return Path(self.config.run.dir)

    @property
    def title(self) -> str:
        """The run in a few words."""
        islands, ranks = self.config.swarm.islands, self.ranks
        plural = ("" if islands == 1 else "s", "" if ranks == 1 else "s")
        device = "GPU" if self.gpus else "CPU"
        return f"{self.config.run.name}: {islands} island{plural[0]} x {ranks} rank{plural[1]} on {device}"


@dataclass
class _Island:
    """One island that was started."""

    number: int
    process: subprocess.Popen[bytes]
    progress: IslandProgress
    log: LineTail
    rows: RowTail
    ending: bool = False

    def show_news(self, view: View) -> None:
        """Hand on what the island printed and recorded since the last call."""
        for line in self.log.read():
            self.ending = self.ending or bool(_TORCHRUN_ENDS.match(line))
            if not self.ending:
                view.line(self.number, line)
        for row in self.rows.read():
            if notice := self.progress.apply(row):
                view.notice(self.number, notice)


@dataclass
class _Ending:
    """How a run ended: ``failed`` is the island that took the others down."""

    kind: Literal["done", "failed", "interrupted"]
    failed: _Island | None = None


def launch(
    config_file: Path, overrides: Sequence[str], islands: int | None = None, command: IslandCommand = torchrun_command
) -> int:
    """Run all islands of ``config_file`` on this machine until all are done, one fails, or someone interrupts.

    When all are done, the report is written and its summary printed.

    Returns:
        The exit code: 0, that of the island which failed, or 130 when interrupted.

    Raises:
        ConfigError: before anything was started.
    """
    plan = make_plan(config_file, overrides, islands)
    founder_port = _founder_port(plan.config.swarm)
    if moved := make_run_dir(plan.run_dir):
        print(f"{plan.run_dir} holds an earlier run, which is now {moved}")
    mark = uuid.uuid4().hex
    started: list[_Island] = []
    with _Stop() as stop, make_view(plan.title) as view:
        try:
            for island in _start_islands(plan, founder_port, mark, command):
                started.append(island)
            ending = _watch(started, view, stop)
        finally:
            _end_all(started, mark, stop)
        _show_last(started, ending, view)
    return _tell_ending(plan, ending)


def make_plan(config_file: Path, overrides: Sequence[str], islands: int | None = None) -> LaunchPlan:
    """Check everything that can be checked before a process starts.

    Raises:
        ConfigError: naming what can't work and what to do.
    """
    from diloco.from_config import make_fragments
    from islands.fragments import schema_of
    from islands.island import load_corpus, meta_model  # imports torch, which `diloco --help` does not need
    from islands.mesh import check_grid

    asked = [*overrides, *([] if islands is None else [f"swarm.islands={islands}"])]
    config = load_config(RunConfig, config_file, asked)
    _refuse_keys_set_by_launch(config.swarm)
    gpus = _visible_gpus() if config.run.device != "cpu" else ()
    ranks = _ranks_of_an_island(config, len(gpus))
    check_grid(config, ranks)
    make_fragments(config, schema_of(meta_model(config)))
    load_corpus(config)
    needed = ranks * config.swarm.islands
    if len(gpus) < needed:
        if config.run.device == "cuda":
            raise ConfigError(
                f"run.device=cuda needs a GPU for each of {config.swarm.islands} islands x {ranks} ranks = {needed} "
                f"ranks, and this machine has {len(gpus)}. Start fewer, or set run.device=auto to train on the CPU"
            )
        gpus = ()
    return LaunchPlan(config, config_file, tuple(asked), ranks, gpus[:needed])


def _refuse_keys_set_by_launch(swarm: SwarmSection) -> None:
    for key in ("slot", "initial_peers", "identity_file", "announce"):
        value = getattr(swarm, key)
        if value != SwarmSection.model_fields[key].default:
            raise ConfigError(
                f"swarm.{key}={value!r}: 'diloco launch' starts all islands of a run, the first one too, and sets this "
                "key for each of them. Remove it, or start one island alone: torchrun ... -m diloco CONFIG"
            )


def _visible_gpus() -> tuple[str, ...]:
    import torch

    count = torch.cuda.device_count()
    named = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return tuple(named[:count]) if named else tuple(map(str, range(count)))


def _ranks_of_an_island(config: RunConfig, num_gpus: int) -> int:
    parallel = config.parallel
    model_ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    if parallel.data_parallel_size > 0:
        return parallel.data_parallel_size * model_ranks
    return max(1, num_gpus // config.swarm.islands // model_ranks) * model_ranks


def _founder_port(swarm: SwarmSection) -> int:
    """The port of island 0, known before it starts so that all islands can start at the same moment."""
    address, port = _host_and_port(swarm.listen)
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((str(address), port))
        except OSError as error:
            raise ConfigError(
                f"swarm.listen={swarm.listen} can't be listened on: {error.strerror}. End the program that has the "
                f"port, choose another one, or give port 0 for any that is free"
            ) from None
        return probe.getsockname()[1]


def _host_and_port(listen: str) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]:
    host, _, port = listen.rpartition(":")
    return ipaddress.ip_address(host.strip("[]")), int(port)


def make_identity(path: Path) -> str:
    """Write a new private key, as the p2p daemon reads it, and return the peer id that others know it by.

    Done by hand, since importing hivemind for it would delay every launch by seconds; a test compares with hivemind.
    The format: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
    """
    import base58
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(_rsa_key_message(private))
    public = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    multihash = b"\x12\x20" + hashlib.sha256(_rsa_key_message(public)).digest()  # sha2-256, 32 bytes
    return base58.b58encode(multihash).decode()


def _rsa_key_message(der: bytes) -> bytes:
    """The protobuf message {1: RSA (0), 2: der}. A 2048-bit key has 128 to 16383 bytes: its length takes two."""
    return b"\x08\x00\x12" + bytes([len(der) & 0x7F | 0x80, len(der) >> 7]) + der


def _start_islands(plan: LaunchPlan, founder_port: int, mark: str, command: IslandCommand) -> Iterator[_Island]:
    swarm, run_dir = plan.config.swarm, plan.run_dir.resolve()
    for number in range(swarm.islands):
        island_dir(run_dir, number).mkdir()
    founder_id = make_identity(island_dir(run_dir, 0) / "identity")
    host, _ = _host_and_port(swarm.listen)
    reachable = ipaddress.ip_address("127.0.0.1" if host.version == 4 else "::1") if host.is_unspecified else host
    founder_address = f"/ip{host.version}/{reachable}/tcp/{founder_port}/p2p/{founder_id}"
    for number in range(swarm.islands):
        own = {
            "swarm.slot": number,
            "swarm.listen": f"{swarm.listen.rpartition(':')[0]}:{founder_port if number == 0 else 0}",
            "swarm.identity_file": str(island_dir(run_dir, number) / "identity"),
            "swarm.initial_peers": [] if number == 0 else [founder_address],
        }
        if not plan.gpus:
            own["run.device"] = "cpu"
        overrides = [*plan.overrides, *(f"{key}={json.dumps(value)}" for key, value in own.items())]
        argv, log = command(plan.ranks, plan.config_file, overrides), log_file(run_dir, number)
        process = _start_process(argv, log, _environment(plan, number, mark))
        progress = IslandProgress(number, plan.config.train.steps)
        yield _Island(number, process, progress, LineTail(log), RowTail(metrics_file(run_dir, number)))


def _environment(plan: LaunchPlan, number: int, mark: str) -> dict[str, str]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ, LAUNCH_MARK: mark, "PYTHONUNBUFFERED": "1"}
    if plan.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(plan.gpus[number * plan.ranks : (number + 1) * plan.ranks])
    return environment


def _start_process(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Its output goes straight to a file: a slow terminal never slows an island, and its log outlives the launcher."""
    if sys.platform == "linux":
        command = [sys.executable, "-S", "-c", _TIED_TO_PARENT, str(os.getpid()), *command]
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )


class _Stop:
    """Counts the wishes to end (Ctrl-C, SIGTERM, a closed terminal) instead of raising in the middle of something."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.wishes = 0

    def __enter__(self) -> "_Stop":
        self._before = {number: signal.signal(number, self._count) for number in self._SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: object) -> None:
        self.wishes += 1


def _watch(islands: list[_Island], view: View, stop: _Stop) -> _Ending:
    while True:
        codes = [island.process.poll() for island in islands]  # before reading, so that the last lines are read too
        for island, code in zip(islands, codes):
            island.show_news(view)
            if code is not None:
                island.progress.state = "failed" if code else "done"
        view.refresh([island.progress for island in islands])
        if stop.wishes:
            return _Ending("interrupted")
        if failed := next((island for island, code in zip(islands, codes) if code), None):
            return _Ending("failed", failed)
        if all(code == 0 for code in codes):
            return _Ending("done")
        time.sleep(POLL_SECONDS)


def _end_all(islands: list[_Island], mark: str, stop: _Stop) -> None:
    """End every process of this launch: ask, wait, kill. At once if none is left; another Ctrl-C cuts the wait."""
    for island in islands:
        if island.process.poll() is None:
            _signal_group(island.process.pid, signal.SIGTERM)
    wishes, deadline = stop.wishes, time.monotonic() + STOP_SECONDS
    while _processes_left(islands, mark) and time.monotonic() < deadline and stop.wishes == wishes:
        time.sleep(POLL_SECONDS / 2)
    deadline = time.monotonic() + KILL_SECONDS
    while (left := _processes_left(islands, mark)) and time.monotonic() < deadline:  # some may be starting others
        for process_id in left:
            _signal_group(process_id, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 2)


def _processes_left(islands: list[_Island], mark: str) -> set[int]:
    """Process ids of this launch that still live. Beyond Linux, only the islands' own first processes are known."""
    left = {island.process.pid for island in islands if island.process.poll() is None}
    needle = f"{LAUNCH_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                left.add(int(entry.name))
    return left


def _signal_group(process_id: int, number: signal.Signals) -> None:
    """Signal a process and, if it leads a group, that group."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(process_id, number)


def _show_last(islands: list[_Island], ending: _Ending, view: View) -> None:
    for island in islands:
        island.show_news(view)
        if ending.kind != "done" and island is not ending.failed and island.progress.state != "done":
            island.progress.state = "stopped"
    view.refresh([island.progress for island in islands], force=True)


def _tell_ending(plan: LaunchPlan, ending: _Ending) -> int:
    if ending.kind == "interrupted":
        print(f"Interrupted: all islands are ended. What there is: diloco report {plan.run_dir}", file=sys.stderr)
        return INTERRUPTED
    if ending.failed is None:
        print_summary(plan.run_dir, write_report(plan.run_dir))
        return 0
    number, log = ending.failed.number, log_file(plan.run_dir, ending.failed.number)
    printed = log.read_text(errors="replace")
    first_failure = _FIRST_EXIT_CODE.search(printed)
    code = int(first_failure[1]) if first_failure else ending.failed.process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    lines = list(itertools.takewhile(lambda line: not _TORCHRUN_ENDS.match(line), printed.splitlines()))
    print(f"\nIsland {number} {how}, so all islands were ended. The end of {log}:", file=sys.stderr)
    print("\n".join(f"  {line}" for line in lines[-LOG_LINES_AFTER_FAILURE:]), file=sys.stderr)
    return 128 - code if code < 0 else code
