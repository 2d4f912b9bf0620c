"""What every round of an island uses."""

import asyncio
from dataclasses import dataclass, field
from statistics import median
from typing import Callable, Coroutine

from diloco.exchange.base import ExchangeEvent
from diloco.exchange.hivemind.ipc import Committing
from diloco.exchange.hivemind.membership import Membership
from diloco.exchange.hivemind.messages import LeftOut, Reply, Request
from diloco.exchange.hivemind.network import Network, Unreachable
from diloco.ledger import Ledger
from diloco.reduction import Wire


@dataclass(frozen=True)
class LastRound:
    """Who was in the round that made the agreed state of a fragment."""

    members: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()
    excluded: tuple[LeftOut, ...] = ()


@dataclass
class Surroundings:
    """What every round of an island uses.

    Attributes:
        residual_decay, max_weight_ratio: see the configuration.
        carry: an island that was left out keeps its work for the next round.
        report: to the trainer.
        background: runs something that nobody waits for.
        last_round: of each fragment.
    """

    run: str
    network: Network
    membership: Membership
    wire: Wire
    round_deadline: float
    min_islands: int
    max_weight_ratio: float
    carry: bool
    report: Callable[[Committing | ExchangeEvent], None]
    background: Callable[[Coroutine[None, None, object]], None]
    residual_decay: float = 1.0
    last_round: dict[int, LastRound] = field(default_factory=dict)

    def step(self, ledger: Ledger) -> int:
        """The inner step that the swarm has reached: of the last round, or further where most members are further."""
        steps = [member.status.step for member in self.membership.awaited() if member.status]
        return max(ledger.step, int(median(steps)) if steps else 0)

    async def call(self, slot: int, request: Request, timeout: float) -> Reply | str:
        """A member's reply, or in words why there is none; one where nothing listens any more is counted as gone.

        Nobody waits for the answer of one that is counted as gone meanwhile.
        """
        member = self.membership.members.get(slot)
        if member is None:
            return "it is no member any more"
        call = asyncio.ensure_future(self.network.call(member.peer, request, timeout))
        gone = asyncio.ensure_future(member.gone.wait())
        try:
            await asyncio.wait({call, gone}, return_when=asyncio.FIRST_COMPLETED)
            return call.result() if call.done() else "it is gone"
        except Unreachable as error:
            if error.gone:
                self.membership.lost(member, f"can't be reached: {error}")
            return str(error)
        finally:
            call.cancel()
            gone.cancel()


def in_words(reply: Reply | str) -> str:
    """Why a reply is not the one hoped for."""
    return reply if isinstance(reply, str) else getattr(reply, "reason", reply.kind)
