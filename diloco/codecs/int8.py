"""Whole numbers of 8 bits, with a scale for every 64."""

from typing import Literal

from diloco.blocks import check_byte_order
from diloco.config import CodecSection
from diloco.whole_numbers import WholeNumbers

_BLOCK = 64  # 8.125 bits for each parameter


class Config(CodecSection):
    """``outer.codec.type: int8``"""

    type: Literal["int8"] = "int8"


def build(config: Config) -> WholeNumbers:
    """The codec. Raises RuntimeError on a big-endian machine."""
    check_byte_order("int8")
    return WholeNumbers(code_bits=8, block=_BLOCK)
