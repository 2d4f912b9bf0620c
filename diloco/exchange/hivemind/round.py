"""One round of one fragment, from launch to outcome."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Callable, Coroutine

from torch import Tensor

from diloco.exchange.base import ExchangeEvent, RoundOutcome
from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.catch_up import TransferFailed, fetch_state, seal, tip_to_adopt
from diloco.exchange.hivemind.ipc import Committing
from diloco.exchange.hivemind.membership import Membership
from diloco.exchange.hivemind.messages import Ack, ContributionHeader, Offer, Proposal, Settle, Settled, Share, Tip, Vote
from diloco.exchange.hivemind.network import Network, Stream, Traffic, Unreachable
from diloco.exchange.hivemind.scatter_reduce import NotFinite, ScatterReduce, all_or_none
from diloco.outer_state import FragmentState
from diloco.pseudo_gradient import Health, cosine, pseudo_gradient
from diloco.reduction import Codec, chunk_slice, num_chunks

_LAGGARD_SHARE = 0.5  # of the deadline: how long a round waits for a live member that offers nothing
_PAUSE_SECONDS = 0.2  # between two attempts
_SETTLE_SECONDS = 5.0


@dataclass
class Surroundings:
    """What every round of an island uses.

    Attributes:
        report: to the trainer.
        background: runs something that nobody waits for.
        last_round: members and weights of the last committed round, by fragment.
    """

    run: str
    network: Network
    membership: Membership
    codec: Codec
    round_deadline: float
    min_islands: int
    report: Callable[[Committing | ExchangeEvent], None]
    background: Callable[[Coroutine[None, None, object]], None]
    last_round: dict[int, tuple[tuple[int, ...], tuple[float, ...]]] = field(default_factory=dict)


class Round:
    """This island's part in the next round of a fragment.

    Args:
        keep: remembers an attempt, so that messages about it find it.

    Attributes:
        offering: the contribution is encoded, and others may name this island in proposals.
        attempt: the one in progress.
        following: a proposal accepted while the one before it is being settled.
    """

    def __init__(
        self, around: Surroundings, state: FragmentState, weight: float, keep: Callable[[Attempt], None]
    ) -> None:
        self._around, self._state, self._weight, self._keep = around, state, weight, keep
        self.fragment, self.height, self.lineage = state.index, state.height + 1, bytes.fromhex(state.lineage)
        self.offering = False
        self.attempt: Attempt | None = None
        self.following: Attempt | None = None
        self._started = time.monotonic()
        self._deadline = self._started + around.round_deadline
        self._last_attempt = 0
        self._trouble = ""
        self._traffic = Traffic()
        self._changed = asyncio.Event()
        self._health = Health(0.0, False)
        self._encoded: list[Tensor] = []

    async def run(self) -> RoundOutcome:
        """Take part until the round has an outcome, which is never later than the deadline and one settling of votes."""
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
            for attempt in (self.attempt, self.following):
                if attempt and not attempt.committed:
                    attempt.fail(self._trouble or "this island's round is over")
                    self._around.background(self._ask_others(attempt, AttemptFailed("this island's round is over")))

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
        for attempt in (self.attempt, self.following):
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
        if self.following or (self.attempt and not self.attempt.frozen):
            return f"attempt {self._last_attempt} is still open"
        own = self._own_share()
        if own not in proposal.shares:
            return "this island's share is not what it offered"
        self._accept(proposal)
        return ""

    # -- what happens next ---------------------------------------------------------------------------------------------

    async def _advance(self) -> RoundOutcome | None:
        if self.attempt:
            return await self._try(self.attempt)
        tip = self._tip_to_adopt()
        if tip:
            return await self._catch_up(tip)
        shares = self._shares_to_propose()
        if shares:
            self._propose(shares)
            self.notice()
            return None
        reason = self._reason_to_stop()
        return self._skipped(reason) if reason else None

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(min(1.0, max(0.0, self._deadline - time.monotonic()))):
                await self._changed.wait()
        except TimeoutError:
            pass

    def _tip_to_adopt(self) -> Tip | None:
        own = Tip(
            fragment=self.fragment,
            height=self._state.height,
            lineage=self.lineage,
            digest=bytes.fromhex(self._state.digest),
        )
        live = self._around.membership.live()
        return tip_to_adopt(own, {m.slot: m.tips[self.fragment] for m in live if self.fragment in m.tips})

    def _shares_to_propose(self) -> tuple[Share, ...]:
        """The shares of a proposal, if it is this island that makes it and now is the time; else none."""
        live = self._around.membership.live()
        offers = {member.slot: self._matching_offer(member.offers) for member in live}
        ready = {slot: offer for slot, offer in offers.items() if offer and not offer.passed}
        everyone = all(offers.values())
        patience = self._started + _LAGGARD_SHARE * self._around.round_deadline
        if not self._health.finite or not (everyone or time.monotonic() > patience):
            return ()
        if len(ready) + 1 < self._around.min_islands or any(slot < self._around.membership.slot for slot in ready):
            return ()
        self._last_attempt = max([self._last_attempt, *(offer.attempt for offer in ready.values())])
        peers = self._around.membership.members
        shares = [self._own_share()] + [
            Share(slot=slot, peer=peers[slot].peer, weight=offer.weight, norm=offer.norm) for slot, offer in ready.items()
        ]
        return tuple(sorted(shares, key=lambda share: share.slot))

    def _matching_offer(self, offers: dict[int, Offer]) -> Offer | None:
        offer = offers.get(self.fragment)
        return offer if offer and (offer.height, offer.lineage) == (self.height, self.lineage) else None

    def _reason_to_stop(self) -> str:
        live = self._around.membership.live()
        own = "" if self._health.finite else "own pseudo-gradient is not finite"
        offers = [self._matching_offer(member.offers) for member in live]
        if own and all(offer and offer.passed for offer in offers):
            return own
        if len(live) + 1 < self._around.min_islands:
            lost = f"; {self._trouble}" if self._trouble else ""
            return f"{len(live) + 1} islands are there and exchange.min_islands={self._around.min_islands}{lost}"
        if time.monotonic() < self._deadline:
            return ""
        silent = [member.slot for member, offer in zip(live, offers) if not offer]
        return own or self._trouble or f"islands {silent} offered nothing within {self._around.round_deadline:g} s"

    # -- one attempt ---------------------------------------------------------------------------------------------------

    def _propose(self, shares: tuple[Share, ...]) -> None:
        proposal = Proposal(
            run=self._around.run,
            fragment=self.fragment,
            height=self.height,
            attempt=self._last_attempt + 1,
            lineage=self.lineage,
            shares=shares,
        )
        attempt = self._accept(proposal)
        for share in attempt.others:
            self._around.background(self._send_proposal(attempt, share))

    async def _send_proposal(self, attempt: Attempt, share: Share) -> None:
        reply = await self._call(share.slot, attempt.proposal)
        if isinstance(reply, Ack):
            return
        attempt.fail(f"island {share.slot} did not accept the proposal: {_words(reply)}")

    def _accept(self, proposal: Proposal) -> Attempt:
        self._last_attempt = proposal.attempt
        shares = proposal.shares
        position = shares.index(self._own_share())

        async def open_stream(at: int) -> Stream:
            header = ContributionHeader(proposal=attempt.id)
            return await self._around.network.open_stream(shares[at].peer, header, self._traffic)

        weights = [share.weight for share in shares]
        state = self._state
        transfer = ScatterReduce(
            self._around.codec, self._encoded, state.numel, state.dtype, weights, position, self._traffic, open_stream
        )
        attempt = Attempt(proposal, self._around.membership.slot, transfer)
        if self.attempt:
            self.following = attempt
        else:
            self.attempt = attempt
        self._keep(attempt)
        self.notice()
        return attempt

    async def _try(self, attempt: Attempt) -> RoundOutcome | None:
        try:
            return await self._attempt_once(attempt)
        except AttemptFailed as error:
            failure = error
        except NotFinite as error:
            failure = AttemptFailed(str(error), final=True)
        except (OSError, EOFError, ValueError) as error:
            failure = AttemptFailed(f"{error} ({type(error).__name__})")
        attempt.fail(failure.reason, failure.final)
        attempt.transfer = None
        if await self._ask_others(attempt, failure):
            return self._commit(attempt, self._similarity)
        if failure.final or time.monotonic() >= self._deadline:
            self.attempt = None
            return self._skipped(failure.reason)
        self._trouble = failure.reason
        self.attempt, self.following = self.following, None
        self._around.membership.publish()
        await asyncio.sleep(_PAUSE_SECONDS)
        self.notice()
        return None

    async def _attempt_once(self, attempt: Attempt) -> RoundOutcome:
        overdue = asyncio.get_running_loop().call_later(
            max(0.0, self._deadline - time.monotonic()),
            attempt.fail,
            f"not finished within exchange.round_deadline={self._around.round_deadline:g} s",
        )
        try:
            mean = await attempt.unless_failed(attempt.transfer.run())
            digest, self._similarity = await asyncio.to_thread(self._stage, mean)
            await attempt.unless_failed(self._vote(attempt, bytes.fromhex(digest)))
            return self._commit(attempt, self._similarity)
        finally:
            overdue.cancel()

    async def _vote(self, attempt: Attempt, digest: bytes) -> None:
        attempt.vote(attempt.slot, digest)

        async def send(share: Share) -> None:
            reply = await self._call(share.slot, Vote(proposal=attempt.id, digest=digest))
            if not isinstance(reply, Ack):
                raise AttemptFailed(f"island {share.slot} did not take the vote: {_words(reply)}")

        await all_or_none([attempt.all_ballots(), *(send(share) for share in attempt.others)])
        if not attempt.unanimous():
            digests = ", ".join(f"island {slot}: {vote.hex()[:12]}" for slot, vote in sorted(attempt.ballots.items()))
            self._around.report(ExchangeEvent("disagreement", f"fragment {self.fragment}: {digests}"))
            raise AttemptFailed(f"digests differ: {digests}", final=True)

    async def _ask_others(self, attempt: Attempt, failure: AttemptFailed) -> bool:
        """Bind everyone who can be reached to give the attempt up; returns whether it counts as committed instead."""
        question = Settle(proposal=attempt.id, reason=failure.reason[:1000], final=failure.final)
        live = {member.slot for member in self._around.membership.live()}
        asked = [share.slot for share in attempt.others if share.slot in live]
        replies = await asyncio.gather(*(self._call(slot, question, _SETTLE_SECONDS) for slot in asked))
        settled = [reply for reply in replies if isinstance(reply, Settled)]
        voted = attempt.slot in attempt.ballots
        ballots = [ballot for reply in settled for ballot in reply.ballots]
        return voted and (any(reply.committed for reply in settled) or attempt.unanimous(ballots))

    async def _call(self, slot: int, request: messages.Request, timeout: float | None = None) -> messages.Reply | str:
        """A member's reply, or in words why there is none."""
        membership = self._around.membership
        member = membership.members[slot]
        try:
            return await self._around.network.call(member.peer, request, timeout or membership.peer_timeout)
        except Unreachable as error:
            if error.gone:
                membership.lost(member, f"can't be reached: {error}")
            return str(error)

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def _commit(self, attempt: Attempt, similarity: float) -> RoundOutcome:
        """Swap. Nothing in here waits, so no message can come in between."""
        attempt.committed, attempt.transfer, self.attempt = True, None, None
        shares = attempt.proposal.shares
        members, weights = tuple(share.slot for share in shares), tuple(share.weight for share in shares)
        outcome = self._outcome(
            "committed",
            height=self.height,
            members=members,
            weights=weights,
            digest=attempt.ballots[attempt.slot].hex(),
            cosine=similarity,
        )
        self._swap(outcome)
        return outcome

    async def _catch_up(self, tip: Tip) -> RoundOutcome | None:
        reason = self._trouble if self._health.finite else "own pseudo-gradient is not finite"
        header = None
        for donor in self._around.membership.live():
            if donor.tips.get(self.fragment) != tip:
                continue
            fetch = fetch_state(self._around.network, donor.peer, tip, self._state, self._traffic)
            try:
                async with asyncio.timeout(max(1.0, self._deadline - time.monotonic())):
                    header = await fetch
                digest = await asyncio.to_thread(seal, self._state, tip)
            except (TransferFailed, OSError, EOFError, ValueError, TimeoutError) as error:
                self._trouble = f"behind at height {self._state.height}; no state from island {donor.slot}: {error}"
                continue
            outcome = self._outcome(
                "left_out",
                height=tip.height,
                members=header.members,
                weights=header.weights,
                reason=f"the others committed height {tip.height} without this island" + (f": {reason}" if reason else ""),
                digest=digest,
            )
            self._swap(outcome)
            return outcome
        if time.monotonic() >= self._deadline:
            return self._skipped(self._trouble)
        await asyncio.sleep(_PAUSE_SECONDS)
        self.notice()
        return None

    def _swap(self, outcome: RoundOutcome) -> None:
        self._around.report(Committing(outcome))
        self._state.commit()
        self._around.last_round[self.fragment] = (outcome.members, outcome.weights)
        self._around.membership.publish()

    def _skipped(self, reason: str) -> RoundOutcome:
        return self._outcome("skipped", height=self._state.height, reason=reason)

    def _outcome(self, kind: str, height: int, **details) -> RoundOutcome:
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
            chunks = range(num_chunks(state.numel))
            self._encoded = [self._around.codec.encode(state.local[chunk_slice(state.numel, chunk)]) for chunk in chunks]
        return health

    def _stage(self, mean: Tensor) -> tuple[str, float]:
        return self._state.stage(mean), cosine(self._state.local, mean)

    def _own_share(self) -> Share:
        around = self._around
        return Share(
            slot=around.membership.slot, peer=around.network.peer, weight=self._weight, norm=self._health.norm
        )


def _words(reply: messages.Reply | str) -> str:
    return reply if isinstance(reply, str) else getattr(reply, "reason", reply.kind)
