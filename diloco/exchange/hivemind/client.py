"""The trainer's end: starts the exchange process, talks to it, and starts it again when it dies."""

import atexit
import math
import multiprocessing
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Callable

from diloco.config import RunConfig
from diloco.exchange.base import ExchangeEvent, JoinError, RoundOutcome, Seat, Work
from diloco.exchange.hivemind import ipc, process
from diloco.exchange.hivemind.lifetime import describe_exit
from diloco.outer_state import LATE, NOT_CALLED, OuterState

_START_SECONDS = 300.0  # imports on a busy machine, on top of swarm.join_timeout
_GRACE_SECONDS = 15.0  # on top of exchange.round_deadline: one settling of votes and a busy machine
_STAGED_PER_SECOND = 50e6  # bytes of state that even a slow machine steps and hashes; what is begun is not interrupted
_CLOSE_SECONDS = 5.0
_LEAVE_SHARE = 0.25  # of checkpoint.grace, for which a round is still waited for; the rest is for the last checkpoint
_ASK_SECONDS = 0.5  # between two questions whether to stop
_PROGRESS_SECONDS = 2.0  # between two lines about bytes that come
_BEAT_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 30.0
_STABLE_SECONDS = 60.0


class HivemindExchange:
    """See :class:`diloco.exchange.base.Exchange`. The exchange process is being started when this is constructed."""

    def __init__(self, config: RunConfig, state: OuterState, schema: str, prefers: int = -1) -> None:
        self._config, self._state = config, state
        self._folder = tempfile.mkdtemp(prefix="diloco-")
        identity = config.swarm.identity_file or str(Path(self._folder) / "identity")
        ticket = secrets.token_bytes(32)
        where = identity, config.swarm.listen
        self._start = ipc.Start(config.model_dump(), state, schema, *where, os.getpid(), ticket, prefers=prefers)
        self._changed = threading.Condition()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None
        self._seat: Seat | None = None
        self._sign_of_life = time.monotonic()
        self._present = False  # the exchange process of now has its place; else rounds would wait for it
        self._reseating = False  # the slot was lost, and the exchange process asks for another
        self._to_take: set[int] = set()  # fragments whose anchor the trainer has to take, because of a new seat
        self._refusal = ""
        self._traceback = ""
        self._end_reason = ""
        self._closing = False
        self._asked: Callable[[], bool] = lambda: False
        self._launched: dict[int, float] = {}  # when that was
        self._committing: dict[int, list[RoundOutcome]] = {}  # swaps that were about to happen
        self._outcomes: dict[int, RoundOutcome] = {}
        self._events: list[ExchangeEvent] = []
        self._next_progress_line = 0.0
        # The kernel ties the exchange process to the thread that starts it, so one thread does, as long as this lives.
        self._keeper = threading.Thread(target=self._keep, name="exchange-keeper", daemon=True)
        self._keeper.start()
        atexit.register(self.close)

    def join(self, waiting: Callable[[], None] = lambda: None) -> Seat:
        """See :class:`diloco.exchange.base.Exchange`."""
        limit = self._config.swarm.join_timeout + _START_SECONDS
        with self._changed:
            while not (self._seat or self._refusal) and time.monotonic() < self._sign_of_life + limit:
                self._changed.wait(1.0)
                waiting()
            if self._seat:
                return self._seat
            reason = self._refusal or (
                f"the exchange process did not get ready within {limit:g} s; is the machine overloaded?"
            )
        self.close()
        raise JoinError(reason)

    def started(self) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""
        with self._changed:
            self._start = replace(self._start, started=True)
            if self._pipe:
                self._send(ipc.Started())

    def progress(self, step: int, tokens_per_second: float) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""
        self._state.step.fill_(step)
        self._state.tokens_per_second.fill_(tokens_per_second)

    def called(self, fragment: int) -> bool:
        """See :class:`diloco.exchange.base.Exchange`."""
        return self._urgency(fragment) != NOT_CALLED

    def is_late(self, fragment: int) -> bool:
        """See :class:`diloco.exchange.base.Exchange`."""
        return self._urgency(fragment) == LATE

    def launch(self, fragment: int, work: Work) -> None:
        """See :class:`diloco.exchange.base.Exchange`.

        Raises:
            ValueError: there is nothing to count.
            RuntimeError: a round of this fragment is in flight.
        """
        if work.tokens <= 0:
            raise ValueError(f"a round needs a positive weight (tokens since the last), got {work.tokens}")
        with self._changed:
            if fragment in self._launched:
                raise RuntimeError(f"a round of fragment {fragment} is in flight; take its outcome first")
            self._launched[fragment] = time.monotonic()
            if self._reseating:
                self._outcomes[fragment] = self._skipped(fragment, "this island has lost its slot and asks for another")
            elif fragment in self._to_take or work.lease not in (None, self._seat.lease):
                self._to_take.discard(fragment)
                self._outcomes[fragment] = self._taken(fragment)
            elif not self._present:
                self._outcomes[fragment] = self._skipped(fragment, "the exchange process is being started again")
            else:
                self._send(ipc.Launch(fragment, work))

    def arrived(self, fragment: int) -> bool:
        """See :class:`diloco.exchange.base.Exchange`."""
        with self._changed:
            return fragment in self._outcomes

    def peek(self, fragment: int) -> RoundOutcome | None:
        """See :class:`diloco.exchange.base.Exchange`."""
        with self._changed:
            return self._outcomes.get(fragment)

    def outcome(self, fragment: int) -> RoundOutcome:
        """See :class:`diloco.exchange.base.Exchange`."""
        with self._changed:
            limit = self._config.exchange.round_deadline + _GRACE_SECONDS
            limit += sum(tensor.nbytes for tensor in self._state.fragments[fragment].agreed_tensors()) / _STAGED_PER_SECOND
            if not self._ends_by(fragment, self._launched[fragment] + limit):
                # It might still commit while the trainer believes that nothing changed, so it has to end first.
                self._end_reason = self._end_reason or f"it did not end a round within {limit:g} s and was stopped"
                if self._process:
                    self._process.kill()
                self._changed.wait_for(lambda: fragment in self._outcomes)
            del self._launched[fragment]
            self._committing.pop(fragment, None)
            outcome = self._outcomes.pop(fragment)
            if outcome.seat:
                self._to_take.clear()  # the trainer takes them all at once
                for other in [index for index, untaken in self._outcomes.items() if untaken.seat]:
                    self._outcomes[other] = self._skipped(other, "this island had lost its slot")
            return outcome

    def leave_when(self, asked: Callable[[], bool]) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""
        self._asked = asked

    def events(self) -> list[ExchangeEvent]:
        """See :class:`diloco.exchange.base.Exchange`."""
        with self._changed:
            events, self._events = self._events, []
        return events

    def close(self, hurry: bool = False) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""
        if os.getpid() != self._start.parent_pid:
            return  # a fork of the trainer ends, not the trainer
        with self._changed:
            self._closing = True
            if self._pipe:
                self._send(ipc.Close(hurry))
            self._changed.notify_all()
        # It may be needed by those who are behind.
        self._keeper.join(_CLOSE_SECONDS + (0.0 if hurry else self._config.exchange.peer_timeout))
        with self._changed:
            if self._process:
                self._process.kill()
        self._keeper.join()
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def _ends_by(self, fragment: int, until: float) -> bool:
        """Wait for a round to end, and leave the swarm in the middle of it where this island is to stop. Returns whether it ended."""
        leave_at = math.inf
        while fragment not in self._outcomes and (now := time.monotonic()) < until:
            if leave_at == math.inf and self._asked():
                leave_at = now + _LEAVE_SHARE * self._config.checkpoint.grace
            if now >= leave_at:
                self._closing, self._end_reason = True, "was told to leave, as this island is to stop"
                if self._pipe:
                    self._send(ipc.Close(hurry=True))
                return self._changed.wait_for(lambda: fragment in self._outcomes, _CLOSE_SECONDS)
            self._changed.wait(min(until - now, _ASK_SECONDS))
        return fragment in self._outcomes

    # -- the keeper's thread -------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        short_lives = 0
        while True:
            started = time.monotonic()
            try:
                self._live_once()
            except Exception as error:  # it could not even be started
                self._traceback = f"{type(error).__name__}: {error}"
            with self._changed:
                self._process = self._pipe = None
                self._present = False
                if not self._seat and not self._closing:
                    failure = f"the exchange process failed: {self._end_reason}\n{self._traceback}"
                    self._refusal = self._refusal or failure
                self._end_launched()
                if self._closing or self._refusal:
                    self._changed.notify_all()
                    return
                event = f"exchange process {self._end_reason}; starting it again\n{self._traceback}".strip()
                self._events.append(ExchangeEvent("restarted", event))
                self._end_reason = self._traceback = ""
                self._changed.notify_all()
                short_lives = short_lives + 1 if time.monotonic() - started < _STABLE_SECONDS else 0
                if short_lives > 1:
                    pause = min(_LONGEST_PAUSE_SECONDS, 2.0**short_lives)
                    self._changed.wait_for(lambda: self._closing, pause)

    def _live_once(self) -> None:
        """Start the exchange process and read from it until it has ended."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=process.main, args=(theirs, self._start), name="exchange", daemon=True)
        with self._changed:
            if self._closing:
                return
            child.start()
            self._process, self._pipe = child, ours
        theirs.close()
        while True:
            ready = wait([ours, child.sentinel], timeout=_BEAT_SECONDS)
            self._state.beat.add_(1)
            if ours in ready:  # what it said before it died comes first
                try:
                    self._receive(ours.recv())
                except (EOFError, OSError):
                    break
            elif ready:
                break
        child.join()
        with self._changed:
            self._process = None
            self._end_reason = self._end_reason or f"ended ({describe_exit(child.exitcode)})"
        child.close()
        ours.close()

    def _receive(self, message: ipc.FromExchange) -> None:
        with self._changed:
            match message:
                case ipc.Listening():
                    self._tell_address(message.address)
                case ipc.Joined():
                    if self._seat:
                        self._events.append(ExchangeEvent("rejoined", f"exchange process in slot {message.seat.slot}"))
                    if self._reseating:
                        self._to_take = set(range(len(self._state.fragments)))
                    self._seat, self._reseating, self._present = message.seat, False, True
                    self._start = replace(self._start, rejoin=message.roster, listen=message.listen)
                case ipc.Taking():
                    self._sign_of_life = time.monotonic()
                    self._show_taking(message)
                case ipc.SeatLost():
                    self._reseating = True
                    self._forget_previous_anchors()
                    self._start = replace(self._start, rejoin=None, any_slot=True)
                    self._end_reason = message.reason
                case ipc.Refused():
                    if self._seat:  # training goes on, and so do the attempts to come back
                        self._end_reason = message.reason
                    else:
                        self._refusal = message.reason
                case ipc.Crashed():
                    self._traceback = message.traceback
                case ipc.Committing():
                    self._committing.setdefault(message.outcome.fragment, []).append(message.outcome)
                case ipc.Ended():
                    self._outcomes[message.outcome.fragment] = message.outcome
                case ExchangeEvent():
                    self._events.append(message)
            self._changed.notify_all()

    def _tell_address(self, address: str) -> None:
        """The others need the first island's address before they can come, so while it still waits in :meth:`join`."""
        swarm = self._config.swarm
        if not self._seat and swarm.islands > 1 and not swarm.initial_peers:
            print(f"first island; the others join it with swarm.initial_peers=[{address}]", file=sys.stderr, flush=True)

    def _end_launched(self) -> None:
        """Give every round in flight an outcome, now that nobody writes to the state any more."""
        for fragment in self._launched.keys() - self._outcomes.keys():
            digest = self._state.fragments[fragment].digest
            swapped = [outcome for outcome in self._committing.get(fragment, ()) if outcome.digest == digest]
            if swapped:  # it died just after the swap
                self._outcomes[fragment] = swapped[-1]
            else:
                self._outcomes[fragment] = self._skipped(fragment, f"the exchange process {self._end_reason}")

    def _forget_previous_anchors(self) -> None:
        """A newcomer writes the swarm's state over them: who has not taken an outcome yet can only take the anchor."""
        for fragment, outcome in self._outcomes.items():
            if outcome.kind == "left_out":
                self._outcomes[fragment] = replace(outcome, rejected=True)

    def _urgency(self, fragment: int) -> int:
        """Nothing can be launched while there is no exchange process in its place, whatever the last one wrote.

        Nor before the last outcome is taken.
        """
        if not self._present or fragment in self._launched:
            return NOT_CALLED
        return LATE if fragment in self._to_take else int(self._state.called[fragment])

    def _show_taking(self, taking: ipc.Taking) -> None:
        done, total = taking.num_bytes, taking.total_bytes
        if time.monotonic() >= self._next_progress_line or done == total:
            self._next_progress_line = time.monotonic() + _PROGRESS_SECONDS
            share = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
            print(f"joining a run in progress: fragment {taking.fragment}, {share}", file=sys.stderr, flush=True)

    def _taken(self, fragment: int) -> RoundOutcome:
        """What becomes of the work of an island that lost its slot: nothing. Its state is the swarm's already."""
        state, seat = self._state.fragments[fragment], self._seat
        assert seat is not None
        return RoundOutcome(
            "left_out",
            fragment,
            state.height,
            reason=f"this island had lost its slot; it has slot {seat.slot} now",
            digest=state.digest,
            rejected=True,
            position=seat.position,
            step=seat.step,
            tokens=seat.tokens,
            seat=seat,
        )

    def _skipped(self, fragment: int, reason: str) -> RoundOutcome:
        return RoundOutcome("skipped", fragment, self._state.fragments[fragment].height, reason=reason)

    def _send(self, message: ipc.FromTrainer) -> None:
        try:
            self._pipe.send(message)
        except OSError:
            pass  # it is dead; the keeper notices by itself and gives every round an outcome
