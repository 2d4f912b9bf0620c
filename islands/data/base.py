"""Tokens on disk, and which of them a rank sees: a pure function of (seed, slot, position).

A *sample* is ``seq_len`` tokens and the one that follows them. Position ``p`` of an island in slot ``s`` is sample
``permutation_epoch(g mod n)`` with ``g = p * max_slots + s`` and ``epoch = g // n``: no two ranks or islands ever meet the same
sample within an epoch, whatever their grids, and starting at a position needs no replay of what came before.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from islands.config_file import ConfigError


@dataclass(frozen=True)
class Corpus:
    """Token arrays of one dtype; ``held_out`` shares no file with ``train``."""

    train: np.ndarray
    held_out: np.ndarray
    vocab_size: int


#: The vocabulary of a corpus whose tokens are bytes.
NUM_BYTES = 256

#: Of each part of a corpus, how many pieces of how many tokens its fingerprint looks at.
_PIECES, _PIECE_TOKENS = 64, 1024


def fingerprint(corpus: Corpus) -> dict[str, Any]:
    """Tells a corpus from others, without reading all of it: its vocabulary, token counts, and SHA-256 (hex) of pieces spread
    evenly over it."""
    digest = hashlib.sha256()
    for tokens in (corpus.train, corpus.held_out):
        for start in np.linspace(0, max(0, len(tokens) - _PIECE_TOKENS), _PIECES).astype(np.int64):
            digest.update(tokens[start : start + _PIECE_TOKENS].astype("<i8").tobytes())
    counts = {"vocab_size": corpus.vocab_size, "train_tokens": len(corpus.train), "held_out_tokens": len(corpus.held_out)}
    return counts | {"sample": digest.hexdigest()}


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a pseudo-random permutation of ``range(size)`` sends each of ``index``; no table is made.

    A Feistel network of four rounds over the next even power of two, walked until it lands inside the range.
    """
    half_bits = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half_bits) - 1)
    keys = np.frombuffer(hashlib.sha256(key.to_bytes(16, "little")).digest(), dtype=np.uint64)
    result = index.astype(np.uint64)
    outside = np.ones(result.shape, dtype=bool)
    while outside.any():
        left, right = result[outside] >> np.uint64(half_bits), result[outside] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        result[outside] = (left << np.uint64(half_bits)) | right
        outside = result >= size
    return result.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Sampler:
    """Which samples the islands of a run with ``max_slots`` slots see."""

    num_samples: int
    seed: int
    max_slots: int = 1

    def __call__(self, positions: np.ndarray, slot: int = 0) -> np.ndarray:
        """Sample numbers of the ``positions`` (any shape) of an island in ``slot``."""
        order = positions.astype(np.int64) * self.max_slots + slot
        epochs, index = np.divmod(order, self.num_samples)
        samples = np.empty_like(order)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            samples[inside] = permute(index[inside], self.num_samples, key=(self.seed << 64) | int(epoch))
        return samples


class Batches:
    """Batches of the training text by position: a pure function, so that any of them is a start.

    Args:
        data_rank, data_ranks: this rank among those that split the batch of a slot.
        replica: of those of an island, which take the batches of as many slots, from the island's on.
    """

    def __init__(
        self, tokens: np.ndarray, seq_len: int, batch_size: int, sampler: Sampler, data_rank: int, data_ranks: int, replica: int = 0
    ) -> None:
        self._tokens, self._seq_len, self._sampler, self._replica = tokens, seq_len, sampler, replica
        share = batch_size // data_ranks
        self._rows = np.arange(data_rank * share, (data_rank + 1) * share)

    def at(self, slot: int, position: int) -> tuple[Tensor, Tensor]:
        """This rank's share of the batch that starts at sequence ``position`` of ``slot``: inputs and targets, int64
        (share, seq_len)."""
        return windows(self._tokens, self._sampler(position + self._rows, slot + self._replica), self._seq_len)


def num_samples(tokens: np.ndarray, seq_len: int) -> int:
    """Whole samples in ``tokens``."""
    return max(0, (len(tokens) - 1) // seq_len)


def windows(tokens: np.ndarray, samples: np.ndarray, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (len(samples), seq_len), of the given samples."""
    rows = np.stack([tokens[start : start + seq_len + 1] for start in samples * seq_len]).astype(np.int64)
    rows = torch.from_numpy(rows)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def read_bytes(files: Sequence[Path], held_out: float, key: str) -> Corpus:
    """Byte tokens of ``files``, in the order given. A hash of its path below their common folder says whether a file is
    held out; at least one is, and at least one is not. Of a single file the last part is held out.

    Raises:
        ConfigError: there is no file, one can't be read, or a part stays empty.
    """
    if not files:
        raise ConfigError(f"{key}: there are no files to read")
    texts = [_read(file, key) for file in files]
    if len(files) == 1:
        cut = int(len(texts[0]) * (1 - held_out))
        train, held = [texts[0][:cut]], [texts[0][cut:]]
    else:
        shares = _shares(files)
        order = sorted(range(len(files)), key=lambda index: shares[index])
        held_files = {index for index in order if shares[index] < held_out} | {order[0]}
        held_files -= {order[-1]}
        held = [texts[index] for index in range(len(files)) if index in held_files]
        train = [texts[index] for index in range(len(files)) if index not in held_files]
    corpus = Corpus(*(np.frombuffer(b"".join(part), dtype=np.uint8) for part in (train, held)), vocab_size=NUM_BYTES)
    if not len(corpus.train) or not len(corpus.held_out):
        raise ConfigError(
            f"{key}: {sum(map(len, texts))} bytes of text leave {len(corpus.train)} to train on and "
            f"{len(corpus.held_out)} held out; give more text or change data.held_out={held_out}"
        )
    return corpus


def _read(file: Path, key: str) -> bytes:
    try:
        return file.read_bytes() + b"\n"
    except OSError as error:
        raise ConfigError(f"{key}: can't read {file}: {error.strerror}") from error


def _shares(files: Sequence[Path]) -> list[float]:
    """A number from 0 to 1 for each file, drawn by its path below their common folder: a copy elsewhere is split alike."""
    root = Path(os.path.commonpath([file.absolute().parent for file in files]))
    names = [file.absolute().relative_to(root).as_posix() for file in files]
    return [int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") / 2**64 for name in names]
