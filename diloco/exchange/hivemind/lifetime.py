"""Processes that don't outlive the one that started them, kill -9 included. Standard library only."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1

# Runs before the real program: asks the kernel for SIGKILL when the parent dies, then becomes the program. The parent
# may have died before that was asked for, hence the second look at who the parent is.
_WRAPPER = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)}, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Linux only; elsewhere the end of the pipe to the parent has to do.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def dying_with_me(arguments: list[str]) -> list[str]:
    """The command line that runs ``arguments`` as a child of this process which dies with it."""
    if sys.platform != "linux":
        return arguments
    return [sys.executable, "-I", "-S", "-c", _WRAPPER, str(os.getpid()), *arguments]


def describe_exit(code: int | None) -> str:
    """An exit code of a child in words: ``"killed by SIGKILL"``, ``"exit code 1"``."""
    if code is not None and code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
