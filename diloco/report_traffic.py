"""What rounds asked of links and processors: as the exchange counted it, or, where islands shared a process, as it would be of each."""

from dataclasses import dataclass
from typing import Any

from diloco.codecs import build_wire
from diloco.reduction import Wire, num_chunks, reducer_chunks, sends_whole
from diloco.round_bytes import round_bytes
from diloco.run_files import Row
from islands import plugins


@dataclass(frozen=True)
class Traffic:
    """Of an island in one round of one fragment.

    Attributes:
        sent: bytes, mean over islands.
        each_way: bytes that go through the busiest island's link one after the other.
    """

    sent: float
    each_way: float


def wire_of(raw: dict[str, Any]) -> Wire | None:
    """The codecs of a run whose resolved configuration is ``raw``; None where it exchanges nothing."""
    codec = raw.get("outer", {}).get("codec")
    if codec is None:
        return None
    return build_wire(plugins.load("diloco.codecs", codec["type"]).Config.model_validate(codec))


def traffic_of(row: Row, wire: Wire, islands: int) -> Traffic:
    """Of the round of ``row``. Where nothing was counted, because islands were simulated, what the exchange's rules come to."""
    sent, received = row.get("bytes_sent") or 0, row.get("bytes_received") or 0
    if sent or received:
        return Traffic(sent, max(sent, received))
    if islands < 2 or not _numel(row):
        return Traffic(0.0, 0.0)
    found = round_bytes(wire, _numel(row), islands)
    return Traffic(found.sent, found.each_way)


def decode_seconds(row: Row, wire: Wire, islands: int) -> float:
    """Of the busiest island of a real swarm, where one process took ``row``'s to decode all contributions, whole.

    Where each island reduces a share of the chunks, it decodes that share of all contributions, and the means of the others, which take
    about as long as one contribution.
    """
    seconds, chunks = row["decode_seconds"], num_chunks(max(1, _numel(row)))
    if islands < 2 or sends_whole(wire, islands):
        return seconds
    return seconds * (len(reducer_chunks(_numel(row), islands, 0)) / chunks + 1 / islands)


def _numel(row: Row) -> int:
    """Parameters of the round's fragment; 0 where the row does not tell."""
    encoded, bits = row.get("encoded_bytes") or 0, row.get("bits_per_parameter") or 0
    return round(8 * encoded / bits) if bits else 0
