"""A fragment's next state, written chunk by chunk while others are on the wire, and the digest that members vote for. torch only."""

import hashlib
from typing import Callable, Iterable, Sequence

from torch import Tensor, uint8

from diloco.reduction import chunk_slice, num_chunks


class Staging:
    """One attempt's step of the outer optimizer, beside the agreed state. Chunks come in any order, from several threads.

    Args:
        numel: of the fragment.
        write: makes the next state of some elements, of the mean of exactly those; returns their digest.
        seal: all is written, with these digests of chunks; returns that of the whole (hex).

    Attributes:
        void: it was committed, or another one is written there now: nothing more may come of this one.
    """

    def __init__(self, numel: int, write: Callable[[slice, Tensor], bytes], seal: Callable[[Sequence[bytes]], str]) -> None:
        self._numel, self._write, self._seal = numel, write, seal
        self._digests: list[bytes | None] = [None] * num_chunks(numel)
        self.void = False

    def apply(self, chunk: int, mean: Tensor) -> None:
        """Step one chunk by its mean. No two threads may do the same one. Raises RuntimeError where it is void."""
        if self.void:
            raise RuntimeError("this step is over")
        self._digests[chunk] = self._write(chunk_slice(self._numel, chunk), mean)

    def seal(self) -> str:
        """Make it what the next commit swaps in; returns its SHA-256 (hex).

        Raises:
            RuntimeError: chunks are missing, or it is void.
        """
        missing = [chunk for chunk, digest in enumerate(self._digests) if digest is None]
        if self.void or missing:
            why = "it is over" if self.void else f"{len(missing)} chunks are not staged, the first of them {missing[0]}"
            raise RuntimeError(f"this step can't be sealed: {why}")
        return self._seal([digest for digest in self._digests if digest is not None])


def chunk_digest(tensors: Iterable[Tensor], piece: slice) -> bytes:
    """SHA-256 of the same elements of flat tensors, one after the other."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(memoryview(tensor[piece].view(uint8).numpy()))
    return digest.digest()


def chunk_digests(tensors: Sequence[Tensor]) -> list[bytes]:
    """Of each chunk of a fragment whose flat tensors these are, one or more."""
    numel = tensors[0].numel()
    return [chunk_digest(tensors, chunk_slice(numel, chunk)) for chunk in range(num_chunks(numel))]


def state_digest(chunks: Iterable[bytes], ledger: bytes) -> bytes:
    """SHA-256 of a whole state: over the digests of its chunks, then its ledger."""
    return hashlib.sha256(b"".join(chunks) + ledger).digest()
