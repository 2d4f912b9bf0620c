"""Codecs, one file each: ``Config`` and ``build(config) -> Codec``."""

from diloco.config import CodecSection
from diloco.reduction import Wire
from islands import plugins

_MEAN_BITS = 8


def build_wire(section: CodecSection) -> Wire:
    """The codecs of a run: what it asks for, and 8 bits for means where that has fewer."""
    codec = plugins.build("diloco.codecs", section)
    if codec.bits >= _MEAN_BITS:
        return Wire(codec, codec)
    int8 = plugins.load("diloco.codecs", "int8")
    return Wire(codec, int8.build(int8.Config()))
