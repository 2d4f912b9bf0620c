"""What islands say to each other, and how it is read: msgpack, strict types, bounded sizes, never pickle.

Anything else is a :class:`BadMessage`, whoever sent it.
"""

import hashlib
from typing import Annotated, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from diloco.config import MAX_DATA_CONNECTIONS

#: Longest message, in bytes; checked before it is parsed.
MAX_MESSAGE_BYTES = 256 << 10

MAX_MEMBERS = 1024
MAX_FRAGMENTS = 1024
MAX_CARRIER_ADDRESSES = 8

Hash = Annotated[bytes, Field(min_length=32, max_length=32)]
Slot = Annotated[int, Field(ge=0, lt=1 << 20)]
Fragment = Annotated[int, Field(ge=0, lt=MAX_FRAGMENTS)]
Height = Annotated[int, Field(ge=0, lt=1 << 48)]
Weight = Annotated[float, Field(gt=0)]
Norm = Annotated[float, Field(ge=0)]
Peer = Annotated[str, Field(min_length=1, max_length=128)]
Text = Annotated[str, Field(max_length=8192)]
Addresses = Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=16)]


class BadMessage(ValueError):
    """Bytes from the network that are not one of the messages below; says what is wrong with them."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Entry(_Message):
    """A line of the member list."""

    slot: Slot
    peer: Peer
    addresses: Addresses


class Hello(_Message):
    """A newcomer asks for a slot (-1: any), and again until all are there. ``settings`` is what all must share."""

    kind: Literal["hello"] = "hello"
    run: Annotated[str, Field(max_length=256)]
    settings: Annotated[
        dict[Annotated[str, Field(max_length=256)], Annotated[str, Field(max_length=256)]], Field(max_length=512)
    ]
    slot: Annotated[int, Field(ge=-1, lt=1 << 20)]
    addresses: Addresses


class Wait(_Message):
    """Answer to a hello: the slot is yours, others are missing."""

    kind: Literal["wait"] = "wait"
    came: int
    expected: int


class Welcome(_Message):
    """Answer to a hello: everyone is there, this is who."""

    kind: Literal["welcome"] = "welcome"
    members: Annotated[tuple[Entry, ...], Field(max_length=MAX_MEMBERS)]


class Elsewhere(_Message):
    """Answer to a hello: the first island decides, and is at these addresses."""

    kind: Literal["elsewhere"] = "elsewhere"
    addresses: Addresses


class Refused(_Message):
    """No, and why."""

    kind: Literal["refused"] = "refused"
    reason: Text


class Ack(_Message):
    """Yes."""

    kind: Literal["ack"] = "ack"


class Tip(_Message):
    """Where a member's agreed state of one fragment stands."""

    fragment: Fragment
    height: Height
    lineage: Hash
    digest: Hash


class Offer(_Message):
    """A member's contribution to round ``height`` of a fragment; ``passed``: it has none, don't wait for it.

    ``attempt`` is the last attempt of that round which the member knows of.
    """

    fragment: Fragment
    height: Height
    lineage: Hash
    attempt: Annotated[int, Field(ge=0, lt=1 << 32)]
    weight: Weight
    norm: Norm
    passed: bool


class Carrier(_Message):
    """A data connection of a member: a daemon that moves its bulk bytes, with a peer id of its own."""

    peer: Peer
    addresses: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=MAX_CARRIER_ADDRESSES)]


class Status(_Message):
    """Sign of life, sent at an interval and whenever it changes, and the answer to one. Replaces the member's last one.

    ``incarnation`` tells one process of an island from the next, ``sequence`` the order of its messages; ``carriers`` stay
    the same for an incarnation.
    """

    kind: Literal["status"] = "status"
    incarnation: Hash
    sequence: Annotated[int, Field(ge=0)]
    tips: Annotated[tuple[Tip, ...], Field(max_length=MAX_FRAGMENTS)]
    offers: Annotated[tuple[Offer, ...], Field(max_length=MAX_FRAGMENTS)]
    carriers: Annotated[tuple[Carrier, ...], Field(max_length=MAX_DATA_CONNECTIONS)] = ()


class Leave(_Message):
    """The member ends on purpose."""

    kind: Literal["leave"] = "leave"


class Share(_Message):
    """One member's part in a proposal."""

    slot: Slot
    peer: Peer
    weight: Weight
    norm: Norm


class Proposal(_Message):
    """Who takes part in one attempt of one round; ``shares`` are in slot order, the proposer's first."""

    kind: Literal["proposal"] = "proposal"
    run: Annotated[str, Field(max_length=256)]
    fragment: Fragment
    height: Height
    attempt: Annotated[int, Field(ge=1, lt=1 << 32)]
    lineage: Hash
    shares: Annotated[tuple[Share, ...], Field(min_length=1, max_length=MAX_MEMBERS)]

    def id(self) -> bytes:
        """SHA-256 of all that it says; what contributions, votes and questions refer to."""
        return hashlib.sha256(encode(self)).digest()


class Vote(_Message):
    """The sender has the result of this proposal, and its state would be ``digest``."""

    kind: Literal["vote"] = "vote"
    proposal: Hash
    digest: Hash


class Settle(_Message):
    """The sender has given this proposal up unless someone committed it. Whoever has not is bound not to, by answering.

    ``final``: trying again would fail in the same way.
    """

    kind: Literal["settle"] = "settle"
    proposal: Hash
    reason: Text
    final: bool


class Ballot(_Message):
    """A vote that a member knows of."""

    slot: Slot
    digest: Hash


class Settled(_Message):
    """Answer to a settle: whether this member committed, and the votes that it had received until then."""

    kind: Literal["settled"] = "settled"
    committed: bool
    ballots: Annotated[tuple[Ballot, ...], Field(max_length=MAX_MEMBERS)]


class ContributionHeader(_Message):
    """Opens a stream that carries encoded chunks one way and their encoded means the other.

    It is number ``lane`` of ``lanes`` that share the chunks: it carries those whose place is ``lane`` modulo ``lanes``.
    """

    kind: Literal["contribution"] = "contribution"
    proposal: Hash
    lane: Annotated[int, Field(ge=0, lt=MAX_DATA_CONNECTIONS)]
    lanes: Annotated[int, Field(ge=1, le=MAX_DATA_CONNECTIONS)]


class StateRequest(_Message):
    """Opens a stream that asks for the agreed state of a fragment at exactly this lineage."""

    kind: Literal["state_request"] = "state_request"
    fragment: Fragment
    height: Height
    lineage: Hash


class StateHeader(_Message):
    """Before the tensors of a state: the bytes of each, and who was in the round that made it."""

    kind: Literal["state_header"] = "state_header"
    sizes: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=64)]
    members: Annotated[tuple[Slot, ...], Field(max_length=MAX_MEMBERS)]
    weights: Annotated[tuple[Weight, ...], Field(max_length=MAX_MEMBERS)]


Request = Hello | Status | Leave | Proposal | Vote | Settle
Reply = Wait | Welcome | Elsewhere | Refused | Ack | Settled | Status
Header = ContributionHeader | StateRequest | StateHeader | Refused
Message = Request | Reply | Header

_ANY: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """A message as msgpack."""
    return msgpack.packb(message.model_dump(), use_bin_type=True)


def decode(raw: bytes) -> Message:
    """The message that ``raw`` holds.

    Raises:
        BadMessage: too long, not msgpack, or not one of the messages here to the letter.
    """
    if len(raw) > MAX_MESSAGE_BYTES:
        raise BadMessage(f"{len(raw)} bytes, and a message has at most {MAX_MESSAGE_BYTES}")
    try:
        return _ANY.validate_python(msgpack.unpackb(raw, raw=False, use_list=False, strict_map_key=True))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise BadMessage(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    except Exception as error:  # msgpack raises errors of many kinds, and none of them may end the loop
        raise BadMessage(f"not msgpack: {type(error).__name__}: {error}") from None
