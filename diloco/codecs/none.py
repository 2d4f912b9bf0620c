"""The values as they are, little-endian."""

import sys
from typing import Literal

import torch
from torch import Tensor

from diloco.config import CodecSection


class Config(CodecSection):
    """``outer.codec.type: none``"""

    type: Literal["none"] = "none"


class NoCodec:
    """Bytes are the values' own memory: nothing is copied, nothing is lost."""

    bits = 32.0

    def encode(self, values: Tensor) -> Tensor:
        """See :class:`diloco.reduction.Codec`."""
        return values.contiguous().view(torch.uint8)

    def decode(self, encoded: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """See :class:`diloco.reduction.Codec`."""
        expected = self.encoded_bytes(numel, dtype)
        if encoded.numel() != expected:
            raise ValueError(f"{numel} values of {dtype} take {expected} bytes, got {encoded.numel()}")
        if encoded.storage_offset() % dtype.itemsize or encoded.data_ptr() % dtype.itemsize:
            encoded = encoded.clone()  # from the middle of a message
        return encoded.view(dtype)

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """See :class:`diloco.reduction.Codec`."""
        return numel * dtype.itemsize


def build(config: Config) -> NoCodec:
    """The codec. Raises RuntimeError on a big-endian machine, whose bytes others would misread."""
    if sys.byteorder != "little":
        raise RuntimeError("outer.codec.type=none sends little-endian memory, and this machine is big-endian")
    return NoCodec()
