"""Islands that are processes anywhere, over hivemind's libp2p daemon and DHT.

Reading order: ``client`` (the trainer's end), ``process`` and ``island`` (the exchange process), ``door`` (who may come
in), ``membership`` (who is there), ``rounds`` and ``round`` (how islands agree), ``attempt`` (one try, its votes),
``scatter_reduce`` and ``catch_up`` (the bytes), ``network`` and ``messages`` (the wire).
"""

from typing import Literal

from diloco.config import ExchangeSection, RunConfig
from diloco.exchange.hivemind.client import HivemindExchange
from diloco.outer_state import OuterState


class Config(ExchangeSection):
    """``exchange.type: hivemind``"""

    type: Literal["hivemind"] = "hivemind"


def build(config: RunConfig, state: OuterState, schema: str) -> HivemindExchange:
    """Start the exchange process of this island; it gets ready while the trainer does.

    Args:
        state: shared with the exchange process, which writes beside what is agreed and swaps at commit.
        schema: names, shapes and dtypes of all that is exchanged; islands whose schemas differ can't train together.
    """
    return HivemindExchange(config, state, schema)
