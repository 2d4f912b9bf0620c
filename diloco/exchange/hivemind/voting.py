"""How the members of an attempt find out together whether it counts."""

import asyncio

from diloco.exchange.base import ExchangeEvent
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.messages import Ack, Settle, Settled, Share, Vote
from diloco.exchange.hivemind.scatter_reduce import all_or_none
from diloco.exchange.hivemind.surroundings import Surroundings, in_words

_SETTLE_SECONDS = 5.0


async def cast_vote(around: Surroundings, attempt: Attempt, digest: bytes) -> None:
    """Vote for ``digest``, and wait until this member may commit (see :mod:`diloco.exchange.hivemind.attempt`).

    Raises:
        AttemptFailed: a member does not take the vote, or the digests differ.
    """
    attempt.vote(attempt.slot, digest)

    async def send(share: Share) -> None:
        reply = await around.call(share.slot, Vote(proposal=attempt.id, digest=digest), around.membership.peer_timeout)
        if not isinstance(reply, Ack):
            raise AttemptFailed(f"island {share.slot} did not take the vote: {in_words(reply)}")

    await all_or_none([attempt.all_ballots(), *(send(share) for share in attempt.others)])
    if not attempt.unanimous():
        digests = ", ".join(f"island {slot}: {vote.hex()[:12]}" for slot, vote in sorted(attempt.ballots.items()))
        around.report(ExchangeEvent("disagreement", f"fragment {attempt.proposal.fragment}: {digests}"))
        raise AttemptFailed(f"digests differ: {digests}", final=True)


async def settle(around: Surroundings, attempt: Attempt, failure: AttemptFailed) -> bool:
    """Bind everyone who can be reached to give the attempt up too; returns whether it counts as committed instead.

    It does if this member has voted and another one committed, or if the votes that are known between them are
    complete: then one that can't be reached may have committed.
    """
    attempt.fail(failure.reason, failure.final)
    question = Settle(proposal=attempt.id, reason=failure.reason[:1000], final=failure.final)
    live = {member.slot for member in around.membership.live()}
    asked = [share.slot for share in attempt.others if share.slot in live]
    replies = await asyncio.gather(*(around.call(slot, question, _SETTLE_SECONDS) for slot in asked))
    settled = [reply for reply in replies if isinstance(reply, Settled)]
    ballots = [ballot for reply in settled for ballot in reply.ballots]
    voted = attempt.slot in attempt.ballots
    return voted and (any(reply.committed for reply in settled) or attempt.unanimous(ballots))
