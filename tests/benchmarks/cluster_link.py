"""Tokens a second of one cluster over the link between its nodes, by how often the replicas meet.

Two replicas of two ranks each (zero3 inside), whole ``torchrun --nnodes 2`` jobs in two network namespaces, joined by an emulated link
of a given rate (1 ms, TCP's cubic) that gloo's all-reduces have to take. They really train 5.5M parameters, of which gradients or
parameters are 22 MB in fp32.

An inner step is made to last 0.5 s, most of it asleep, as four ranks and the link share this machine's cores: nothing of that length is
computed. What gradients take on the link counts only where it makes a step longer than that, as if they travelled beside the
computation: the best that ``k = 1`` can hope for. A round without overlap always counts.

``full_speed`` is the share of the tokens/s of steps that last 0.5 s and wait for nothing; ``inner_step_seconds`` the median length of a
step, without rounds: where it is more than 0.5 and k is not 1, the processors were the limit too. ``megabytes`` are IP bytes that a node
sent to the other for each step, as the link counted them. The first period, in which memory and connections are new, is not counted, nor
the last.

    python tests/benchmarks/cluster_link.py [--quick] [--rate 100mbit]

``--quick``: 100 Mbit/s only, and not k = 50; under a minute. The two that mostly wait for their links run side by side.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "swarm"))

import faulty_island  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from wan import WanLink, missing  # noqa: E402

from diloco.run_files import Row, RowTail, metrics_file  # noqa: E402

REPLICAS, RANKS, STEP_SECONDS, RTT_MS = 2, 2, 0.5, 1.0
BATCH, SEQ_LEN = 2, 32  # of one replica
RATES = ("1gbit", "100mbit")
_PORT = 29500
_SECONDS = 300.0  # that a job may take


@dataclass(frozen=True)
class Method:
    """How often replicas meet, for how many periods, and how long they train on meanwhile."""

    sync_every: int
    periods: int
    overlap: int = 0

    def __str__(self) -> str:
        return f"k = {self.sync_every}" + (f", overlap {self.overlap}" if self.overlap else "")

    @property
    def window(self) -> tuple[int, int]:
        """The inner steps after which counting begins and ends: whole periods, and a round that begins in it may end in it."""
        return self.sync_every, self.sync_every * (self.periods - 1)


METHODS = [Method(1, 22), Method(10, 6), Method(10, 6, overlap=8), Method(50, 3)]
QUICK = [Method(1, 5), Method(10, 3), Method(10, 3, overlap=8)]


@dataclass(frozen=True)
class Figures:
    """Of one run; see the top of this file."""

    rate: str
    method: str
    tokens_per_second: float
    full_speed: float
    inner_step_seconds: float
    megabytes: float


def settings(method: Method, folder: Path) -> dict[str, Any]:
    """The configuration of a job."""
    return dict(
        run=dict(dir=str(folder), timeout=_SECONDS),
        model=dict(hidden_size=384, num_layers=3, num_heads=6, num_kv_heads=6, intermediate_size=1024),
        data=dict(type="python_stdlib", seq_len=SEQ_LEN),
        train=dict(steps=method.sync_every * method.periods, global_batch_size=BATCH, eval_sequences=4),
        outer=dict(sync_every=method.sync_every, overlap=method.overlap, optimizer=dict(type="sgd", lr=1.0, momentum=0.0)),
        exchange=dict(type="process_group"),
        swarm=dict(islands=REPLICAS, max_slots=REPLICAS),
    )


def start(config: Path, node: int, link: WanLink) -> subprocess.Popen:
    """``torchrun`` of one node, whose log lies beside ``config``."""
    where = [f"--nnodes={REPLICAS}", f"--node-rank={node}", f"--master-addr={link.address(0)}", f"--master-port={_PORT}"]
    arguments = [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={RANKS}", faulty_island.__file__, str(config)]
    environment = {
        **os.environ,
        "TEST_FAULTS": str(config.parent),
        "TEST_STEP_SECONDS": str(STEP_SECONDS),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "wan0",
    }
    with config.with_name(f"log-{node}.txt").open("wb") as log:
        return subprocess.Popen(link.command(node, arguments), env=environment, stdout=log, stderr=subprocess.STDOUT)


def measure(method: Method, rate: str) -> Figures:
    """One job on one link.

    Raises:
        RuntimeError: it failed, or took too long; with its last lines.
    """
    with tempfile.TemporaryDirectory() as folder, WanLink(REPLICAS, rate, RTT_MS, tuned=True) as link:
        config = Path(folder) / "config.yaml"
        config.write_text(json.dumps(settings(method, Path(folder) / "run")))
        nodes = [start(config, node, link) for node in range(REPLICAS)]
        try:
            steps, sent = watch(method, Path(folder), nodes, link)
        finally:
            for node in nodes:
                node.kill()
                node.wait()
    count, step_seconds = len(steps) - 1, [row["step_seconds"] for row in steps[1:]]
    each = (steps[-1]["time"] - steps[0]["time"]) / count  # rounds included
    tokens = REPLICAS * BATCH * SEQ_LEN
    return Figures(rate, str(method), tokens / each, STEP_SECONDS / each, statistics.median(step_seconds), sent / count / 1e6)


def watch(method: Method, folder: Path, nodes: list[subprocess.Popen], link: WanLink) -> tuple[list[Row], float]:
    """The rows of the steps from one edge of the window to the other, and bytes that a node sent meanwhile."""
    rows, steps, sent = RowTail(metrics_file(folder / "run", 0)), [], []
    first, last = method.window
    deadline = time.monotonic() + _SECONDS
    while len(steps) <= last - first:
        if time.monotonic() > deadline or any(node.poll() for node in nodes):
            logs = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("log-*.txt")))
            raise RuntimeError(f"{method} failed, or took more than {_SECONDS:g} s:\n{logs}")
        for row in rows.read():
            if row["kind"] == "step" and first <= row["step"] <= last:
                steps.append(row)
                sent.append(sum(counts.bytes for counts in link.counts().values()) / REPLICAS)
        time.sleep(0.02)
    return steps, sent[-1] - sent[0]


def quick() -> list[Figures]:
    """One link."""
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(measure, method, "100mbit") for method in QUICK if not method.overlap]
        rows = [each.result() for each in waiting]
    return [*rows, *(measure(method, "100mbit") for method in QUICK if method.overlap)]


def show(rows: list[Figures]) -> None:
    """The table, for people."""
    table = Table("link", "", "tokens/s", "of full speed", "inner step", "MB a step", title=f"{REPLICAS} replicas of {RANKS} ranks")
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].rate != row.rate
        figures = f"{row.tokens_per_second:,.0f}", f"{row.full_speed:.0%}", f"{row.inner_step_seconds:.2f} s", f"{row.megabytes:.2f}"
        table.add_row(row.rate, row.method, *figures, end_section=last)
    Console(width=110).print(table)


def main() -> None:
    """Run all, show them, and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one rate and few steps: under a minute")
    parser.add_argument("--rate", choices=RATES, help="only links of this rate")
    arguments = parser.parse_args()
    if reason := missing():
        sys.exit(f"no links can be made here: {reason}")
    rates = [arguments.rate] if arguments.rate else RATES
    rows = quick() if arguments.quick else [measure(method, rate) for rate in rates for method in METHODS]
    show(rows)
    print(json.dumps(dict(step_seconds=STEP_SECONDS, rtt_ms=RTT_MS, rows=[asdict(row) for row in rows])))


if __name__ == "__main__":
    main()
