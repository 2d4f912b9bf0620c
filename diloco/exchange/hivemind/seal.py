"""What shows that a message comes from somebody who has the swarm's key: 32 bytes in front of it.

The sender's and the receiver's peer ids are sealed in. The connection's encryption has proven who is at each end, so a
seal that somebody else could hold, or send again, is of no use to them.
"""

import hmac
from dataclasses import dataclass
from typing import Literal

from diloco.exchange.hivemind.messages import MAX_MESSAGE_BYTES, BadMessage

SEAL_BYTES = 32

Purpose = Literal["request", "answer", "stream"]


class NotSealed(BadMessage):
    """Bytes without this swarm's seal; their sender has another key, or none."""


@dataclass(frozen=True)
class Seal:
    """The seal of one run.

    Attributes:
        subkey: empty in a swarm without a key; then nothing is added or checked.
    """

    subkey: bytes

    def close(self, purpose: Purpose, sender: str, receiver: str, body: bytes) -> bytes:
        """``body`` with its seal in front."""
        return self._seal(purpose, sender, receiver, body) + body if self.subkey else body

    def open(self, purpose: Purpose, sender: str, receiver: str, sealed: bytes) -> bytes:
        """The body of what :meth:`close` made with equal arguments. Raises NotSealed for anything else."""
        if not self.subkey:
            return sealed
        if not SEAL_BYTES <= len(sealed) <= SEAL_BYTES + MAX_MESSAGE_BYTES:
            raise NotSealed(f"{len(sealed)} bytes can't be a sealed message")
        body = sealed[SEAL_BYTES:]
        if not hmac.compare_digest(sealed[:SEAL_BYTES], self._seal(purpose, sender, receiver, body)):
            raise NotSealed("the seal is not that of this swarm's key")
        return body

    @property
    def size(self) -> int:
        """Bytes that it adds."""
        return SEAL_BYTES if self.subkey else 0

    def _seal(self, purpose: str, sender: str, receiver: str, body: bytes) -> bytes:
        return hmac.digest(self.subkey, joined(purpose.encode(), sender.encode(), receiver.encode(), body), "sha256")


def subkey(key: bytes, run: str, use: str) -> bytes:
    """A key for one use in one run, which tells nothing about the swarm's key or the other subkeys."""
    return hmac.digest(key, joined(b"diloco 1", use.encode(), run.encode()), "sha256")


def joined(*parts: bytes) -> bytes:
    """One string of bytes that no other parts would give: each has its length in front."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
