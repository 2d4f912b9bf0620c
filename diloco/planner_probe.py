"""What a plan can measure before a run: the time of a step of this configuration on this machine, and the way to a member."""

import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Sequence

from islands.config_file import ConfigError

_STEPS, _WARM_UPS = 8, 3  # the first ones touch memory, fill caches, compile
_STEP_LIMIT_SECONDS = 1800.0
_CONNECT_SECONDS = 5.0
_CONNECTS = 3
_HOST_AND_PORT = re.compile(r"/(?:ip[46]|dns[46]?)/([^/]+)/tcp/(\d+)/")


def probe_step_seconds(config_file: Path, overrides: Sequence[str], ranks: int) -> float:
    """Seconds of an inner step: the median of some real ones, of one island by itself.

    Raises:
        ConfigError: the steps can't be done here; with what the island said.
    """
    with tempfile.TemporaryDirectory(prefix="diloco-plan-") as folder:
        alone = [f"run.dir={folder}", f"train.steps={_STEPS}", "train.resume=never", "train.eval_every=0", "optimizer.warmup_steps=0"]
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *torchrun, "-m", "islands", str(config_file), *overrides, *alone, "train.profile=[]"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"--probe: {_STEPS} steps were not done within {_STEP_LIMIT_SECONDS:g} s; give --step-seconds") from None
        if done.returncode:
            said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-10:])
            raise ConfigError(f"--probe: the steps could not be done on this machine; give --step-seconds instead\n{said}")
        rows = map(json.loads, (Path(folder) / "island-0" / "metrics.jsonl").read_text().splitlines())
        return median(row["step_seconds"] for row in rows if row["kind"] == "step" and row["step"] > _WARM_UPS)


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
