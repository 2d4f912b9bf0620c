"""A newcomer's way from its slot to the swarm's state: nothing counts it before it has all of it."""

import asyncio
import time
from typing import Callable

from diloco.exchange.base import JoinError, Seat
from diloco.exchange.hivemind.catch_up import take_over, tip_of, tip_to_adopt
from diloco.exchange.hivemind.messages import Tip
from diloco.exchange.hivemind.stream import Traffic
from diloco.exchange.hivemind.surroundings import LastRound, Surroundings
from diloco.outer_state import FragmentState, OuterState

_PAUSE_SECONDS = 0.25
_MOST_PASSES = 2  # over all fragments: where rounds are shorter than a transfer, the swarm would be ahead after each


async def take_over_all(
    around: Surroundings, state: OuterState, patience: float, tell: Callable[[int, int, int], None]
) -> None:
    """Take the agreed state of every fragment from the members, until all of it is what the swarm stands on.

    Or was a moment ago: the others wait for a member that trains, so what is missing still comes in its first round.

    Args:
        patience: seconds without any progress until it is given up.
        tell: called with fragment, bytes that came, bytes in all.

    Raises:
        JoinError: no member has the state, or gives it.
    """
    taken: set[int] = set()
    problem, progress, passes = "no member has any state yet", time.monotonic(), 0

    def came(fragment: int, done: int, total: int) -> None:
        nonlocal progress
        progress = time.monotonic()
        tell(fragment, done, total)

    while time.monotonic() < progress + patience:
        await asyncio.gather(*(around.membership.exchange_status(member) for member in around.membership.live()))
        wanted = [(part, tip) for part in state.fragments if (tip := _tip(around, part, part.index in taken))]
        if len(taken) == len(state.fragments) and (not wanted or passes >= _MOST_PASSES):
            return
        for part, tip in wanted:
            deadline = time.monotonic() + max(patience, around.round_deadline)
            header = await take_over(
                around, part, tip, Traffic(), deadline, lambda done, total: came(part.index, done, total)
            )
            if isinstance(header, str):
                problem = header
                continue
            part.forget_residual()
            part.commit(around.membership.slot)
            around.last_round[part.index] = LastRound(header.members, header.weights, header.excluded)
            taken.add(part.index)
            progress = time.monotonic()
        passes += len(taken) == len(state.fragments)
        await asyncio.sleep(0 if wanted else _PAUSE_SECONDS)
    raise JoinError(f"this island has slot {around.membership.slot}, and got no state within {patience:g} s: {problem}")


def late_seat(around: Surroundings, state: OuterState, address: str) -> Seat:
    """Where an island that took over the state begins: at the members' step, behind all that its slot has counted."""
    own, ledgers = around.membership.own, [part.ledger for part in state.fragments]
    return Seat(
        own.slot,
        address,
        own.epoch,
        position=max(ledger.positions[own.slot] for ledger in ledgers),
        step=max(around.step(ledger) for ledger in ledgers),
        tokens=max(ledger.tokens for ledger in ledgers),
        late=True,
    )


def _tip(around: Surroundings, part: FragmentState, has_own: bool) -> Tip | None:
    return tip_to_adopt(tip_of(part) if has_own else None, around.membership.tips(part.index))
