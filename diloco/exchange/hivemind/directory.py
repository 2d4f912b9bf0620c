"""The member list in the DHT: where others than the members can look up who takes part."""

import asyncio

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.utils import get_dht_time

from diloco.exchange.hivemind.daemon import Daemon
from diloco.exchange.hivemind.ipc import Place
from diloco.outer_state import OuterState

_HEARTBEATS_UNTIL_EXPIRY = 3


async def publish_for_ever(
    daemon: Daemon, run: str, place: Place, others: list[Place], state: OuterState, interval: float
) -> None:
    """Keep this island's record under ``<run>.members``: subkey its peer id, value msgpack (slot, address, heights).

    Rounds don't depend on it: what the DHT answers is only as good as the peers that store it.
    """
    known = [address for other in others for address in other.addresses[:1]]
    node = await DHTNode.create(p2p=daemon, initial_peers=known, ensure_bootstrap_success=False)
    while True:  # no shutdown: the node ends with its daemon, which may be dead already
        record = {
            "slot": place.slot,
            "address": place.addresses[0],
            "heights": [fragment.height for fragment in state.fragments],
        }
        expiry = get_dht_time() + _HEARTBEATS_UNTIL_EXPIRY * interval
        await node.store(f"{run}.members", msgpack.packb(record), expiration_time=expiry, subkey=place.peer)
        await asyncio.sleep(interval)
