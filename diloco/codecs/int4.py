"""Whole numbers of 4 bits, with a scale for every 32."""

from typing import Literal

from diloco.blocks import check_byte_order
from diloco.config import CodecSection
from diloco.whole_numbers import WholeNumbers

_BLOCK = 32  # 4.25 bits for each parameter


class Config(CodecSection):
    """``outer.codec.type: int4``"""

    type: Literal["int4"] = "int4"


def build(config: Config) -> WholeNumbers:
    """The codec. Raises RuntimeError on a big-endian machine."""
    check_byte_order("int4")
    return WholeNumbers(code_bits=4, block=_BLOCK)
