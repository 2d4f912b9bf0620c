"""Threads of which one runs at a time, in an order that follows from the simulated clock alone and never from how fast they are."""

import threading
import time
from dataclasses import dataclass, field
from typing import Callable, Protocol, Self, Sequence

_LOOK_SECONDS = 1.0  # the main thread wakes so often, to act on signals


class Player(Protocol):
    """Who takes turns."""

    def play(self) -> None:
        """All that it does; in it, :meth:`Turns.wait_for` and :meth:`Turns.pass_time` let others go on."""

    def enter(self) -> None:
        """Its turn begins."""

    def leave(self) -> None:
        """Its turn ends, and another one's begins."""


class Abandoned(BaseException):
    """Another player has failed, so that this one is not to go on."""


@dataclass
class _Seat:
    """A player's thread, and where it stands.

    Attributes:
        ready: whether it could go on.
        clock: its simulated seconds.
        used: real seconds of its own, up to ``since``, when its present turn began.
    """

    index: int
    player: Player
    ready: Callable[[], bool] = lambda: True
    clock: float = 0.0
    used: float = 0.0
    since: float = 0.0
    may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


class Turns:
    """Gives the turn to one player after another: of those who can go on the one with the earliest clock, then the first.

    It serves as the condition of a :class:`~diloco.meeting.Hub`: nobody runs beside the one whose turn it is, so there is nothing to
    lock, and to wait is to let the others go on. A wait needs no limit: where nobody could go on, that is seen at once.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._seats: list[_Seat] = []
        self._current: _Seat | None = None
        self._over, self._error = threading.Event(), None

    def run(self, players: Sequence[Player]) -> None:
        """Until all have played.

        Raises:
            BaseException: what the first of them raised that failed; the others go no further.
        """
        self._seats = [_Seat(index, player) for index, player in enumerate(players)]
        threads = [threading.Thread(target=self._play, args=(seat,), name=f"player-{seat.index}", daemon=True) for seat in self._seats]
        for thread in threads:
            thread.start()
        self._give(self._next())
        while not self._over.wait(_LOOK_SECONDS):
            pass
        for thread in threads:
            thread.join(_LOOK_SECONDS)
        if self._error:
            raise self._error

    def clock(self) -> float:
        """Simulated seconds of the player whose turn it is; they pass by :meth:`pass_time` and by waiting for others."""
        return self._current.clock

    def own_clock(self) -> float:
        """Real seconds for which the player whose turn it is has had it."""
        return self._current.used + time.monotonic() - self._current.since

    def pass_time(self, seconds: float) -> None:
        """So many simulated seconds go by for the player whose turn it is; those come first who are behind."""
        self._current.clock += seconds
        self._let_others_go(lambda: True)

    def wait_for(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Let others go on until ``ready()``. Always True, whatever the ``timeout``, which is for threads side by side.

        Raises:
            RuntimeError: nobody can go on.
        """
        if not ready():
            self._let_others_go(ready)
        return True

    def notify_all(self) -> None:
        """Nothing to do: who waits is asked whether it can go on."""

    def __enter__(self) -> Self:
        """Nothing to lock."""
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was locked."""

    def _play(self, seat: _Seat) -> None:
        try:
            self._begin_turn(seat)
            seat.player.play()
            self._seats.remove(seat)
            if self._seats:
                self._give(self._next())
            else:
                self._over.set()
        except Abandoned:
            return
        except BaseException as error:
            self._fail(error)

    def _let_others_go(self, ready: Callable[[], bool]) -> None:
        seat = self._current
        seat.ready = ready
        following = self._next()
        if following is not seat:
            seat.used = self.own_clock()
            seat.player.leave()
            self._give(following)
            self._begin_turn(seat)
        else:
            self._now = seat.clock = max(seat.clock, self._now)

    def _begin_turn(self, seat: _Seat) -> None:
        seat.may_go.acquire()  # given, or everything is abandoned
        if self._error:
            raise Abandoned
        self._now = seat.clock = max(seat.clock, self._now)
        seat.player.enter()
        seat.since = time.monotonic()

    def _next(self) -> _Seat:
        able = [seat for seat in self._seats if seat.ready()]
        if not able:
            waiting = ", ".join(str(seat.index) for seat in self._seats)
            raise RuntimeError(f"islands {waiting} wait for each other, and none of them can go on; this is a fault of the simulation")
        return min(able, key=lambda seat: (seat.clock, seat.index))

    def _give(self, seat: _Seat) -> None:
        self._current = seat
        seat.may_go.release()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        for seat in self._seats:
            seat.may_go.release()
        self._over.set()
