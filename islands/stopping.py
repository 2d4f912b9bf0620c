"""The wish to stop (SIGTERM: a spot machine is being taken; Ctrl-C), and the step at which all ranks of an island follow it."""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Callable, NoReturn, Self

import torch.distributed as dist

from islands.process import Process

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

#: One SIGTERM may come twice: to every process of a machine, and from torchrun, which passes on its own.
_SAME_WISH_SECONDS = 2.0

_EXIT_TOO_LATE = 1

#: Of the grace, how long a wait for others may go on; the rest is for the last checkpoint.
_WAITING_SHARE = 0.25

_WISH, _STOP_AT = "stopping/wish", "stopping/at"


class Stopped(SystemExit):
    """Asked to stop before there was anything to save: the process leaves, with exit code 0, which needs no one to catch this."""


class StopAgreement:
    """The ranks' common answer to whether they stop after a step, by the store: a collective would be one more in every step.

    A rank leaves its wish in the store. Rank 0, when it finds one after step s, announces s + 1 as the last step, before it begins that
    step. No rank can be done with step s + 1 without what rank 0 has given to its loss and gradient norm, which each rank waits for and
    reads. So each finds the announcement after step s + 1 at the latest, and nobody stops before.

    Attributes:
        known_after: where ranks do not meet in every step, the step that none can be done with before it could know what rank 0 says
            after step s; by default s + 1.
    """

    def __init__(self, process: Process) -> None:
        self._rank, self._alone = process.rank, process.world_size == 1
        self.known_after: Callable[[int], int] = lambda step: step + 1
        self._store = process.store.clone()  # of its own: the other may be held by a long wait
        self._stop_at: int | None = None

    def wish(self) -> None:
        """Ask all ranks to stop. May be called in another thread."""
        self._store.set(_WISH, str(self._rank))

    def wished(self) -> bool:
        """Whether any rank asked. Does not wait."""
        return self._store.check([_WISH])

    def reached(self, step: int) -> bool:
        """Whether ``step``, which is done, was the last one. Does not wait, and asks the store once."""
        if self._stop_at is None and self._rank == 0 and self.wished():
            self._stop_at = step if self._alone else self.known_after(step)
            self._store.set(_STOP_AT, str(self._stop_at))
        elif self._stop_at is None and self._rank != 0 and self._store.check([_STOP_AT]):
            self._stop_at = int(self._store.get(_STOP_AT))
        return self._stop_at is not None and step >= self._stop_at


class Stopping:
    """Entered around all that a rank does, in the main thread.

    The first SIGTERM or SIGINT is remembered, and told to the other ranks. A second one ends the process at once (exit code 143, 130),
    and so does the grace, when it is over and the process is not (1), saying where it was. What signals mean is decided in a thread of
    its own, since the main thread may be deep in a collective that waits for ever.

    Args:
        grace: seconds from the first wish until the process ends, come what may.
    """

    def __init__(self, process: Process, grace: float) -> None:
        self._rank, self._grace = process.rank, grace
        self._agreement = StopAgreement(process)
        self._asked = threading.Event()
        self._pressing_from: float | None = None
        self._receiver, self._sender = socket.socketpair()
        self._sender.setblocking(False)
        self._thread = threading.Thread(target=self._listen, name="stopping", daemon=True)

    def __enter__(self) -> Self:
        """Take over the signals."""
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(self._sender.fileno(), warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, _left_to_the_thread) for number in _SIGNALS}
        for number in _SIGNALS:
            signal.siginterrupt(number, False)  # C code that waits goes on waiting
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Give the signals back. Once asked, keep them: what follows is the end of the process, which has the same limits."""
        if self._asked.is_set():
            return
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._sender.close()  # ends the thread
        self._thread.join()
        self._receiver.close()

    def ranks_meet(self, known_after: Callable[[int], int]) -> None:
        """They do so less often than in every step: see :attr:`StopAgreement.known_after`."""
        self._agreement.known_after = known_after

    def agreed(self, step: int) -> bool:
        """Called by every rank after each inner step, with a number that grows by one and is the same on all ranks.

        Returns:
            Whether to stop now: True on all ranks at the same step, that at which all of them know it. Costs one question to the store,
            which does not wait.
        """
        return self._agreement.reached(step)

    def raise_if_asked(self) -> None:
        """For rank 0 while it waits for other islands, before training began; it then has to tell the other ranks of its own.

        Raises:
            Stopped: a rank was asked to stop.
        """
        if self.asked():
            raise Stopped

    def asked(self) -> bool:
        """On rank 0: whether any rank was asked to stop. Does not wait."""
        return self._asked.is_set() or self._agreement.wished()

    def presses(self) -> bool:
        """On rank 0, while it waits for other islands: whether it should wait no longer. For a share of the grace it still may."""
        if self._pressing_from is None and self.asked():
            self._pressing_from = time.monotonic() + _WAITING_SHARE * self._grace
        return self._pressing_from is not None and time.monotonic() >= self._pressing_from

    def _listen(self) -> None:
        """The thread: signal numbers come from the interpreter, whatever the main thread does."""
        asked_at = self._next_wish(None)
        if asked_at is None:
            return
        self._asked.set()
        if self._rank == 0:
            print("stopping: a last checkpoint, then the end; again ends at once", flush=True)
        try:
            self._agreement.wish()
        except dist.DistError as error:
            print(f"rank {self._rank} could not tell the others that it was asked to stop: {error}", file=sys.stderr, flush=True)
        self._next_wish(asked_at)

    def _next_wish(self, asked_at: float | None) -> float | None:
        """Wait for a signal. The first one (``asked_at`` is None) is returned as when it came, None at the end; later ones end all."""
        while True:
            left = None if asked_at is None else asked_at + self._grace - time.monotonic()
            if left is not None and left <= 0:
                self._end_too_late()
            self._receiver.settimeout(left)
            try:
                received = self._receiver.recv(1)
            except TimeoutError:
                continue
            if not received:
                return None
            number, now = received[0], time.monotonic()
            if number not in _SIGNALS or (asked_at and number == signal.SIGTERM and now - asked_at < _SAME_WISH_SECONDS):
                continue
            if asked_at is None:
                return now
            _end(f"rank {self._rank} was asked twice, so it ends at once", 128 + number)

    def _end_too_late(self) -> NoReturn:
        frame = sys._current_frames().get(threading.main_thread().ident)
        where = "".join(traceback.format_stack(frame)) if frame else "  (at the end of the interpreter)\n"
        told = f"has not ended in the {self._grace:g} s (checkpoint.grace) after it was asked to stop, so it ends now. It was here:"
        _end(f"rank {self._rank} {told}\n{where.rstrip()}", _EXIT_TOO_LATE)


def _left_to_the_thread(number: int, frame: object) -> None:
    """A handler has to be there, or the signal would end the process; it only runs once the main thread is back in Python."""


def _end(message: str, code: int) -> NoReturn:
    """At once: nothing is waited for. What this process has started goes with it, as the kernel was told."""
    print(message, file=sys.stderr, flush=True)
    os._exit(code)
