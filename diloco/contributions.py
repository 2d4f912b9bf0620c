"""Which contributions a round counts, and how much. Pure rules on plain numbers, so that all members apply them alike.

They are a safeguard against broken islands, not against a conspiracy: most members have to be sound.
"""

from dataclasses import dataclass
from statistics import median, median_low
from typing import Mapping, Sequence

#: A pseudo-gradient may be this many times as large as those of the others, per token where it is of more tokens.
LARGEST_NORM_RATIO = 5.0

#: The bytes of a contribution may have a norm this much above the one that was claimed: what a codec adds.
LARGEST_CLAIM_RATIO = 1.5

#: A contribution whose cosine with the others' mean is below this, by more than chance, works against them. Sound ones are
#: above zero.
MOST_OPPOSITE = -0.1

#: Standard deviations of the cosine of unrelated vectors, which is one over the root of their size.
_CHANCE = 5.0


#: Why each rule leaves out a contribution, which claimed ``norm``.
RULES = {
    "norm": "its pseudo-gradient of norm {norm:.3g} is far larger than the others'",
    "claim": "what it sent is larger than the norm {norm:.3g} that it claimed, or not finite",
    "opposite": "its pseudo-gradient works against those of all others",
    "digest": "its result differs from that of most others",
}

_DENSE_BITS = 32.0


@dataclass(frozen=True)
class Size:
    """What a member says of its contribution before it sends it."""

    tokens: int
    norm: float


def capped_weights(tokens: Sequence[int], max_weight_ratio: float) -> tuple[float, ...]:
    """Weights of members that trained on so many tokens: none more than the ratio times their (lower) median."""
    largest = max_weight_ratio * median_low(tokens)
    return tuple(min(float(count), largest) for count in tokens)


def too_large(sizes: Mapping[int, Size], typical_norm: float) -> set[int]:
    """Slots whose contribution is absurdly large.

    Against the median of all and what was typical in the last rounds, whichever is larger: with error feedback and few
    bits, newcomers send far less at first than those who have lost much before. Two members can't outvote each other, so
    one of them has to be too large against the other instead of the median. A lone one has no judge.
    """
    if len(sizes) < 2:
        return set()
    usual_tokens = median_low(size.tokens for size in sizes.values())
    norms = {slot: size.norm * min(1.0, usual_tokens / size.tokens) for slot, size in sizes.items()}
    if len(sizes) > 2:
        usual = max(median(norms.values()), typical_norm)
        return {slot for slot, norm in norms.items() if norm > LARGEST_NORM_RATIO * usual}
    largest, other = sorted(norms, key=lambda slot: norms[slot], reverse=True)
    limit = LARGEST_NORM_RATIO * max(norms[other], typical_norm)
    return {largest} if typical_norm and norms[largest] > limit else set()


def independent_values(bits: float, numel: int) -> int:
    """How many of ``numel`` elements can be told from zero in a contribution: a sparse codec has few bits for each.

    The fewer there are, the more do two sound contributions oppose each other by chance.
    """
    return max(1, int(numel * min(1.0, bits / _DENSE_BITS)))


@dataclass(frozen=True)
class Measured:
    """What the reducers saw of one member's contribution: its square, and its dot product with the mean of all."""

    square: float
    along: float

    def cosine(self, mean_square: float) -> float:
        """With the mean of all, whose square is given; 0 where either is zero."""
        size = (self.square * mean_square) ** 0.5
        return self.along / size if size > 0 else 0.0


def understated(claimed_norms: Sequence[float], measured: Sequence[Measured]) -> int | None:
    """Position of the first member whose bytes are larger than it claimed, so that the rule above did not see it."""
    for position, (claimed, seen) in enumerate(zip(claimed_norms, measured, strict=True)):
        if seen.square > (LARGEST_CLAIM_RATIO * claimed) * (LARGEST_CLAIM_RATIO * claimed):  # ** would raise OverflowError
            return position
    return None


def most_opposite(
    weights: Sequence[float], measured: Sequence[Measured], mean_square: float, numel: int
) -> int | None:
    """Position of the member that works most against the mean of the others, if one does; needs three members.

    Only the worst: it drags the mean to its side, so that sound members may look opposed to it as well.
    """
    if len(weights) < 3:
        return None
    total = sum(weights)
    cosines = []
    for weight, seen in zip(weights, measured, strict=True):
        share = weight / total
        along_others = seen.along - share * seen.square  # with the sum of the others' shares, not yet divided by theirs
        others_square = mean_square - 2 * share * seen.along + share * share * seen.square
        size = (max(others_square, 0.0) * seen.square) ** 0.5
        cosines.append(along_others / size if size > 0 else 0.0)
    worst = min(range(len(cosines)), key=lambda position: cosines[position])
    return worst if cosines[worst] < MOST_OPPOSITE - _CHANCE / numel**0.5 else None
