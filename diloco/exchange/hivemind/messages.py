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

MAX_MEMBERS = 64
MAX_FRAGMENTS = 1024
MAX_ADDRESSES = 16
MAX_CARRIER_ADDRESSES = 8

Hash = Annotated[bytes, Field(min_length=32, max_length=32)]
Slot = Annotated[int, Field(ge=0, lt=1 << 20)]
Fragment = Annotated[int, Field(ge=0, lt=MAX_FRAGMENTS)]
Height = Annotated[int, Field(ge=0, lt=1 << 48)]
Epoch = Annotated[int, Field(ge=0, lt=1 << 32)]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Weight = Annotated[float, Field(gt=0)]
Norm = Annotated[float, Field(ge=0)]
Peer = Annotated[str, Field(min_length=1, max_length=128)]
Text = Annotated[str, Field(max_length=8192)]
Addresses = Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=MAX_ADDRESSES)]


class BadMessage(ValueError):
    """Bytes from the network that are not one of the messages below; says what is wrong with them."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Entry(_Message):
    """A line of the member list: who has a slot.

    ``epoch``: how many had it before. ``ticket``: drawn by the trainer when it starts, so that an island that was started
    again is not taken for the one that died. ``since``: height of the roster that granted it.
    """

    slot: Slot
    epoch: Epoch
    peer: Peer
    addresses: Addresses
    ticket: Hash
    since: Height


class Roster(_Message):
    """The member list, agreed on like the outer state: ``height`` grants were committed since the run began."""

    kind: Literal["roster"] = "roster"
    height: Height
    lineage: Hash
    entries: Annotated[tuple[Entry, ...], Field(max_length=MAX_MEMBERS)]


class RosterRequest(_Message):
    """What is your member list? From a member who heard of one that comes before its own."""

    kind: Literal["roster_request"] = "roster_request"


class Hello(_Message):
    """A newcomer asks for a slot (-1: any), and again until it has one. ``settings`` is what all must share.

    ``prefers`` is a slot that it had in an earlier life and goes on in where that is free; -1: none.
    """

    kind: Literal["hello"] = "hello"
    run: Annotated[str, Field(max_length=256)]
    settings: Annotated[
        dict[Annotated[str, Field(max_length=256)], Annotated[str, Field(max_length=256)]], Field(max_length=512)
    ]
    slot: Annotated[int, Field(ge=-1, lt=1 << 20)]
    prefers: Annotated[int, Field(ge=-1, lt=1 << 20)] = -1
    addresses: Addresses
    ticket: Hash


class Wait(_Message):
    """Answer to a hello: the slot is yours, others are missing."""

    kind: Literal["wait"] = "wait"
    came: int
    expected: int


class Welcome(_Message):
    """Answer to a hello: you have a place, this is who takes part."""

    kind: Literal["welcome"] = "welcome"
    roster: Roster


class Queued(_Message):
    """Answer to a hello: the run is in progress, its members are at ``addresses``: ask all of them until they have granted a
    slot. ``reason``: why there is none yet.
    """

    kind: Literal["queued"] = "queued"
    addresses: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=MAX_MEMBERS)]
    reason: Text


class Elsewhere(_Message):
    """Answer to a hello: the first island decides, and is at these addresses."""

    kind: Literal["elsewhere"] = "elsewhere"
    addresses: Addresses


class Refused(_Message):
    """No, and why."""

    kind: Literal["refused"] = "refused"
    reason: Text


class NotAMember(_Message):
    """Answer to one who is not in the member list, of this height and lineage: it may have been, and lost its slot."""

    kind: Literal["not_a_member"] = "not_a_member"
    roster_height: Height
    roster_lineage: Hash


class Ack(_Message):
    """Yes."""

    kind: Literal["ack"] = "ack"


class Tip(_Message):
    """Where a member's agreed state of one fragment stands."""

    fragment: Fragment
    height: Height
    lineage: Hash
    digest: Hash
    tokens: Count


class Claim(_Message):
    """What a member says of its contribution: sequences ``start`` to ``position`` of its slot, ``norm`` of its movement."""

    slot: Slot
    epoch: Epoch
    peer: Peer
    tokens: Annotated[int, Field(ge=1, lt=1 << 62)]
    start: Count
    position: Count
    step: Count
    norm: Norm
    pace: Annotated[tuple[Norm, Norm, Norm], Field(description="diloco.adaptation.Pace")] = (0.0, 0.0, 0.0)


class Offer(_Message):
    """A member's contribution to round ``height`` of a fragment; ``passed``: it has none, don't wait for it.

    ``attempt`` is the last attempt of that round which the member knows of.
    """

    fragment: Fragment
    height: Height
    lineage: Hash
    attempt: Annotated[int, Field(ge=0, lt=1 << 32)]
    claim: Claim
    passed: bool


class Carrier(_Message):
    """A data connection of a member: a daemon that moves its bulk bytes, with a peer id of its own."""

    peer: Peer
    addresses: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=MAX_CARRIER_ADDRESSES)]


class Status(_Message):
    """Sign of life, sent at an interval and whenever it changes, and the answer to one. Replaces the member's last one.

    ``incarnation`` tells one exchange process of an island from the next, ``sequence`` the order of its messages;
    ``carriers`` stay the same for an incarnation. Others wait for an island that is ``starting`` or ``training``, and not
    for one that takes over state or whose trainer stands still.
    """

    kind: Literal["status"] = "status"
    incarnation: Hash
    sequence: Annotated[int, Field(ge=0)]
    state: Literal["starting", "training", "recovering", "frozen"]
    roster_height: Height
    roster_lineage: Hash
    step: Count
    tokens_per_second: Annotated[float, Field(ge=0)]
    tips: Annotated[tuple[Tip, ...], Field(max_length=MAX_FRAGMENTS)]
    offers: Annotated[tuple[Offer, ...], Field(max_length=MAX_FRAGMENTS)]
    carriers: Annotated[tuple[Carrier, ...], Field(max_length=MAX_DATA_CONNECTIONS)] = ()


class Leave(_Message):
    """The member ends on purpose."""

    kind: Literal["leave"] = "leave"


class Excluded(_Message):
    """A member whose contribution is left out, although it was offered, and by which rule."""

    claim: Claim
    rule: Literal["norm", "claim", "opposite", "digest"]


class Proposal(_Message):
    """Who takes part in one attempt of one round; ``claims`` are in slot order, the proposer's first, ``weights`` beside."""

    kind: Literal["proposal"] = "proposal"
    run: Annotated[str, Field(max_length=256)]
    fragment: Fragment
    height: Height
    attempt: Annotated[int, Field(ge=1, lt=1 << 32)]
    lineage: Hash
    claims: Annotated[tuple[Claim, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    weights: Annotated[tuple[Weight, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    excluded: Annotated[tuple[Excluded, ...], Field(max_length=MAX_MEMBERS)]

    def id(self) -> bytes:
        """SHA-256 of all that it says; what contributions, votes and questions refer to."""
        return hashlib.sha256(encode(self)).digest()


class Grant(_Message):
    """A proposal to give a slot to a newcomer. ``voters`` are slots in order, the proposer's first."""

    kind: Literal["grant"] = "grant"
    run: Annotated[str, Field(max_length=256)]
    height: Height
    attempt: Annotated[int, Field(ge=1, lt=1 << 32)]
    lineage: Hash
    voters: Annotated[tuple[Slot, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    entry: Entry

    def id(self) -> bytes:
        """SHA-256 of all that it says."""
        return hashlib.sha256(encode(self)).digest()


class Evidence(_Message):
    """What a reducer saw of one member's contribution in the chunks that it reduced.

    ``square``: sum of its squares; ``along``: its dot product with the weighted mean.
    """

    square: Norm
    along: float


class Vote(_Message):
    """The sender has the result of this proposal, and its state would be ``digest``.

    ``evidence``: of each member in the proposal's order, ``mean_square``: of the mean, both in the chunks it reduced.
    """

    kind: Literal["vote"] = "vote"
    proposal: Hash
    digest: Hash
    mean_square: Norm
    evidence: Annotated[tuple[Evidence, ...], Field(max_length=MAX_MEMBERS)]


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
    mean_square: Norm
    evidence: Annotated[tuple[Evidence, ...], Field(max_length=MAX_MEMBERS)]


class Settled(_Message):
    """Answer to a settle: whether this member committed, or has found that nobody may any more; and the votes that it had
    received until it stopped to take them.
    """

    kind: Literal["settled"] = "settled"
    committed: bool
    given_up: bool = False
    ballots: Annotated[tuple[Ballot, ...], Field(max_length=MAX_MEMBERS)]


class ContributionHeader(_Message):
    """Opens a stream that carries encoded chunks one way and their encoded means the other.

    It is number ``lane`` of ``lanes`` that share the chunks.
    """

    kind: Literal["contribution"] = "contribution"
    proposal: Hash
    lane: Annotated[int, Field(ge=0, lt=MAX_DATA_CONNECTIONS)]
    lanes: Annotated[int, Field(ge=1, le=MAX_DATA_CONNECTIONS)]


class StateRequest(_Message):
    """Opens a stream that asks for bytes ``start`` to ``stop`` of a fragment's agreed state at exactly this lineage."""

    kind: Literal["state_request"] = "state_request"
    fragment: Fragment
    height: Height
    lineage: Hash
    start: Count
    stop: Count


class LeftOut(_Message):
    """Whose contribution the last round left out by a rule, and which."""

    slot: Slot
    rule: Annotated[str, Field(max_length=16)]


class StateHeader(_Message):
    """Before the bytes of a state: how many it has in all, its ledger, and who was in the round that made it."""

    kind: Literal["state_header"] = "state_header"
    num_bytes: Count
    ledger: Annotated[bytes, Field(max_length=1 << 15)]
    members: Annotated[tuple[Slot, ...], Field(max_length=MAX_MEMBERS)]
    weights: Annotated[tuple[Weight, ...], Field(max_length=MAX_MEMBERS)]
    excluded: Annotated[tuple[LeftOut, ...], Field(max_length=MAX_MEMBERS)]


Request = Hello | Status | Leave | Proposal | Grant | Vote | Settle | RosterRequest
Reply = Wait | Welcome | Queued | Elsewhere | Refused | NotAMember | Ack | Settled | Status | Roster
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
