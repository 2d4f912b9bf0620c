"""The member list in the DHT: where others than the members can look up who takes part."""

import asyncio

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.utils import get_dht_time

from diloco.exchange.hivemind.daemon import Daemon
from diloco.exchange.hivemind.membership import Membership
from diloco.outer_state import OuterState

_HEARTBEATS_UNTIL_EXPIRY = 3


async def publish_for_ever(
    daemon: Daemon, run: str, membership: Membership, state: OuterState
) -> None:
    """Keep this island's record under ``<run>.members``: subkey its peer id, value msgpack (slot, address, heights).

    Rounds don't depend on it: what the DHT answers is only as good as the peers that store it.
    """
    own, interval = membership.own, membership.interval
    known = [entry.addresses[0] for entry in membership.roster.entries if entry is not own and entry.addresses]
    node = await DHTNode.create(p2p=daemon, initial_peers=known, ensure_bootstrap_success=False)
    while True:  # no shutdown: the node ends with its daemon, which may be dead already
        record = {
            "slot": own.slot,
            "address": own.addresses[0],
            "heights": [fragment.height for fragment in state.fragments],
        }
        expiry = get_dht_time() + _HEARTBEATS_UNTIL_EXPIRY * interval
        await node.store(f"{run}.members", msgpack.packb(record), expiration_time=expiry, subkey=own.peer)
        await asyncio.sleep(interval)
