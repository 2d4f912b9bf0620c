"""How far an island moved. Pure functions on flat tensors; torch only."""

from dataclasses import dataclass
from typing import Iterator

import torch
from torch import Tensor

#: Elements per step of an elementwise pass. Small enough that what is made on the way, in fp64 256 KiB, is memory that is used
#: over and over, which larger blocks get from the system and give back each time; large enough that the calls cost little.
BLOCK = 1 << 15


def blocks(numel: int) -> Iterator[slice]:
    """Pieces of a flat tensor, of :data:`BLOCK` elements; the last may be shorter."""
    return (slice(start, min(start + BLOCK, numel)) for start in range(0, numel, BLOCK))


@dataclass(frozen=True)
class Health:
    """What an island tells about its contribution: its L2 norm, and whether every element is finite."""

    norm: float
    finite: bool


def pseudo_gradient(anchor: Tensor, local: Tensor, out: Tensor) -> Health:
    """Write ``anchor - local`` into ``out``, which may be ``local``. All are flat and of one dtype.

    Returns:
        The norm (summed in fp64) and whether all of it is finite, found in the same pass.
    """
    total = 0.0
    for piece in blocks(anchor.numel()):
        total += square_of(torch.sub(anchor[piece], local[piece], out=out[piece]))
    return Health(norm=total**0.5, finite=total < float("inf"))  # a NaN or an infinity makes the sum so


def square_of(values: Tensor) -> float:
    """Sum of the squares (in fp64) of a flat tensor."""
    total = 0.0
    for piece in blocks(values.numel()):
        wide = values[piece].double()
        total += float(wide @ wide)
    return total


def agreeable(norm: float) -> float:
    """A norm as islands agree on it: to nine digits, as another number of threads sums in another order."""
    return float(f"{norm:.9g}")
