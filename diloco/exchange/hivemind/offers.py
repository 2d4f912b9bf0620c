"""When a proposal is made, by whom, and whom it names: a pure function of what the live members offer."""

from typing import Mapping

from diloco.exchange.hivemind.messages import Offer, Share


def matching(offers: Mapping[int, Offer], fragment: int, height: int, lineage: bytes) -> Offer | None:
    """A member's offer to exactly this round."""
    offer = offers.get(fragment)
    return offer if offer and (offer.height, offer.lineage) == (height, lineage) else None


def shares_to_propose(
    own: Share, peers: Mapping[int, str], offers: Mapping[int, Offer | None], patient: bool, min_islands: int
) -> tuple[Share, ...]:
    """The shares of the proposal that this island has to make now, in slot order; none if there is nothing to propose.

    Args:
        peers: libp2p ids by slot.
        offers: the other live members', by slot; None where a member offers nothing to this round.
        patient: wait for those who offer nothing.
    """
    ready = {slot: offer for slot, offer in offers.items() if offer and not offer.passed}
    waiting = patient and not all(offers.values())
    if waiting or len(ready) + 1 < min_islands or any(slot < own.slot for slot in ready):
        return ()
    others = (
        Share(slot=slot, peer=peers[slot], weight=offer.weight, norm=offer.norm) for slot, offer in ready.items()
    )
    return tuple(sorted([own, *others], key=lambda share: share.slot))
