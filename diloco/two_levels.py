"""Two levels that magnitudes are rounded to, found from their own statistics. torch only, the same bits on every machine."""

import torch
from torch import Tensor

from diloco.blocks import row_sums

_REFINEMENTS = 2  # a third one gains less than half a percent of the error, on Gaussian and heavy tails


def two_levels(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """For each row: the mean of its small magnitudes and that of its large ones, and which are large.

    Large is what is nearer to the large level (Lloyd's iteration, "Least squares quantization in PCM", 1982). It begins at a
    third of the way from the row's least to its greatest, which is near the best threshold of a Gaussian and of heavier
    tails alike: a threshold from the mean alone lets one outlier spoil the row.

    Args:
        magnitudes: (rows, width) fp32, not negative; overwritten.

    Returns:
        (rows, 2) levels, small then large, neither above the greatest of the row; (rows, width) fp32, 1 where large, else 0.
        Where none is large, both levels are the mean of all.
    """
    width = magnitudes.shape[1]
    share = 2.0 ** -(width - 1).bit_length()
    shares = magnitudes.mul_(share)  # their sums can't overflow
    least, greatest = shares.amin(1, keepdim=True), shares.amax(1, keepdim=True)
    threshold = least + (greatest - least) / 3
    scratch, is_large = shares.clone(), torch.empty_like(shares)
    total = row_sums(scratch)
    for _ in range(_REFINEMENTS):
        torch.gt(shares, threshold, out=is_large)
        count = is_large.sum(1, keepdim=True)  # of whole numbers: exact in any order
        above = row_sums(torch.mul(shares, is_large, out=scratch))
        small = ((total - above) / (width - count)).clamp_(min=0)
        large = torch.where(count > 0, above / count, small)
        threshold = torch.maximum((small + large) * 0.5, least)  # rounding could take the mean of equals below all of them
    return torch.minimum(torch.cat([small, large], dim=1), greatest) / share, is_large
