"""The hook that makes an island one of many: gather, exchange, outer step, scatter.

All ranks of the island call it alike. Rank 0 holds the outer state and talks to the exchange; the others learn each outcome from
it, so that all of them issue the same collectives in the same order.
"""

import time
from dataclasses import dataclass

from torch import Tensor

from diloco.config import OuterSection, RunConfig
from diloco.exchange.base import Exchange, RoundOutcome, Seat, Work
from diloco.outer_state import FragmentState, OuterState
from diloco.schedule import RoundTimer, Schedule, Standing, StepSchedule, TimedSchedule
from diloco.uncounted import Uncounted, fate_of
from islands.fragments import ParameterMover
from islands.metrics import Metrics
from islands.process import Process
from islands.sharing import FirstRankSays
from islands.train_loop import Progress

_OWNER = 0
_GRACE_SECONDS = 60.0  # on top of what an exchange allows itself


@dataclass(frozen=True)
class Coordinator:
    """What rank 0 has and the other ranks don't."""

    exchange: Exchange
    state: OuterState


def make_schedule(config: RunConfig, num_fragments: int) -> Schedule:
    """When the rounds of a run begin, and when the run ends."""
    train, seconds = config.train, config.outer.sync_seconds
    if seconds is None:
        return StepSchedule(train.steps, int(config.outer.sync_every), num_fragments)
    total = train.steps * train.global_batch_size * config.data.seq_len * config.swarm.islands
    return TimedSchedule(train.steps, seconds, total, num_fragments)


class OuterRound:
    """A :class:`~islands.train_loop.StepHook` that runs the outer rounds.

    Args:
        coordinator: on rank 0; None on the others.
        round_seconds: the longest that a round may take, which ranks then wait for rank 0.
    """

    def __init__(
        self,
        schedule: Schedule,
        section: OuterSection,
        mover: ParameterMover,
        coordinator: Coordinator | None,
        metrics: Metrics,
        process: Process,
        round_seconds: float,
    ) -> None:
        self._schedule, self._left_out, self._mover = schedule, section.left_out, mover
        self._coordinator, self._metrics = coordinator, metrics
        self._say_due = FirstRankSays(process, "rounds that begin")
        self._say_outcome = FirstRankSays(process, "outcome of a round")
        self._wait_seconds = round_seconds + _GRACE_SECONDS
        self._work: list[Uncounted] = []
        self._timer: RoundTimer | None = None
        self._resumed = 0.0  # when the inner step that comes next could begin
        self._swarm_tokens = [0] * schedule.num_fragments

    def start(self, seat: Seat) -> Progress:
        """Make the model's parameters the first anchor, or, where the run is in progress, the anchor the parameters.

        Returns:
            Where in the run this island begins.
        """
        count = self._schedule.num_fragments
        for index in range(count):
            state = self._state(index)
            if seat.late:
                self._take_anchor(index)
                continue
            self._mover.gather(index, _OWNER, state and state.anchor)
            if state:
                state.initialize()
        progress = Progress(slot=seat.slot, position=seat.position)
        self._swarm_tokens = [seat.tokens] * count
        self._work = [Uncounted(seat.position) for _ in range(count)]
        _stand(progress, self._schedule.joined(seat.step, seat.tokens))
        self._resumed = time.monotonic()
        if self._coordinator:
            if isinstance(self._schedule, TimedSchedule):
                self._timer = RoundTimer(self._schedule, self._resumed)
            self._coordinator.exchange.started()
        return progress

    def after_step(self, progress: Progress, tokens: int) -> float:
        """See :class:`~islands.train_loop.StepHook`."""
        for work in self._work:
            work.tokens += tokens
        _stand(progress, self._schedule.stepped(_standing(progress)))
        if self._coordinator:
            self._coordinator.exchange.progress(progress.step, tokens / (time.monotonic() - self._resumed))
        launched, stall = {}, 0.0
        for fragment in self._due(progress.step):
            started = time.monotonic()
            launched[fragment] = self._launch(fragment, progress)
            stall += time.monotonic() - started
        for fragment, work in launched.items():
            started, slot = time.monotonic(), progress.slot
            outcome = self._land(fragment, work, progress)
            seconds = time.monotonic() - started
            stall += seconds
            self._record(outcome, work, slot, seconds)
        self._resumed = time.monotonic()
        return stall

    def _due(self, step: int) -> list[int]:
        """Fragments whose round begins now, as rank 0 knows: by schedule, or because the others are waiting."""
        due: list[int] = []
        if self._coordinator:
            exchange, count = self._coordinator.exchange, self._schedule.num_fragments
            if isinstance(self._schedule, StepSchedule):
                scheduled = self._schedule.launches(step)
                due = [index for index in range(count) if index in scheduled or exchange.is_late(index)]
            else:
                due = self._timer.due(time.monotonic(), exchange.called)
        return self._say_due(due, self._wait_seconds)

    def _launch(self, fragment: int, progress: Progress) -> Work:
        state = self._state(fragment)
        self._mover.gather(fragment, _OWNER, state and state.local)
        work = self._work[fragment].offer(progress.position, progress.step)
        if self._coordinator:
            self._coordinator.exchange.launch(fragment, work)
        return work

    def _land(self, fragment: int, work: Work, progress: Progress) -> RoundOutcome:
        """Wait for the outcome, tell all ranks, and let progress and parameters follow it."""
        outcome = self._coordinator and self._coordinator.exchange.outcome(fragment)
        outcome = self._say_outcome(outcome, self._wait_seconds)
        if self._timer:
            self._timer.landed(fragment, time.monotonic())
        taken = progress.position
        self._follow(outcome, progress)
        last = progress.lr_step >= self._schedule.steps
        fate = fate_of(work, outcome, self._left_out, last)
        lost = fate.reason
        if outcome.seat:
            for index in range(self._schedule.num_fragments):
                self._take_anchor(index)
                self._work[index].forget(progress.position)
        elif fate.kind == "counted":
            self._take_anchor(fragment)
            self._work[fragment].counted(work)
        elif fate.kind == "dropped":
            self._take_anchor(fragment)
            self._work[fragment].forget(progress.position)
        elif outcome.kind == "left_out":  # the others moved on: move as far, and keep what this island added to it
            state = self._state(fragment)
            self._mover.scatter(fragment, _OWNER, state and state.anchor - state.previous_anchor, apply=Tensor.add_)
        elif last:  # nothing has taken the place of these parameters, so they stay; but no round will count them
            lost = f"the last round was skipped ({outcome.reason})"
        if lost:
            self._metrics.write("event", what="dropped", detail=f"{taken - work.start} sequences: {lost}")
        return outcome

    def _follow(self, outcome: RoundOutcome, progress: Progress) -> None:
        """Go on where the swarm is: in time, and in the slot's data."""
        if seat := outcome.seat:
            progress.slot, progress.position = seat.slot, seat.position
            self._swarm_tokens = [seat.tokens] * len(self._swarm_tokens)
            _stand(progress, self._schedule.joined(seat.step, seat.tokens))
        elif outcome.kind != "skipped":
            progress.position = max(progress.position, outcome.position)
            self._swarm_tokens[outcome.fragment] = outcome.tokens
            _stand(progress, self._schedule.landed(_standing(progress), outcome.step, min(self._swarm_tokens)))

    def _take_anchor(self, fragment: int) -> None:
        state = self._state(fragment)
        self._mover.scatter(fragment, _OWNER, state and state.anchor)

    def _state(self, fragment: int) -> FragmentState | None:
        return self._coordinator.state.fragments[fragment] if self._coordinator else None

    def _record(self, outcome: RoundOutcome, work: Work, slot: int, stall_seconds: float) -> None:
        self._metrics.write(
            "round",
            round=outcome.height,
            fragment=outcome.fragment,
            step=work.step,
            slot=slot,
            start=work.start,
            position=work.position,
            counted=None if outcome.seat else outcome.position,  # of this slot, as the swarm has it
            members=list(outcome.members),
            weight=work.tokens,
            tokens=outcome.tokens,
            outcome=outcome.kind,
            reason=outcome.reason,
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            exchange_seconds=outcome.exchange_seconds,
            waiting_seconds=outcome.waiting_seconds,
            transfer_seconds=outcome.transfer_seconds,
            recovering_seconds=outcome.recovering_seconds,
            stall_seconds=stall_seconds,
            pseudo_gradient_norm=outcome.pseudo_gradient_norm,
            cosine=outcome.cosine,
            digest=outcome.digest,
        )
        for event in self._coordinator.exchange.events() if self._coordinator else ():
            self._metrics.write("event", what=event.what, detail=event.detail)


def _standing(progress: Progress) -> Standing:
    return Standing(progress.step, progress.lr_step)


def _stand(progress: Progress, standing: Standing) -> None:
    progress.step, progress.lr_step = standing
