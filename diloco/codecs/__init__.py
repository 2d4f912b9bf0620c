"""Codecs, one file each: ``Config`` and ``build(config) -> Codec``."""

from typing import Sequence

from diloco.config import CodecSection
from diloco.reduction import Wire
from islands import plugins

_MEAN_BITS = 8


def build_wire(section: CodecSection, cheaper: Sequence[str] = ()) -> Wire:
    """The codecs of a run: what it asks for, and 8 bits for means where that has fewer.

    Args:
        cheaper: names of codecs to fall back to.
    """
    codec = plugins.build("diloco.codecs", section)
    fallbacks = tuple(build_wire(plugins.load("diloco.codecs", name).Config()) for name in cheaper)
    if codec.bits >= _MEAN_BITS:
        return Wire(codec, codec, fallbacks)
    int8 = plugins.load("diloco.codecs", "int8")
    return Wire(codec, int8.build(int8.Config()), fallbacks)
