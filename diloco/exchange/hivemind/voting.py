"""How the members of an attempt find out together whether it counts."""

import asyncio
from typing import Literal

from diloco.exchange.base import ExchangeEvent
from diloco.exchange.hivemind.attempt import Attempt, AttemptFailed
from diloco.exchange.hivemind.messages import Ack, Ballot, Settle, Settled, Vote
from diloco.exchange.hivemind.scatter_reduce import all_or_none
from diloco.exchange.hivemind.surroundings import Surroundings, in_words

_SETTLE_SECONDS = 5.0


async def cast_vote(around: Surroundings, attempt: Attempt, ballot: Ballot) -> None:
    """Vote, and wait until this member may commit (see :mod:`diloco.exchange.hivemind.attempt`).

    Raises:
        AttemptFailed: a member does not take the vote, the digests differ, or a contribution must not count.
    """
    attempt.vote(ballot)
    vote = Vote(
        proposal=attempt.id, digest=ballot.digest, mean_square=ballot.mean_square, evidence=ballot.evidence
    )

    async def send(slot: int) -> None:
        reply = await around.call(slot, vote, around.membership.peer_timeout)
        if not isinstance(reply, Ack):
            raise AttemptFailed(f"island {slot} did not take the vote: {in_words(reply)}")

    await all_or_none([attempt.all_ballots(), *(send(slot) for slot in attempt.others)])
    if objection := attempt.objection():
        raise AttemptFailed(f"the contribution of island {objection.claim.slot} must not count ({objection.rule})")
    if not attempt.unanimous():
        votes = sorted(attempt.ballots.items())
        digests = ", ".join(f"island {slot}: {vote.digest.hex()[:12]}" for slot, vote in votes)
        around.report(ExchangeEvent("disagreement", digests))
        raise AttemptFailed(f"digests differ: {digests}")


async def settle(
    around: Surroundings, attempt: Attempt, failure: AttemptFailed
) -> Literal["committed", "given_up", "in_doubt"]:
    """Bind everyone who can be reached to give the attempt up too; returns what it counts as.

    ``committed`` if this member has voted and another one committed, or if the votes that are known between them are
    complete and nothing stands against it: then one that can't be reached may have committed. ``in_doubt`` if some can't be
    reached, and one of them may have committed by votes that are not known here: it holds the acknowledgement of everyone
    who answers.
    """
    attempt.fail(failure.reason, failure.final)
    question = Settle(proposal=attempt.id, reason=failure.reason[:1000], final=failure.final)
    live = {member.slot for member in around.membership.live()}
    asked = [slot for slot in attempt.others if slot in live]
    replies = await asyncio.gather(*(around.call(slot, question, _SETTLE_SECONDS) for slot in asked))
    settled = {slot: reply for slot, reply in zip(asked, replies, strict=True) if isinstance(reply, Settled)}
    ballots = [ballot for reply in settled.values() for ballot in reply.ballots]
    attempt.hearsay |= {ballot.slot: ballot for ballot in ballots if attempt.names(ballot.slot)}
    if attempt.slot not in attempt.ballots:
        return "given_up"  # nobody commits without this member's vote
    if any(reply.committed for reply in settled.values()) or attempt.accepted(ballots):
        return "committed"
    silent = set(attempt.others) - settled.keys()
    held_by_all = set(attempt.ballots).intersection(
        *({ballot.slot for ballot in reply.ballots} for reply in settled.values())
    )
    return "in_doubt" if len(silent) > 1 and silent & held_by_all else "given_up"
