"""Giving slots to newcomers: a round of its own kind, without tensors, agreed on by the same votes."""

import asyncio
import time
from dataclasses import dataclass
from typing import Callable

from diloco.exchange.base import ExchangeEvent
from diloco.exchange.hivemind import voting
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.messages import Ack, Ballot, Entry, Grant, Hello
from diloco.exchange.hivemind.roster import Roster, next_entry
from diloco.exchange.hivemind.surroundings import Surroundings, in_words

_GUEST_SILENCE_SECONDS = 5.0
_MOST_GUESTS = 64
_LOOK_SECONDS = 0.25
_LEASE_TIMEOUTS = 4.0  # times peer_timeout: how long a silent island keeps its slot
_SHORTEST_LEASE_SECONDS = 60.0


@dataclass
class _Guest:
    hello: Hello
    asked: float


class Granting:
    """This island's part in granting slots.

    Args:
        keep: remembers an attempt, so that votes for it find it.
    """

    def __init__(self, around: Surroundings, max_slots: int, keep: Callable[[Attempt], None]) -> None:
        self._around, self._max_slots, self._keep = around, max_slots, keep
        self._guests: dict[str, _Guest] = {}
        self._attempt: Attempt | None = None
        self._last_attempt = 0
        self._lease_seconds = max(_SHORTEST_LEASE_SECONDS, _LEASE_TIMEOUTS * around.membership.peer_timeout)

    def ask(self, peer: str, hello: Hello) -> str:
        """A newcomer wants a slot; returns why it can't have one, or an empty string: it has to ask again."""
        entry = self._entry_for(peer, hello)
        if isinstance(entry, str):
            return entry
        if peer not in self._guests and len(self._guests) >= _MOST_GUESTS:
            return f"{_MOST_GUESTS} others are waiting for a slot"
        self._guests[peer] = _Guest(hello, time.monotonic())
        return ""

    def consider(self, grant: Grant) -> str:
        """Accept another member's proposal; returns why not, or an empty string."""
        roster = self._around.membership.roster
        if self._attempt and self._attempt.id == grant.id():
            return ""  # sent again, as the answer got lost
        if (grant.height, grant.lineage) != (roster.height + 1, roster.lineage):
            return f"this island's member list has height {roster.height}"
        if self._attempt and not self._attempt.frozen:
            return "another grant is being voted on"
        if self._around.membership.slot not in grant.voters:
            return "this island is not among its voters"
        before = roster.of_slot(grant.entry.slot)
        if grant.entry.epoch != (before.epoch + 1 if before else 0) or grant.entry.slot >= self._max_slots:
            return "slot or epoch do not follow from the member list"
        if before and before.slot == self._around.membership.slot:
            return "this island has that slot itself"
        holder = self._around.membership.members.get(grant.entry.slot)
        if holder and holder.alive and holder.peer != grant.entry.peer:
            return f"island {holder.slot}, which has that slot, is alive"
        if grant.entry.since != grant.height:
            return "it is not granted now"
        self._around.background(self._vote(self._accept(grant)))
        return ""

    async def run(self) -> None:
        """Propose grants to those who ask, when it is this island's turn to do so, for ever."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            now = time.monotonic()
            self._guests = {
                peer: guest for peer, guest in self._guests.items() if now - guest.asked < _GUEST_SILENCE_SECONDS
            }
            membership = self._around.membership
            first = all(member.slot > membership.slot for member in membership.live())
            if self._guests and first and not self._attempt:
                await self._propose(next(iter(self._guests)))

    def member_lost(self, slot: int, reason: str) -> None:
        """A member is not there any more: no attempt that needs its vote can succeed."""
        if self._attempt and self._attempt.names(slot):
            self._attempt.fail(f"island {slot} {reason}")

    def _entry_for(self, peer: str, hello: Hello) -> Entry | str:
        membership = self._around.membership
        return next_entry(
            membership.roster, peer, hello, self._max_slots, membership.silent_seconds(), self._lease_seconds
        )

    async def _propose(self, peer: str) -> None:
        entry, membership = self._entry_for(peer, self._guests[peer].hello), self._around.membership
        if isinstance(entry, str):
            del self._guests[peer]
            return
        # The holder of the slot that is given away has no say: it is the newcomer itself before it died, or gone.
        voters = (membership.slot, *(member.slot for member in membership.live() if member.slot != entry.slot))
        grant = Grant(
            run=self._around.run,
            height=membership.roster.height + 1,
            attempt=self._last_attempt + 1,
            lineage=membership.roster.lineage,
            voters=voters,
            entry=entry,
        )
        attempt = self._accept(grant)
        for slot in attempt.others:
            self._around.background(self._send(attempt, slot))
        await self._vote(attempt)

    async def _send(self, attempt: Attempt, slot: int) -> None:
        reply = await self._around.call(slot, attempt.proposal, self._around.membership.peer_timeout)
        if not isinstance(reply, Ack):
            attempt.fail(f"island {slot} did not accept the grant: {in_words(reply)}")

    def _accept(self, grant: Grant) -> Attempt:
        self._last_attempt = max(self._last_attempt, grant.attempt)
        self._attempt = Attempt(grant, grant.voters, self._around.membership.slot)
        self._keep(self._attempt)
        return self._attempt

    async def _vote(self, attempt: Attempt) -> None:
        """Vote for a grant that was accepted, and take it in if all did."""
        timeout = 2 * self._around.membership.peer_timeout
        overdue = asyncio.get_running_loop().call_later(timeout, attempt.fail, f"no outcome within {timeout:g} s")
        grown = self._around.membership.roster.after(attempt.proposal.entry)
        ballot = Ballot(slot=attempt.slot, digest=grown.lineage, mean_square=0.0, evidence=())
        try:
            await attempt.unless_failed(voting.cast_vote(self._around, attempt, ballot))
            self._commit(attempt, grown)
        except AttemptFailed as failure:
            if await voting.settle(self._around, attempt, failure) == "committed":
                self._commit(attempt, grown)
            else:
                who = attempt.proposal.entry.addresses[:1] or (attempt.proposal.entry.peer,)
                self._around.report(ExchangeEvent("not_granted", f"slot for {who[0]}: {failure.reason}; trying again"))
        finally:
            overdue.cancel()
            if self._attempt is attempt:
                self._attempt = None

    def _commit(self, attempt: Attempt, grown: Roster) -> None:
        attempt.committed = True
        self._guests.pop(attempt.proposal.entry.peer, None)
        self._around.membership.adopt(grown)
