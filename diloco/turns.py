"""Islands of one process by turns: one runs at a time, in an order that follows from the simulated clock alone.

They are greenlets, which hand over only where they say so, and all of one thread: what torch keeps for each thread (workers, and
what it knows of distributed tensors) is there once, however many islands there are.
"""

import math
import time
from dataclasses import dataclass
from typing import Callable, Protocol, Self, Sequence

from greenlet import greenlet


class Player(Protocol):
    """Who takes turns."""

    def play(self) -> None:
        """All that it does; in it, :meth:`Turns.wait_for` and :meth:`Turns.pass_time` let others go on."""

    def enter(self) -> None:
        """Its turn begins."""

    def leave(self) -> None:
        """Its turn has ended, but not its play."""


@dataclass
class _Seat:
    """A player, and where it stands.

    Attributes:
        ready: whether it could go on.
        patience: simulated seconds after which it goes on all the same, if nobody else can.
        clock: its simulated seconds.
        used: real seconds of its own, up to ``since``, when its present turn began.
    """

    index: int
    player: Player
    greenlet: greenlet
    ready: Callable[[], bool] = lambda: True
    patience: float = math.inf
    clock: float = 0.0
    used: float = 0.0
    since: float = 0.0


class Turns:
    """Gives the turn to one player after another: of those who can go on the one with the earliest clock, then the first.

    It serves as the condition of a :class:`~diloco.meeting.Hub`: nobody runs beside the one whose turn it is, so there is nothing to
    lock, and to wait is to let the others go on. Nobody waits in vain: where no one can go on, that is seen at once.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._seats: list[_Seat] = []
        self._current: _Seat | None = None

    def run(self, players: Sequence[Player]) -> None:
        """Until all have played.

        Raises:
            RuntimeError: nobody can go on.
            BaseException: what a player raised; the others go no further.
        """
        self._seats = [_Seat(index, player, greenlet(player.play)) for index, player in enumerate(players)]
        try:
            while self._seats:
                self._turn(self._next())
        finally:
            for seat in self._seats:
                seat.greenlet.throw()  # ends it where it is

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
        """Let others go on until ``ready()``; or, where nobody can, for so many simulated seconds. Returns what it is then."""
        if not ready():
            self._let_others_go(ready, math.inf if timeout is None else timeout)
        return ready()

    def notify_all(self) -> None:
        """Nothing to do: who waits is asked whether it can go on."""

    def __enter__(self) -> Self:
        """Nothing to lock."""
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing was locked."""

    def _turn(self, seat: _Seat) -> None:
        """Of one player, until it waits or is done."""
        self._move_clock(seat)
        seat.player.enter()
        self._current, seat.since = seat, time.monotonic()
        seat.greenlet.switch()
        seat.used = self.own_clock()
        if seat.greenlet.dead:
            self._seats.remove(seat)
        else:
            seat.player.leave()

    def _let_others_go(self, ready: Callable[[], bool], patience: float = math.inf) -> None:
        seat = self._current
        seat.ready, seat.patience = ready, patience
        if self._next() is seat:
            self._move_clock(seat)
        else:
            seat.greenlet.parent.switch()

    def _move_clock(self, seat: _Seat) -> None:
        """Nobody goes on before what it waited for, or before its patience is at an end."""
        if not seat.ready():
            seat.clock += seat.patience
        self._now = seat.clock = max(seat.clock, self._now)

    def _next(self) -> _Seat:
        """Whose turn it is; changes nothing, so it may be asked again."""
        if able := [seat for seat in self._seats if seat.ready()]:
            return min(able, key=lambda seat: (seat.clock, seat.index))
        first = min(self._seats, key=lambda seat: (seat.clock + seat.patience, seat.index))
        if first.patience == math.inf:
            waiting = ", ".join(str(seat.index) for seat in self._seats)
            raise RuntimeError(f"islands {waiting} wait for each other, and none of them can go on; this is a fault of the simulation")
        return first
