"""One round of one fragment, from launch to outcome."""

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Callable

from diloco.contributions import independent_values
from diloco.exchange.base import RoundOutcome, Work
from diloco.exchange.hivemind import offers, voting
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.contribution import Contribution
from diloco.exchange.hivemind.ending import Ending
from diloco.exchange.hivemind.messages import Ack, Ballot, ContributionHeader, LeftOut, Offer, Proposal, Tip
from diloco.exchange.hivemind.overtaken import Overtaken
from diloco.exchange.hivemind.scatter_reduce import NotFinite, ScatterReduce, all_or_none
from diloco.exchange.hivemind.standing import Standing
from diloco.exchange.hivemind.stream import Stream
from diloco.exchange.hivemind.surroundings import LastRound, Surroundings, in_words
from diloco.outer_state import FragmentState
from diloco.staging import Staging

_PAUSE_SECONDS = 0.2  # between two attempts
_LOOK_AGAIN_SECONDS = 1.0


class Round:
    """This island's part in the next round of a fragment.

    Args:
        keep: remembers an attempt, so that messages about it find it.

    Attributes:
        offering: the contribution is encoded, and others may name this island in proposals.
    """

    def __init__(
        self, around: Surroundings, state: FragmentState, work: Work, keep: Callable[[Attempt], None]
    ) -> None:
        self._around, self._state, self._keep = around, state, keep
        self._wire = around.wire.choose(state.codec)
        self._contribution = Contribution(state, self._wire.contribution, around.residual_decay, work)
        self._standing = Standing(around, state, self._contribution)
        self._ending = Ending(around, state, self._contribution)
        self.offering = False
        self._attempt: Attempt | None = None
        self._following: Attempt | None = None  # a proposal accepted while the one before it is being settled
        self._last_attempt = 0
        self._trouble = ""  # what went wrong last
        self._started = time.monotonic()
        self._deadline = self._started + around.round_deadline
        self._overtaken = Overtaken(around, state, self._contribution, self._standing, self._ending, self._deadline)
        self._changed = asyncio.Event()

    async def run(self) -> RoundOutcome:
        """Take part until the round has an outcome: at the latest at the deadline and one settling of votes."""
        outcome = await self._overtaken.settle_last()
        if outcome:
            return outcome
        await asyncio.to_thread(self._contribution.prepare)
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
            self._give_up_open("this island's round is over")

    @property
    def passes(self) -> bool:
        """At its end the others waited in the next round, to which this island has nothing to offer."""
        return self._overtaken.passes

    def offer(self) -> Offer:
        """What the others are told about it."""
        standing = self._standing
        return Offer(
            fragment=standing.fragment,
            height=standing.height,
            lineage=standing.lineage,
            attempt=self._last_attempt,
            claim=standing.claim(),
            passed=not standing.may_count(),
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
        if proposal.id() in {attempt.id for attempt in (self._attempt, self._following) if attempt}:
            return ""  # sent again, as the answer got lost
        if not self.offering:
            return "nothing is offered to this round now"
        if proposal.attempt <= self._last_attempt:
            return f"attempt {proposal.attempt} is not later than attempt {self._last_attempt}"
        if self._following or (self._attempt and not self._attempt.frozen):
            return f"attempt {self._last_attempt} is still open"
        if objection := self._standing.objection(proposal):
            return objection
        self._accept(proposal)
        return ""

    # -- what happens next ---------------------------------------------------------------------------------------------

    async def _advance(self) -> RoundOutcome | None:
        if self._attempt:
            return await self._try(self._attempt)
        tip = self._standing.tip_to_adopt()
        if tip:
            return await self._catch_up(tip)
        selection = self._standing.to_propose(self._waited())
        if selection and await self._may_go_without_others(selection):
            return self._propose(selection)
        reason = self._reason_to_stop()
        return self._ending.skipped(reason) if reason else None

    async def _wait_for_change(self) -> None:
        left = max(0.0, self._deadline - time.monotonic())
        try:
            async with asyncio.timeout(min(_LOOK_AGAIN_SECONDS, left)):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _waited(self) -> float:
        return time.monotonic() - self._started

    async def _may_go_without_others(self, selection: offers.Selection) -> bool:
        """Ask the live members that the proposal would not name where they stand, and see whether it is still right.

        An island that stood still for a while knows only what the others said before: without this it would take them
        for late, go on without them, and split the swarm.
        """
        named = {claim.slot for claim in selection.claims}
        unnamed = [member for member in self._around.membership.live() if member.slot not in named]
        answers = await asyncio.gather(*(self._around.membership.exchange_status(member) for member in unnamed))
        known = all(answer or not member.awaited for answer, member in zip(answers, unnamed, strict=True))
        standing, waited = self._standing, self._waited()
        return known and not self._attempt and not standing.tip_to_adopt() and standing.to_propose(waited) == selection

    def _reason_to_stop(self) -> str:
        standing, found = self._standing, self._standing.offered()
        if not standing.may_count() and all(offer and offer.passed for offer in found.values()):
            return standing.why_not()
        if len(found) + 1 < self._around.min_islands:
            reason = f"{len(found) + 1} islands are there and exchange.min_islands={self._around.min_islands}"
            return f"{reason}; {self._trouble}" if self._trouble else reason
        if time.monotonic() < self._deadline:
            return ""
        silent = [slot for slot, offer in found.items() if not offer]
        waited = f"islands {silent} offered nothing within {self._around.round_deadline:g} s"
        return self._trouble or (waited if standing.may_count() else standing.why_not())

    # -- one attempt ---------------------------------------------------------------------------------------------------

    def _propose(self, selection: offers.Selection) -> None:
        standing = self._standing
        known = [offer.attempt for offer in standing.offered().values() if offer]
        proposal = Proposal(
            run=self._around.run,
            fragment=standing.fragment,
            height=standing.height,
            attempt=max([self._last_attempt, *known]) + 1,
            lineage=standing.lineage,
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
            self._wire,
            self._contribution.own.chunks,
            self._state.numel,
            self._state.dtype,
            proposal.weights,
            proposal.claims.index(self._standing.claim()),
            self._ending.traffic,
            lambda position: self._around.network.lanes(proposal.claims[position].peer),
            lambda position, lane, lanes: self._open_stream(proposal, position, lane, lanes),
        )
        members = [claim.slot for claim in proposal.claims]
        judge = partial(offers.judge, proposal, independent_values(self._wire.contribution.bits, self._state.numel))
        attempt = Attempt(proposal, members, self._around.membership.slot, transfer, judge)
        if self._attempt:
            self._following = attempt
        else:
            self._attempt = attempt
        self._keep(attempt)
        self.notice()
        return attempt

    async def _open_stream(self, proposal: Proposal, position: int, lane: int, lanes: int) -> Stream:
        header = ContributionHeader(proposal=proposal.id(), lane=lane, lanes=lanes)
        return await self._around.network.open_stream(proposal.claims[position].peer, header, self._ending.traffic, lane)

    async def _try(self, attempt: Attempt) -> RoundOutcome | None:
        with self._ending.timed("transfer"):
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
            return self._ending.skipped(f"in doubt whether the others committed it: {failure.reason}")
        failure = await self._standing.learn_from(attempt, failure)
        attempt.transfer = None
        self._trouble = failure.reason
        self._attempt, self._following = self._following, None
        if failure.final or time.monotonic() >= self._deadline:
            return self._ending.skipped(failure.reason)
        self._around.membership.publish()
        await asyncio.sleep(_PAUSE_SECONDS)
        self.notice()
        return None

    async def _transfer_and_vote(self, attempt: Attempt) -> None:
        """Up to where nothing but the swap is missing. The mean is staged chunk by chunk, while others are on the wire."""
        overdue = asyncio.get_running_loop().call_later(
            max(0.0, self._deadline - time.monotonic()),
            attempt.fail,
            f"not finished within exchange.round_deadline={self._around.round_deadline:g} s",
        )
        transfer = attempt.transfer
        try:
            staging = self._state.begin_staging(offers.counted(attempt.proposal.claims))
            await attempt.unless_failed(self._side_by_side(attempt, transfer, staging))
        finally:
            overdue.cancel()
            self._ending.decode_seconds += transfer.decode_seconds

    async def _side_by_side(self, attempt: Attempt, transfer: ScatterReduce, staging: Staging) -> None:
        apply = partial(self._contribution.apply, staging)
        await all_or_none([transfer.run(apply), self._vote(attempt, transfer, staging)])

    async def _vote(self, attempt: Attempt, transfer: ScatterReduce, staging: Staging) -> None:
        """As soon as all means are there: who misses bytes of this member does not vote yet, so this one need not wait for it."""
        await transfer.complete.wait()
        digest = bytes.fromhex(staging.seal())
        mean_square, evidence = transfer.evidence()
        ballot = Ballot(slot=attempt.slot, digest=digest, mean_square=mean_square, evidence=evidence)
        await voting.cast_vote(self._around, attempt, ballot)

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def _commit(self, attempt: Attempt) -> RoundOutcome:
        """Nothing in here waits, so no message can come between the decision and the swap."""
        attempt.committed, attempt.transfer, self._attempt = True, None, None
        proposal, standing = attempt.proposal, self._standing
        standing.tell_excluded([each for each in proposal.excluded if each.claim.slot not in standing.convicted])
        excluded = tuple(LeftOut(slot=each.claim.slot, rule=each.rule) for each in proposal.excluded)
        last = LastRound(attempt.members, proposal.weights, excluded)
        measured, mean_square = offers.add_up(attempt.ballots, len(attempt.members))
        cosine = measured[attempt.position(attempt.slot)].cosine(mean_square)
        rolled_over = self._ending.left_out is not None  # the anchor moved by more than the round that was launched for
        return self._ending.swap("committed", last, cosine=cosine, rejected=rolled_over)

    async def _catch_up(self, tip: Tip) -> RoundOutcome | None:
        taken = await self._overtaken.take_over(tip)
        if isinstance(taken, str):
            self._trouble = taken
            if time.monotonic() >= self._deadline:
                return self._ending.skipped(self._trouble)
            await asyncio.sleep(_PAUSE_SECONDS)
            self.notice()
            return None
        outcome = self._overtaken.end(tip, taken, self._trouble)
        if outcome is None:
            self._go_on()
        return outcome

    def _go_on(self) -> None:
        self._contribution.work = replace(self._contribution.work, step=self._around.step(self._state.ledger))
        self._give_up_open("this island has taken over another state")
        self._standing.begin()
        self._last_attempt, self._trouble = 0, ""
        self._around.membership.publish()
        self.notice()

    def _give_up_open(self, reason: str) -> None:
        """No attempt that was accepted and not begun will be."""
        for attempt in (self._attempt, self._following):
            if attempt and not attempt.committed:
                attempt.fail(reason)
                attempt.transfer = None
                self._around.background(voting.settle(self._around, attempt, AttemptFailed(reason)))
        self._attempt = self._following = None
