"""Train one island alone: a plain sharded trainer."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable

from islands import resume
from islands.agreement import check_agreement
from islands.checkpoint import Checkpointer
from islands.checkpoint_part import Saved
from islands.config import IslandConfig
from islands.config_file import ConfigError, dump_config
from islands.data.base import NUM_BYTES, Corpus
from islands.island import Island, build_island, load_corpus, num_parameters
from islands.mesh import check_grid
from islands.metrics import Metrics
from islands.process import is_first_rank, num_restarts, pick_device, process_group, world_size
from islands.resume import Chosen
from islands.sharing import FirstRankSays
from islands.stopping import Stopping
from islands.strategies.pipeline_plan import num_micro_batches, predicted_bubble
from islands.train_loop import train

_SLOT = 0  # of an island without others


def run_alone(config: IslandConfig, replicas: int = 1, max_slots: int = 1) -> None:
    """Check everything, then start the ranks and train, from the checkpoint that ``train.resume`` leads to.

    Args:
        replicas: of the grid that ``config`` describes: hybrid shard, as they average gradients at every step. Each trains on the batches
            of a slot of its own, of ``max_slots``.

    Raises:
        ConfigError: before any process group exists, or when the ranks were started with different configurations.
    """
    grid = replace(check_grid(config, world_size() // replicas), replicas=replicas)
    corpus, device = load_corpus(config), pick_device(config.run.device)
    told, restarted = partial(print, flush=True), num_restarts() > 0
    part = _Slots(max_slots) if max_slots > 1 else None
    chosen = _choose(config, told, restarted, part.facts if part else {}) if is_first_rank() else None
    with process_group(device, config.run.timeout) as process, Stopping(process, config.checkpoint.grace) as stopping:
        check_agreement(config, process, replicas=replicas)
        chosen = FirstRankSays(process, "checkpoint to resume from")(chosen, config.run.timeout)
        island = build_island(config, process, corpus, grid)
        progress = resume.load(island, chosen) if chosen else None
        if is_first_rank():
            resume.leave_behind(config, _SLOT, chosen, told, restarted)
        metrics = open_metrics(island, _SLOT, continues=chosen is not None)
        if chosen:
            metrics.write("event", what="resumed", detail=chosen.event)
        with Checkpointer(island, metrics, part, saved=progress) as checkpointer:
            if train(island, island.batches(max_slots), metrics, progress=progress, checkpointer=checkpointer, stop=stopping):
                metrics.write("event", what="end", detail="all steps done")
            else:
                metrics.write("event", what="stopped", detail="as asked; started again, it goes on from its last checkpoint")
        metrics.close()


class _Slots:
    """What a checkpoint tells of an island whose samples are those of some slots of many."""

    def __init__(self, max_slots: int) -> None:
        self.facts = {"max_slots": max_slots}

    def snapshot(self) -> Callable[[], Saved]:
        """See :class:`~islands.checkpoint_part.CheckpointPart`."""
        return lambda: Saved(self.facts)


def _choose(config: IslandConfig, told: Callable[[str], None], restarted: bool, facts: dict[str, int]) -> Chosen | None:
    """Args: facts: that the island's own checkpoints have."""
    chosen = resume.choose(config, _SLOT, told, restarted)
    if chosen and chosen.manifest.facts != facts:
        raise ConfigError(
            f"{chosen.folder} is of an island that has its samples by another rule (it has rounds with others, or gradients of them), and "
            "would go on with others here; go on with the command, exchange.type and outer.sync_every that it had. To train otherwise, set "
            "another run.dir; to begin with its weights, export them (diloco export) and set model.init_from to that folder"
        )
    return chosen


def open_metrics(island: Island, slot: int, continues: bool = False, make: Callable[..., Metrics] = Metrics) -> Metrics:
    """Metrics of the island in ``slot``, with the resolved configuration beside them and a first row that says what runs.

    Args:
        continues: what an earlier process left in the island's folder belongs to this run too.
        make: takes the arguments of :class:`~islands.metrics.Metrics`.
    """
    config, process, folder = island.config, island.process, Path(island.config.run.dir)
    first = process.rank == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        written = folder / f".config.{slot}.yaml"  # several islands may do so at once
        written.write_text(dump_config(config))
        written.replace(folder / "config.resolved.yaml")
    metrics = make(folder / f"island-{slot}", slot, first, config.run.tensorboard)
    detail = dict(
        parameters=num_parameters(config),
        ranks=process.world_size,
        replicas=island.grid.replicas,
        grid=str(island.grid),
        device=str(process.device.type),
        steps=config.train.steps,
        global_batch_size=config.train.global_batch_size,
        continues=continues,
    )
    if island.grid.pipeline > 1:
        detail["predicted_bubble"] = predicted_bubble(config.parallel, num_micro_batches(config, island.grid.data))
    metrics.write("event", what="start", detail=detail)
    if warning := other_tokens(config, island.corpus):
        metrics.write("event", what="warning", detail=warning)
    return metrics


def other_tokens(config: IslandConfig, corpus: Corpus) -> str:
    """That the weights in ``model.init_from`` were trained on other tokens than the text has; empty where nothing says so."""
    folder = config.model.init_from
    if not folder or corpus.vocab_size != NUM_BYTES or not (Path(folder) / "tokenizer.json").exists():
        return ""
    return (
        f"the tokens of data.type={config.data.type} are bytes, and model.init_from={folder} has a tokenizer: its weights were trained on "
        "other tokens, and have to learn these from the beginning"
    )
