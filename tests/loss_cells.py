"""One training run of a study: recipe, size and seed in, held-out loss and bytes out. Kept in a file once it is done."""

import hashlib
import json
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from outer_loop import Recorded, outer_round

from diloco.codecs import build_wire
from diloco.config import RunConfig
from diloco.exchange.in_memory import Hub, InMemoryExchange
from diloco.outer_state import OuterState
from islands.config_file import parse_config
from islands.evaluation import Evaluation
from islands.island import Island, build_island, load_corpus, num_parameters
from islands.process import Process
from islands.train_loop import train

ISLANDS = 2
_DEADLINE_SECONDS = 600.0


@dataclass(frozen=True)
class Size:
    """A model and how it is trained.

    Attributes:
        batch: sequences in an inner step of one island.
        final_sequences: held-out sequences on which the trained model is judged.
    """

    model: dict[str, Any]
    seq_len: int
    batch: int
    steps: int
    sync_every: int
    lr: float
    curve_points: int = 5
    final_sequences: int = 512


@dataclass(frozen=True)
class Recipe:
    """What a cell trains with.

    Attributes:
        outer: keys of the section ``outer``; None: one island with the batch of all, which is data-parallel training.
    """

    name: str
    outer: dict[str, Any] | None = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """What a run came to.

    Attributes:
        bytes_sent: by all islands together.
        curve: held-out loss on fewer sequences, over all tokens trained on and all bytes sent until then.
    """

    name: str
    seed: int
    eval_loss: float
    bytes_sent: float
    bits_per_parameter: float
    tokens: int
    rounds: int
    seconds: float
    curve: list[tuple[int, float, float]]


def config_of(recipe: Recipe, size: Size, seed: int) -> RunConfig:
    """The whole configuration. Recipes differ in the section ``outer``, and in the batch where there is one island."""
    islands = 1 if recipe.outer is None else ISLANDS
    raw = dict(
        run=dict(name="loss-per-byte", seed=seed),
        model=size.model,
        data=dict(type="python_stdlib", seq_len=size.seq_len),
        parallel=dict(data_parallel_strategy="ddp"),
        optimizer=dict(type="adamw", lr=size.lr, warmup_steps=size.steps // 15),
        train=dict(
            steps=size.steps,
            global_batch_size=size.batch * ISLANDS // islands,
            eval_every=max(1, size.steps // size.sync_every // size.curve_points) * size.sync_every,
        ),
        outer=dict(sync_every=size.sync_every, **(recipe.outer or {})),
        exchange=dict(type="in_memory", round_deadline=_DEADLINE_SECONDS, min_islands=islands),
        swarm=dict(islands=islands, max_slots=islands),
    )
    return parse_config(RunConfig, raw)


def run_cell(recipe: Recipe, size: Size, seed: int, process: Process, folder: Path) -> Cell:
    """The cell from its file in ``folder``; trained, and written there, if there is none."""
    config = config_of(recipe, size, seed)
    identity = f"{config.model_dump_json()} {size.final_sequences}"
    name = re.sub("[^a-z0-9.]+", "-", recipe.name)
    file = folder / f"{name}-seed{seed}-{hashlib.sha256(identity.encode()).hexdigest()[:10]}.json"
    if file.exists():
        return Cell(**json.loads(file.read_text()))
    found = _train(recipe, config, size, process)
    folder.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(asdict(found)))
    part.rename(file)
    return found


def _train(recipe: Recipe, config: RunConfig, size: Size, process: Process) -> Cell:
    corpus, count, started = load_corpus(config), config.swarm.islands, time.monotonic()
    torch.set_num_threads(1)  # of torch's own: islands are threads already
    islands = [build_island(config, process, corpus) for _ in range(count)]
    hub, metrics = Hub(count), [Recorded() for _ in range(count)]
    if recipe.outer is None:
        train(islands[0], islands[0].batches(), metrics[0])
    else:
        with ThreadPoolExecutor(count) as threads:
            for done in [threads.submit(_train_island, islands[slot], slot, hub, metrics[slot]) for slot in range(count)]:
                done.result()
    parameters, batch_tokens = num_parameters(config), size.batch * ISLANDS * size.seq_len
    sent = [_bytes_sent(metrics, parameters, row["step"]) for row in metrics[0].of("eval")]
    judge = Evaluation(corpus.held_out, size.seq_len, size.final_sequences, islands[0].mesh.data.get_group(), process.device)
    return Cell(
        recipe.name,
        config.run.seed,
        judge(islands[0].model.forward_backward),
        sent[-1],
        statistics.fmean(row["bits_per_parameter"] for row in metrics[0].of("round")) if recipe.outer is not None else 32.0,
        size.steps * batch_tokens,
        len(metrics[0].of("round")) or size.steps,
        round(time.monotonic() - started, 1),
        [(row["step"] * batch_tokens, total, row["loss"]) for row, total in zip(metrics[0].of("eval"), sent)],
    )


def _train_island(island: Island, slot: int, hub: Hub, metrics: Recorded) -> None:
    """One island to its end, in a thread of its own."""
    outer, exchange = island.config.outer, island.config.exchange
    made: list[InMemoryExchange] = []

    def exchange_of(state: OuterState) -> InMemoryExchange:
        limits = exchange.round_deadline, exchange.min_islands, outer.residual_decay
        made.append(InMemoryExchange(hub, slot, state, build_wire(outer.codec), *limits))
        return made[0]

    hook = outer_round(island, exchange_of, metrics)
    try:
        train(island, island.batches(ISLANDS), metrics, [hook], hook.start(made[0].join()))
    finally:
        made[0].close()


def _bytes_sent(metrics: list[Recorded], parameters: int, steps: int) -> int:
    """By all islands together, up to and with inner step ``steps``.

    Data-parallel training sends, of every gradient, ``2 (M-1)/M`` times 4 bytes a parameter from each of M islands (a ring
    all-reduce). Of two islands each sends its encoded contribution, whole, to the ``M-1`` others.
    """
    if len(metrics) == 1:
        return 2 * (ISLANDS - 1) * 4 * parameters * steps
    return sum((ISLANDS - 1) * row["encoded_bytes"] for each in metrics for row in each.of("round") if row["step"] <= steps)
