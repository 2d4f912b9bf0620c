"""Starts all islands of a run on this machine, shows them, stops them cleanly, and ends every one of their processes."""

import ipaddress
import itertools
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterator, Literal, Sequence

from diloco.config import SwarmSection
from diloco.earlier_run import begin, command_to_go_on, newest
from diloco.identity import make_identity
from diloco.launch_plan import LaunchPlan, founder_port, host_and_port, make_plan
from diloco.launch_processes import LAUNCH_MARK, POLL_SECONDS, StopRequest, end_all, start_process
from diloco.live_view import IslandProgress, View, make_view
from diloco.report import print_summary, write_report
from diloco.run_files import LineTail, RowTail, island_dir, lock_run_dir, log_file, metrics_file, set_aside

LOG_LINES_AFTER_FAILURE = 20
GRACE_MARGIN_SECONDS = 10.0  # on top of checkpoint.grace: for what is left when a rank has stopped

INTERRUPTED = 130

#: The lines in which torchrun tells how its ranks ended. Its account of the last time are pages that repeat what they said
#: themselves, but for the exit code of the rank that failed first.
_TORCHRUN_ENDS = re.compile(r"[WE]\d{4} \S+ \d+ \S*torch/distributed/elastic/multiprocessing/api\.py")
_TORCHRUN_ACCOUNT = re.compile(rf"^{_TORCHRUN_ENDS.pattern}\S* failed \(exitcode.*\n?", re.MULTILINE)
_FIRST_EXIT_CODE = re.compile(r"Root Cause.*?exitcode *: (-?\d+)", re.DOTALL)

#: Makes the command of one island: (plan, overrides) -> argv.
IslandCommand = Callable[[LaunchPlan, Sequence[str]], list[str]]


def torchrun_command(plan: LaunchPlan, overrides: Sequence[str]) -> list[str]:
    """One island under torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.ranks_of_job}"]
    return [*torchrun, f"--max-restarts={plan.max_restarts}", "-m", "diloco", str(plan.config_file), *overrides]


@dataclass
class _Island:
    """One island that was started."""

    number: int
    process: subprocess.Popen[bytes]
    progress: IslandProgress
    log: LineTail
    rows: RowTail
    ending: bool = False
    ended: bool = False

    def show_news(self, view: View) -> None:
        """Hand on what the island printed and recorded since the last call."""
        for line in self.log.read():
            self.ending = self.ending or bool(_TORCHRUN_ENDS.match(line))
            if not self.ending:
                view.line(self.number, line)
        for row in self.rows.read():
            if row.get("what") == "start" and self.progress.begun:
                self.ending = False
                view.tell(f"island {self.number} begins again: one of its ranks had died")
            if notice := self.progress.apply(row):
                view.notice(self.number, notice)

    def show_end(self, code: int, asked: bool) -> None:
        """Its first process ended; ``asked`` to, maybe."""
        self.ended = True
        stopped = (asked or self.progress.state == "stopped") and not self.progress.finished
        self.progress.state = "failed" if code else "stopped" if stopped else "done"


@dataclass
class _Ending:
    """How a run ended: ``failed`` is the island that took the others down."""

    kind: Literal["done", "stopped", "failed", "interrupted"]
    failed: _Island | None = None


def launch(
    config_file: Path,
    overrides: Sequence[str],
    islands: int | None = None,
    max_restarts: int = 0,
    command: IslandCommand = torchrun_command,
) -> int:
    """Run all islands of ``config_file`` on this machine until all are done, one fails, or someone wants them to stop.

    When all are done, the report is written and its summary printed. An unfinished run in ``run.dir`` goes on, as ``train.resume``
    allows.

    Returns:
        The exit code: 0 where all are done or have stopped cleanly, that of the island which failed, or 130 when they had to be ended.

    Raises:
        ConfigError: before anything was started.
    """
    plan = make_plan(config_file, overrides, islands, max_restarts)
    port = founder_port(plan.config.swarm)
    with lock_run_dir(plan.run_dir) as lock:
        beginning = begin(plan.config)
        for line in beginning.told:
            print(line, flush=True)
        return _run(replace(plan, overrides=plan.overrides + beginning.overrides), command, port, lock.fileno())


def _run(plan: LaunchPlan, command: IslandCommand, port: int, lock: int) -> int:
    mark = uuid.uuid4().hex
    started: list[_Island] = []
    with _Wishes() as wishes, make_view(plan.title) as view:
        try:
            for island in _start_islands(plan, command, port, mark, lock):
                started.append(island)
            ending = _watch(plan, started, view, wishes)
        finally:
            end_all([island.process for island in started], mark, at_once=lambda: wishes.repeated)
        _show_last(started, ending, view)
    return _tell_ending(plan, ending)


def _start_islands(plan: LaunchPlan, command: IslandCommand, port: int, mark: str, lock: int) -> Iterator[_Island]:
    swarm, run_dir = plan.config.swarm, plan.run_dir.resolve()
    for number in range(plan.jobs):
        island_dir(run_dir, number).mkdir(exist_ok=True)
    own_keys = [{}] if plan.in_one_job else _keys_of_islands(swarm, run_dir, port)
    for number, own in enumerate(own_keys):
        if not plan.gpus:
            own["run.device"] = "cpu"
        overrides = [*plan.overrides, *(f"{key}={json.dumps(value)}" for key, value in own.items())]
        rows, log = RowTail(metrics_file(run_dir, number)), log_file(run_dir, number)
        rows.read()  # those of an earlier process, if the run goes on
        set_aside(log)
        process = start_process(command(plan, overrides), log, {**plan.environment(number), LAUNCH_MARK: mark}, lock)
        yield _Island(number, process, IslandProgress(number, plan.config.train.steps), LineTail(log), rows)


def _keys_of_islands(swarm: SwarmSection, run_dir: Path, port: int) -> list[dict[str, object]]:
    """How the islands of a swarm find each other, by island: what each sets for itself."""
    founder_id = make_identity(island_dir(run_dir, 0) / "identity")
    host, _ = host_and_port(swarm.listen)
    reachable = ipaddress.ip_address("127.0.0.1" if host.version == 4 else "::1") if host.is_unspecified else host
    founder_address = f"/ip{host.version}/{reachable}/tcp/{port}/p2p/{founder_id}"
    return [
        {
            "swarm.slot": number,
            "swarm.listen": f"{swarm.listen.rpartition(':')[0]}:{port if number == 0 else 0}",
            "swarm.identity_file": str(island_dir(run_dir, number) / "identity"),
            "swarm.initial_peers": [] if number == 0 else [founder_address],
        }
        for number in range(swarm.islands)
    ]


class _Wishes:
    """Counts the wishes to stop (Ctrl-C, SIGTERM, a closed terminal) instead of raising in the middle of something."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self._heeded: int | None = None

    def __enter__(self) -> "_Wishes":
        self._before = {number: signal.signal(number, self._count_one) for number in self._SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def heed(self) -> None:
        """The islands are being asked to stop, be it for a wish or not: the next wish is one to end at once."""
        self._heeded = self.count

    @property
    def repeated(self) -> bool:
        """Whether there was another one after they were heeded."""
        return self._heeded is not None and self.count > self._heeded

    def _count_one(self, number: int, frame: object) -> None:
        self.count += 1


def _watch(plan: LaunchPlan, islands: list[_Island], view: View, wishes: _Wishes) -> _Ending:
    """Until all have ended. Someone's wish, or the failure of one, becomes a wish that all stop, for which they have a time."""
    request, deadline = StopRequest(), math.inf
    failed: _Island | None = None
    while True:
        asked = deadline < math.inf
        failed = failed or _show_news(islands, view, asked)
        if wishes.repeated or time.monotonic() > deadline:
            return _Ending("failed" if failed else "interrupted", failed)
        if all(island.process.returncode is not None for island in islands):
            stopped = any(island.progress.state == "stopped" for island in islands)
            return _Ending("failed" if failed else "stopped" if stopped else "done", failed)
        if not asked and (wishes.count or failed):
            deadline = time.monotonic() + plan.config.checkpoint.grace + GRACE_MARGIN_SECONDS
            wishes.heed()
            reason = f"island {failed.number} failed; " if failed else ""
            view.tell(f"{reason}stopping: last checkpoints are being written; Ctrl-C {'' if failed else 'again '}ends at once")
        for island in islands if deadline < math.inf else ():
            request.send(island.process, may_have_ranks=island.progress.state != "starting")
        time.sleep(POLL_SECONDS)


def _show_news(islands: list[_Island], view: View, asked: bool) -> _Island | None:
    """Show what is new. Returns an island that has failed: one that was asked to stop before it trained has nothing to lose."""
    codes = [island.process.poll() for island in islands]  # before reading, so that the last lines are read too
    failed = None
    for island, code in zip(islands, codes):
        island.show_news(view)
        begun = island.progress.state not in ("starting", "joining")
        if code is not None and not island.ended:
            island.show_end(code if begun or not asked else 0, asked)
            failed = failed or (island if island.progress.state == "failed" else None)
    view.refresh([island.progress for island in islands])
    return failed


def _show_last(islands: list[_Island], ending: _Ending, view: View) -> None:
    for island in islands:
        island.show_news(view)
        if ending.kind != "done" and island is not ending.failed and island.progress.state != "done":
            island.progress.state = "stopped"
    view.refresh([island.progress for island in islands], force=True)


def _tell_ending(plan: LaunchPlan, ending: _Ending) -> int:
    if ending.failed:
        return _tell_failure(plan, ending.failed)
    last = newest(plan.config)
    reached = last.progress["lr_step"] if last else 0
    at_the_end = reached >= plan.config.train.steps  # of the island that is furthest on; others may have been stopped on the last steps
    if ending.kind == "done" or (ending.kind == "stopped" and at_the_end):
        print_summary(plan.run_dir, write_report(plan.run_dir))
        return 0
    if ending.kind == "interrupted":
        print(f"Interrupted: all islands are ended. What there is: diloco report {plan.run_dir}", file=sys.stderr)
        return INTERRUPTED
    where = f"at step {reached} of {plan.config.train.steps}" if last else "before there was a checkpoint"
    print(f"Stopped {where}. To go on: {shlex.join(command_to_go_on(plan))}\nWhat there is: diloco report {plan.run_dir}")
    return 0


def _tell_failure(plan: LaunchPlan, failed: _Island) -> int:
    log = log_file(plan.run_dir, failed.number)
    printed = log.read_text(errors="replace")
    first_failure = _FIRST_EXIT_CODE.search(printed)
    code = int(first_failure[1]) if first_failure else failed.process.returncode
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    print(f"\nIsland {failed.number} {how}, so all islands were ended. The end of {log}:", file=sys.stderr)
    print("\n".join(f"  {line}" for line in _last_words(printed)[-LOG_LINES_AFTER_FAILURE:]), file=sys.stderr)
    return 128 - code if code < 0 else code


def _last_words(printed: str) -> list[str]:
    """What the ranks said when they ran for the last time, up to where torchrun ended them."""
    attempts = [0, *(account.end() for account in _TORCHRUN_ACCOUNT.finditer(printed))]
    begun = attempts[-2] if len(attempts) > 1 else 0  # the account of the last one comes after it
    return list(itertools.takewhile(lambda line: not _TORCHRUN_ENDS.match(line), printed[begun:].splitlines()))
