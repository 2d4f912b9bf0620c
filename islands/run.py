"""Train one island alone: a plain sharded trainer."""

from pathlib import Path

from islands.agreement import check_agreement
from islands.config import IslandConfig
from islands.config_file import dump_config
from islands.island import Island, build_island, load_corpus, num_parameters
from islands.mesh import check_grid
from islands.metrics import Metrics
from islands.process import pick_device, process_group, world_size
from islands.strategies.pipeline_plan import num_micro_batches, predicted_bubble
from islands.train_loop import train


def run_alone(config: IslandConfig) -> None:
    """Check everything, then start the ranks and train.

    Raises:
        ConfigError: before any process group exists, or when the ranks were started with different configurations.
    """
    check_grid(config, world_size())
    corpus, device = load_corpus(config), pick_device(config.run.device)
    with process_group(device, config.run.timeout) as process:
        check_agreement(config, process)
        island = build_island(config, process, corpus)
        metrics = open_metrics(island, slot=0)
        train(island, island.batches(), metrics)
        metrics.write("event", what="end", detail="all steps done")
        metrics.close()


def open_metrics(island: Island, slot: int, continues: bool = False) -> Metrics:
    """Metrics of the island in ``slot``, with the resolved configuration beside them and a first row that says what runs.

    Args:
        continues: what an earlier process left in the island's folder belongs to this run too.
    """
    config, process, folder = island.config, island.process, Path(island.config.run.dir)
    first = process.rank == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.resolved.yaml").write_text(dump_config(config))
    metrics = Metrics(folder / f"island-{slot}", slot, first, config.run.tensorboard)
    detail = dict(
        parameters=num_parameters(config),
        ranks=process.world_size,
        grid=str(island.grid),
        device=str(process.device.type),
        steps=config.train.steps,
        global_batch_size=config.train.global_batch_size,
        continues=continues,
    )
    if island.grid.pipeline > 1:
        detail["predicted_bubble"] = predicted_bubble(config.parallel, num_micro_batches(config, island.grid.data))
    metrics.write("event", what="start", detail=detail)
    return metrics
