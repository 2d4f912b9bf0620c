"""Islands that are processes anywhere, over hivemind's libp2p daemon and DHT.

In order of reading: ``client`` is the trainer's end of an exchange process, ``process`` its start and ``island`` its
inside. ``door`` lets islands in: at the start by itself, later by ``granting``, a vote on the ``roster``; ``joining`` is how
a newcomer gets the state. ``membership`` knows who is alive, ``directory`` puts each as a ``member_record`` into the DHT,
where an ``onlooker`` finds it.

``rounds`` dispatches; a ``round`` goes from launch to its ``ending`` with a ``contribution``; its ``standing`` and the pure
functions in ``offers`` tell who takes part; an ``attempt`` counts votes, ``voting`` casts and settles them, and ``overtaken``
is what becomes of a round that the others finished alone; ``scatter_reduce`` moves contributions, ``catch_up`` and
``donations`` state. ``network``, ``messages``, ``seal``, ``limits``, ``stream``, ``raw_socket``, ``carriers`` and ``daemon``
are the wire.
"""

from typing import Literal

from diloco.config import ExchangeSection, RunConfig
from diloco.exchange.hivemind.client import HivemindExchange
from diloco.outer_state import OuterState


class Config(ExchangeSection):
    """``exchange.type: hivemind``"""

    type: Literal["hivemind"] = "hivemind"


def build(config: RunConfig, state: OuterState, schema: str, prefers: int = -1) -> HivemindExchange:
    """Start the exchange process of this island; it gets ready while the trainer does.

    Args:
        state: shared with the exchange process, which writes beside what is agreed and swaps at commit.
        schema: names, shapes and dtypes of all that is exchanged; islands whose schemas differ can't train together.
        prefers: the slot that this island had when its checkpoint was made; -1: none.
    """
    return HivemindExchange(config, state, schema, prefers)
