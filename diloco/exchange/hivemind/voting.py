"""How the members of an attempt find out together whether it counts."""

import asyncio
from typing import Literal, Mapping, Sequence

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
    if not attempt.vote(ballot):  # it must not reach the others either: they would count on it
        raise AttemptFailed("this island gave it up before it voted")
    vote = Vote(
        proposal=attempt.id, digest=ballot.digest, mean_square=ballot.mean_square, evidence=ballot.evidence
    )

    async def send(slot: int) -> None:
        reply = await around.call(slot, vote, around.membership.peer_timeout)
        if not isinstance(reply, Ack):
            raise AttemptFailed(f"island {slot} did not take the vote: {in_words(reply)}")
        attempt.acknowledged.add(slot)

    await all_or_none([attempt.all_ballots(), *(send(slot) for slot in attempt.others)])
    if objection := attempt.objection():
        raise AttemptFailed(f"the contribution of island {objection.claim.slot} must not count ({objection.rule})")
    if not attempt.unanimous():
        votes = sorted(attempt.ballots.items())
        digests = ", ".join(f"island {slot}: {vote.digest.hex()[:12]}" for slot, vote in votes)
        around.report(ExchangeEvent("disagreement", digests))
        raise AttemptFailed(f"digests differ: {digests}")


Verdict = Literal["committed", "given_up", "in_doubt"]


async def settle(around: Surroundings, attempt: Attempt, failure: AttemptFailed) -> Verdict:
    """Bind everyone who can be reached to give the attempt up too; returns what it counts as.

    ``committed`` if this member has voted and another one committed, or if the votes that are known between them are
    complete and nothing stands against it: then one that can't be reached may have committed. ``given_up`` if another one
    has found that it is, or nobody can have committed. ``in_doubt`` where some can't be reached, and there is no telling:
    one of them may have committed by votes that are not known here, as it holds the acknowledgement of everyone who
    answers; or they have given it up, as nobody is known to have this member's vote.
    """
    attempt.fail(failure.reason, failure.final)
    live = {member.slot for member in around.membership.live()}
    settled = await _ask(around, attempt, failure, [slot for slot in attempt.others if slot in live])
    # Who could not be reached, and has asked meanwhile, may decide by what it was told from here.
    settled |= await _ask(around, attempt, failure, sorted(attempt.asked_by - settled.keys()))
    ballots = [ballot for reply in settled.values() for ballot in reply.ballots]
    attempt.hearsay |= {ballot.slot: ballot for ballot in ballots if attempt.names(ballot.slot)}
    verdict = _verdict(attempt, settled)
    attempt.given_up = verdict == "given_up"
    return verdict


async def _ask(
    around: Surroundings, attempt: Attempt, failure: AttemptFailed, slots: Sequence[int]
) -> dict[int, Settled]:
    question = Settle(proposal=attempt.id, reason=failure.reason[:1000], final=failure.final)
    replies = await asyncio.gather(*(around.call(slot, question, _SETTLE_SECONDS) for slot in slots))
    return {slot: reply for slot, reply in zip(slots, replies, strict=True) if isinstance(reply, Settled)}


def _verdict(attempt: Attempt, settled: Mapping[int, Settled]) -> Verdict:
    if attempt.slot not in attempt.ballots:
        return "given_up"  # nobody commits without this member's vote
    if any(reply.committed for reply in settled.values()):
        return "committed"
    if any(reply.given_up for reply in settled.values()):
        return "given_up"
    silent = set(attempt.others) - settled.keys()
    held = [{ballot.slot for ballot in reply.ballots} for reply in settled.values()]
    if settled.keys() - set(attempt.ballots).union(*held):
        return "given_up"  # one that answers has not voted, and does so no more
    if attempt.accepted(ballot for reply in settled.values() for ballot in reply.ballots):
        known_elsewhere = attempt.acknowledged or any(attempt.slot in slots for slots in held)
        return "committed" if known_elsewhere or not silent else "in_doubt"
    held_by_all = set(attempt.ballots).intersection(*held)
    return "in_doubt" if len(silent) > 1 and silent & held_by_all else "given_up"
