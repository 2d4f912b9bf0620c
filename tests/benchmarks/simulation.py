"""What it costs to simulate islands: seconds of eight beside eight times one island alone, and memory of up to 64.

The one island is an ordinary one, with the same outer rounds by itself. Both train in the same process in turns, so that a busy
machine slows them alike; the ratios are medians over the turns, of seconds on the clock and of those that the CPU worked. Peak memory is
that of processes of their own.

    python tests/benchmarks/simulation.py [--quick]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Callable

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from outer_loop import Recorded, outer_round  # noqa: E402
from rank_pool import RankPool  # noqa: E402

from diloco.config import RunConfig  # noqa: E402
from diloco.exchange.in_memory import Hub, InMemoryExchange  # noqa: E402
from diloco.from_config import make_wire  # noqa: E402
from diloco.simulate import Simulation  # noqa: E402
from islands.config_file import parse_config  # noqa: E402
from islands.island import build_island, load_corpus  # noqa: E402
from islands.out_of_memory import peak_memory_bytes  # noqa: E402
from islands.process import Process  # noqa: E402
from islands.train_loop import train  # noqa: E402

ISLANDS = 8


class Closing(Recorded):
    """Rows in a list, as an island's own are closed at its end."""

    def close(self) -> None:
        """Nothing is open."""


def make_config(preset: str, islands: int, steps: int) -> RunConfig:
    """A round every ten steps, as int4."""
    return parse_config(
        RunConfig,
        dict(
            model=dict(preset=preset),
            data=dict(seq_len=128),
            train=dict(steps=steps, global_batch_size=4, eval_sequences=4),
            outer=dict(sync_every=10, codec=dict(type="int4")),
            exchange=dict(type="in_memory"),
            swarm=dict(islands=islands, max_slots=64),
        ),
    )


def simulated(process: Process, config: RunConfig) -> Callable[[], object]:
    """To be run: all islands."""
    return Simulation(config, process, load_corpus(config), lambda *told: Closing()).run


def alone(process: Process, config: RunConfig) -> Callable[[], object]:
    """To be run: one island, whose rounds have no other member."""
    island, metrics, exchanges = build_island(config, process, load_corpus(config)), Recorded(), []

    def exchange(state: Any) -> InMemoryExchange:
        exchanges.append(InMemoryExchange(Hub(1), 0, state, make_wire(config), 60.0))
        return exchanges[0]

    hook = outer_round(island, exchange, metrics)
    progress = hook.start(exchanges[0].join())
    return lambda: train(island, island.batches(config.swarm.max_slots), metrics, [hook], progress)


def seconds_of(run: Callable[[], object]) -> tuple[float, float]:
    """On the clock, and of the CPU."""
    began, worked = time.monotonic(), time.process_time()
    run()
    return time.monotonic() - began, time.process_time() - worked


def compare(process: Process, preset: str, turns: int, steps: int) -> dict[str, float]:
    """Cost of one step of one island, simulated and alone."""
    torch.set_num_threads(1)
    taken: dict[str, list[tuple[float, float]]] = dict(alone=[], simulated=[])
    for turn in range(turns + 1):
        one = seconds_of(alone(process, make_config(preset, 1, steps)))
        many = seconds_of(simulated(process, make_config(preset, ISLANDS, steps)))
        if turn:  # the first turn warms up
            taken["alone"].append(one)
            taken["simulated"].append(many)
    pairs = zip(taken["alone"], taken["simulated"], strict=True)
    ratios = [(many[0] / ISLANDS / one[0], many[1] / ISLANDS / one[1]) for one, many in pairs]
    return dict(
        alone_step_seconds=statistics.median(clock for clock, _ in taken["alone"]) / steps,
        simulated_step_seconds=statistics.median(clock for clock, _ in taken["simulated"]) / steps / ISLANDS,
        clock_ratio=statistics.median(clock for clock, _ in ratios),
        cpu_ratio=statistics.median(cpu for _, cpu in ratios),
    )


def peak(process: Process, preset: str, islands: int) -> int:
    """Bytes, after rounds of so many islands."""
    torch.set_num_threads(1)
    run = simulated(process, make_config(preset, islands, 2)) if islands > 1 else alone(process, make_config(preset, 1, 2))
    run()
    return peak_memory_bytes(process.device)


def in_fresh_process(measure: Callable[..., Any], *arguments: Any) -> Any:
    """What it returns from a process that did nothing else."""
    pool = RankPool(1)
    try:
        return pool.run(measure, 1, *arguments, timeout=3000.0)[0]
    finally:
        pool.close()


def main() -> None:
    """Print the figures, and as the last line their JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer turns and steps: under a minute")
    turns, steps = (2, 10) if parser.parse_args().quick else (5, 40)
    preset = "quickstart"
    figures = in_fresh_process(compare, preset, turns, steps)
    peaks = {islands: in_fresh_process(peak, preset, islands) for islands in (1, ISLANDS, 64)}
    figures |= {f"peak_megabytes_{islands}": num_bytes / 1e6 for islands, num_bytes in peaks.items()}
    figures["megabytes_per_island"] = (peaks[64] - peaks[ISLANDS]) / (64 - ISLANDS) / 1e6
    told = "a step takes {simulated_step_seconds:.4f} s for each of 8 islands and {alone_step_seconds:.4f} s alone: "
    told += "{clock_ratio:.3f} times, {cpu_ratio:.3f} by the CPU; peak memory {peak_megabytes_1:.0f} MB for 1 island, "
    told += "{peak_megabytes_8:.0f} for 8, {peak_megabytes_64:.0f} for 64"
    print(told.format(**figures))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
