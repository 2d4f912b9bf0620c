"""The outer loop's part of a checkpoint: how it gets in while rounds are in flight."""

import threading
import time
from dataclasses import replace
from typing import Callable, Iterator

from torch import Tensor

from diloco.eager import EagerStart
from diloco.exchange.base import Exchange, RoundOutcome
from diloco.flight import Flight, Logbook
from diloco.outer_facts import FlightFacts, FragmentFacts, LogFacts, OuterFacts
from diloco.outer_state import FragmentState, OuterState
from islands.checkpoint_part import Saved
from islands.fragments import Fragment

_READY_SECONDS = 60.0  # that an exchange has to encode a contribution, or to say how a round ended that it has committed
_LOOK_SECONDS = 0.01
_MOST_TRIES = 100  # commits that may come in between


class NotCopied(RuntimeError):
    """The outer state can't be copied: the message says what did not come, or what came in between."""


class Copying:
    """A copy on its way in another thread. No fragment of it may be launched again before its turn was."""

    def __init__(self, fragments: int) -> None:
        self._done = [threading.Event() for _ in range(fragments)]
        self._given_up = ""

    def done(self, fragment: int) -> None:
        """Of this one nothing is needed any more. Raises NotCopied where it was launched meanwhile."""
        self._done[fragment].set()
        if self._given_up:
            raise NotCopied(self._given_up)

    def end(self) -> None:
        """However it ended, nobody need wait."""
        for done in self._done:
            done.set()

    def wait(self, fragment: int) -> None:
        """It is about to be launched. Copying that takes too long is given up, and not the training."""
        if not self._done[fragment].wait(2 * _READY_SECONDS):
            self._given_up = f"the next round of fragment {fragment} began before its state was copied"


class OuterCopy:
    """On rank 0: what a checkpoint holds of the outer loop, taken between two inner steps and collected while training goes on."""

    def __init__(
        self, log: Logbook, fragments: list[Fragment], state: OuterState, exchange: Exchange, eager: list[EagerStart]
    ) -> None:
        self._log, self._fragments, self._state, self._exchange = LogFacts.of(log), fragments, state, exchange
        self._flights = [flight for flight in log.flights.values() if not flight.void]
        self._eager = [(start.base.clone(), start.offered.clone()) for start in eager]  # the next step may change them
        self.copying = Copying(len(fragments))

    def collect(self) -> Saved:
        """Copy the rest. Raises NotCopied."""
        tensors: dict[str, Tensor] = {}
        facts: list[FragmentFacts] = []
        flying = {flight.fragment: flight for flight in self._flights}
        told: dict[int, FlightFacts] = {}
        try:
            for fragment, state in zip(self._fragments, self._state.fragments, strict=True):
                found: dict[str, Tensor] = {}
                if flight := flying.get(state.index):
                    self._wait_until_encoded(flight, state)
                    agreed, outcome = self._copy_with_outcome(flight, state, found)
                    told[state.index] = _tell(flight, outcome, state, found)
                else:
                    agreed = _copy_agreed(state, found)
                facts.append(agreed)
                self.copying.done(state.index)
                for what, flat in found.items():
                    tensors |= named(fragment, f"outer.{what}", flat)
        finally:
            self.copying.end()
        for fragment, starts in zip(self._fragments, self._eager):
            for what, flat in zip(("eager_base", "eager_offered"), starts, strict=True):
                tensors |= named(fragment, f"outer.{what}", flat)
        flights = tuple(told[fragment] for fragment in flying)  # in the order in which they were launched, and will land
        return Saved(OuterFacts(self._log, tuple(facts), flights).to_json(), tensors)

    def _copy_with_outcome(
        self, flight: Flight, state: FragmentState, found: dict[str, Tensor]
    ) -> tuple[FragmentFacts, RoundOutcome | None]:
        """What is agreed, and the outcome that led there, if the round has one: never one of them without the other."""
        for _ in range(_MOST_TRIES):
            agreed = _copy_agreed(state, found)
            outcome = self._outcome(flight) if agreed.height == flight.height else self._wait_for_outcome(flight)
            if outcome and outcome.seat:
                raise NotCopied(f"the island gets another slot: {outcome.reason}")
            if outcome is None or outcome.kind == "skipped" or outcome.digest == agreed.digest:
                return agreed, outcome
        raise NotCopied(f"the round of fragment {state.index} ended with another state than its outcome tells")

    def _wait_until_encoded(self, flight: Flight, state: FragmentState) -> None:
        def ready() -> bool:
            return state.contribution_norm is not None or self._outcome(flight) is not None

        _wait(ready, f"the contribution to the round of fragment {flight.fragment} was not encoded")

    def _wait_for_outcome(self, flight: Flight) -> RoundOutcome | None:
        _wait(lambda: self._outcome(flight) is not None, f"the end of the round of fragment {flight.fragment} was not reported")
        return self._outcome(flight)

    def _outcome(self, flight: Flight) -> RoundOutcome | None:
        return flight.outcome or self._exchange.peek(flight.fragment)


def _tell(flight: Flight, outcome: RoundOutcome | None, state: FragmentState, found: dict[str, Tensor]) -> FlightFacts:
    """Copy into ``found`` what a round lands with; or, where it has no outcome, what was offered to it."""
    facts = FlightFacts(flight.fragment, flight.numel, flight.work, flight.inner_step, flight.slot)
    if outcome is None:
        found["contribution"] = state.local.clone()
        return replace(facts, norm=state.contribution_norm)
    found["previous_anchor"] = state.previous_anchor.clone()
    if state.mean is not None:
        found["mean"] = state.mean.clone()
    return replace(facts, outcome=outcome)


def _wait(ready: Callable[[], bool], otherwise: str) -> None:
    until = time.monotonic() + _READY_SECONDS
    while not ready():
        if time.monotonic() > until:
            raise NotCopied(f"{otherwise} within {_READY_SECONDS:g} s")
        time.sleep(_LOOK_SECONDS)


def _copy_agreed(state: FragmentState, found: dict[str, Tensor]) -> FragmentFacts:
    """Copy what is agreed into ``found``, once more whenever the exchange has committed meanwhile."""
    for _ in range(_MOST_TRIES):
        version = state.version
        facts = FragmentFacts(state.height, state.lineage, state.digest, state.ledger, state.offered)
        copies = {what: flat.clone() for what, flat in agreed(state)}
        if state.version == version:
            found |= copies
            return facts
    raise NotCopied(f"fragment {state.index} was committed {_MOST_TRIES} times while it was being copied")


def agreed(state: FragmentState) -> Iterator[tuple[str, Tensor]]:
    """What a checkpoint holds of every fragment: names and flat tensors."""
    yield "anchor", state.anchor
    yield from ((f"optimizer.{name}", flat) for name, flat in state.optimizer_state.items())
    if state.residual is not None:
        yield "residual", state.residual


def named(fragment: Fragment, prefix: str, flat: Tensor) -> dict[str, Tensor]:
    """Views of a fragment's flat tensor, by parameter and in its shape."""
    sizes = [parameter.numel for parameter in fragment.parameters]
    parts = zip(fragment.parameters, flat.split(sizes), strict=True)
    return {f"{prefix}.{parameter.name}": part.view(parameter.shape) for parameter, part in parts}
