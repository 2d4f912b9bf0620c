"""Tokens on disk, and which of them a rank sees: a pure function of (seed, slot, position).

A *sample* is ``seq_len`` tokens and the one that follows them. Position ``p`` of an island in slot ``s`` is sample
``permutation_epoch(g mod n)`` with ``g = p * max_slots + s`` and ``epoch = g // n``: no two ranks or islands ever meet the same
sample within an epoch, whatever their grids, and starting at a position needs no replay of what came before.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

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
    """Which samples an island in ``slot`` of ``max_slots`` sees."""

    num_samples: int
    seed: int
    slot: int = 0
    max_slots: int = 1

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Sample numbers of an island's ``positions`` (any shape)."""
        order = positions.astype(np.int64) * self.max_slots + self.slot
        epochs, index = np.divmod(order, self.num_samples)
        samples = np.empty_like(order)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            samples[inside] = permute(index[inside], self.num_samples, key=(self.seed << 64) | int(epoch))
        return samples


class Batches:
    """Batches of the training text by inner step.

    Args:
        data_rank, data_ranks: this rank among those of its island that split the batch.
    """

    def __init__(
        self, tokens: np.ndarray, seq_len: int, batch_size: int, sampler: Sampler, data_rank: int, data_ranks: int
    ) -> None:
        self._tokens, self._seq_len, self._sampler = tokens, seq_len, sampler
        self._batch_size, share = batch_size, batch_size // data_ranks
        self._rows = np.arange(data_rank * share, (data_rank + 1) * share)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """This rank's share of inner step ``step`` (from 0): inputs and targets, int64 (share, seq_len)."""
        return windows(self._tokens, self._sampler(step * self._batch_size + self._rows), self._seq_len)


def num_samples(tokens: np.ndarray, seq_len: int) -> int:
    """Whole samples in ``tokens``."""
    return max(0, (len(tokens) - 1) // seq_len)


def windows(tokens: np.ndarray, samples: np.ndarray, seq_len: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets, int64 (len(samples), seq_len), of the given samples."""
    rows = np.stack([tokens[start : start + seq_len + 1] for start in samples * seq_len]).astype(np.int64)
    rows = torch.from_numpy(rows)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def read_bytes(files: Sequence[Path], held_out: float, key: str) -> Corpus:
    """Byte tokens of ``files``, in the order given; each file goes to train or held-out by a hash of its
    path below their common folder.

    Raises:
        ConfigError: a file can't be read, or one of the parts stays empty.
    """
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    root = Path(os.path.commonpath([file.absolute().parent for file in files]))
    for file in files:
        name = file.absolute().relative_to(root).as_posix()  # so that a copy elsewhere is split alike
        share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") / 2**64
        try:
            parts[share < held_out].append(file.read_bytes() + b"\n")
        except OSError as error:
            raise ConfigError(f"{key}: can't read {file}: {error.strerror}") from error
    if len(files) == 1:  # nothing to split by: the last part of the only file is held out
        text = (parts[True] or parts[False])[0]
        cut = int(len(text) * (1 - held_out))
        parts = {False: [text[:cut]], True: [text[cut:]]}
    train, held = (np.frombuffer(b"".join(parts[which]), dtype=np.uint8) for which in (False, True))
    if not len(train) or not len(held):
        raise ConfigError(
            f"{key}: of {len(files)} files {len(parts[True])} were held out and {len(parts[False])} left to train on; "
            f"both need at least one. Give more files or change data.held_out={held_out}"
        )
    return Corpus(train, held, vocab_size=256)
