"""How long a round takes on a link, and what that costs in steps. Pure arithmetic on seconds and bytes; no torch.

Checked against shaped links in ``tests/benchmarks/link_model.py``; docs/planning.md has the formula and what it leaves out.
"""

import math
import re
from dataclasses import dataclass, replace

from islands.config_file import ConfigError

#: Round trips that a round of two islands takes beside its bytes, counted in the code and measured, from the launch of the later one. Half
#: of one for the proposal and half for the first bytes, where the later one proposes; else half each for its offer and for the proposal, with
#: which bytes come. Then one for the votes, which are acknowledged.
ROUND_TRIPS = 2.0
#: More with three or more: means come back, or the bytes of one to whom the proposal had to come.
ROUND_TRIPS_OF_MANY = 0.5
#: What hivemind's daemons, event loops and threads need for a round's messages on a machine of two cores: fitted to rounds of 0.1 to 0.4 MB
#: over links of 10 to 300 Mbit/s and 10 to 150 ms, where 12 to 96 ms were beside all that is counted here.
MESSAGES_SECONDS = 0.045
#: Bytes that a TCP connection may send before the first is acknowledged, 10 segments of 1448 (RFC 6928); after a pause again.
FIRST_WINDOW_BYTES = 14480
#: On top of the round trip: what a connection that was silent so long halves its window for, again and again (RFC 2861 as Linux does it).
SILENCE_SECONDS = 0.2
#: Share of a link's rate that is left beside the headers of Ethernet, IP and TCP (1448 of 1538 bytes), while the acknowledgements of
#: as many bytes the other way take theirs (3 %).
GOODPUT = 0.91
#: TCP (cubic) that begins again after a pause, both ways at once, needs so many round trips to settle, and until then this share
#: longer than the line would. Fitted to plain sockets over shaped links, 10 to 100 Mbit/s, 50 and 150 ms, 4 and 13 MB.
SETTLING_ROUND_TRIPS, SETTLING_SHARE = 19.0, 0.42
#: Bytes a second, each way, that the processor encrypts, copies and frames for hivemind's daemons. Streams between two daemons on one
#: machine of two cores carried 257 to 336 MB/s over loopback, one way; an island sends and receives at once.
CPU_BYTES_PER_SECOND = 200e6
#: Share of an inner step behind which data-parallel training can hide its all-reduce: the backward pass (arXiv 2006.15704).
BACKWARD_SHARE = 2 / 3
GRADIENT_BYTES = 4  # of data-parallel training, which is taken to reduce in fp32

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)\s*"
_BANDWIDTH = re.compile(_NUMBER + "(kbit|mbit|gbit)", re.IGNORECASE)
_TIME = re.compile(_NUMBER + "(us|ms|s)", re.IGNORECASE)
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


@dataclass(frozen=True)
class Link:
    """Of each island to the network.

    Attributes:
        bits_per_second: each way.
        rtt: seconds to another island and back.
        connections: TCP connections that carry bulk bytes to each island (``swarm.data_connections``, at least 1).
        daemons: whether hivemind's carry the bytes, and encrypt them; else they are those of collectives inside one job.
    """

    bits_per_second: float
    rtt: float
    connections: int = 1
    daemons: bool = True


@dataclass(frozen=True)
class RoundLoad:
    """What one round of one fragment asks of one island.

    Attributes:
        islands: members of the round.
        bytes_each_way: that the island sends, and receives; the larger of the two.
        encode_seconds: measured: of computing, before anything is sent.
        decode_seconds: measured: from what came to the mean.
        step_seconds: measured: of the outer optimizer and the digest.
        chunks: in which the fragment goes; while one is on the wire another is decoded.
        copy_seconds: that training stands still for to copy parameters out and back.
    """

    islands: int
    bytes_each_way: float
    encode_seconds: float
    decode_seconds: float
    step_seconds: float
    chunks: int = 1
    copy_seconds: float = 0.0


@dataclass(frozen=True)
class Pace:
    """When rounds are.

    Attributes:
        inner_step_seconds: of computing one inner step.
        sync_every: H, inner steps between two rounds of the same fragment.
        overlap: inner steps that a round has until it lands.
    """

    inner_step_seconds: float
    sync_every: int
    fragments: int
    overlap: int


@dataclass(frozen=True)
class Prediction:
    """Where a run's time goes, once it is under way.

    Attributes:
        round_seconds: from launch to outcome.
        stall_seconds: for which training stands still, per round.
        utilization: share of the time in which inner steps are computed.
        seconds_per_step: mean, stalls included.
    """

    round_seconds: float
    stall_seconds: float
    utilization: float
    seconds_per_step: float


def line_seconds(link: Link, num_bytes: float) -> float:
    """For which so many bytes keep the line, or the core that encrypts them for daemons, busy each way."""
    return num_bytes / _bytes_per_second(link)


def slow_start_seconds(link: Link, num_bytes: float, idle: float = math.inf) -> float:
    """For which connections leave the line idle, as each waits for the acknowledgement of its window.

    The window doubles with each round trip until it fills the line, or all is sent: Kurose and Ross, Computer Networking.

    Args:
        idle: seconds since bulk bytes last went over them, of which the window keeps some.
    """
    lost, left = 0.0, num_bytes
    enough = min(num_bytes, _bytes_per_second(link) * link.rtt)
    halvings = min(64.0, idle // (link.rtt + SILENCE_SECONDS))
    window = max(float(FIRST_WINDOW_BYTES * link.connections), enough / 2**halvings)
    while left > window and (waiting := link.rtt - line_seconds(link, window)) > 1e-9:
        lost, left, window = lost + waiting, left - window, 2 * window
    return lost


def settling_seconds(link: Link, num_bytes: float, idle: float = math.inf) -> float:
    """By which congestion control that has to find its rate again delays so many bytes."""
    if idle < link.rtt + SILENCE_SECONDS:
        return 0.0
    return SETTLING_SHARE * min(line_seconds(link, num_bytes), SETTLING_ROUND_TRIPS * link.rtt)


def round_seconds(link: Link, load: RoundLoad, idle: float = math.inf) -> float:
    """From launch to outcome, when all members launch at once, ``idle`` seconds after the bytes of the round before."""
    if load.islands == 1:
        return load.encode_seconds + load.decode_seconds + load.step_seconds
    size, applying = load.bytes_each_way, load.decode_seconds + load.step_seconds
    if not link.daemons:
        return load.encode_seconds + _ring_seconds(link, load.islands, size) + applying
    link = replace(link, connections=min(link.connections, load.chunks))  # a chunk goes over one of them
    wire = line_seconds(link, size) + slow_start_seconds(link, size, idle) + settling_seconds(link, size, idle)
    beside = max(wire, applying) + min(wire, applying) / load.chunks
    trips = ROUND_TRIPS + (ROUND_TRIPS_OF_MANY if load.islands > 2 else 0.0)
    return load.encode_seconds + trips * link.rtt + MESSAGES_SECONDS + beside


def predict(link: Link, load: RoundLoad, pace: Pace) -> Prediction:
    """Of a long run, in which all islands are equally fast and rounds of several fragments may be in flight at once."""
    busy, computing = _busy_seconds(link, load), pace.sync_every / pace.fragments * pace.inner_step_seconds
    at_once = _with_rounds(round_seconds(link, load, idle=0.0), busy, load.copy_seconds, pace)
    idle = max(0.0, computing + at_once.stall_seconds - busy - link.rtt)  # the ends of streams are told and acknowledged last
    return _with_rounds(round_seconds(link, load, idle), busy, load.copy_seconds, pace)


def data_parallel(link: Link, islands: int, gradient_bytes: float, inner_step_seconds: float) -> Prediction:
    """Of islands that all-reduce their gradients in a ring at every step, behind the backward pass as far as that lasts."""
    link = replace(link, daemons=False)
    reducing = _ring_seconds(link, islands, ring_bytes(gradient_bytes, islands))
    stall = max(0.0, reducing - BACKWARD_SHARE * inner_step_seconds)
    return Prediction(reducing, stall, *_shares(inner_step_seconds, stall))


def ring_bytes(num_bytes: float, members: int) -> float:
    """That each member sends in a ring all-reduce of ``num_bytes``."""
    return 2 * (members - 1) * num_bytes / members


def data_parallel_bytes(parameters: int, islands: int, steps: float = 1) -> float:
    """That an island sends which all-reduces its gradients at each step."""
    return ring_bytes(GRADIENT_BYTES * parameters * steps, islands)


def landings_in_flight(pace: Pace) -> int:
    """Rounds that land from the launch of one up to its own landing, which counts; and so the most that are in flight at once."""
    return max(1, math.ceil(pace.overlap * pace.fragments / pace.sync_every))


def parse_bandwidth(text: str) -> float:
    """``200mbit`` is 200e6 bits a second. Raises ConfigError."""
    return _with_unit(text, _BANDWIDTH, _BITS, "bandwidth", "kbit, mbit or gbit (a second), such as 200mbit")


def parse_time(text: str) -> float:
    """``80ms`` is 0.08 seconds. Raises ConfigError."""
    return _with_unit(text, _TIME, _SECONDS, "time", "us, ms or s, such as 80ms")


def _ring_seconds(link: Link, members: int, num_bytes: float) -> float:
    """Of a ring in which each sends so many bytes in all, on 2 (members - 1) hops."""
    return (members - 1) * link.rtt + line_seconds(link, num_bytes)


def _bytes_per_second(link: Link) -> float:
    return min(link.bits_per_second / 8 * GOODPUT, CPU_BYTES_PER_SECOND if link.daemons else math.inf)


def _busy_seconds(link: Link, load: RoundLoad) -> float:
    """For which a round keeps others from the line, or from the processor."""
    return 0.0 if load.islands == 1 else line_seconds(link, load.bytes_each_way)


def _with_rounds(lasts: float, busy: float, copying: float, pace: Pace) -> Prediction:
    """Stalls such that each round is in when it has to land, and no more rounds are launched than the line can carry.

    Of the rounds that land between a round's launch and its own landing, each gives it the time of its stall.
    """
    between = pace.sync_every / pace.fragments  # inner steps from one round to the next
    computing = between * pace.inner_step_seconds
    late = (lasts - pace.overlap * pace.inner_step_seconds) / landings_in_flight(pace)
    stall = max(0.0, late, busy - computing) + copying
    utilization, seconds = _shares(computing, stall)
    return Prediction(lasts, stall, utilization, seconds / between)


def _shares(computing: float, stall: float) -> tuple[float, float]:
    """Share of the time that is computing, and all of it."""
    return computing / (computing + stall) if computing else 0.0, computing + stall


def _with_unit(text: str, pattern: re.Pattern[str], units: dict[str, float], what: str, rule: str) -> float:
    found = pattern.fullmatch(text.strip())
    value = float(found[1]) * units[found[2].lower()] if found else math.nan
    if not found or (what == "bandwidth" and value <= 0):
        raise ConfigError(f"{text!r} is no {what}; write a number above 0 and {rule}")
    return value
