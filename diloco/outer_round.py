"""The hook that makes an island one of many: gather, exchange, outer step, scatter.

All ranks of the island call it alike. Rank 0 holds the outer state and talks to the exchange; the others learn each outcome from
it, so that all of them issue the same collectives in the same order.
"""

import time
from dataclasses import dataclass

from torch import Tensor

from diloco.exchange.base import Exchange, RoundOutcome
from diloco.outer_state import FragmentState, OuterState
from diloco.schedule import Schedule
from islands.fragments import ParameterMover
from islands.metrics import Metrics
from islands.process import Process
from islands.sharing import FirstRankSays

_OWNER = 0
_GRACE_SECONDS = 60.0  # on top of what an exchange allows itself


@dataclass(frozen=True)
class Coordinator:
    """What rank 0 has and the other ranks don't."""

    exchange: Exchange
    state: OuterState


class OuterRound:
    """A :class:`~islands.train_loop.StepHook` that runs the outer rounds.

    Args:
        coordinator: on rank 0; None on the others.
        round_seconds: the longest that a round may take, which ranks then wait for rank 0.
    """

    def __init__(
        self,
        schedule: Schedule,
        mover: ParameterMover,
        coordinator: Coordinator | None,
        metrics: Metrics,
        process: Process,
        round_seconds: float,
    ) -> None:
        self._schedule, self._mover, self._coordinator, self._metrics = schedule, mover, coordinator, metrics
        self._say, self._round_seconds = FirstRankSays(process, "outcome of a round"), round_seconds
        self._tokens = [0] * schedule.num_fragments  # trained on since the last commit of each fragment
        self._offered = [0] * schedule.num_fragments

    def start(self) -> None:
        """Make the model's parameters the first anchor."""
        for index in range(self._schedule.num_fragments):
            state = self._state(index)
            self._mover.gather(index, _OWNER, state and state.anchor)
            if state:
                state.initialize()

    def after_step(self, step: int, tokens: int) -> float:
        """See :class:`~islands.train_loop.StepHook`."""
        self._tokens = [before + tokens for before in self._tokens]
        launches, landings = self._schedule.launches(step), self._schedule.landings(step)
        if not launches and not landings:
            return 0.0
        started = time.monotonic()
        for fragment in launches:
            self._launch(fragment)
        stall = time.monotonic() - started
        for fragment in landings:
            started = time.monotonic()
            outcome = self._land(fragment)
            seconds = time.monotonic() - started
            stall += seconds
            self._record(outcome, step, seconds)
        return stall

    def _launch(self, fragment: int) -> None:
        state = self._state(fragment)
        self._mover.gather(fragment, _OWNER, state and state.local)
        self._offered[fragment] = self._tokens[fragment]
        if self._coordinator:
            self._coordinator.exchange.launch(fragment, float(self._offered[fragment]))

    def _land(self, fragment: int) -> RoundOutcome:
        """Wait for the outcome, tell all ranks, and let the parameters follow it."""
        outcome = self._coordinator and self._coordinator.exchange.outcome(fragment)
        outcome = self._say(outcome, seconds=self._round_seconds + _GRACE_SECONDS)
        state = self._state(fragment)
        if outcome.kind == "committed":
            self._mover.scatter(fragment, _OWNER, state and state.anchor)
            self._tokens[fragment] -= self._offered[fragment]
        elif not outcome.finite:  # nothing can be kept of such parameters, and no gradient would ever mend them
            self._mover.scatter(fragment, _OWNER, state and state.anchor)
            self._tokens[fragment] = 0
        elif outcome.kind == "left_out":  # the others moved on: follow them, and keep this island's work for the next round
            self._mover.scatter(fragment, _OWNER, state and state.anchor - state.previous_anchor, apply=Tensor.add_)
        return outcome

    def _state(self, fragment: int) -> FragmentState | None:
        return self._coordinator.state.fragments[fragment] if self._coordinator else None

    def _record(self, outcome: RoundOutcome, step: int, stall_seconds: float) -> None:
        self._metrics.write(
            "round",
            round=outcome.height,
            fragment=outcome.fragment,
            step=step,
            members=list(outcome.members),
            weight=self._offered[outcome.fragment],
            outcome=outcome.kind,
            reason=outcome.reason,
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            exchange_seconds=outcome.exchange_seconds,
            stall_seconds=stall_seconds,
            pseudo_gradient_norm=outcome.pseudo_gradient_norm,
            cosine=outcome.cosine,
            digest=outcome.digest,
        )
        if not outcome.finite:
            self._metrics.write("event", what="reset", detail=f"parameters were not finite at step {step}; took the anchor")
        for event in self._coordinator.exchange.events() if self._coordinator else ():
            self._metrics.write("event", what=event.what, detail=event.detail)
