"""How much others may ask of this island at once: strangers far less than members, whose place they can't take."""

import time
from collections import Counter, OrderedDict
from contextlib import contextmanager
from typing import Iterator

from diloco.exchange.hivemind.messages import BadMessage

_MEMBER_STREAMS, _ALL_MEMBERS_STREAMS = 128, 512
_STRANGER_STREAMS, _ALL_STRANGERS_STREAMS = 4, 32
_REQUESTS_PER_SECOND = 20.0  # of a peer that is no member; one that waits to be let in asks four times a second
_REQUESTS_AT_ONCE = 100.0
_PEERS_REMEMBERED = 1024


class OpenStreams:
    """Counts the streams that others have open to this island."""

    def __init__(self) -> None:
        self._of_peer: Counter[str] = Counter()
        self._of_all: Counter[bool] = Counter()

    @contextmanager
    def one_more(self, peer: str, is_member: bool) -> Iterator[None]:
        """A stream that is open for the time of the block. Raises BadMessage where there are enough."""
        own, everyone = (_STRANGER_STREAMS, _ALL_STRANGERS_STREAMS)
        if is_member:
            own, everyone = (_MEMBER_STREAMS, _ALL_MEMBERS_STREAMS)
        if self._of_peer[peer] >= own or self._of_all[is_member] >= everyone:
            raise BadMessage(f"{self._of_peer[peer]} streams of {peer} are open, {self._of_all[is_member]} in all")
        self._of_peer[peer] += 1
        self._of_all[is_member] += 1
        try:
            yield
        finally:
            self._of_all[is_member] -= 1
            self._of_peer[peer] -= 1
            if not self._of_peer[peer]:
                del self._of_peer[peer]


class RequestRate:
    """Lets each peer make so many requests a second, and some at once; opening a stream is one."""

    def __init__(self) -> None:
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()  # by peer: requests left, and when that was

    def allows(self, peer: str) -> bool:
        """Whether this peer may send one now, which counts."""
        now = time.monotonic()
        left, before = self._left.pop(peer, (_REQUESTS_AT_ONCE, now))
        left = min(_REQUESTS_AT_ONCE, left + (now - before) * _REQUESTS_PER_SECOND)
        allowed = left >= 1.0
        self._left[peer] = (left - 1.0 if allowed else left, now)
        while len(self._left) > _PEERS_REMEMBERED:
            self._left.popitem(last=False)
        return allowed
