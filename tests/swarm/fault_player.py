"""Makes the faults of a plan happen to a :class:`cluster.Cluster`, and notes the proof that each of them did."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterable, Iterator

import stranger
from cluster import Cluster
from faults import Fault
from harness import is_gone, status
from island_process import MARK, IslandProcess

_GONE_SECONDS = 10.0  # for what must end by itself after its trainer was killed
_TURN_SECONDS = 0.5  # the running part of a turn of a slowed trainer
_HOLDS = {"transfer": "hold_in_transfer", "vote": "hold_before_vote"}


@dataclass
class Strike:
    """A fault on its way.

    Attributes:
        began, ended: Unix seconds; 0: not yet. A kill begins and ends at once.
        proof: what was seen of it; empty until it has really happened.
        stops_trainer: the share of its time in which it keeps the victim from training.
    """

    fault: Fault
    began: float = 0.0
    ended: float = 0.0
    proof: str = ""
    stops_trainer: float = 0.0


class FaultPlayer:
    """Plays a plan. Call :meth:`tick` often: nothing happens by itself.

    No thread of its own, because an island dies with the thread that started it.

    Args:
        may_strike: asked before each fault whose moment has come; while it says no, the fault waits.

    Attributes:
        strikes: one a fault, in the order of the plan.
    """

    def __init__(
        self, cluster: Cluster, faults: Iterable[Fault], may_strike: Callable[[Fault], bool] = lambda fault: True
    ) -> None:
        self.cluster, self.strikes = cluster, [Strike(fault) for fault in faults]
        self._may_strike, self._started = may_strike, time.monotonic()
        self._running = [self._play(strike) for strike in self.strikes]

    def tick(self) -> None:
        """Let every fault do what is due."""
        for play in list(self._running):
            try:
                next(play)
            except StopIteration:
                self._running.remove(play)

    def done(self) -> bool:
        """Whether all faults are over."""
        return not self._running

    def play(self, timeout: float, until: Callable[[], object] = lambda: True) -> None:
        """Until all faults are over and ``until`` is true; fails when an island ends that nobody killed."""
        self.cluster.wait_until(lambda: self.done() and until(), timeout, meanwhile=self.tick)

    def assert_all_fired(self) -> None:
        """A fault that did not happen proves nothing about who survived it."""
        missed = [str(strike.fault) for strike in self.strikes if not strike.proof]
        assert not missed, f"these faults were planned and did not happen: {missed}"

    # -- one fault, step by step; every yield gives the others their turn ----------------------------------------------

    def _play(self, strike: Strike) -> Iterator[None]:
        fault = strike.fault
        victim = self.cluster.islands[fault.islands[0]] if fault.islands else None
        while not self._is_due(fault, victim) or not self._may_strike(fault):
            yield
        if fault.during:
            hold = _HOLDS[fault.during]
            for mark in ("fired", "release"):
                (victim.faults / f"{hold}.{mark}").unlink(missing_ok=True)
            (victim.faults / hold).touch()
            yield from _until((victim.faults / f"{hold}.fired").exists)
        yield from _ACTIONS[fault.kind](self, strike, victim)
        strike.ended = strike.ended or time.time()
        _let_go(fault, victim)

    def _is_due(self, fault: Fault, victim: IslandProcess | None) -> bool:
        if not fault.at_round:
            return time.monotonic() - self._started >= fault.at_seconds
        watched = [victim] if victim else self.cluster.islands
        return max(island.height() for island in watched) >= fault.at_round - 1

    def _kill(self, strike: Strike, victim: IslandProcess) -> Iterator[None]:
        pids = victim.pids()
        strike.began = strike.ended = time.time()
        victim.kill()
        deadline = time.monotonic() + _GONE_SECONDS
        while left := [pid for pid in pids if not is_gone(pid)]:
            assert time.monotonic() < deadline, f"processes {left} outlive the trainer of island {victim.slot}"
            yield
        strike.proof = f"{len(pids)} processes gone within {time.time() - strike.began:.1f} s"

    def _kill_part(self, strike: Strike, victim: IslandProcess) -> Iterator[None]:
        find = victim.exchange_pid if strike.fault.kind == "kill exchange" else victim.daemon_pid
        pid = yield from _until(find)
        strike.began = time.time()
        os.kill(pid, signal.SIGKILL)
        yield from _until(lambda: is_gone(pid))
        strike.proof = f"process {pid} gone"

    def _restart(self, strike: Strike, victim: IslandProcess) -> Iterator[None]:
        yield from _until(lambda: not victim.alive())  # its end may have had to wait
        strike.began = time.time()
        self.cluster.start(victim.slot)
        strike.proof = f"life {len(victim.lives)} is process {victim.lives[-1].process.pid}"
        yield

    def _freeze(self, strike: Strike, victim: IslandProcess) -> Iterator[None]:
        pids = victim.pids()
        strike.began, strike.stops_trainer = time.time(), 1.0
        try:
            _signal(pids, signal.SIGSTOP)
            yield from _until(lambda: all(status(pid) in ("T", "") for pid in pids))
            strike.proof = f"{len(pids)} processes stood still"
            _let_go(strike.fault, victim)
            yield from _pause(strike.fault.seconds)
        finally:
            _signal(pids, signal.SIGCONT)

    def _cut(self, strike: Strike, victim: IslandProcess) -> Iterator[None]:
        link, fault = self.cluster.link, strike.fault
        assert link, f"{fault}: a cut needs a link; give the cluster one"
        before, strike.began = link.packets_cut(victim.slot), time.time()
        link.cut(fault.islands, fault.others or None)
        _let_go(fault, victim)
        try:
            yield from _pause(fault.seconds)
        finally:
            link.heal(fault.islands, fault.others or None)
        if swallowed := link.packets_cut(victim.slot) - before:
            strike.proof = f"{swallowed} packets swallowed"

    def _slow(self, strike: Strike, victim: IslandProcess) -> Iterator[None]:
        strike.began = time.time()
        yield from (self._slow_link if self.cluster.link else self._slow_trainer)(strike, victim)

    def _slow_link(self, strike: Strike, victim: IslandProcess) -> Iterator[None]:
        link, fault = self.cluster.link, strike.fault
        before = link.bytes_of(victim.slot)
        link.slow([victim.slot], fault.factor)
        try:
            yield from _pause(fault.seconds)
        finally:
            link.slow([victim.slot], 1.0)
        if passed := link.bytes_of(victim.slot) - before:
            strike.proof = f"{passed / 1e3:.0f} kB passed at 1/{fault.factor:g} of the rate"

    def _slow_trainer(self, strike: Strike, victim: IslandProcess) -> Iterator[None]:
        fault, until, turns = strike.fault, time.monotonic() + strike.fault.seconds, 0
        pids, strike.stops_trainer = victim.trainer_pids(), 1 - 1 / fault.factor
        try:
            while time.monotonic() < until:
                _signal(pids, signal.SIGSTOP)
                yield from _pause(_TURN_SECONDS * (fault.factor - 1))
                _signal(pids, signal.SIGCONT)
                yield from _pause(_TURN_SECONDS)
                turns += 1
        finally:
            _signal(pids, signal.SIGCONT)
        strike.proof = f"the trainer stood still {turns} times for {_TURN_SECONDS * (fault.factor - 1):g} s"

    def _armed(self, strike: Strike, victim: IslandProcess) -> Iterator[None]:
        kind, strike.began = strike.fault.kind, time.time()
        (victim.faults / kind).touch()
        fired = victim.faults / f"{kind}.fired"
        yield from _until(fired.exists)
        fired.unlink()
        strike.began = strike.ended = time.time()
        strike.proof = f"happened after round {victim.height()}"

    def _stranger(self, strike: Strike, victim: None) -> Iterator[None]:
        living = [island for island in self.cluster.islands if island.alive()]
        host, link = living[0], self.cluster.link
        arguments = [sys.executable, str(Path(stranger.__file__)), self.cluster.addresses[host.slot]]
        strike.began = time.time()
        process = subprocess.Popen(
            link.command(link.count - 1, arguments) if link else arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**host.environment, MARK: self.cluster.mark},
        )
        yield from _until(lambda: process.poll() is not None)
        last = (process.stdout.read().strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        strike.proof = f"island {host.slot}: {last}"


_ACTIONS = {
    "kill": FaultPlayer._kill,
    "kill exchange": FaultPlayer._kill_part,
    "kill daemon": FaultPlayer._kill_part,
    "restart": FaultPlayer._restart,
    "freeze": FaultPlayer._freeze,
    "cut": FaultPlayer._cut,
    "slow": FaultPlayer._slow,
    "nan": FaultPlayer._armed,
    "corrupt": FaultPlayer._armed,
    "stranger": FaultPlayer._stranger,
}


def _let_go(fault: Fault, victim: IslandProcess | None) -> None:
    """Let an exchange process that was held in a phase go on, now that the fault is in force."""
    if fault.during:
        (victim.faults / f"{_HOLDS[fault.during]}.release").touch()


def _until(condition: Callable[[], object]) -> Iterator[None]:
    while not (value := condition()):
        yield
    return value


def _pause(seconds: float) -> Iterator[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        yield


def _signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
