"""Where a round stands, as this island sees it: who offers what, who is found out, and whose state counts."""

import asyncio

from diloco.exchange.base import ExchangeEvent
from diloco.exchange.hivemind import offers
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.catch_up import tip_of, tip_to_adopt
from diloco.exchange.hivemind.contribution import Contribution
from diloco.exchange.hivemind.messages import Claim, Excluded, Offer, Proposal, Tip
from diloco.exchange.hivemind.surroundings import Surroundings
from diloco.outer_state import FragmentState

NOT_FINITE = "own pseudo-gradient is not finite"
DAMAGED = "its copy of the agreed state was damaged in memory"

_LAGGARD_SHARE = 0.5  # of the deadline: how long a round waits for a live member that offers nothing


class Standing:
    """What is known about the round that follows this island's agreed state.

    Attributes:
        convicted: whose contribution an attempt has shown to be unfit, by slot.
        damaged: the agreed state is not what its digest says; it has to be taken over again.
    """

    def __init__(self, around: Surroundings, state: FragmentState, contribution: Contribution) -> None:
        self._around, self._state, self._contribution = around, state, contribution
        self.fragment, self.damaged = state.index, False
        self.begin()

    def begin(self) -> None:
        """The round after the state that is agreed on now."""
        self.height, self.lineage = self._state.height + 1, bytes.fromhex(self._state.lineage)
        self.convicted: dict[int, Excluded] = {}
        self._disagreements = 0

    def claim(self) -> Claim:
        """This island's own."""
        return self._contribution.claim(self._around.membership.own)

    def offered(self) -> dict[int, Offer | None]:
        """The other live members' offers to this round; None of one for which the round waits."""
        found: dict[int, Offer | None] = {}
        for member in self._around.membership.live():
            offer = offers.matching(member.offers, self.fragment, self.height, self.lineage)
            if offer or member.awaited:
                found[member.slot] = offer
        return found

    def others_wait(self, height: int, lineage: bytes) -> bool:
        """Whether another member offers something to a round of this fragment."""
        live = self._around.membership.live()
        return any(offers.matching(member.offers, self.fragment, height, lineage) for member in live)

    def tip_to_adopt(self) -> Tip | None:
        """The state that the swarm stands on, where this island does not."""
        tips = self._around.membership.tips(self.fragment)
        return tip_to_adopt(None if self.damaged else tip_of(self._state), tips)

    def to_propose(self, waited: float) -> offers.Selection | None:
        """What this island has to propose now, if it is the one to do so: the first of those who take part.

        Args:
            waited: seconds for which it has waited for those who offer nothing.
        """
        if any(waited < self._patience_with(slot) for slot, offer in self.offered().items() if offer is None):
            return None
        around, typical = self._around, self._state.ledger.typical_norm
        selection = offers.select(self._candidates(), self.convicted, typical, around.max_weight_ratio)
        if selection is None or selection.claims[0].slot != around.membership.slot:
            return None
        return selection if len(selection.claims) >= around.min_islands else None

    def _patience_with(self, slot: int) -> float:
        """How long to wait for a live member; not as long for one that has not begun to train when others have agreed."""
        longest = _LAGGARD_SHARE * self._around.round_deadline
        begins = self._around.membership.members[slot].tips.get(self.fragment) is None and self._state.height > 0
        return min(longest, self._around.membership.peer_timeout) if begins else longest

    def objection(self, proposal: Proposal) -> str:
        """Why another's proposal can't be accepted, or an empty string."""
        if (proposal.height, proposal.lineage) != (self.height, self.lineage):
            return f"this island's next height is {self.height}, on lineage {self.lineage.hex()[:12]}"
        if self.claim() not in proposal.claims or not self.may_count():
            return "this island's claim is not what it offered"
        roster, ledger = self._around.membership.roster, self._state.ledger
        for claim in proposal.claims:
            if objection := offers.claim_objection(claim, roster, ledger):
                return objection
        return offers.proposal_objection(
            proposal, self.convicted, ledger.typical_norm, self._around.max_weight_ratio
        )

    def may_count(self) -> bool:
        """Whether this island's own contribution may count at all."""
        return not self.damaged and not self.why_not()

    def why_not(self) -> str:
        """Why it may not."""
        if not self._contribution.own.finite:
            return NOT_FINITE
        membership = self._around.membership
        if membership.slot in self.convicted:
            return offers.rules_in_words([self.convicted[membership.slot]])[0]
        return offers.claim_objection(self.claim(), membership.roster, self._state.ledger)

    async def learn_from(self, attempt: Attempt, failure: AttemptFailed) -> AttemptFailed:
        """What a vote that did not lead to a commit tells about the members, for the next attempt."""
        ballots = attempt.hearsay | attempt.ballots
        if len(ballots) < len(attempt.members):
            return failure
        if objection := attempt.objection(ballots.values()):
            self._convict([objection])
        elif not attempt.unanimous(ballots.values()):
            self._disagreements += 1
            if not await asyncio.to_thread(self._state.is_intact):
                self.damaged, self.convicted = True, {}
                told = f"fragment {self.fragment}: {DAMAGED}; taking it over again"
                self._around.report(ExchangeEvent("damaged", told))
            elif self._disagreements > 1:
                odd = offers.odd_ones(attempt.proposal, ballots)
                self._convict(odd)
                return failure if odd else AttemptFailed(failure.reason, final=True)
        return failure

    def tell_excluded(self, excluded: list[Excluded]) -> None:
        """Name those who were left out by a rule, in the log."""
        for told in offers.rules_in_words(excluded):
            self._around.report(ExchangeEvent("excluded", told))

    def _candidates(self) -> list[Claim]:
        """Whose contributions may count: of islands that have their slot, on sequences that were not counted before."""
        roster, ledger = self._around.membership.roster, self._state.ledger
        claims = [offer.claim for offer in self.offered().values() if offer and not offer.passed]
        sound = [claim for claim in claims if not offers.claim_objection(claim, roster, ledger)]
        return [self.claim(), *sound] if self.may_count() else sound

    def _convict(self, found: list[Excluded]) -> None:
        self.convicted |= {each.claim.slot: each for each in found}
        self.tell_excluded(found)
