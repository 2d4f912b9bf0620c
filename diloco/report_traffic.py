"""The bytes of rounds: as the exchange counted them, or, where islands shared a process, as they would be on the wire."""

from typing import Any

from diloco.codecs import build_wire
from diloco.reduction import Wire, sends_whole
from diloco.run_files import Row
from islands import plugins

GRADIENT_BYTES = 4  # data-parallel training is taken to reduce fp32 gradients


def wire_of(raw: dict[str, Any]) -> Wire | None:
    """The codecs of a run whose resolved configuration is ``raw``; None where it exchanges nothing."""
    codec = raw.get("outer", {}).get("codec")
    if codec is None:
        return None
    return build_wire(plugins.load("diloco.codecs", codec["type"]).Config.model_validate(codec))


def bytes_each_way(row: Row, wire: Wire, islands: int) -> float:
    """That an island sends in the round of ``row``, and receives: the larger of the two; the mean over islands.

    Where nothing was sent, because the islands were simulated, it is what
    :mod:`diloco.exchange.hivemind.scatter_reduce` would send: contributions whole, to every other island; or a share of the
    contribution, and of the mean, to each.
    """
    if counted := max(row.get("bytes_sent") or 0, row.get("bytes_received") or 0):
        return counted
    encoded, bits = row.get("encoded_bytes") or 0, row.get("bits_per_parameter") or 0
    if islands < 2 or not encoded or not bits:
        return 0.0
    if sends_whole(wire, islands):
        return (islands - 1) * encoded
    mean_bytes = encoded / bits * wire.mean.bits  # the parameters of the fragment are 8 encoded / bits
    return (islands - 1) / islands * (encoded + mean_bytes)


def decode_share(wire: Wire, islands: int) -> float:
    """Of the seconds in which one process decodes the contributions of all islands, those of one island of a real swarm.

    Where each reduces a share, it decodes that share of all contributions, and the means of the others: about one more.
    """
    return 1.0 if islands < 2 or sends_whole(wire, islands) else 2.0 / islands


def data_parallel_bytes(parameters: int, workers: int, steps: int) -> float:
    """That a worker sends, with a ring all-reduce of fp32 gradients at each step."""
    return 2 * (workers - 1) / workers * GRADIENT_BYTES * parameters * steps
