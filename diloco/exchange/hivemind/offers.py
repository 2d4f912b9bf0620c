"""Who takes part in a round, with which weight, and who is left out: pure functions of what the members offer.

The proposer chooses by them, and every member checks by them what was proposed.
"""

from dataclasses import dataclass
from typing import Collection, Iterable, Mapping, Sequence

from diloco.adaptation import Pace
from diloco.contributions import RULES, Measured, Size, capped_weights, most_opposite, too_large, understated
from diloco.exchange.hivemind.messages import Ballot, Claim, Excluded, Offer, Proposal, StateHeader
from diloco.exchange.hivemind.roster import Roster
from diloco.ledger import Counted, Ledger


@dataclass(frozen=True)
class Selection:
    """Whom a proposal names: ``claims`` in slot order with their ``weights``, and whom a rule leaves out."""

    claims: tuple[Claim, ...]
    weights: tuple[float, ...]
    excluded: tuple[Excluded, ...]


def matching(offers: Mapping[int, Offer], fragment: int, height: int, lineage: bytes) -> Offer | None:
    """A member's offer to exactly this round."""
    offer = offers.get(fragment)
    return offer if offer and (offer.height, offer.lineage) == (height, lineage) else None


def claim_objection(claim: Claim, roster: Roster, ledger: Ledger) -> str:
    """Why a claim can't count: of an island whose lease is over, or on sequences that have been counted before."""
    entry = roster.of_slot(claim.slot)
    if entry is None or (entry.epoch, entry.peer) != (claim.epoch, claim.peer):
        return f"island {claim.slot} does not have that slot, or not in epoch {claim.epoch}"
    if claim.slot >= len(ledger.positions):
        return f"there is no slot {claim.slot}"
    counted = ledger.positions[claim.slot]
    if not counted <= claim.start < claim.position:
        return f"sequences {claim.start} to {claim.position} of slot {claim.slot}, where {counted} have been counted"
    return ""


def select(
    candidates: Collection[Claim], convicted: Mapping[int, Excluded], typical_norm: float, max_weight_ratio: float
) -> Selection | None:
    """Whom of the candidates to propose; None where nobody is left.

    Args:
        convicted: whom an earlier attempt of this round has found out, by slot.
    """
    caught = [convicted[claim.slot] for claim in candidates if _is_convicted(claim, convicted)]
    sound = {claim.slot: claim for claim in candidates if not _is_convicted(claim, convicted)}
    large = too_large({slot: Size(claim.tokens, claim.norm) for slot, claim in sound.items()}, typical_norm)
    excluded = [*caught, *(Excluded(claim=sound[slot], rule="norm") for slot in large)]
    claims = tuple(sound[slot] for slot in sorted(sound.keys() - large))
    if not claims:
        return None
    weights = capped_weights([claim.tokens for claim in claims], max_weight_ratio)
    return Selection(claims, weights, tuple(sorted(excluded, key=lambda each: each.claim.slot)))


def proposal_objection(
    proposal: Proposal, convicted: Mapping[int, Excluded], typical_norm: float, max_weight_ratio: float
) -> str:
    """Why a proposal does not follow the rules, or an empty string."""
    candidates = [*proposal.claims, *(each.claim for each in proposal.excluded)]
    expected = select(candidates, convicted, typical_norm, max_weight_ratio)
    if expected != Selection(proposal.claims, proposal.weights, proposal.excluded):
        return "by the rules that this island applies, its members, weights or exclusions would be others"
    return ""


def judge(proposal: Proposal, numel: int, ballots: Mapping[int, Ballot]) -> Excluded | None:
    """Whose contribution must not count, by what all reducers have seen of its ``numel`` independent values."""
    claims = proposal.claims
    if any(len(ballot.evidence) != len(claims) for ballot in ballots.values()):
        return None
    measured, mean_square = add_up(ballots, len(claims))
    position = understated([claim.norm for claim in claims], measured)
    if position is not None:
        return Excluded(claim=claims[position], rule="claim")
    position = most_opposite(proposal.weights, measured, mean_square, numel)
    return None if position is None else Excluded(claim=claims[position], rule="opposite")


def add_up(ballots: Mapping[int, Ballot], num_members: int) -> tuple[list[Measured], float]:
    """Of each member what the reducers together have seen, each in its share; and the square of the mean."""
    measured, mean_square = [Measured(0.0, 0.0)] * num_members, 0.0
    for slot in sorted(ballots):
        mean_square += ballots[slot].mean_square
        pairs = zip(measured, ballots[slot].evidence, strict=True)
        measured = [Measured(sum_.square + seen.square, sum_.along + seen.along) for sum_, seen in pairs]
    return measured, mean_square


def odd_ones(proposal: Proposal, ballots: Mapping[int, Ballot]) -> list[Excluded]:
    """The members whose digest differs from the one that most of them have; none where there is no majority."""
    digests = [ballot.digest for ballot in ballots.values()]
    common = max(set(digests), key=digests.count)
    if len(ballots) < len(proposal.claims) or digests.count(common) * 2 <= len(digests):
        return []
    return [Excluded(claim=claim, rule="digest") for claim in proposal.claims if ballots[claim.slot].digest != common]


def ledger_of(header: StateHeader) -> Ledger:
    """The ledger that a donor sends before a state. Raises struct.error where its size is wrong."""
    return Ledger.from_bytes(header.ledger)


def counted(claims: Iterable[Claim]) -> list[Counted]:
    """What the ledger notes when a round of these claims is committed."""
    return [Counted(claim.slot, claim.tokens, claim.position, claim.step, claim.norm, Pace(*claim.pace)) for claim in claims]


def rules_in_words(excluded: Sequence[Excluded]) -> list[str]:
    """Each exclusion for the log."""
    return [f"island {each.claim.slot}: {RULES[each.rule].format(norm=each.claim.norm)}" for each in excluded]


def _is_convicted(claim: Claim, convicted: Mapping[int, Excluded]) -> bool:
    found = convicted.get(claim.slot)
    return found is not None and found.claim == claim
