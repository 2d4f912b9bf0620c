"""What a plan can measure before a run: the time of a step of this configuration on this machine, and the way to a member."""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from statistics import median
from typing import Sequence

from diloco.launch_processes import LAUNCH_MARK, end_all, start_process
from diloco.run_files import RowTail, metrics_file
from islands.config_file import ConfigError

_STEPS, _WARM_UPS = 8, 3  # the first ones touch memory, fill caches, compile
_MANY_STEPS = 1_000_000
_LIMIT_SECONDS = 1800.0  # a large model is long in coming, and compiling longer
_LOOK_SECONDS = 0.1
_LINES_TOLD = 10
_LOG = "log.txt"
_CONNECT_SECONDS = 5.0
_CONNECTS = 3
_HOST_AND_PORT = re.compile(r"/(?:ip[46]|dns[46]?)/([^/]+)/tcp/(\d+)/")


def probe_step_seconds(config_file: Path, overrides: Sequence[str], ranks: int) -> float:
    """Seconds of an inner step: the median of some real ones, of one island by itself, which then is killed: it writes no checkpoint.

    Raises:
        ConfigError: the steps can't be done here; with what the island said.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-plan-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        alone = [f"run.dir={folder}", f"train.steps={_MANY_STEPS}", "train.resume=never", "train.eval_every=0", "train.profile=[]"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, "-m", "islands", str(config_file), *overrides, *alone, "checkpoint.every=0"]
        mark = uuid.uuid4().hex
        with open(os.devnull) as nothing:  # start_process hands something on
            environment = {**os.environ, LAUNCH_MARK: mark}
            island = start_process(command, folder / _LOG, environment, inherited=nothing.fileno())
        try:
            return median(_first_steps(island, folder)[_WARM_UPS:])
        finally:
            end_all([island], mark, at_once=lambda: True)
            island.wait()


def _first_steps(island: subprocess.Popen[bytes], folder: Path) -> list[float]:
    tail, seconds, deadline = RowTail(metrics_file(folder, 0)), list[float](), time.monotonic() + _LIMIT_SECONDS
    while len(seconds) < _STEPS:
        ended = island.poll() is not None
        seconds += [row["step_seconds"] for row in tail.read() if row["kind"] == "step"]
        if (ended and len(seconds) < _STEPS) or time.monotonic() > deadline:
            why = "the steps could not be done on this machine" if ended else f"{_STEPS} steps were not done within {_LIMIT_SECONDS:g} s"
            said = (folder / _LOG).read_text(errors="replace").strip().splitlines()[-_LINES_TOLD:]
            raise ConfigError("\n".join([f"--probe: {why}; give --step-seconds instead", *said]))
        time.sleep(_LOOK_SECONDS)
    return seconds


def probe_rtt(addresses: Sequence[str]) -> float:
    """Seconds to the nearest of these islands and back: what a TCP connection to it takes, the least of some.

    Raises:
        ConfigError: none of them can be reached.
    """
    times, problems = [], []
    for host, port in (found.groups() for address in addresses if (found := _HOST_AND_PORT.match(address))):
        try:
            times += [_connect_seconds(host, int(port)) for _ in range(_CONNECTS)]
        except OSError as error:
            problems.append(f"{host}:{port}: {error}")
    if not times:
        raise ConfigError(f"--probe: no island of swarm.initial_peers can be reached; give --rtt instead\n{'; '.join(problems)}")
    return min(times)


def _connect_seconds(host: str, port: int) -> float:
    started = time.perf_counter()
    with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
        return time.perf_counter() - started
