"""How far islands are from each other when a round begins: from the norms and cosines that their rows have. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco.run_files import Row


@dataclass(frozen=True)
class Drift:
    """Of one round, all islands with equal weight.

    Attributes:
        norm: L2 norm of a pseudo-gradient, mean over islands.
        distance: of islands from their mean, root mean square over islands, in L2.
        cosine: between the pseudo-gradients of two islands, mean over pairs weighted by the product of their norms; None of one island.
    """

    norm: float
    distance: float
    cosine: float | None


def drift_of(norms: Sequence[float], cosines: Sequence[float]) -> Drift:
    """Of pseudo-gradients g_i, given |g_i| and the cosine of each with the mean m of all.

    ``|m| = mean(|g_i| c_i)``; ``mean |g_i - m|^2 = mean |g_i|^2 - |m|^2``; the sum of ``g_i g_j`` over unlike i and j is
    ``M^2 |m|^2 - sum |g_i|^2``. Exact where the codec is; else cosines are those of what the others decode.
    """
    count, squares = len(norms), sum(norm * norm for norm in norms)
    mean_norm = sum(norm * cosine for norm, cosine in zip(norms, cosines, strict=True)) / count
    pairs = sum(norms) ** 2 - squares
    cosine = (count**2 * mean_norm**2 - squares) / pairs if count > 1 and pairs > 0 else None
    return Drift(sum(norms) / count, math.sqrt(max(0.0, squares / count - mean_norm**2)), cosine)


def drift_of_rounds(rounds: Iterable[Row]) -> dict[tuple[int, int], Drift]:
    """By fragment and round, from the rows of all islands: those that were committed, with a norm and a cosine each."""
    found: dict[tuple[int, int], list[Row]] = defaultdict(list)
    for row in rounds:
        if row.get("outcome") == "committed" and row.get("pseudo_gradient_norm") is not None and row.get("cosine") is not None:
            found[row.get("fragment", 0), row.get("round", 0)].append(row)
    return {
        place: drift_of([row["pseudo_gradient_norm"] for row in rows], [row["cosine"] for row in rows])
        for place, rows in sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
    }
