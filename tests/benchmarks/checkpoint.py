"""What a checkpoint costs: seconds that training stands still, and megabytes a second, beside ``torch.save`` of the same state.

One rank with one thread, model and AdamW state. The first checkpoint, for which memory is taken, is told apart; else they are medians.
``torch.save`` writes into the page cache, as it does for those who use it; a checkpoint is on the disk, and hashed, before it counts.

    python tests/benchmarks/checkpoint.py [--quick] [--folder FOLDER]
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from outer_loop import Recorded  # noqa: E402
from rank_pool import RankPool  # noqa: E402

from islands.checkpoint import Checkpointer  # noqa: E402
from islands.checkpoint_state import tensors_of  # noqa: E402
from islands.config import IslandConfig  # noqa: E402
from islands.config_file import parse_config  # noqa: E402
from islands.island import build_island, load_corpus  # noqa: E402
from islands.process import Process  # noqa: E402
from islands.progress import Progress  # noqa: E402


def measure(process: Process, preset: str, folder: str, turns: int) -> dict[str, Any]:
    """Figures of one rank, in turns: a checkpoint, a ``torch.save``."""
    raw = dict(
        run=dict(dir=folder),
        model=dict(preset=preset),
        data=dict(seq_len=64),
        train=dict(steps=1000, global_batch_size=1, eval_sequences=1),
        checkpoint=dict(keep=1),
    )
    config = parse_config(IslandConfig, raw)
    island, metrics = build_island(config, process, load_corpus(config)), Recorded()
    island.train_step(*island.batches().at(0, 0), 1e-3)  # makes the optimizer's state
    plain, checkpointer = [], Checkpointer(island, metrics)
    for turn in range(1, turns + 2):
        checkpointer.save_last(Progress(step=turn))
        started = time.monotonic()
        torch.save(tensors_of(island), Path(folder) / "plain.pt")
        plain.append(time.monotonic() - started)
    first, *rest = [row["detail"] for row in metrics.of("event")]
    megabytes, plain_seconds = first["bytes"] / 1e6, statistics.median(plain[1:])
    stall, write = (statistics.median(row[key] for row in rest) for key in ("stall_seconds", "write_seconds"))
    return dict(
        megabytes=round(megabytes),
        first_stall_seconds=first["stall_seconds"],
        stall_seconds=stall,
        torch_save_seconds=plain_seconds,
        stall_ratio=stall / plain_seconds,
        write_megabytes_per_second=megabytes / write,
        torch_save_megabytes_per_second=megabytes / plain_seconds,
    )


def main() -> None:
    """Print the figures, and as the last line their JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer turns: under a minute")
    parser.add_argument("--folder", help="where to write; default a folder of its own in the system's place for temporary files")
    arguments = parser.parse_args()
    pool = RankPool(1)
    try:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            preset, turns = ("15M", 5) if arguments.quick else ("60M", 9)
            (figures,) = pool.run(measure, 1, preset, folder, turns, timeout=1500.0)
    finally:
        pool.close()
    told = "{megabytes} MB: training waits {stall_seconds:.3f} s, the first time {first_stall_seconds:.3f} s; "
    told += "torch.save takes {torch_save_seconds:.3f} s"
    print(told.format(**figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
