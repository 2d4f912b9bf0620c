"""How an island goes on from the outer loop's part of a checkpoint; where exactly depends on what the swarm did meanwhile."""

from dataclasses import replace

from torch import Tensor

from diloco.eager import EagerStart
from diloco.exchange.base import Seat
from diloco.outer_checkpoint import agreed, named
from diloco.outer_facts import OuterFacts
from diloco.outer_round import OuterRound
from diloco.outer_state import OuterState
from islands.fragments import Fragment
from islands.progress import Progress


class OuterResume:
    """From one checkpoint, for an island that has taken its ``seat``.

    Where it is back in its slot and the run begins again with it, it goes on from where it was, with what was in flight. In
    another slot its own work can't count any more, so it goes on from the anchor. In a swarm that went on meanwhile (a late seat)
    the anchor is the swarm's, and of the outer loop only what its encodings lost is the checkpoint's.

    Args:
        fragments, state: on rank 0; the others have no state.
    """

    def __init__(
        self, facts: OuterFacts, seat: Seat, outer_round: OuterRound, fragments: list[Fragment], state: OuterState | None
    ) -> None:
        self._facts, self._seat, self._round = facts, seat, outer_round
        self._fragments, self._state = fragments, state
        self._same_slot = seat.slot == facts.slot

    def targets(self) -> dict[str, Tensor]:
        """Where tensors of the checkpoint are to be read into, by their keys."""
        if self._state is None:
            return {}
        if self._seat.late:
            return _residuals(self._facts, self._fragments, self._state, self._seat)
        found = _agreed_state(self._fragments, self._state)
        if self._same_slot:
            found |= _in_flight(self._facts, self._fragments, self._state)
            for fragment, start in zip(self._fragments, self._round.make_eager_starts()):
                found |= named(fragment, "outer.eager_base", start.base) | named(fragment, "outer.eager_offered", start.offered)
        return found

    def go_on(self, progress: Progress) -> Progress:
        """All that :meth:`targets` named has been read, and the model. Returns where in the run the island begins.

        Args:
            progress: of the checkpoint.

        Raises:
            RuntimeError: what was read is not what the islands had agreed on.
        """
        if self._state and not self._seat.late:
            _settle(self._facts, self._state)
        if self._same_slot and not self._seat.late:
            return self._round.go_on(self._facts.logbook(self._seat.lease, self._round.steps), progress)
        if self._state and not self._same_slot:
            for part in self._state.fragments:
                part.forget_residual()
        return self._round.start(self._seat if self._seat.late else _from_the_anchor(self._facts, self._seat))


def _in_flight(facts: OuterFacts, fragments: list[Fragment], state: OuterState) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for flight in facts.flights:
        fragment, part = fragments[flight.fragment], state.fragments[flight.fragment]
        if flight.outcome is None:
            found |= named(fragment, "outer.contribution", part.local)
            continue
        found |= named(fragment, "outer.previous_anchor", part.previous_anchor)
        if part.mean is not None:
            found |= named(fragment, "outer.mean", part.mean)
    return found


def _agreed_state(fragments: list[Fragment], state: OuterState) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for fragment, part in zip(fragments, state.fragments, strict=True):
        for what, flat in agreed(part):
            found |= named(fragment, f"outer.{what}", flat)
    return found


def _residuals(facts: OuterFacts, fragments: list[Fragment], state: OuterState, seat: Seat) -> dict[str, Tensor]:
    """Of an island that took over the swarm's state: where that has counted no more of this island than the checkpoint had,
    what its encodings lost is still to come."""
    found: dict[str, Tensor] = {}
    for fragment, part, before in zip(fragments, state.fragments, facts.fragments, strict=True):
        same = seat.slot == facts.slot and part.ledger.positions[seat.slot] == before.ledger.positions[facts.slot]
        if same and part.residual is not None:
            found |= named(fragment, "outer.residual", part.residual)
    return found


def _settle(facts: OuterFacts, state: OuterState) -> None:
    """The tensors are there: make them the agreed state.

    Raises:
        RuntimeError: they are not what the islands had agreed on.
    """
    for part, before in zip(state.fragments, facts.fragments, strict=True):
        digest = part.resume(before.height, before.lineage, before.ledger, before.offered)
        if digest != before.digest:
            raise RuntimeError(
                f"fragment {part.index} of the checkpoint has digest {digest[:12]}, and the islands agreed on {before.digest[:12]} "
                "at that round; resume from another checkpoint"
            )
    for flight in facts.flights:
        if flight.outcome is None and flight.norm is not None:
            state.fragments[flight.fragment].contributes(flight.norm)


def _from_the_anchor(facts: OuterFacts, seat: Seat) -> Seat:
    """Of an island that goes on from what was agreed, in another slot than the one in which its own work was done."""
    ledgers = [fragment.ledger for fragment in facts.fragments]
    return replace(
        seat,
        position=max(ledger.positions[seat.slot] for ledger in ledgers),
        step=max(ledger.step for ledger in ledgers),
        tokens=max(ledger.tokens for ledger in ledgers),
        late=True,
    )
