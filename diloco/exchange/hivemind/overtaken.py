"""What becomes of a round of this island when the others have agreed without it: it takes over what they have."""

import asyncio
import time

from diloco.exchange.base import RoundOutcome
from diloco.exchange.hivemind import offers
from diloco.exchange.hivemind.catch_up import take_over
from diloco.exchange.hivemind.contribution import Contribution
from diloco.exchange.hivemind.ending import Ending
from diloco.exchange.hivemind.messages import StateHeader, Tip
from diloco.exchange.hivemind.standing import DAMAGED, Standing
from diloco.exchange.hivemind.surroundings import LastRound, Surroundings
from diloco.outer_state import FragmentState

_PAUSE_SECONDS = 0.2  # between two attempts to get the state


class Overtaken:
    """One round's part in it.

    Attributes:
        passes: at its end the others waited in the next round, to which this island has nothing to offer.
    """

    def __init__(
        self,
        around: Surroundings,
        state: FragmentState,
        contribution: Contribution,
        standing: Standing,
        ending: Ending,
        deadline: float,
    ) -> None:
        self._around, self._state, self._contribution = around, state, contribution
        self._standing, self._ending, self._deadline = standing, ending, deadline
        self._codec = state.codec
        self._taken: tuple[Tip, StateHeader] | tuple[None, None] = None, None  # staged, and not used yet
        self.passes = False

    async def settle_last(self) -> RoundOutcome | None:
        """Where it is open whether the last contribution has counted, find out: to prepare the next one forgets what it lost.

        Returns:
            An outcome where it has, or can't be found out in time: what is offered now holds the same work again.
        """
        membership, state = self._around.membership, self._state
        while state.offered not in (0, state.ledger.positions[membership.slot]):
            await asyncio.gather(*(membership.exchange_status(member) for member in membership.live()))
            tip = self._standing.tip_to_adopt()
            if not tip:
                return None
            taken = await self.take_over(tip)
            if isinstance(taken, str):
                if time.monotonic() >= self._deadline:
                    return self._ending.skipped(taken)
                await asyncio.sleep(_PAUSE_SECONDS)
            elif state.staged.ledger.positions[membership.slot] == state.offered:
                reason = f"the others had counted its sequences up to {state.offered}, of which it had not heard"
                return self._leave_out(_last_round(taken), reason)
            else:
                self._taken = tip, taken
                return None
        return None

    async def take_over(self, tip: Tip) -> StateHeader | str:
        """Stage the state at ``tip``; or in words why it did not come."""
        (known, header), self._taken = self._taken, (None, None)
        staged = self._state.staged  # an attempt may have written over it
        if header and known == tip and (staged.lineage, staged.digest) == (tip.lineage.hex(), tip.digest.hex()):
            return header
        with self._ending.timed("recovering"):
            taken = await take_over(self._around, self._state, tip, self._ending.traffic, self._deadline)
        if isinstance(taken, str):
            return f"at height {self._state.height}, the others at {tip.height}, and no state came: {taken}"
        return taken

    def end(self, tip: Tip, taken: StateHeader, trouble: str) -> RoundOutcome | None:
        """Swap in what was taken over. None where this island's contribution may count in the round after that.

        Args:
            trouble: what went wrong before.
        """
        last = _last_round(taken)
        if self._was_counted(taken):
            moved_further = tip.height > self._state.height + 1 or self._ending.left_out is not None
            return self._ending.swap("committed", last, rejected=moved_further)
        rules, reason = self._why_left_out(tip, last, trouble)
        if not rules and self._may_go_on(taken):
            # What it offers is the same to the anchor that it took over: it moves there with this island's work on top. If
            # this process dies now, the trainer can only take the anchor.
            self._ending.left_out = self._ending.swap("left_out", last, reason=reason, rejected=True)
            return None
        rejected = bool(rules) or self._standing.damaged or self._ending.left_out is not None
        return self._leave_out(last, reason, rejected)

    def _leave_out(self, last: LastRound, reason: str, rejected: bool = False) -> RoundOutcome:
        outcome = self._ending.swap("left_out", last, reason=reason, rejected=rejected)
        self.passes = self._standing.others_wait(outcome.height + 1, bytes.fromhex(self._state.lineage))
        return outcome

    def _was_counted(self, taken: StateHeader) -> bool:
        """Whether the state taken over holds this island's contribution: it voted, and did not hear what came of it."""
        counted = offers.ledger_of(taken).positions[self._around.membership.slot]
        return not self._standing.damaged and counted == self._contribution.work.position

    def _why_left_out(self, tip: Tip, last: LastRound, trouble: str) -> tuple[list[str], str]:
        """The rules by which, if any, and the reason in words."""
        standing, slot = self._standing, self._around.membership.slot
        rules = [each.rule for each in last.excluded if each.slot == slot]
        rules += [standing.convicted[slot].rule] if slot in standing.convicted else []
        why = trouble or standing.why_not()
        if standing.damaged:
            why = DAMAGED
        elif rules:
            why = f"by the rule {rules[0]!r}"
        return rules, f"the others committed height {tip.height} without this island" + (f": {why}" if why else "")

    def _may_go_on(self, taken: StateHeader) -> bool:
        """Whether others wait in the round after the one that was taken over, and this island's work may count there."""
        standing, staged = self._standing, self._state.staged
        counted = offers.ledger_of(taken).positions[self._around.membership.slot]
        fits = self._around.carry and standing.may_count() and self._contribution.work.start >= counted
        fits = fits and self._state.codec_of(staged.ledger) == self._codec  # or the others could not read what is encoded
        return fits and standing.others_wait(staged.height + 1, bytes.fromhex(staged.lineage))


def _last_round(taken: StateHeader) -> LastRound:
    return LastRound(taken.members, taken.weights, taken.excluded)
