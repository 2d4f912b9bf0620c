"""Rising places in rows, as few bits as there is surprise in them: Rice's code of the gaps. torch only, and no loops.

R. F. Rice, "Some practical universal noiseless coding techniques" (JPL 79-22, 1979): a gap's low bits as they are, then as
many zeros as its high bits say, and a one. Among random places that is within 3 % of the least that is possible. The low
bits of all gaps come first, bit by bit, so that whole tensors are shifted; behind them all zeros and ones are one bitmap.
"""

import torch
from torch import Tensor

from diloco.bits import pack, unpack


class Rice:
    """``count`` places in each row of ``width``. Needs a little-endian machine.

    Args:
        count: a multiple of 8.

    Attributes:
        low_bits: of a gap that are sent as they are: with these, random gaps take the fewest bits.
    """

    def __init__(self, width: int, count: int) -> None:
        self._width, self._count = width, count
        self.low_bits = max(((width - 1) // count).bit_length() - 1, 0)

    def encode(self, columns: Tensor) -> Tensor:
        """``columns`` (rows, count), rising along each row, from 0 to width - 1, as bytes."""
        gaps = columns.int()
        gaps[:, 1:] -= gaps[:, :-1].clone() + 1
        gaps = gaps.view(-1)
        planes = gaps >> torch.arange(self.low_bits, dtype=torch.int32)[:, None] & 1
        ends = torch.cumsum((gaps >> self.low_bits) + 1, 0) - 1  # bits of the bitmap that are one
        bitmap = torch.zeros(-(-(int(ends[-1]) + 1) // 8) * 8 if len(ends) else 0, dtype=torch.uint8)
        bitmap[ends] = 1
        return pack(torch.cat([planes.view(-1).to(torch.uint8), bitmap]), 1)

    def decode(self, encoded: Tensor, rows: int) -> Tensor:
        """The inverse: (rows, count) int64.

        Raises:
            ValueError: it holds another number of places, or one outside its row, or goes on behind the last.
        """
        total, smallest, largest = rows * self._count, self.least_bytes(rows), self.most_bytes(rows)
        if not smallest <= encoded.numel() <= largest:
            raise ValueError(f"{total} places take {smallest} to {largest} bytes, got {encoded.numel()}")
        bits = unpack(encoded, 1)
        planes, bitmap = bits[: total * self.low_bits].view(self.low_bits, total), bits[total * self.low_bits :]
        ends = torch.nonzero(bitmap).view(-1)
        if len(ends) != total or total and bitmap.numel() - int(ends[-1]) > 8:
            raise ValueError(f"{total} places take as many ones and less than a byte behind them, got {len(ends)} ones")
        gaps = torch.diff(ends, prepend=ends.new_tensor([-1])) - 1 << self.low_bits
        for bit, plane in enumerate(planes):
            gaps += plane.long() << bit
        columns = torch.cumsum(gaps.view(rows, self._count) + 1, 1) - 1
        if total and int(columns.max()) >= self._width:
            raise ValueError(f"place {int(columns.max())} of a row of {self._width}")
        return columns

    def least_bytes(self, rows: int) -> int:
        """Where all gaps are small."""
        return rows * self._count * (self.low_bits + 1) // 8

    def most_bytes(self, rows: int) -> int:
        """Where the places leave as much room before the last of each row as there is."""
        return self.least_bytes(rows) + -(-rows * ((self._width - self._count) >> self.low_bits) // 8)
