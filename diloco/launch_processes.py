"""The processes of a launch: started so that none outlives the launcher, found again, asked to stop, and ended."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Callable

POLL_SECONDS = 0.1
STOP_SECONDS = 5.0  # from asking processes to end until they are killed
KILL_SECONDS = 3.0  # from killing processes until we stop watching them go

#: Marks every process of a launch, whoever its parent is by now: torchrun's workers and the exchange's daemons have
#: sessions of their own, so neither a process group nor the tree of parents leads to all of them.
LAUNCH_MARK = "DILOCO_LAUNCH_ID"

#: What torchrun sets for each rank, and a rank's own children inherit.
_RANK_MARK = b"LOCAL_RANK="

#: Runs the rest of its arguments as a process that is told to end when its parent, the launcher, is gone (SIGKILL too).
#: In a process of its own, because code between fork and exec is unsafe once libraries have started threads.
_TIED_TO_PARENT = (
    "import ctypes, os, signal, sys; "
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM); "  # PR_SET_PDEATHSIG
    "os.getppid() == int(sys.argv[1]) or sys.exit('the launcher is gone'); "
    "os.execv(sys.argv[2], sys.argv[2:])"
)


def start_process(command: list[str], log: Path, environment: dict[str, str], inherited: int) -> subprocess.Popen[bytes]:
    """Its output goes straight to a file: a slow terminal never slows an island, and its log outlives the launcher.

    Args:
        inherited: file descriptor that it keeps open.
    """
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
            pass_fds=[inherited],
        )


class StopRequest:
    """Asks islands to stop: each rank by itself, once. torchrun, if asked, would kill them after a time of its own, and fail."""

    def __init__(self) -> None:
        self._asked: set[int] = set()

    def send(self, process: subprocess.Popen[bytes], may_have_ranks: bool) -> None:
        """Ask the ranks that an island has by now; called again, those that have come since.

        Args:
            process: the island's first one.
            may_have_ranks: or may have had some. If not, it is asked itself, which loses nothing.
        """
        if process.poll() is not None or process.pid in self._asked:
            return
        ranks = _ranks_of(process.pid)
        if not ranks and (not may_have_ranks or sys.platform != "linux"):
            ranks = [process.pid]
        for process_id in set(ranks) - self._asked:
            self._asked.add(process_id)
            _signal(os.kill, process_id, signal.SIGTERM)


def end_all(processes: Iterable[subprocess.Popen[bytes]], mark: str, at_once: Callable[[], bool]) -> None:
    """End every process of a launch: ask, wait, kill. At once if none is left.

    Args:
        at_once: asked now and then; True cuts the wait.
    """
    processes = list(processes)
    if not at_once():  # an island ends those that it started, as long as it lives
        for process_id in [process.pid for process in processes if process.poll() is None] or _left(processes, mark):
            _signal_group(process_id, signal.SIGTERM)
    deadline = time.monotonic() + STOP_SECONDS
    while not at_once() and _left(processes, mark) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS / 2)
    deadline = time.monotonic() + KILL_SECONDS
    while (left := _left(processes, mark)) and time.monotonic() < deadline:  # some may be starting others
        for process_id in left:
            _signal_group(process_id, signal.SIGKILL)
        time.sleep(POLL_SECONDS / 2)


def _left(processes: list[subprocess.Popen[bytes]], mark: str) -> set[int]:
    """Process ids of this launch that still live. Beyond Linux, only the islands' own first processes are known."""
    left = {process.pid for process in processes if process.poll() is None}
    needle = f"{LAUNCH_MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is somebody else's
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                left.add(int(entry.name))
    return left


def _ranks_of(torchrun: int) -> list[int]:
    """Process ids of the ranks that ``torchrun`` started."""
    ranks = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == torchrun and any(each.startswith(_RANK_MARK) for each in (entry / "environ").read_bytes().split(b"\0")):
                ranks.append(int(entry.name))
    return ranks


def _signal_group(process_id: int, number: signal.Signals) -> None:
    """Signal a process and, if it leads a group, that group."""
    for send in (os.killpg, os.kill):
        _signal(send, process_id, number)


def _signal(send: Callable[[int, int], None], process_id: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended meanwhile
        send(process_id, number)
