"""How a round of this island ended: the swap, and what the trainer is told."""

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from typing import Iterator

from diloco.exchange.base import RoundOutcome
from diloco.exchange.hivemind.contribution import Contribution
from diloco.exchange.hivemind.ipc import Committing
from diloco.exchange.hivemind.stream import Traffic
from diloco.exchange.hivemind.surroundings import LastRound, Surroundings
from diloco.ledger import Ledger
from diloco.outer_state import FragmentState


class Ending:
    """Keeps what a round costs, and turns it into an outcome.

    Attributes:
        traffic: bytes on the wire so far.
        decode_seconds: of computing means, in all attempts.
        left_out: a round that the others committed without this island, and from which it went on.
    """

    def __init__(self, around: Surroundings, state: FragmentState, contribution: Contribution) -> None:
        self._around, self._state, self._contribution = around, state, contribution
        self._started, self._seconds, self.traffic = time.monotonic(), Counter[str](), Traffic()
        self._running: dict[str, float] = {}  # since when; a round may end inside what is timed
        self.decode_seconds = 0.0
        self.left_out: RoundOutcome | None = None

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """The block is spent on ``transfer`` or ``recovering``; all other time but encoding is waiting."""
        self._running[what] = time.monotonic()
        try:
            yield
        finally:
            self._seconds[what] += time.monotonic() - self._running.pop(what)

    def swap(self, kind: str, last: LastRound, **details: object) -> RoundOutcome:
        """Make the staged state the agreed one, which is the end of a round. Nothing in here waits."""
        staged = self._state.staged
        outcome = self._outcome(
            kind,
            staged.height,
            staged.ledger,
            members=last.members,
            weights=last.weights,
            digest=staged.digest,
            **details,
        )
        self._around.report(Committing(outcome))
        self._state.commit(self._around.membership.slot)
        self._around.last_round[self._state.index] = last
        self._around.membership.publish()
        return outcome

    def skipped(self, reason: str) -> RoundOutcome:
        """Nothing was applied; but where the round went on from another, the state has moved."""
        if self.left_out:
            return replace(self.left_out, reason=f"{self.left_out.reason}; then {reason}")
        return self._outcome("skipped", self._state.height, self._state.ledger, reason=reason)

    def _outcome(self, kind: str, height: int, ledger: Ledger, **details: object) -> RoundOutcome:
        now = time.monotonic()
        seconds, encoding = now - self._started, self._contribution.encode_seconds
        transfer, recovering = (
            self._seconds[what] + now - self._running.get(what, now) for what in ("transfer", "recovering")
        )
        return RoundOutcome(
            kind,
            self._state.index,
            height,
            bytes_sent=self.traffic.sent,
            bytes_received=self.traffic.received,
            exchange_seconds=seconds,
            pseudo_gradient_norm=self._contribution.own.norm,
            position=ledger.positions[self._around.membership.slot],
            step=self._around.step(ledger) if kind == "left_out" else ledger.step,
            tokens=ledger.tokens,
            waiting_seconds=max(0.0, seconds - encoding - transfer - recovering),
            transfer_seconds=transfer,
            recovering_seconds=recovering,
            encoded_bytes=self._contribution.own.num_bytes,
            encode_seconds=encoding,
            decode_seconds=self.decode_seconds,
            step_seconds=self._contribution.step_seconds,
            **details,
        )
