"""One round of one fragment, from launch to outcome."""

import asyncio
import time
from typing import Callable

from torch import Tensor

from diloco.exchange.base import RoundOutcome
from diloco.exchange.hivemind import voting
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.catch_up import take_over, tip_to_adopt
from diloco.exchange.hivemind.ipc import Committing
from diloco.exchange.hivemind.messages import Ack, ContributionHeader, Offer, Proposal, Share, Tip
from diloco.exchange.hivemind.network import Stream, Traffic
from diloco.exchange.hivemind.offers import matching, shares_to_propose
from diloco.exchange.hivemind.scatter_reduce import NotFinite, ScatterReduce
from diloco.exchange.hivemind.surroundings import Surroundings, in_words
from diloco.outer_state import FragmentState
from diloco.pseudo_gradient import Health, cosine, pseudo_gradient
from diloco.reduction import chunk_slice, num_chunks

_LAGGARD_SHARE = 0.5  # of the deadline: how long a round waits for a live member that offers nothing
_PAUSE_SECONDS = 0.2  # between two attempts
_LOOK_AGAIN_SECONDS = 1.0
_NOT_FINITE = "own pseudo-gradient is not finite"


class Round:
    """This island's part in the next round of a fragment.

    Args:
        keep: remembers an attempt, so that messages about it find it.

    Attributes:
        offering: the contribution is encoded, and others may name this island in proposals.
    """

    def __init__(
        self, around: Surroundings, state: FragmentState, weight: float, keep: Callable[[Attempt], None]
    ) -> None:
        self._around, self._state, self._weight, self._keep = around, state, weight, keep
        self.fragment, self.height, self.lineage = state.index, state.height + 1, bytes.fromhex(state.lineage)
        self.offering = False
        self._attempt: Attempt | None = None
        self._following: Attempt | None = None  # a proposal accepted while the one before it is being settled
        self._last_attempt = 0
        self._trouble = ""  # what went wrong last
        self._started = time.monotonic()
        self._deadline = self._started + around.round_deadline
        self._traffic = Traffic()
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
            weight=self._weight,
            norm=self._health.norm if self._health.finite else 0.0,
            passed=not self._health.finite,
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
        if self._own_share() not in proposal.shares:
            return "this island's share is not what it offered"
        self._accept(proposal)
        return ""

    # -- what happens next ---------------------------------------------------------------------------------------------

    async def _advance(self) -> RoundOutcome | None:
        if self._attempt:
            return await self._try(self._attempt)
        tip = self._tip_to_adopt()
        if tip:
            return await self._catch_up(tip)
        shares = self._shares_to_propose()
        if shares and await self._may_go_without_others(shares):
            return self._propose(shares)
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
        """The other live members' offers to this round."""
        live = self._around.membership.live()
        return {member.slot: matching(member.offers, self.fragment, self.height, self.lineage) for member in live}

    def _tip_to_adopt(self) -> Tip | None:
        height, digest = self._state.height, bytes.fromhex(self._state.digest)
        own = Tip(fragment=self.fragment, height=height, lineage=self.lineage, digest=digest)
        tips = {member.slot: member.tips.get(self.fragment) for member in self._around.membership.live()}
        return tip_to_adopt(own, {slot: tip for slot, tip in tips.items() if tip})

    def _shares_to_propose(self) -> tuple[Share, ...]:
        if not self._health.finite:
            return ()
        peers = {slot: member.peer for slot, member in self._around.membership.members.items()}
        patient = time.monotonic() < self._started + _LAGGARD_SHARE * self._around.round_deadline
        return shares_to_propose(self._own_share(), peers, self._offers(), patient, self._around.min_islands)

    async def _may_go_without_others(self, shares: tuple[Share, ...]) -> bool:
        """Ask the live members that the proposal would not name where they stand, and see whether it is still right.

        An island that stood still for a while knows only what the others said before: without this it would take them
        for late, go on without them, and split the swarm.
        """
        named = {share.slot for share in shares}
        unnamed = [member for member in self._around.membership.live() if member.slot not in named]
        answers = await asyncio.gather(*(self._around.membership.exchange_status(member) for member in unnamed))
        still = not self._attempt and not self._tip_to_adopt() and self._shares_to_propose() == shares
        return still and all(answers)

    def _reason_to_stop(self) -> str:
        offers = self._offers()
        if not self._health.finite and all(offer and offer.passed for offer in offers.values()):
            return _NOT_FINITE
        if len(offers) + 1 < self._around.min_islands:
            reason = f"{len(offers) + 1} islands are there and exchange.min_islands={self._around.min_islands}"
            return f"{reason}; {self._trouble}" if self._trouble else reason
        if time.monotonic() < self._deadline:
            return ""
        silent = [slot for slot, offer in offers.items() if not offer]
        waited = f"islands {silent} offered nothing within {self._around.round_deadline:g} s"
        return self._trouble or (waited if self._health.finite else _NOT_FINITE)

    # -- one attempt ---------------------------------------------------------------------------------------------------

    def _propose(self, shares: tuple[Share, ...]) -> None:
        known = [offer.attempt for offer in self._offers().values() if offer]
        proposal = Proposal(
            run=self._around.run,
            fragment=self.fragment,
            height=self.height,
            attempt=max([self._last_attempt, *known]) + 1,
            lineage=self.lineage,
            shares=shares,
        )
        attempt = self._accept(proposal)
        for share in attempt.others:
            self._around.background(self._send_proposal(attempt, share.slot))

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
            [share.weight for share in proposal.shares],
            proposal.shares.index(self._own_share()),
            self._traffic,
            lambda position: self._around.network.lanes(proposal.shares[position].peer),
            lambda position, lane, lanes: self._open_stream(proposal, position, lane, lanes),
        )
        attempt = Attempt(proposal, self._around.membership.slot, transfer)
        if self._attempt:
            self._following = attempt
        else:
            self._attempt = attempt
        self._keep(attempt)
        self.notice()
        return attempt

    async def _open_stream(self, proposal: Proposal, position: int, lane: int, lanes: int) -> Stream:
        header = ContributionHeader(proposal=proposal.id(), lane=lane, lanes=lanes)
        return await self._around.network.open_stream(proposal.shares[position].peer, header, self._traffic, lane)

    async def _try(self, attempt: Attempt) -> RoundOutcome | None:
        try:
            await self._transfer_and_vote(attempt)
            return self._commit(attempt)
        except AttemptFailed as error:
            failure = error
        except NotFinite as error:
            failure = AttemptFailed(str(error), final=True)
        except (OSError, EOFError, ValueError) as error:
            failure = AttemptFailed(f"{type(error).__name__}: {error}")
        if await voting.settle(self._around, attempt, failure):
            return self._commit(attempt)
        attempt.transfer = None
        self._trouble = failure.reason
        self._attempt, self._following = self._following, None
        if failure.final or time.monotonic() >= self._deadline:
            return self._skipped(failure.reason)
        self._around.membership.publish()
        await asyncio.sleep(_PAUSE_SECONDS)
        self.notice()
        return None

    async def _transfer_and_vote(self, attempt: Attempt) -> None:
        """Up to where nothing but the swap is missing. What runs in a thread is waited for, never abandoned."""
        overdue = asyncio.get_running_loop().call_later(
            max(0.0, self._deadline - time.monotonic()),
            attempt.fail,
            f"not finished within exchange.round_deadline={self._around.round_deadline:g} s",
        )
        try:
            mean = await attempt.unless_failed(attempt.transfer.run())
            digest = await asyncio.to_thread(self._stage, mean)
            await attempt.unless_failed(voting.cast_vote(self._around, attempt, bytes.fromhex(digest)))
        finally:
            overdue.cancel()

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def _commit(self, attempt: Attempt) -> RoundOutcome:
        """Nothing in here waits, so no message can come between the decision and the swap."""
        attempt.committed, attempt.transfer, self._attempt = True, None, None
        shares = attempt.proposal.shares
        outcome = self._outcome(
            "committed",
            height=self.height,
            members=tuple(share.slot for share in shares),
            weights=tuple(share.weight for share in shares),
            digest=attempt.ballots[attempt.slot].hex(),
            cosine=self._cosine,
        )
        self._swap(outcome)
        return outcome

    async def _catch_up(self, tip: Tip) -> RoundOutcome | None:
        taken = await take_over(self._around, self._state, tip, self._traffic, self._deadline)
        if isinstance(taken, str):
            self._trouble = f"at height {self._state.height}, the others at {tip.height}, and no state came: {taken}"
            if time.monotonic() >= self._deadline:
                return self._skipped(self._trouble)
            await asyncio.sleep(_PAUSE_SECONDS)
            self.notice()
            return None
        why = self._trouble if self._health.finite else _NOT_FINITE
        outcome = self._outcome(
            "left_out",
            height=tip.height,
            members=taken.members,
            weights=taken.weights,
            reason=f"the others committed height {tip.height} without this island" + (f": {why}" if why else ""),
            digest=tip.digest.hex(),
        )
        self._swap(outcome)
        return outcome

    def _swap(self, outcome: RoundOutcome) -> None:
        self._around.report(Committing(outcome))
        self._state.commit()
        self._around.last_round[self.fragment] = (outcome.members, outcome.weights)
        self._around.membership.publish()

    def _skipped(self, reason: str) -> RoundOutcome:
        return self._outcome("skipped", height=self._state.height, reason=reason)

    def _outcome(self, kind: str, height: int, **details: object) -> RoundOutcome:
        return RoundOutcome(
            kind,
            self.fragment,
            height,
            bytes_sent=self._traffic.sent,
            bytes_received=self._traffic.received,
            exchange_seconds=time.monotonic() - self._started,
            pseudo_gradient_norm=self._health.norm,
            **details,
        )

    # -- work for a thread ---------------------------------------------------------------------------------------------

    def _prepare(self) -> Health:
        state = self._state
        health = pseudo_gradient(state.anchor, state.local, out=state.local)
        if health.finite:
            pieces = (chunk_slice(state.numel, chunk) for chunk in range(num_chunks(state.numel)))
            self._encoded = [self._around.codec.encode(state.local[piece]) for piece in pieces]
        return health

    def _stage(self, mean: Tensor) -> str:
        self._cosine = cosine(self._state.local, mean)
        return self._state.stage(mean)

    def _own_share(self) -> Share:
        membership = self._around.membership
        return Share(
            slot=membership.slot, peer=self._around.network.peer, weight=self._weight, norm=self._health.norm
        )
