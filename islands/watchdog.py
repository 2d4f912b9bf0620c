"""When ranks wait for one that does not come, say which, and where it was last seen.

Each rank notes where it is (step and phase: an assignment), and a thread of its own tells the others once a second,
through the store. When a collective fails, or a phase lasts as long as the timeout, a rank reads what all of them
said. No clocks are compared: a rank whose signs have stopped is gone, one that is elsewhere says so, and so does one
that ended.
"""

import json
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch.distributed as dist

from islands.process import Process, dump_flight_recorder, is_collective_failure, last_collective

#: Share of the timeout after which a phase is reported while it lasts: some backends end the process at the timeout.
_PATIENCE = 0.9


class RankLost(RuntimeError):
    """A collective operation failed. The message names the ranks that did not take part, and where they were."""


class _Place(NamedTuple):
    entered: int
    step: int
    phase: str
    since: float


@dataclass(frozen=True)
class Sign:
    """What a rank says about itself.

    Attributes:
        count: grows with every sign.
        entered: phases that it has entered; as all ranks go through the same, it orders them.
        seconds: for how long it has been in this phase, by its own clock.
        waits_in_vain: a collective failed on it.
        ended: why it takes part no more; empty while it does.
    """

    count: int
    entered: int
    step: int
    phase: str
    seconds: float
    waits_in_vain: bool = False
    ended: str = ""

    @property
    def place(self) -> str:
        """Where it is."""
        return f"{self.phase} of step {self.step}"


class Watchdog:
    """Entered around training; ``enter`` notes each phase.

    Args:
        folder: where the backend's flight recorder is written, for torchfrtrace, when a collective fails.
    """

    def __init__(self, process: Process, folder: Path) -> None:
        self._rank, self._timeout, self._folder = process.rank, process.timeout, folder
        self._keys = [f"watchdog/{rank}" for rank in range(process.world_size)]
        self._store = process.store.clone()  # of its own: the other may be held by a long wait
        self._interval = min(1.0, process.timeout / 10)
        self._place = _Place(0, 0, "start", time.monotonic())
        self._count, self._ending = 0, {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def enter(self, phase: str, step: int | None = None) -> None:
        """This rank begins ``phase``, of ``step`` if that is another than before."""
        before = self._place
        self._place = _Place(before.entered + 1, before.step if step is None else step, phase, time.monotonic())

    def __enter__(self) -> Self:
        """Begin to tell the others."""
        if len(self._keys) > 1:
            self._say()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say how it ended. A failure of a collective becomes :class:`RankLost`."""
        if len(self._keys) == 1:
            return
        self._stop.set()
        self._thread.join()
        in_vain = error is not None and is_collective_failure(error)
        try:
            if not in_vain:
                reason = f"failed ({kind.__name__}: {_first_line(error)})" if error else "is done with all steps"
                self._say(ended=reason)
                return
            self._say(waits_in_vain=True)
            report = self.explain()
        except dist.DistError as lost:
            report = f"where the others were can't be read: the ranks' store is gone ({_first_line(lost)})"
        if in_vain:
            self._dump()
            operation = last_collective() or "a collective operation"
            told = f"rank {self._rank}: {operation} failed: {_first_line(error)}"
            raise RankLost(f"{told}\n{report}") from error

    def explain(self) -> str:
        """Which ranks did not take part in what this rank waits for. Takes three intervals, to see who still lives."""
        before = self._signs()
        for _ in range(3):
            time.sleep(self._interval)
            self._say()
        after = self._signs()
        told, waiting, silent = [], [], []
        for rank, sign in enumerate(after):
            absence = "" if rank == self._rank else self._absence(before[rank], sign)
            if absence:
                told.append(f"rank {rank} is missing: {absence}")
            else:
                waiting.append(rank)
                silent += [rank] if rank != self._rank and not sign.waits_in_vain else []
        if not told and silent:
            told.append(f"{_ranks(silent)} did not give up yet: computing still, or waiting for others")
        return "\n".join([*told, f"{_ranks(waiting)} waited in {after[self._rank].place}"])

    def _absence(self, before: Sign | None, now: Sign | None) -> str:
        """Why a rank does not take part in what this one waits for; empty where it seems to do."""
        if now is None:
            return "it never began to train"
        if now.ended:
            return f"it {now.ended}, in {now.place}"
        if before == now and not now.waits_in_vain:
            return f"it died or is frozen, and was last seen in {now.place}"
        if now.entered != self._place.entered:
            order = "behind" if now.entered < self._place.entered else "ahead"
            return f"it is {order}, and has been in {now.place} for {now.seconds:.1f} s"
        return ""

    def _watch(self) -> None:
        reported = None
        while not self._stop.wait(self._interval):
            place = self._place
            seconds = time.monotonic() - place.since
            try:
                self._say()
                if seconds > _PATIENCE * self._timeout and place is not reported:
                    reported = place
                    told = f"rank {self._rank} has been in {place.phase} of step {place.step} for {seconds:.0f} s"
                    print(f"{told}:\n{self.explain()}", file=sys.stderr, flush=True)
                    self._dump()
            except dist.DistError:
                return  # the store is gone; a failing collective will tell

    def _say(self, **ending: bool | str) -> None:
        """Tell the others where this rank is. An ending, once said, holds."""
        self._ending |= ending
        place = self._place
        self._count += 1
        seconds = time.monotonic() - place.since
        sign = Sign(self._count, place.entered, place.step, place.phase, seconds, **self._ending)
        self._store.set(self._keys[self._rank], json.dumps(asdict(sign)))

    def _signs(self) -> list[Sign | None]:
        return [
            Sign(**json.loads(self._store.get(key))) if self._store.check([key]) else None for key in self._keys
        ]

    def _dump(self) -> None:
        if recording := dump_flight_recorder():
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"rank_{self._rank}").write_bytes(recording)  # the name that torchfrtrace looks for


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
