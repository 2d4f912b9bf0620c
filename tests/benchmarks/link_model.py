"""The link model against real rounds: predicted and measured round time and utilization on shaped links.

Two islands, whole ``python -m diloco`` processes in network namespaces (``tests/swarm/wan.py``), train over links of a given rate and
round-trip time. What the model is told of them is the link as it was asked for, the bytes that a round should take by the
configuration, and from the run's own rows what was computed: encoding, decoding, the outer step, copies, the inner step. Nothing
that was measured on the link goes into it.

    blocking     codec none, overlap 0, one fragment
    streaming    codec int4, overlap 2, four fragments

    python tests/benchmarks/link_model.py [--quick] [--rate 50mbit] [--rtt 50] [--method blocking] [--rounds 5]

The first two rounds of every fragment don't count: connections are opened and memory is touched in those. A round takes as long as
for the island that was last to launch it. Target: the round within 15 %, utilization within 5 points, on all links. All of it takes
about 20 minutes, in which nothing else should run.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Sequence

sys.path.insert(0, str(Path(__file__).parent.parent / "swarm"))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from wan import WanLink, missing  # noqa: E402

from cluster import Cluster  # noqa: E402
from diloco.config import RunConfig  # noqa: E402
from diloco.link_model import Link, Pace, Prediction, RoundLoad, parse_bandwidth, predict  # noqa: E402
from diloco.planner import Planner  # noqa: E402
from diloco.round_bytes import round_bytes  # noqa: E402
from diloco.run_files import Row  # noqa: E402
from islands.config_file import load_config  # noqa: E402

ROUND_ERROR, UTILIZATION_ERROR = 0.15, 0.05
RATES, RTTS = ("10mbit", "50mbit", "100mbit", "300mbit"), (10.0, 50.0, 150.0)
QUICK = [("10mbit", 150.0, "streaming"), ("50mbit", 50.0, "blocking")]
STEP_SECONDS, WARM_UPS, CONNECTIONS = 0.2, 2, 4
GIVE_UP_SECONDS = 300.0

COMMON = (
    "train.global_batch_size=1",
    "data.seq_len=8",  # the step is to take time, and not the processor, which an island with a GPU does not need for it
    "exchange.peer_timeout=30",
    "exchange.round_deadline=600",
    f"swarm.data_connections={CONNECTIONS}",
)
METHODS = {
    "blocking": ("outer.sync_every=5",),
    "streaming": ("outer.sync_every=8", "outer.codec.type=int4", "outer.fragments=4", "outer.overlap=2"),
}


@dataclass(frozen=True)
class Case:
    """Predicted and measured on one link; times in seconds."""

    rate: str
    rtt_ms: float
    method: str
    round_bytes: float
    round_predicted: float
    round_measured: float
    utilization_predicted: float
    utilization_measured: float

    @property
    def round_error(self) -> float:
        """Relative."""
        return self.round_predicted / self.round_measured - 1

    @property
    def utilization_error(self) -> float:
        """As a share of the time."""
        return self.utilization_predicted - self.utilization_measured

    @property
    def good(self) -> bool:
        """Within both targets."""
        return abs(self.round_error) <= ROUND_ERROR and abs(self.utilization_error) <= UTILIZATION_ERROR


def model(rate: str) -> tuple[str, ...]:
    """Overrides: 0.7M parameters where the line is slowest, 3.3M elsewhere."""
    hidden, intermediate = (128, 320) if rate == "10mbit" else (256, 704)
    values = {"hidden_size": hidden, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": intermediate}
    return tuple(f"model.{key}={value}" for key, value in values.items())


def measure(rate: str, rtt: float, method: str, rounds: int) -> Case:
    """One run on one link."""
    settings, wanted = [*COMMON, *model(rate), *METHODS[method]], WARM_UPS + rounds
    with tempfile.TemporaryDirectory() as folder, WanLink(2, rate, rtt, tuned=True) as link:
        with Cluster(Path(folder), 2, settings, link, step_seconds=STEP_SECONDS) as cluster:

            def ended() -> bool:
                rows = [row for island in cluster.islands for row in island.rows("round")]
                counts = [sum(row["fragment"] == last for row in rows) for last in {row["fragment"] for row in rows}]
                return bool(counts) and min(counts) >= 2 * wanted

            cluster.wait_until(ended, timeout=GIVE_UP_SECONDS)
            islands = [list(island.read()) for island in cluster.islands]
        planner = Planner(load_config(RunConfig, Path(folder) / "run" / "config.resolved.yaml"), ranks=1)
    return compare(planner, islands, rate, rtt, method)


def compare(planner: Planner, islands: Sequence[Sequence[Row]], rate: str, rtt: float, method: str) -> Case:
    """Of what the islands recorded."""
    link, setting = Link(parse_bandwidth(rate), rtt / 1000, CONNECTIONS), planner.setting(STEP_SECONDS)
    warm = WARM_UPS * setting.sync_every
    steps = [[row for row in rows if row["kind"] == "step" and row["step"] > warm] for rows in islands]
    pace = Pace(
        fmean(row["step_seconds"] for rows in steps for row in rows), setting.sync_every, setting.fragments, setting.overlap
    )
    loads, measured = [], []
    for fragment, numel in enumerate(planner.sizes(setting.fragments)):
        rounds = _rounds(islands, fragment)
        measured.append(median(min(row["exchange_seconds"] for row in pair) for pair in rounds))
        rows = [row for pair in rounds for row in pair]
        traffic = round_bytes(planner.wire(setting.codec), numel, planner.islands)
        computed = {key: median(row[key] for row in rows) for key in ("encode_seconds", "decode_seconds", "step_seconds")}
        copied = median(row["gather_seconds"] + row["scatter_seconds"] for row in rows)
        loads.append(RoundLoad(planner.islands, traffic.each_way, **computed, chunks=traffic.chunks, copy_seconds=copied))
    predicted: list[Prediction] = [predict(link, load, pace) for load in loads]
    return Case(
        rate,
        rtt,
        method,
        fmean(load.bytes_each_way for load in loads),
        fmean(each.round_seconds for each in predicted),
        fmean(measured),
        pace.inner_step_seconds / fmean(each.seconds_per_step for each in predicted),
        fmean(_utilization(rows) for rows in steps),
    )


def _rounds(islands: Sequence[Sequence[Row]], fragment: int) -> list[list[Row]]:
    """Rows of each round of a fragment that both islands committed, one of each island."""
    found: dict[int, list[Row]] = defaultdict(list)
    for row in itertools.chain(*islands):
        if row["kind"] == "round" and row["fragment"] == fragment and row["outcome"] == "committed":
            found[row["round"]].append(row)
    return [pair for number, pair in found.items() if number > WARM_UPS and len(pair) == len(islands)]


def _utilization(steps: Sequence[Row]) -> float:
    computing, waiting = (sum(row[key] for row in steps) for key in ("step_seconds", "stall_seconds"))
    return computing / (computing + waiting)


def show(cases: Sequence[Case]) -> None:
    """The table for people."""
    table = Table("link", "", "MB", "round", "predicted", "error", "computing", "predicted", "error", title="two islands")
    for case in cases:
        link = f"{case.rate} {case.rtt_ms:g} ms"
        cells = [f"{case.round_measured:.2f} s", f"{case.round_predicted:.2f} s", f"{case.round_error:+.0%}"]
        cells += [f"{case.utilization_measured:.1%}", f"{case.utilization_predicted:.1%}", f"{100 * case.utilization_error:+.1f}"]
        table.add_row(link, case.method, f"{case.round_bytes / 1e6:.2f}", *cells, style=None if case.good else "red")
    Console(width=110).print(table)


def main() -> None:
    """Run it, show it, and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two links, in about a minute")
    parser.add_argument("--rate", choices=RATES, help="only links of this rate")
    parser.add_argument("--rtt", type=float, help="only links of this round-trip time in ms")
    parser.add_argument("--method", choices=METHODS, help="only this one")
    parser.add_argument("--rounds", type=int, default=5, help="of each fragment that count (5)")
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(f"no links can be made here: {reason}")
    grid = itertools.product(RATES, RTTS, METHODS)
    only = (arguments.rate, arguments.rtt, arguments.method)
    chosen = [cell for cell in grid if all(want in (None, value) for value, want in zip(cell, only, strict=True))]
    cases = []
    for rate, rtt, method in QUICK if arguments.quick else chosen:
        cases.append(measure(rate, rtt, method, 3 if arguments.quick else arguments.rounds))
        print(json.dumps(asdict(cases[-1])), file=sys.stderr, flush=True)
    show(cases)
    worst = {
        "round_error": max(abs(case.round_error) for case in cases),
        "utilization_error": max(abs(case.utilization_error) for case in cases),
    }
    print(json.dumps({**worst, "good": sum(case.good for case in cases), "cases": [asdict(case) for case in cases]}))


if __name__ == "__main__":
    main()
