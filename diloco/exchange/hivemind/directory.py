"""The member list in the DHT: where others than the members can look up who takes part."""

import asyncio
import hmac
import secrets
from typing import Any

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.utils import get_dht_time
from hivemind.utils.auth import AuthorizerBase
from hivemind.utils.timed_storage import TimedStorage

from diloco.exchange.hivemind.daemon import Daemon
from diloco.exchange.hivemind.membership import Membership
from diloco.exchange.hivemind.seal import joined
from diloco.outer_state import OuterState

_HEARTBEATS_UNTIL_EXPIRY = 3
_CLOCKS_APART_SECONDS = 60.0
_NONCE_BYTES = 16


class KeyAuthorizer(AuthorizerBase):
    """Seals every request to the DHT and every answer of it, so that it exists for those with the swarm's key only.

    hivemind asks it with protobuf messages that have a field for a signature, and doesn't tell it who the peers are. So a
    request is bound to its time and a number used once, and an answer to its request.
    """

    def __init__(self, subkey: bytes) -> None:
        self._subkey = subkey
        self._seen = TimedStorage()

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        """Called by hivemind before a request leaves."""
        request.auth.time, request.auth.nonce = get_dht_time(), secrets.token_bytes(_NONCE_BYTES)
        request.auth.signature = self._seal("request", request, b"")

    async def validate_request(self, request: Any) -> bool:
        """Whether a request is of this swarm, of now, and comes for the first time."""
        now, nonce = get_dht_time(), request.auth.nonce
        if not self._holds("request", request, b"") or abs(request.auth.time - now) > _CLOCKS_APART_SECONDS:
            return False
        if len(nonce) != _NONCE_BYTES or nonce in self._seen:
            return False
        return self._seen.store(nonce, None, now + 2 * _CLOCKS_APART_SECONDS)

    async def sign_response(self, response: Any, request: Any) -> None:
        """Called by hivemind before an answer leaves."""
        response.auth.nonce = request.auth.nonce
        response.auth.signature = self._seal("answer", response, request.auth.nonce)

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Whether an answer is of this swarm, and to this request."""
        return response.auth.nonce == request.auth.nonce and self._holds("answer", response, request.auth.nonce)

    def _seal(self, purpose: str, message: Any, nonce: bytes) -> bytes:
        """Over all of the message but the seal itself."""
        message.auth.signature = b""
        kind, body = type(message).__name__.encode(), message.SerializeToString(deterministic=True)
        return hmac.digest(self._subkey, joined(purpose.encode(), kind, nonce, body), "sha256")

    def _holds(self, purpose: str, message: Any, nonce: bytes) -> bool:
        seal = message.auth.signature
        return hmac.compare_digest(seal, self._seal(purpose, message, nonce))


async def publish_for_ever(
    daemon: Daemon, run: str, membership: Membership, state: OuterState, authorizer: AuthorizerBase | None
) -> None:
    """Keep this island's record under ``<run>.members``: subkey its peer id, value msgpack (slot, address, heights).

    Rounds don't depend on it: what the DHT answers is only as good as the peers that store it.
    """
    own, interval = membership.own, membership.interval
    known = [entry.addresses[0] for entry in membership.roster.entries if entry is not own and entry.addresses]
    node = await DHTNode.create(
        p2p=daemon, initial_peers=known, ensure_bootstrap_success=False, authorizer=authorizer
    )
    while True:  # no shutdown: the node ends with its daemon, which may be dead already
        record = {
            "slot": own.slot,
            "address": own.addresses[0],
            "heights": [fragment.height for fragment in state.fragments],
        }
        expiry = get_dht_time() + _HEARTBEATS_UNTIL_EXPIRY * interval
        await node.store(f"{run}.members", msgpack.packb(record), expiration_time=expiry, subkey=own.peer)
        await asyncio.sleep(interval)
