"""The link model against real rounds: predicted and measured round time and utilization on shaped links.

Two islands, whole ``python -m diloco`` processes in network namespaces (``tests/swarm/wan.py``), train over links of a given rate and
round-trip time. What the model is told of them is the link as it was asked for, the bytes that a round should take by the
configuration, and from the run's own rows what was computed: encoding, decoding, the outer step, copies, the inner step. Nothing
that was measured on the link goes into it.

    python tests/benchmarks/link_model.py [--quick] [--rate 50mbit] [--rtt 50] [--method blocking] [--rounds 6]

Rounds before the first one of every fragment has ended don't count: connections are opened and memory is touched in those. A round
takes as long as for the island that was last to launch it. Target: the round within 15 %, utilization within 5 points, on all links.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, Sequence

sys.path.insert(0, str(Path(__file__).parent.parent / "swarm"))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from wan import WanLink, missing  # noqa: E402

from cluster import Cluster  # noqa: E402
from diloco.link_model import Link, Pace, Prediction, RoundLoad, parse_bandwidth, predict  # noqa: E402
from diloco.round_bytes import round_bytes  # noqa: E402

ROUND_ERROR, UTILIZATION_ERROR = 0.15, 0.05
RATES, RTTS = ("10mbit", "50mbit", "100mbit", "300mbit"), (10.0, 50.0, 150.0)
QUICK = [("10mbit", 150.0, "streaming"), ("50mbit", 50.0, "blocking")]
STEP_SECONDS = 0.2
CONNECTIONS = 4
_GIVE_UP_SECONDS = 240.0


@dataclass(frozen=True)
class Case:
    """What is trained: so many parameters (in words), overrides, and the pace."""

    size: str
    settings: tuple[str, ...]


def model(hidden: int, layers: int, heads: int, intermediate: int) -> tuple[str, ...]:
    """Overrides."""
    values = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": heads}
    return tuple(f"model.{key}={value}" for key, value in {**values, "intermediate_size": intermediate}.items())


COMMON = (
    *model(256, 4, 4, 704),
    "train.global_batch_size=1",
    "data.seq_len=32",
    "exchange.peer_timeout=30",
    "exchange.round_deadline=600",
    f"swarm.data_connections={CONNECTIONS}",
)
SETTINGS = {
    "blocking": ("outer.sync_every=10",),
    "streaming": ("outer.sync_every=8", "outer.codec.type=int4", "outer.fragments=4", "outer.overlap=2"),
}


def measure(rate: str, rtt: float, method: str, rounds: int, extra: Sequence[str] = (), seconds: float = STEP_SECONDS) -> dict[str, Any]:
    """One run on one link, compared with what is predicted for it."""
    settings = [*COMMON, *SETTINGS[method], *extra]
    with tempfile.TemporaryDirectory() as folder, WanLink(2, rate, rtt, queue_ms=max(100.0, rtt), tuned=True) as link:
        with Cluster(Path(folder), 2, settings, link, step_seconds=seconds) as cluster:
            wanted = rounds + 4
            cluster.wait_until(
                lambda: all(len(island.rows("round")) >= wanted for island in cluster.islands), timeout=_GIVE_UP_SECONDS
            )
            rows = [list(island.read()) for island in cluster.islands]
    return rows
