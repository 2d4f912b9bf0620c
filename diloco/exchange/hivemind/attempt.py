"""One attempt of one round: who is in it, its votes, and the promise not to commit it. No input or output in here.

The rule that keeps islands together: a member commits when every named member voted for the same digest **and** every
one has acknowledged this member's vote. So while a member may have committed, each of the others holds its vote, and
those who are left can tell from the votes that they hold between them whether it may have.
"""

import asyncio
from typing import Callable, Coroutine, Iterable, Mapping, Sequence, TypeVar

from diloco.exchange.hivemind.messages import Ballot, Excluded, Grant, Proposal
from diloco.exchange.hivemind.scatter_reduce import ScatterReduce

T = TypeVar("T")


class AttemptFailed(Exception):
    """The attempt came to nothing. ``final``: so would the next one."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.final = reason, final


class Attempt:
    """An accepted proposal, as one of its members sees it.

    Args:
        judge: looks at the votes of all members, and names the one whose contribution must not count.

    Attributes:
        members: slots, in the order of the proposal.
        transfer: its bytes; None after the end.
        ballots: votes by slot, the own one too.
        hearsay: votes that came after it was given up, or that others tell of. They commit nothing, but tell who is to blame.
        committed: the result was swapped in.
        acknowledged: who has taken the own vote.
        frozen: this member commits it by votes no more. It may still do so when it turns out that another one may have.
        given_up: it was found that nobody can have committed it, and nobody may any more.
        asked_by: who has asked what it counts as.
    """

    def __init__(
        self,
        proposal: Proposal | Grant,
        members: Sequence[int],
        slot: int,
        transfer: ScatterReduce | None = None,
        judge: Callable[[Mapping[int, Ballot]], Excluded | None] = lambda ballots: None,
    ) -> None:
        self.proposal, self.id, self.slot = proposal, proposal.id(), slot
        self.members, self.transfer, self._judge = tuple(members), transfer, judge
        self.ballots: dict[int, Ballot] = {}
        self.hearsay: dict[int, Ballot] = {}
        self.acknowledged: set[int] = set()
        self.asked_by: set[int] = set()
        self.committed = self.frozen = self.given_up = False
        self._failure: asyncio.Future[AttemptFailed] = asyncio.get_running_loop().create_future()
        self._news = asyncio.Event()

    @property
    def others(self) -> list[int]:
        """The other members."""
        return [slot for slot in self.members if slot != self.slot]

    def names(self, slot: int) -> bool:
        """Whether the island in ``slot`` takes part."""
        return slot in self.members

    def position(self, slot: int) -> int:
        """Where the island in ``slot`` stands in the order of reduction."""
        return self.members.index(slot)

    def fail(self, reason: str, final: bool = False) -> None:
        """Give it up: from now on this member never commits it on its own. Nothing happens once it is committed."""
        if not self.committed and not self._failure.done():
            self.frozen = True
            self._failure.set_result(AttemptFailed(reason, final))

    def vote(self, ballot: Ballot) -> bool:
        """Count a vote; False where it comes too late."""
        if self.frozen:
            self.hearsay[ballot.slot] = ballot
            return False
        self.ballots[ballot.slot] = ballot
        self._news.set()
        return True

    def unanimous(self, more: Iterable[Ballot] = ()) -> bool:
        """Whether, with the votes that others know of, all members voted for one digest."""
        known = self._known(more)
        return set(known) == set(self.members) and len({ballot.digest for ballot in known.values()}) == 1

    def objection(self, more: Iterable[Ballot] = ()) -> Excluded | None:
        """Whose contribution must not count, by the votes of all; None before all of them are known."""
        known = self._known(more)
        return self._judge(known) if set(known) == set(self.members) else None

    def accepted(self, more: Iterable[Ballot] = ()) -> bool:
        """Whether, with the votes that others know of, nothing stands against it."""
        more = list(more)
        return self.unanimous(more) and self.objection(more) is None

    async def all_ballots(self) -> None:
        """Wait for the vote of every member."""
        while len(self.ballots) < len(self.members):
            self._news.clear()
            await self._news.wait()

    def _known(self, more: Iterable[Ballot]) -> dict[int, Ballot]:
        return self.ballots | {ballot.slot: ballot for ballot in more}

    async def unless_failed(self, work: Coroutine[None, None, T]) -> T:
        """The result of ``work``, which is cancelled when the attempt fails.

        Raises:
            AttemptFailed: it was given up, here or by another member, before or while ``work`` ran.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._failure}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
        if self._failure.done():
            if not task.cancelled():
                task.exception()  # seen; why the attempt failed first says more
            raise self._failure.result()
        return task.result()
