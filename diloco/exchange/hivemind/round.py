"""One round of one fragment, from launch to outcome."""

import asyncio
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Callable, Iterator

from torch import Tensor

from diloco.exchange.base import ExchangeEvent, RoundOutcome, Work
from diloco.exchange.hivemind import offers, voting
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.catch_up import take_over, tip_of, tip_to_adopt
from diloco.exchange.hivemind.ipc import Committing
from diloco.exchange.hivemind.messages import (
    Ack,
    Ballot,
    Claim,
    ContributionHeader,
    Excluded,
    LeftOut,
    Offer,
    Proposal,
    StateHeader,
    Tip,
)
from diloco.exchange.hivemind.stream import Stream, Traffic
from diloco.exchange.hivemind.scatter_reduce import NotFinite, ScatterReduce
from diloco.exchange.hivemind.surroundings import LastRound, Surroundings, in_words
from diloco.outer_state import FragmentState, Ledger
from diloco.pseudo_gradient import Health, cosine, pseudo_gradient
from diloco.reduction import chunk_slice, num_chunks

_LAGGARD_SHARE = 0.5  # of the deadline: how long a round waits for a live member that offers nothing
_PAUSE_SECONDS = 0.2  # between two attempts
_LOOK_AGAIN_SECONDS = 1.0
_NOT_FINITE = "own pseudo-gradient is not finite"
_DAMAGED = "its copy of the agreed state was damaged in memory"


class Round:
    """This island's part in the next round of a fragment.

    Args:
        keep: remembers an attempt, so that messages about it find it.

    Attributes:
        offering: the contribution is encoded, and others may name this island in proposals.
        passes: at its end the others waited in the next round, to which this island has nothing to offer.
    """

    def __init__(
        self, around: Surroundings, state: FragmentState, work: Work, keep: Callable[[Attempt], None]
    ) -> None:
        self._around, self._state, self._work, self._keep = around, state, work, keep
        self.fragment, self.height, self.lineage = state.index, state.height + 1, bytes.fromhex(state.lineage)
        self.offering = self.passes = False
        self._attempt: Attempt | None = None
        self._following: Attempt | None = None  # a proposal accepted while the one before it is being settled
        self._last_attempt = 0
        self._convicted: dict[int, Excluded] = {}
        self._disagreements = 0
        self._damaged = False
        self._left_out: RoundOutcome | None = None  # a round that this one went on from
        self._trouble = ""  # what went wrong last
        self._started = time.monotonic()
        self._deadline = self._started + around.round_deadline
        self._traffic = Traffic()
        self._seconds: Counter[str] = Counter()
        self._changed = asyncio.Event()
        self._health = Health(0.0, False)
        self._encoded: list[Tensor] = []
        self._cosine = 0.0

    async def run(self) -> RoundOutcome:
        """Take part until the round has an outcome: at the latest at the deadline and one settling of votes."""
        self._health = await asyncio.to_thread(self._prepare)
        self.offering = True
        self._around.membership.publish()
        try:
            while True:
                self._changed.clear()
                outcome = await self._advance()
                if outcome:
                    return outcome
                await self._wait_for_change()
        finally:
            self.offering = False
            over = AttemptFailed("this island's round is over")
            for attempt in (self._attempt, self._following):
                if attempt and not attempt.committed:
                    attempt.fail(over.reason)
                    self._around.background(voting.settle(self._around, attempt, over))

    def offer(self) -> Offer:
        """What the others are told about it."""
        return Offer(
            fragment=self.fragment,
            height=self.height,
            lineage=self.lineage,
            attempt=self._last_attempt,
            claim=self._claim(),
            passed=not self._may_count(),
        )

    def notice(self) -> None:
        """Something changed that may matter to it."""
        self._changed.set()

    def member_lost(self, slot: int, reason: str) -> None:
        """A member is not there any more: no attempt that names it can succeed."""
        for attempt in (self._attempt, self._following):
            if attempt and attempt.names(slot):
                attempt.fail(f"island {slot} {reason}")

    def consider(self, proposal: Proposal) -> str:
        """Accept a proposal; returns why not, or an empty string."""
        if not self.offering:
            return "nothing is offered to this round now"
        if (proposal.height, proposal.lineage) != (self.height, self.lineage):
            return f"this island's next height is {self.height}, on lineage {self.lineage.hex()[:12]}"
        if proposal.attempt <= self._last_attempt:
            return f"attempt {proposal.attempt} is not later than attempt {self._last_attempt}"
        if self._following or (self._attempt and not self._attempt.frozen):
            return f"attempt {self._last_attempt} is still open"
        if self._claim() not in proposal.claims or not self._may_count():
            return "this island's claim is not what it offered"
        roster, ledger = self._around.membership.roster, self._state.ledger
        for claim in proposal.claims:
            if objection := offers.claim_objection(claim, roster, ledger):
                return objection
        ratio = self._around.max_weight_ratio
        if objection := offers.proposal_objection(proposal, self._convicted, ledger.typical_norm, ratio):
            return objection
        self._accept(proposal)
        return ""

    # -- what happens next ---------------------------------------------------------------------------------------------

    async def _advance(self) -> RoundOutcome | None:
        if self._attempt:
            return await self._try(self._attempt)
        tip = self._tip_to_adopt()
        if tip:
            return await self._catch_up(tip)
        selection = self._to_propose()
        if selection and await self._may_go_without_others(selection):
            return self._propose(selection)
        reason = self._reason_to_stop()
        return self._skipped(reason) if reason else None

    async def _wait_for_change(self) -> None:
        left = max(0.0, self._deadline - time.monotonic())
        try:
            async with asyncio.timeout(min(_LOOK_AGAIN_SECONDS, left)):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _offers(self) -> dict[int, Offer | None]:
        """The other members' offers to this round; None of one for which the round waits."""
        found: dict[int, Offer | None] = {}
        for member in self._around.membership.live():
            offer = offers.matching(member.offers, self.fragment, self.height, self.lineage)
            if offer or member.awaited:
                found[member.slot] = offer
        return found

    def _candidates(self) -> list[Claim]:
        """Whose contributions may count: of islands that have their slot, on sequences that were not counted before."""
        roster, ledger = self._around.membership.roster, self._state.ledger
        claims = [offer.claim for offer in self._offers().values() if offer and not offer.passed]
        sound = [claim for claim in claims if not offers.claim_objection(claim, roster, ledger)]
        return [self._claim(), *sound] if self._may_count() else sound

    def _tip_to_adopt(self) -> Tip | None:
        live = self._around.membership.live()
        tips = {member.slot: tip for member in live if (tip := member.tips.get(self.fragment))}
        return tip_to_adopt(None if self._damaged else tip_of(self._state), tips)

    def _to_propose(self) -> offers.Selection | None:
        """What this island has to propose now, if it is the one to do so: the first of those who take part."""
        patient = time.monotonic() < self._started + _LAGGARD_SHARE * self._around.round_deadline
        if patient and not all(self._offers().values()):
            return None
        typical = self._state.ledger.typical_norm
        selection = offers.select(self._candidates(), self._convicted, typical, self._around.max_weight_ratio)
        if selection is None or selection.claims[0].slot != self._around.membership.slot:
            return None
        return selection if len(selection.claims) >= self._around.min_islands else None

    async def _may_go_without_others(self, selection: offers.Selection) -> bool:
        """Ask the live members that the proposal would not name where they stand, and see whether it is still right.

        An island that stood still for a while knows only what the others said before: without this it would take them
        for late, go on without them, and split the swarm.
        """
        named = {claim.slot for claim in selection.claims}
        unnamed = [member for member in self._around.membership.live() if member.slot not in named]
        answers = await asyncio.gather(*(self._around.membership.exchange_status(member) for member in unnamed))
        known = all(answer or not member.awaited for answer, member in zip(answers, unnamed, strict=True))
        return known and not self._attempt and not self._tip_to_adopt() and self._to_propose() == selection

    def _reason_to_stop(self) -> str:
        standing = self._offers()
        if not self._may_count() and all(offer and offer.passed for offer in standing.values()):
            return self._why_not()
        if len(standing) + 1 < self._around.min_islands:
            reason = f"{len(standing) + 1} islands are there and exchange.min_islands={self._around.min_islands}"
            return f"{reason}; {self._trouble}" if self._trouble else reason
        if time.monotonic() < self._deadline:
            return ""
        silent = [slot for slot, offer in standing.items() if not offer]
        waited = f"islands {silent} offered nothing within {self._around.round_deadline:g} s"
        return self._trouble or (waited if self._may_count() else self._why_not())

    def _may_count(self) -> bool:
        """Whether this island's own contribution may count at all."""
        return self._health.finite and not self._damaged and not self._why_not()

    def _why_not(self) -> str:
        if not self._health.finite:
            return _NOT_FINITE
        membership = self._around.membership
        if membership.slot in self._convicted:
            return offers.rules_in_words([self._convicted[membership.slot]])[0]
        return offers.claim_objection(self._claim(), membership.roster, self._state.ledger)

    # -- one attempt ---------------------------------------------------------------------------------------------------

    def _propose(self, selection: offers.Selection) -> None:
        known = [offer.attempt for offer in self._offers().values() if offer]
        proposal = Proposal(
            run=self._around.run,
            fragment=self.fragment,
            height=self.height,
            attempt=max([self._last_attempt, *known]) + 1,
            lineage=self.lineage,
            claims=selection.claims,
            weights=selection.weights,
            excluded=selection.excluded,
        )
        attempt = self._accept(proposal)
        for slot in attempt.others:
            self._around.background(self._send_proposal(attempt, slot))

    async def _send_proposal(self, attempt: Attempt, slot: int) -> None:
        reply = await self._around.call(slot, attempt.proposal, self._around.membership.peer_timeout)
        if not isinstance(reply, Ack):
            attempt.fail(f"island {slot} did not accept the proposal: {in_words(reply)}")

    def _accept(self, proposal: Proposal) -> Attempt:
        self._last_attempt = proposal.attempt
        transfer = ScatterReduce(
            self._around.codec,
            self._encoded,
            self._state.numel,
            self._state.dtype,
            proposal.weights,
            proposal.claims.index(self._claim()),
            self._traffic,
            lambda position: self._around.network.lanes(proposal.claims[position].peer),
            lambda position, lane, lanes: self._open_stream(proposal, position, lane, lanes),
        )
        members = [claim.slot for claim in proposal.claims]
        attempt = Attempt(
            proposal, members, self._around.membership.slot, transfer, partial(offers.judge, proposal, self._state.numel)
        )
        if self._attempt:
            self._following = attempt
        else:
            self._attempt = attempt
        self._keep(attempt)
        self.notice()
        return attempt

    async def _open_stream(self, proposal: Proposal, position: int, lane: int, lanes: int) -> Stream:
        header = ContributionHeader(proposal=proposal.id(), lane=lane, lanes=lanes)
        return await self._around.network.open_stream(proposal.claims[position].peer, header, self._traffic, lane)

    async def _try(self, attempt: Attempt) -> RoundOutcome | None:
        with self._timed("transfer"):
            try:
                await self._transfer_and_vote(attempt)
                return self._commit(attempt)
            except AttemptFailed as error:
                failure = error
            except NotFinite as error:
                failure = AttemptFailed(str(error), final=True)
            except (OSError, EOFError, ValueError) as error:
                failure = AttemptFailed(f"{type(error).__name__}: {error}")
            settled = await voting.settle(self._around, attempt, failure)
            if settled == "committed":
                return self._commit(attempt)
        if settled == "in_doubt":  # going on without them would fork, if they committed it
            attempt.transfer, self._attempt = None, None
            return self._skipped(f"in doubt whether the others committed it: {failure.reason}")
        failure = await self._learn_from(attempt, failure)
        attempt.transfer = None
        self._trouble = failure.reason
        self._attempt, self._following = self._following, None
        if failure.final or time.monotonic() >= self._deadline:
            return self._skipped(failure.reason)
        self._around.membership.publish()
        await asyncio.sleep(_PAUSE_SECONDS)
        self.notice()
        return None

    async def _learn_from(self, attempt: Attempt, failure: AttemptFailed) -> AttemptFailed:
        """What a vote that did not lead to a commit tells about the members, for the next attempt."""
        ballots = attempt.hearsay | attempt.ballots
        if len(ballots) < len(attempt.members):
            return failure
        if objection := attempt.objection(ballots.values()):
            self._convict([objection])
        elif not attempt.unanimous(ballots.values()):
            self._disagreements += 1
            if not await asyncio.to_thread(self._state.is_intact):
                self._damaged, self._convicted = True, {}
                self._around.report(ExchangeEvent("damaged", f"fragment {self.fragment}: {_DAMAGED}; taking it over again"))
            elif self._disagreements > 1:
                odd = offers.odd_ones(attempt.proposal, ballots)
                self._convict(odd)
                return failure if odd else AttemptFailed(failure.reason, final=True)
        return failure

    def _convict(self, found: list[Excluded]) -> None:
        self._convicted |= {each.claim.slot: each for each in found}
        self._tell_excluded(found)

    def _tell_excluded(self, excluded: list[Excluded]) -> None:
        for told in offers.rules_in_words(excluded):
            self._around.report(ExchangeEvent("excluded", told))

    async def _transfer_and_vote(self, attempt: Attempt) -> None:
        """Up to where nothing but the swap is missing. What runs in a thread is waited for, never abandoned."""
        overdue = asyncio.get_running_loop().call_later(
            max(0.0, self._deadline - time.monotonic()),
            attempt.fail,
            f"not finished within exchange.round_deadline={self._around.round_deadline:g} s",
        )
        try:
            mean = await attempt.unless_failed(attempt.transfer.run())
            digest = await asyncio.to_thread(self._stage, attempt.proposal, mean)
            mean_square, evidence = attempt.transfer.evidence()
            ballot = Ballot(
                slot=attempt.slot, digest=bytes.fromhex(digest), mean_square=mean_square, evidence=evidence
            )
            await attempt.unless_failed(voting.cast_vote(self._around, attempt, ballot))
        finally:
            overdue.cancel()

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def _commit(self, attempt: Attempt) -> RoundOutcome:
        """Nothing in here waits, so no message can come between the decision and the swap."""
        attempt.committed, attempt.transfer, self._attempt = True, None, None
        proposal = attempt.proposal
        self._tell_excluded([each for each in proposal.excluded if each.claim.slot not in self._convicted])
        excluded = tuple(LeftOut(slot=each.claim.slot, rule=each.rule) for each in proposal.excluded)
        last = LastRound(attempt.members, proposal.weights, excluded)
        return self._swap("committed", last, cosine=self._cosine)

    async def _catch_up(self, tip: Tip) -> RoundOutcome | None:
        with self._timed("recovering"):
            taken = await take_over(self._around, self._state, tip, self._traffic, self._deadline)
        if isinstance(taken, str):
            self._trouble = f"at height {self._state.height}, the others at {tip.height}, and no state came: {taken}"
            if time.monotonic() >= self._deadline:
                return self._skipped(self._trouble)
            await asyncio.sleep(_PAUSE_SECONDS)
            self.notice()
            return None
        last = LastRound(taken.members, taken.weights, taken.excluded)
        if self._was_counted(taken):
            return self._swap("committed", last)
        slot = self._around.membership.slot
        rules = [each.rule for each in taken.excluded if each.slot == slot]
        rules += [self._convicted[slot].rule] if slot in self._convicted else []
        why = _DAMAGED if self._damaged else f"by the rule {rules[0]!r}" if rules else self._trouble or self._why_not()
        reason = f"the others committed height {tip.height} without this island" + (f": {why}" if why else "")
        if not rules and self._may_go_on(offers.ledger_of(taken)):
            # What it offers is the same to the anchor that it took over: it moves there with this island's work on top. If
            # this process dies now, the trainer can only take the anchor.
            self._left_out = self._swap("left_out", last, reason=reason, rejected=True)
            self._roll_over()
            return None
        rejected = bool(rules) or self._damaged or bool(self._left_out)
        outcome = self._swap("left_out", last, reason=reason, rejected=rejected)
        self.passes = self._others_wait(outcome.height + 1, bytes.fromhex(self._state.lineage))
        return outcome

    def _may_go_on(self, ledger: Ledger) -> bool:
        """Whether others wait in the round after the one that was taken over, and this island's work may count there."""
        if not self._around.carry or not self._may_count() or self._work.start < ledger.positions[self._claim().slot]:
            return False
        staged = self._state.staged
        return self._others_wait(staged.height + 1, bytes.fromhex(staged.lineage))

    def _others_wait(self, height: int, lineage: bytes) -> bool:
        live = self._around.membership.live()
        return any(offers.matching(member.offers, self.fragment, height, lineage) for member in live)

    def _roll_over(self) -> None:
        self.height, self.lineage = self._state.height + 1, bytes.fromhex(self._state.lineage)
        self._last_attempt, self._convicted, self._disagreements, self._trouble = 0, {}, 0, ""
        self._around.membership.publish()
        self.notice()

    def _was_counted(self, taken: StateHeader) -> bool:
        """Whether the state taken over holds this island's contribution: it voted, and did not hear what came of it."""
        ledger = offers.ledger_of(taken)
        return not self._damaged and ledger.positions[self._around.membership.slot] == self._work.position

    def _swap(self, kind: str, last: LastRound, **details: object) -> RoundOutcome:
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
        self._state.commit()
        self._around.last_round[self.fragment] = last
        self._around.membership.publish()
        return outcome

    def _skipped(self, reason: str) -> RoundOutcome:
        if self._left_out:  # the state has moved
            return replace(self._left_out, reason=f"{self._left_out.reason}; then {reason}")
        return self._outcome("skipped", self._state.height, self._state.ledger, reason=reason)

    def _outcome(self, kind: str, height: int, ledger: Ledger, **details: object) -> RoundOutcome:
        seconds = time.monotonic() - self._started
        transfer, recovering = self._seconds["transfer"], self._seconds["recovering"]
        return RoundOutcome(
            kind,
            self.fragment,
            height,
            bytes_sent=self._traffic.sent,
            bytes_received=self._traffic.received,
            exchange_seconds=seconds,
            pseudo_gradient_norm=self._health.norm,
            position=ledger.positions[self._around.membership.slot],
            step=self._around.step(ledger) if kind == "left_out" else ledger.step,
            tokens=ledger.tokens,
            waiting_seconds=max(0.0, seconds - transfer - recovering),
            transfer_seconds=transfer,
            recovering_seconds=recovering,
            **details,
        )

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[what] += time.monotonic() - started

    # -- work for a thread ---------------------------------------------------------------------------------------------

    def _prepare(self) -> Health:
        state = self._state
        health = pseudo_gradient(state.anchor, state.local, out=state.local)
        if health.finite:
            pieces = (chunk_slice(state.numel, chunk) for chunk in range(num_chunks(state.numel)))
            self._encoded = [self._around.codec.encode(state.local[piece]) for piece in pieces]
        return health

    def _stage(self, proposal: Proposal, mean: Tensor) -> str:
        self._cosine = cosine(self._state.local, mean)
        return self._state.stage(mean, offers.counted(proposal.claims))

    def _claim(self) -> Claim:
        own, work = self._around.membership.own, self._work
        return Claim(
            slot=own.slot,
            epoch=own.epoch,
            peer=own.peer,
            tokens=work.tokens,
            start=work.start,
            position=work.position,
            step=work.step,
            norm=self._health.norm if self._health.finite else 0.0,
        )
