"""What an island publishes of itself for those who watch a run, and how it is read: strict types, bounded sizes.

Rounds don't depend on it. It comes from a network, so nothing in it is believed further than it is shown.
"""

from typing import Annotated, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from diloco.exchange.hivemind.messages import (
    MAX_FRAGMENTS,
    MAX_MEMBERS,
    BadMessage,
    Count,
    Epoch,
    Fragment,
    Height,
    Slot,
)

#: Longest record, in bytes; checked before it is parsed. With eight fragments and seven links one has about 1,250.
MAX_RECORD_BYTES = 128 << 10

MAX_SPEED = 1e15
_HEX_DIGITS = 16  # of a hash: enough to tell any two apart that a run will ever have

# What a terminal is given must not hold anything that it would obey.
_Peer = Annotated[str, Field(pattern=r"^[1-9A-HJ-NP-Za-km-z]{1,128}$")]
_Address = Annotated[str, Field(pattern=r"^(/[0-9A-Za-z.:%_-]+)+$", max_length=256)]
_Hash = Annotated[str, Field(pattern=f"^[0-9a-f]{{{_HEX_DIGITS}}}$")]
_Seconds = Annotated[float, Field(ge=0, le=1e10)]
_Speed = Annotated[float, Field(ge=0, le=MAX_SPEED)]

State = Literal["starting", "training", "recovering", "frozen"]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Standing(_Record):
    """Where the agreed state of one fragment stands: hashes by their first 16 hex digits, ``tokens`` committed."""

    fragment: Fragment
    height: Height
    lineage: _Hash
    digest: _Hash
    tokens: Count


class Link(_Record):
    """Another member as this one sees it; ``rtt_ms``: how long its answers take, None before the first."""

    slot: Slot
    alive: bool
    silent_seconds: _Seconds
    rtt_ms: _Seconds | None


class MemberRecord(_Record):
    """One island. ``time`` is its own Unix time; there are no ``fragments`` before it trains."""

    run: Annotated[str, Field(max_length=256)]
    slot: Slot
    epoch: Epoch
    peer: _Peer
    address: _Address
    state: State
    step: Count
    tokens_per_second: _Speed
    fragments: Annotated[tuple[Standing, ...], Field(max_length=MAX_FRAGMENTS)]
    links: Annotated[tuple[Link, ...], Field(max_length=MAX_MEMBERS)]
    time: _Seconds


def short(digest: bytes) -> str:
    """A hash as a record gives it."""
    return digest.hex()[:_HEX_DIGITS]


def encode(record: MemberRecord) -> bytes:
    """A record as msgpack."""
    return msgpack.packb(record.model_dump(), use_bin_type=True)


def decode(raw: object, run: str, peer: object) -> MemberRecord:
    """The record that ``peer`` has published for ``run``.

    Raises:
        BadMessage: it is not a record to the letter, or one of another run or peer.
    """
    if not isinstance(raw, bytes) or len(raw) > MAX_RECORD_BYTES:
        raise BadMessage(f"not a record of {MAX_RECORD_BYTES} bytes at most")
    try:
        record = MemberRecord.model_validate(msgpack.unpackb(raw, raw=False, use_list=False, strict_map_key=True))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise BadMessage(f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}") from None
    except Exception as error:  # msgpack raises errors of many kinds
        raise BadMessage(f"not msgpack: {type(error).__name__}: {error}") from None
    if record.run != run or record.peer != peer or not record.address.endswith(f"/p2p/{peer}"):
        raise BadMessage("a record of another run or peer")
    return record
