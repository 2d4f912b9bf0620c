"""Held-out loss against k, the steps from one meeting of the replicas of a cluster to the next: what is paid for fewer bytes.

Two replicas of one rank each, in one job (``exchange.type: process_group``). ``outer.sync_every: 1`` averages gradients at every step;
the others average parameters, or step an anchor by what was moved (Nesterov), every k steps. One seed fixes the first parameters
and the order of the text for all of them, so differences are taken seed by seed.

Megabytes are those that a replica sends to the other: of gradients, ``2 (R-1)/R`` times 4 bytes for each parameter and step, as a ring
all-reduce over R = 2 does, and in rounds what their rows say.

    python tests/benchmarks/sync_every.py [--quick] [--seeds 1 2 3] [--steps 300]
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Sequence

sys.path.insert(0, str(Path(__file__).parent.parent))

from outer_loop import Recorded  # noqa: E402
from rank_pool import RankPool  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from diloco.cluster import check_cluster, cluster_round  # noqa: E402
from diloco.config import RunConfig  # noqa: E402
from islands.config_file import parse_config  # noqa: E402
from islands.island import build_island, load_corpus, num_parameters  # noqa: E402
from islands.process import Process, one_of  # noqa: E402
from islands.progress import Progress  # noqa: E402
from islands.train_loop import train  # noqa: E402

REPLICAS = 2
AVERAGING, NESTEROV = dict(type="sgd", lr=1.0, momentum=0.0), dict(type="sgd", lr=0.7, momentum=0.9)
OUTER = dict(gradients=AVERAGING, averaging=AVERAGING, nesterov=NESTEROV)
CELLS = [(1, "gradients"), *((k, outer) for outer in ("averaging", "nesterov") for k in (2, 5, 10, 50))]
QUICK_CELLS = [(1, "gradients"), (10, "averaging"), (10, "nesterov")]
SEQ_LEN, QUICK_SEQ_LEN, QUICK_STEPS = 64, 32, 40


@dataclass(frozen=True)
class Row:
    """One k over all seeds. Spreads are standard deviations between seeds; 0 where there is one only.

    Attributes:
        difference_percent: of the loss to that of k = 1, the mean of the differences within each seed.
        megabytes, megabytes_a_step: that a replica sends.
    """

    sync_every: int
    outer: str
    eval_loss: float
    eval_loss_std: float
    difference_percent: float
    difference_percent_std: float
    megabytes_a_step: float
    megabytes: float


def settings(sync_every: int, outer: str, seed: int, steps: int, seq_len: int) -> dict[str, Any]:
    """The whole configuration of a cell."""
    return dict(
        run=dict(name="sync-every", seed=seed),
        model=dict(preset="quickstart"),
        data=dict(type="python_stdlib", seq_len=seq_len),
        optimizer=dict(type="adamw", lr=3e-3, warmup_steps=steps // 15),
        train=dict(steps=steps, global_batch_size=4, eval_sequences=512 if steps > QUICK_STEPS else 64),
        outer=dict(sync_every=sync_every, optimizer=OUTER[outer]),
        exchange=dict(type="process_group"),
        swarm=dict(islands=REPLICAS, max_slots=REPLICAS),
    )


def run_cell(process: Process, raw: dict[str, Any]) -> tuple[float, int]:
    """Train one replica of the job. Returns held-out loss of what they all end with, and bytes that it sent to the others."""
    config, metrics = parse_config(RunConfig, raw), Recorded()
    grid, corpus = check_cluster(config, process.world_size), load_corpus(config)
    if config.outer.sync_every == 1:
        island = build_island(config, process, corpus, replace(grid, replicas=REPLICAS))
        train(island, island.batches(REPLICAS), metrics)
        sent = 2 * (REPLICAS - 1) * 4 * num_parameters(config) // REPLICAS * config.train.steps
    else:
        mine, slot = one_of(process, REPLICAS), process.rank // grid.world_size
        island = build_island(config, mine, corpus, replace(grid, islands=REPLICAS), process)
        hook = cluster_round(config, island, metrics)
        train(island, island.batches(REPLICAS), metrics, [hook], hook.start(Progress(slot=slot)))
        sent = sum(row["bytes_sent"] for row in metrics.of("round"))
    return metrics.of("eval")[-1]["loss"], sent


def row_of(cell: tuple[int, str], found: Sequence[tuple[float, int]], reference: Sequence[tuple[float, int]], steps: int) -> Row:
    """What the seeds of one cell come to, beside those of k = 1."""
    losses, megabytes = [loss for loss, _ in found], found[0][1] / 1e6
    differences = [100 * (loss / other - 1) for loss, (other, _) in zip(losses, reference, strict=True)]
    spread = statistics.stdev if len(found) > 1 else lambda values: 0.0
    means = [figure for values in (losses, differences) for figure in (statistics.fmean(values), spread(values))]
    return Row(*cell, *means, megabytes / steps, megabytes)


def show(rows: Sequence[Row], title: str) -> None:
    """The table, for people."""
    table = Table(title=title, title_justify="left")
    for head in ("k", "outer", "eval loss", "to k = 1, %", "MB a step", "MB in all"):
        table.add_column(head, justify="left" if head == "outer" else "right")
    for row in rows:
        table.add_row(
            f"{row.sync_every}",
            row.outer,
            f"{row.eval_loss:.4f} ± {row.eval_loss_std:.4f}",
            f"{row.difference_percent:+.2f} ± {row.difference_percent_std:.2f}",
            f"{row.megabytes_a_step:.3f}",
            f"{row.megabytes:,.1f}",
        )
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)


def main() -> None:
    """Run all cells, one after another, and print the figures, and as the last line their JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three cells of few steps with one seed: under a minute")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300, help="of each replica")
    arguments = parser.parse_args()
    cells, seeds, steps, seq_len = CELLS, arguments.seeds, arguments.steps, SEQ_LEN
    if arguments.quick:
        cells, seeds, steps, seq_len = QUICK_CELLS, [1], QUICK_STEPS, QUICK_SEQ_LEN
    found: dict[tuple[int, str], list[tuple[float, int]]] = {cell: [] for cell in cells}
    pool = RankPool(REPLICAS)
    try:
        for seed in seeds:
            for cell in cells:
                started = time.monotonic()
                first, *_ = pool.run(run_cell, REPLICAS, settings(*cell, seed, steps, seq_len), timeout=1800.0)
                found[cell].append(first)
                print(f"k {cell[0]}, {cell[1]}, seed {seed}: loss {first[0]:.4f} in {time.monotonic() - started:.0f} s", flush=True)
    finally:
        pool.close()
    rows = [row_of(cell, found[cell], found[cells[0]], steps) for cell in cells]
    tokens = REPLICAS * 4 * seq_len * steps
    show(rows, f"1.05M parameters, {REPLICAS} replicas, {steps} steps, {tokens:,} tokens, seeds {seeds}")
    print(json.dumps(dict(steps=steps, tokens=tokens, seeds=seeds, rows=[asdict(row) for row in rows])))


if __name__ == "__main__":
    main()
