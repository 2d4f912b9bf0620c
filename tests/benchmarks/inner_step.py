"""What the trainer costs beside a loop written by hand: tokens per second of the same model, batch and optimizer.

One rank against a plain loop, and two ranks of ``ddp`` against torch's DistributedDataParallel in that loop. Both run in the same
processes, in turns, so that a busy machine slows them alike; the figures are medians over the turns.

    python tests/benchmarks/inner_step.py [--quick]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent.parent))

from rank_pool import RankPool  # noqa: E402

from islands.config import IslandConfig  # noqa: E402
from islands.config_file import parse_config  # noqa: E402
from islands.initialize import initialize  # noqa: E402
from islands.island import build_island, load_corpus, meta_model  # noqa: E402
from islands.learning_rate import learning_rate  # noqa: E402
from islands.process import Process  # noqa: E402


def settings(quick: bool) -> dict[str, Any]:
    """A model whose matrix products dominate, as in real training."""
    sizes = dict(preset="quickstart") if quick else dict(preset="15M")
    return dict(
        model=dict(**sizes),
        data=dict(seq_len=256),
        optimizer=dict(lr=1e-3),
        parallel=dict(data_parallel_strategy="ddp"),
        train=dict(steps=1000, global_batch_size=8),
    )


def hand_written(config: IslandConfig, process: Process) -> Callable[[Tensor, Tensor, float], float]:
    """The loop body that everyone writes."""
    model: nn.Module = meta_model(config)
    initialize([model], process.device, torch.float32, config.run.seed)
    if process.world_size > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [dict(params=matrices, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))

    def step(inputs: Tensor, targets: Tensor, lr: float) -> float:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def compare(process: Process, raw: dict[str, Any], turns: int, steps: int) -> dict[str, float]:
    """Tokens per second of both on this rank, medians over ``turns`` of ``steps`` steps each."""
    config = parse_config(IslandConfig, raw)
    island = build_island(config, process, load_corpus(config))
    batches, plain = island.batches(), hand_written(config, process)
    loops: dict[str, Callable[[Tensor, Tensor, float], Any]] = dict(ours=island.train_step, plain=plain)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    losses: dict[str, list[float]] = {name: [] for name in loops}
    at = dict.fromkeys(loops, 0)
    for turn in range(turns + 1):
        for name, loop in loops.items():
            started = time.perf_counter()
            for _ in range(steps):
                result = loop(*batches.at(0, 8 * at[name]), learning_rate(config.optimizer, at[name], 1000, 8))
                losses[name].append(getattr(result, "loss", result))
                at[name] += 1
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - started)
    if process.world_size == 1 and losses["ours"][0] != losses["plain"][0]:
        raise AssertionError(f"the two loops do not train the same model: {losses}")
    tokens = steps * config.train.global_batch_size * config.data.seq_len
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    ratios = [plain / ours for ours, plain in zip(seconds["ours"], seconds["plain"])]
    return dict(ours=rates["ours"], plain=rates["plain"], ratio=statistics.median(ratios))


def main() -> None:
    """Print both comparisons, and as the last line their JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and fewer turns: under a minute")
    quick = parser.parse_args().quick
    turns, steps = (6, 5) if quick else (20, 5)
    pool, results = RankPool(2), {}
    try:
        for name, ranks in (("one_rank", 1), ("ddp_2_ranks", 2)):
            results[name] = pool.run(compare, ranks, settings(quick), turns, steps, timeout=1500.0)[0]
            ours, plain, ratio = results[name].values()
            print(f"{name:>12}: ours {ours:,.0f} tokens/s, by hand {plain:,.0f} tokens/s, ratio {ratio:.3f}")
    finally:
        pool.close()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
