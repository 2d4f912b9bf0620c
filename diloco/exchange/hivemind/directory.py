"""The member list in the DHT: where others than the members can look up who takes part."""

import asyncio
import hmac
import itertools
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Iterable, Mapping

import msgpack
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils import get_dht_time
from hivemind.utils.auth import AuthorizerBase
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from diloco.exchange.hivemind import member_record
from diloco.exchange.hivemind.daemon import Daemon
from diloco.exchange.hivemind.member_record import MAX_RECORD_BYTES, MAX_SPEED, Link, MemberRecord, Standing, short
from diloco.exchange.hivemind.membership import Membership
from diloco.exchange.hivemind.messages import MAX_MEMBERS
from diloco.exchange.hivemind.seal import joined

_HEARTBEATS_UNTIL_EXPIRY = 3
_CLOCKS_APART_SECONDS = 60.0
_NONCE_BYTES = 16

_DIAL_SECONDS = 4.0
_ANSWER_SECONDS = 3.0
_MOST_ASKED = 2 * MAX_MEMBERS
_MOST_READ = 4 * MAX_MEMBERS


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
    daemon: Daemon, run: str, membership: Membership, authorizer: AuthorizerBase | None
) -> None:
    """Keep this island's record in the DHT, for those who watch the run.

    Rounds don't depend on it: what the DHT answers is only as good as the peers that store it.
    """
    own, interval = membership.own, membership.interval
    known = [entry.addresses[0] for entry in membership.roster.entries if entry is not own and entry.addresses]
    node = await DHTNode.create(
        p2p=daemon, initial_peers=known, ensure_bootstrap_success=False, authorizer=authorizer
    )
    while True:  # no shutdown: the node ends with its daemon, which may be dead already
        expiry = get_dht_time() + _HEARTBEATS_UNTIL_EXPIRY * interval
        record = member_record.encode(_record_of(run, membership))
        await node.store(_key_of(run), record, expiration_time=expiry, subkey=own.peer)
        await asyncio.sleep(interval)


def _key_of(run: str) -> str:
    """Where the records of a run are; the subkey of each is the peer id."""
    return f"{run}.members"


def _record_of(run: str, membership: Membership) -> MemberRecord:
    """This island as it is now."""
    own, status, now = membership.own, membership.status(), time.monotonic()
    return MemberRecord(
        run=run,
        slot=own.slot,
        epoch=own.epoch,
        peer=own.peer,
        address=own.addresses[0],
        state=status.state,
        step=status.step,
        tokens_per_second=min(status.tokens_per_second, MAX_SPEED),
        fragments=tuple(
            Standing(
                fragment=tip.fragment,
                height=tip.height,
                lineage=short(tip.lineage),
                digest=short(tip.digest),
                tokens=tip.tokens,
            )
            for tip in status.tips
        ),
        links=tuple(
            Link(
                slot=member.slot,
                alive=member.alive and not member.away,
                silent_seconds=max(0.0, now - member.heard),
                rtt_ms=None if member.rtt is None else 1000 * member.rtt,
            )
            for _, member in sorted(membership.members.items())
        ),
        time=time.time(),
    )


@dataclass
class Found:
    """What the DHT told of a run.

    Attributes:
        records: of the members, by peer id.
        malformed: how many more there are that can't be taken for one.
        problems: of each address that was given and told nothing, why; empty: it is there, and its DHT gives no answer.
    """

    records: dict[str, MemberRecord] = field(default_factory=dict)
    malformed: int = 0
    problems: dict[str, str] = field(default_factory=dict)


async def look_up(
    daemon: Daemon, run: str, addresses: Iterable[str], authorizer: AuthorizerBase | None = None
) -> Found:
    """Read the records of a run from outside, without ever storing anything: from those who are at ``addresses``, and
    from all whom they name.

    hivemind's own ``DHTNode.get`` leaves copies at others, and never ends where one value is not msgpack.
    """
    found, known = Found(), _by_peer(addresses)
    given = {peer: tuple(places) for peer, places in known.items()}
    protocol = await DHTProtocol.create(
        daemon, DHTID.generate(), 20, 5, 5, _ANSWER_SECONDS, client_mode=True, authorizer=authorizer
    )
    latest: dict[Any, ValueWithExpiration] = {}
    waiting, asked = list(known), set()
    while waiting:
        asked.update(waiting)
        answers = await asyncio.gather(*(_ask(daemon, protocol, run, peer, known.get(peer, [])) for peer in waiting))
        named: list[str] = []
        for peer, answer in zip(waiting, answers, strict=True):
            if isinstance(answer, str):
                found.problems.update((address, answer) for address in given.get(peer, ()))
                continue
            values, peers = answer
            named += peers
            for subkey, value in values.items():
                if subkey not in latest or value.expiration_time > latest[subkey].expiration_time:
                    latest[subkey] = value
        _read(found, run, latest)
        for peer, record in found.records.items():
            known.setdefault(peer, [record.address])
        new = (peer for peer in dict.fromkeys([*found.records, *named]) if peer not in asked)
        waiting = list(itertools.islice(new, max(0, _MOST_ASKED - len(asked))))
    return found


def _by_peer(addresses: Iterable[str]) -> dict[str, list[str]]:
    known: dict[str, list[str]] = {}
    for address in addresses:
        known.setdefault(address.rpartition("/p2p/")[2], []).append(address)
    return known


async def _ask(
    daemon: Daemon, protocol: DHTProtocol, run: str, peer: str, addresses: list[str]
) -> tuple[dict[Any, ValueWithExpiration], list[str]] | str:
    """The values that one peer has, and whom it names; or why it told nothing."""
    key = DHTID.generate(_key_of(run))
    try:
        async with asyncio.timeout(_DIAL_SECONDS):
            if addresses:  # of others libp2p may know the addresses
                await daemon.dial(peer, *addresses)
    except TimeoutError:
        return f"no connection within {_DIAL_SECONDS:g} s"
    except (P2PDaemonError, OSError) as error:
        return str(error)
    answer = await protocol.call_find(PeerID.from_base58(peer), [key])
    if not answer:
        return ""
    value, nearest = answer[key]
    if value is None or not isinstance(value.value, DictionaryDHTValue):
        return {}, [each.to_base58() for each in nearest.values()]
    with value.value.freeze():  # what has expired is the business of those who store it, and of their clocks
        return dict(value.value.items()), [each.to_base58() for each in nearest.values()]


def _read(found: Found, run: str, values: Mapping[Any, ValueWithExpiration]) -> None:
    """Take in the values that are records."""
    found.records, found.malformed = {}, max(0, len(values) - _MOST_READ)
    for subkey, value in itertools.islice(values.items(), _MOST_READ):
        try:
            raw = msgpack.unpackb(value.value, raw=False) if len(value.value) <= 2 * MAX_RECORD_BYTES else None
            found.records[subkey] = member_record.decode(raw, run, subkey)
        except Exception:  # BadMessage, or whatever msgpack raises
            found.malformed += 1
