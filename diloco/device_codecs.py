"""Codecs for contributions that never leave the device: the CPU learns nothing of the values, and need not wait for them. torch only.

Those in :mod:`diloco.codecs` give the same bytes on every machine, for which they look at the values. Here all machines are alike.
"""

from typing import Protocol

import torch
from torch import Tensor


class DeviceCodec(Protocol):
    """Rows of values to rows of bytes and back. Values that are not finite come back not finite.

    Attributes:
        block: a row has a multiple of so many elements.
    """

    block: int

    def num_bytes(self, numel: int) -> int:
        """That ``numel`` elements take."""

    def encode(self, rows: Tensor) -> Tensor:
        """uint8 (rows, bytes) of values (rows, elements)."""

    def decode(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """The flat values of one row of bytes."""


class Bf16:
    """16 bits: the upper half of fp32, rounded."""

    block = 1

    def num_bytes(self, numel: int) -> int:
        """See :class:`DeviceCodec`."""
        return 2 * numel

    def encode(self, rows: Tensor) -> Tensor:
        """See :class:`DeviceCodec`."""
        return rows.to(torch.bfloat16).view(torch.uint8)

    def decode(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`DeviceCodec`."""
        return row.view(torch.bfloat16).to(dtype)


class Int8:
    """Whole numbers from -127 to 127, with an fp32 scale for every 256: 8.125 bits each."""

    block = 256

    def num_bytes(self, numel: int) -> int:
        """See :class:`DeviceCodec`."""
        return numel + 4 * numel // self.block

    def encode(self, rows: Tensor) -> Tensor:
        """See :class:`DeviceCodec`."""
        blocks = rows.float().unflatten(1, (-1, self.block))
        scales = blocks.abs().amax(dim=2, keepdim=True) / 127
        codes = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().clamp_(-127, 127).to(torch.int8)
        return torch.cat([codes.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], dim=1)

    def decode(self, row: Tensor, dtype: torch.dtype) -> Tensor:
        """See :class:`DeviceCodec`."""
        numel = row.numel() * self.block // (self.block + 4)
        codes, scales = row[:numel].view(torch.int8), row[numel:].view(torch.float32)
        return (codes.unflatten(0, (-1, self.block)) * scales[:, None]).flatten().to(dtype)


#: By the name of ``outer.codec.type``; None: values go as they are.
CODECS: dict[str, DeviceCodec | None] = {"none": None, "bf16": Bf16(), "int8": Int8()}
