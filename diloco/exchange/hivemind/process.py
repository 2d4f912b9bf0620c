"""The exchange process: started beside the trainer, in a session of its own, and never outliving it."""

import asyncio
import ctypes
import multiprocessing.util
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from diloco.exchange.base import JoinError
from diloco.exchange.hivemind import ipc
from diloco.exchange.hivemind.lifetime import die_with_parent


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST_KEPT_BYTES, _MOST_KEPT_BYTES = 8 << 20, 256 << 20


def main(pipe: Connection, start: ipc.Start) -> None:
    """Take part in the swarm until the trainer says ``Close`` or its end of the pipe is gone."""
    os.setsid()  # Ctrl-C in the terminal is the trainer's to handle; it then says Close
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so is a SIGTERM to every process of a machine
    die_with_parent(start.parent_pid)
    torch.set_num_threads(1)
    _keep_freed_memory()
    quiet_hivemind()
    try:
        from diloco.exchange.hivemind.island import take_part

        asyncio.run(take_part(pipe, start))
    except JoinError as error:
        pipe.send(ipc.Refused(str(error)))
    except BaseException:
        pipe.send(ipc.Crashed(traceback.format_exc()))
        _exit(1)
    _exit(0)


def quiet_hivemind() -> None:
    """Have hivemind and its daemon print nothing, unless the user wants them to; before hivemind is imported."""
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")


def _keep_freed_memory() -> None:
    """Have malloc keep what is freed, up to a limit: chunks come and go by the thousand, and each would be new pages.

    glibc only; elsewhere nothing changes.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES)


def _exit(code: int) -> NoReturn:
    """End at once: all is shut down by now, and the interpreter's own end takes seconds after importing hivemind."""
    multiprocessing.util._run_finalizers(0)  # hivemind's semaphores, which the resource tracker would complain about
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
