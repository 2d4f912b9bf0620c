"""How much of its time an island trains on a slow link: ours, ours without codec and overlap, and hivemind's own averager.

Two islands, whole ``python -m diloco`` processes in network namespaces, over a link of a given rate, round-trip time and loss
(TCP's cubic). They really train, on a model whose fp32 parameters take the line about 3 seconds (1 at 1 Gbit/s); an inner
step is made to last a fixed time, most of it asleep, as both islands and the link share this machine's cores. All three
have the same H:

    blocking_fp32       codec none, overlap 0
    hivemind_averager   the same loop, with hivemind's DecentralizedAverager in the place of our exchange (averager_island.py)
    ours                codec int4, fragments, overlap

``utilization`` is 1 - stall / seconds after the first step, of the mean of both islands; a wait that had not ended when the run
was stopped is a stall. ``round_seconds`` is from launch to outcome; ``megabytes`` what an island put on the link for each inner
step x H; ``line`` the share of the link's bytes that this used; ``line_seconds`` how long the bytes that an island sends in a
round take at the link's rate, which is full both ways, and ``transfer_share`` (of blocking_fp32, else null) that over the mean of the
rounds' ``transfer_seconds``: 1 where nothing but the link limits them. With ``--quality`` (and in the whole grid) all three also train the
same steps over loopback without any pause, and ``eval_loss`` is compared.

    python tests/benchmarks/wan.py [--quick] [--quality] [--rate 100mbit] [--rtt 50] [--loss 0.001] [--seconds 30]

``--quick``: 100 Mbit/s, 50 ms, 0.1 % only, in about a minute. Targets there: ours at least 0.98 where blocking_fp32 is below 0.6.
"""

import argparse
import itertools
import json
import os
import signal
import sys
import sysconfig
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "swarm"))

import faulty_island  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from wan import WanLink, bits_per_second, missing  # noqa: E402

import averager_island  # noqa: E402
from cluster import Cluster  # noqa: E402
from island_process import IslandProcess, marked  # noqa: E402

H = 20
QUALITY_STEPS = 240
RATES, RTTS, LOSSES = ("10mbit", "100mbit", "1gbit"), (0.0, 50.0, 150.0), (0.0, 0.001)
METHODS = ("blocking_fp32", "hivemind_averager", "ours")
CONNECTIONS = 8


@dataclass(frozen=True)
class Load:
    """What is trained on links of one rate.

    Attributes:
        model: overrides; ``step_seconds``: of an inner step.
    """

    model: tuple[str, ...]
    step_seconds: float


def sizes(hidden: int, layers: int, heads: int, intermediate: int) -> tuple[str, ...]:
    """Of a model."""
    values = {"hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": heads}
    return tuple(f"model.{key}={value}" for key, value in {**values, "intermediate_size": intermediate}.items())


LOADS = {
    "10mbit": Load(sizes(128, 5, 4, 320), 0.2),  # 1M parameters, 4 MB
    "100mbit": Load((*sizes(384, 5, 6, 1024), "train.global_batch_size=1"), 0.2),  # 9M, 36 MB
    "1gbit": Load((*sizes(640, 6, 10, 1728), "train.global_batch_size=1"), 0.5),  # 30M, 120 MB
}

TEXT = f"data.paths=[{sysconfig.get_path('stdlib')}/*.py]"
COMMON = (f"outer.sync_every={H}", "exchange.peer_timeout=30", "exchange.round_deadline=600", "data.seq_len=32", TEXT)
SETTINGS = {
    "blocking_fp32": (f"swarm.data_connections={CONNECTIONS}",),
    "hivemind_averager": (),
    "ours": (
        f"swarm.data_connections={CONNECTIONS}",
        "outer.codec.type=int4",
        "outer.fragments=4",
        "outer.overlap=8",
        "outer.merge_alpha=0.5",
    ),
}


def script(method: str) -> str:
    """What an island of a method runs."""
    return averager_island.__file__ if method == "hivemind_averager" else faulty_island.__file__


def measure(method: str, rate: str, rtt: float, loss: float, seconds: float) -> dict[str, Any]:
    """One run on one link."""
    load = LOADS[rate]
    settings = [*COMMON, *load.model, *SETTINGS[method]]
    with tempfile.TemporaryDirectory() as folder, WanLink(2, rate, rtt, loss, tuned=True) as link:
        cluster = Cluster(Path(folder), 2, settings, link, step_seconds=load.step_seconds, script=script(method))
        with cluster:
            cluster.wait_until_training()
            before = {pair: counts.bytes for pair, counts in link.counts().items()}
            began = time.monotonic()
            while time.monotonic() < began + seconds:
                cluster.check()
                time.sleep(0.1)
            until, passed = time.time(), time.monotonic() - began
            sent = fmean(counts.bytes - before[pair] for pair, counts in link.counts().items())
            kill(cluster)
        islands = [figures(island, until, load.step_seconds) for island in cluster.islands]
    merged = {key: fmean(each[key] for each in islands) for key in islands[0]}
    rounds = merged["steps"] / H
    line_seconds = 8 * merged["round_bytes"] / bits_per_second(rate) if merged["rounds"] else None
    share = line_seconds / merged["transfer_seconds"] if line_seconds and method == "blocking_fp32" else None
    return {
        "rate": rate,
        "rtt_ms": rtt,
        "loss": loss,
        "method": method,
        "utilization": round(merged["utilization"], 4),
        "round_seconds": round(merged["round_seconds"], 2),
        "rounds": merged["rounds"],
        "megabytes": round(sent / 1e6 / max(rounds, 1e-9), 2),
        "line": round(8 * sent / passed / bits_per_second(rate), 3),
        "line_seconds": line_seconds and round(line_seconds, 3),
        "transfer_share": share and round(share, 3),
    }


def figures(island: IslandProcess, until: float, step_seconds: float) -> dict[str, float]:
    """Of one island, up to a moment."""
    rows = [row for row in island.lives[-1].rows if row["time"] <= until]
    steps = [row for row in rows if row["kind"] == "step"]
    rounds = [row for row in rows if row["kind"] == "round" and row["outcome"] == "committed"]
    stalled = sum(row["stall_seconds"] for row in steps[1:])
    stalled += max(0.0, until - steps[-1]["time"] - 2 * step_seconds)  # it waits still
    waiting = [until - steps[-1]["time"]] if not rounds else [row["exchange_seconds"] for row in rounds]
    return {
        "utilization": 1 - stalled / (until - steps[0]["time"]),
        "round_seconds": fmean(waiting),
        "round_bytes": fmean([row["bytes_sent"] for row in rounds] or [0]),
        "transfer_seconds": fmean([row["transfer_seconds"] for row in rounds] or [0]),
        "rounds": len(rounds),
        "steps": len(steps) - 1,
    }


def kill(cluster: Cluster) -> None:
    """End all its processes at once: those of hivemind's averager would live on."""
    for island in cluster.islands:
        island.read()
        island.lives[-1].ends(by_us=True)
    for pid in marked(cluster.mark):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def eval_loss(method: str) -> float:
    """After the same steps over loopback, as fast as they go."""
    settings = [*COMMON, *LOADS["10mbit"].model, *SETTINGS[method], f"train.eval_every={QUALITY_STEPS}", "train.eval_sequences=64"]
    with tempfile.TemporaryDirectory() as folder:
        with Cluster(Path(folder), 2, settings, steps=QUALITY_STEPS, script=script(method)) as cluster:
            last = [0.0, 0.0]

            def ended() -> bool:
                for slot, island in enumerate(cluster.islands):
                    losses = [row["loss"] for row in island.rows("eval") if row["step"] >= QUALITY_STEPS]
                    last[slot] = losses[-1] if losses else 0.0
                return all(last)

            cluster.wait_until(ended, timeout=600)
            kill(cluster)
    return fmean(last)


def grid(links: list[tuple[str, float, float]], seconds: float) -> list[dict[str, Any]]:
    """All links with all methods, one after the other."""
    rows = []
    for (rate, rtt, loss), method in itertools.product(links, METHODS):
        rows.append(measure(method, rate, rtt, loss, seconds))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def quick() -> list[dict[str, Any]]:
    """One link. The two that wait for the link most of the time run side by side, each on a link of its own; ours alone."""
    link = "100mbit", 50.0, 0.001
    with ThreadPoolExecutor() as pool:
        beside = pool.submit(measure, "hivemind_averager", *link, seconds=26)
        rows = [measure("blocking_fp32", *link, seconds=26), beside.result()]
    return [*rows, measure("ours", *link, seconds=16)]


def show(rows: list[dict[str, Any]], losses: dict[str, float]) -> None:
    """The table for people."""
    table = Table("link", "", "utilization", "round", "MB a round", "line used", title=f"H={H}, two islands")
    for row in rows:
        link = f"{row['rate']} {row['rtt_ms']:g} ms {100 * row['loss']:g} %"
        cells = [f"{row['utilization']:.1%}", f"{row['round_seconds']:.2f} s", f"{row['megabytes']:.2f}", f"{row['line']:.1%}"]
        table.add_row(link, row["method"], *cells, end_section=row["method"] == METHODS[-1])
    console = Console(width=110)
    console.print(table)
    for method, loss in losses.items():
        console.print(f"eval loss of {method} after {QUALITY_STEPS} steps: {loss:.4f}")


def main() -> None:
    """Run it, show it, and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one link, in about a minute")
    parser.add_argument("--quality", action="store_true", help="compare evaluation losses as well")
    parser.add_argument("--rate", choices=RATES, help="only links of this rate")
    parser.add_argument("--rtt", type=float, help="only links of this round-trip time in ms")
    parser.add_argument("--loss", type=float, help="only links with this share of packets lost")
    parser.add_argument("--seconds", type=float, default=24.0, help="of training, for each run (24)")
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(f"no links can be made here: {reason}")
    if arguments.quick:
        rows = quick()
    else:
        chosen = [
            [value for value in values if only in (None, value)]
            for values, only in ((RATES, arguments.rate), (RTTS, arguments.rtt), (LOSSES, arguments.loss))
        ]
        rows = grid(list(itertools.product(*chosen)), arguments.seconds)
    whole = not (arguments.quick or arguments.rate or arguments.rtt is not None or arguments.loss is not None)
    losses = {method: eval_loss(method) for method in METHODS} if whole or arguments.quality else {}
    show(rows, losses)
    goal = [row for row in rows if (row["rate"], row["rtt_ms"], row["loss"]) == ("100mbit", 50.0, 0.001)] or rows
    result = {"utilization": {row["method"]: row["utilization"] for row in goal}, "eval_loss": losses, "rows": rows}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
