"""How far an island moved. Pure functions on flat tensors; torch only."""

from dataclasses import dataclass

import torch
from torch import Tensor

#: Elements per step of an elementwise pass: small enough to stay in cache, and no temporary of the whole size.
BLOCK = 1 << 18


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
    for start in range(0, anchor.numel(), BLOCK):
        piece = slice(start, start + BLOCK)
        torch.sub(anchor[piece], local[piece], out=out[piece])
        wide = out[piece].double()
        total += float(wide @ wide)
    return Health(norm=total**0.5, finite=total < float("inf"))  # a NaN or an infinity makes the sum so


def agreeable(norm: float) -> float:
    """A norm as islands agree on it: to nine digits, as another number of threads sums in another order."""
    return float(f"{norm:.9g}")


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of the angle between two flat tensors (summed in fp64); 0 where either is zero."""
    dot = norm_a = norm_b = 0.0
    for start in range(0, a.numel(), BLOCK):
        x, y = a[start : start + BLOCK].double(), b[start : start + BLOCK].double()
        dot, norm_a, norm_b = dot + float(x @ y), norm_a + float(x @ x), norm_b + float(y @ y)
    return dot / (norm_a * norm_b) ** 0.5 if norm_a and norm_b else 0.0
