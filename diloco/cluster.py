"""Replicas of one cluster: what every rank of one ``torchrun`` job does that spans all islands."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from diloco.cluster_facts import ClusterFacts
from diloco.cluster_resume import choose_together
from diloco.cluster_round import ClusterRound
from diloco.config import RunConfig
from diloco.exchange.process_group import Averager
from diloco.from_config import make_fragments, make_outer_lr, make_schedule
from diloco.report import write_report
from diloco.shard_state import ShardState
from diloco.shards import Shards, count_holders
from islands import plugins, resume
from islands.agreement import check_agreement
from islands.checkpoint import Checkpointer
from islands.config_file import ConfigError
from islands.data.base import Corpus
from islands.fragments import schema_of
from islands.initialize import parameter_dtype
from islands.island import Island, build_island, load_corpus, meta_model
from islands.mesh import Grid, check_grid
from islands.metrics import Metrics
from islands.process import Process, is_first_rank, one_of, pick_device, process_group, world_size
from islands.progress import Progress
from islands.resume import Chosen
from islands.run import open_metrics, run_alone
from islands.stopping import Stopping
from islands.train_loop import train


def run_cluster(config: RunConfig) -> None:
    """Check everything, then train all replicas: as one island that averages gradients where ``outer.sync_every`` is 1, else as islands.

    Raises:
        ConfigError: before anything is started, or when the ranks were started with different configurations.
    """
    grid = check_cluster(config, world_size())
    if config.outer.sync_every == 1:
        run_alone(config, config.swarm.islands, config.swarm.max_slots)
        if is_first_rank():
            write_report(config.run.dir)
    else:
        _run_islands(config, grid)


def check_cluster(config: RunConfig, ranks: int) -> Grid:
    """The grid of one island where all ``ranks`` of the job are divided among ``swarm.islands``.

    Raises:
        ConfigError: they can't be.
    """
    islands = config.swarm.islands
    if ranks % islands:
        fitting = [size for size in range(1, min(ranks, config.swarm.max_slots) + 1) if ranks % size == 0]
        raise ConfigError(
            f"swarm.islands: the {ranks} rank{'s' if ranks > 1 else ''} of the job can't be divided among {islands} replicas "
            f"(exchange.type=process_group has them all in one job); start a multiple of {islands} ranks, or set swarm.islands to "
            f"{' or '.join(map(str, fitting))}"
        )
    return check_grid(config, ranks // islands)


def _run_islands(config: RunConfig, grid: Grid) -> None:
    corpus, device = load_corpus(config), pick_device(config.run.device)
    make_fragments(config, schema_of(meta_model(config)))  # refused before anything is started
    with process_group(device, config.run.timeout) as job, Stopping(job, config.checkpoint.grace) as stopping:
        check_agreement(config, job, replicas=config.swarm.islands)
        if ended := train_islands(config, grid, corpus, job, stopping):
            dist.barrier()  # what the islands have written is all there
    if ended and is_first_rank():
        write_report(config.run.dir)


def train_islands(config: RunConfig, grid: Grid, corpus: Corpus, job: Process, stopping: Stopping) -> bool:
    """On all ranks of the job: build, resume, train. Returns whether it came to the end.

    Args:
        grid: of one island.
    """
    islands, told = config.swarm.islands, partial(print, flush=True)
    process, slot = one_of(job, islands), job.rank // grid.world_size
    chosen = choose_together(config, corpus, job, process, slot, islands, told)
    island = build_island(config, process, corpus, replace(grid, islands=islands), job)
    if process.rank == 0:
        resume.leave_behind(config, slot, chosen, told, together=True)
    with closing(open_metrics(island, slot, continues=chosen is not None, make=partial(Metrics, console=slot == 0))) as metrics:
        hook = cluster_round(config, island, metrics)
        progress = _go_on(island, chosen, hook) if chosen else hook.start(Progress(slot=slot))
        stopping.ranks_meet(partial(hook.meeting_after, progress.step))
        if chosen:
            metrics.write("event", what="resumed", detail=chosen.event)
        batches, saved = island.batches(config.swarm.max_slots), replace(progress) if chosen else None
        with Checkpointer(island, metrics, hook, saved=saved, skips=False) as checkpointer:
            ended = train(island, batches, metrics, [hook], progress, checkpointer, stopping)
        what, detail = ("end", "all steps done") if ended else ("stopped", f"on request after step {progress.step}")
        metrics.write("event", what=what, detail=detail)
    return ended


def cluster_round(config: RunConfig, island: Island, metrics: Metrics) -> ClusterRound:
    """The hook of a rank; called on all of them alike."""
    fragments, process = make_fragments(config, schema_of(meta_model(config))), island.process
    parts, optimizer = island.model.parts, plugins.build("diloco.outer_optimizers", config.outer.optimizer)
    holders = count_holders(parts, process)
    shards = [Shards(parts, fragment, holders) for fragment in fragments]
    device = next(parts[0].parameters()).device  # that of the shards, which may be offloaded
    outer_lr, dtype = make_outer_lr(config), parameter_dtype(config)
    states = [ShardState(each.numel, optimizer, outer_lr, dtype, device, config.exchange.offload) for each in shards]
    averager = Averager(island.mesh.root["island"].get_group(), config.outer.codec.type, device)
    schedule = make_schedule(config, len(fragments))
    return ClusterRound(schedule, config.outer, fragments, shards, states, averager, island.traffic, metrics, process, config.swarm.islands)


def _go_on(island: Island, chosen: Chosen, hook: ClusterRound) -> Progress:
    facts = ClusterFacts.from_json(chosen.manifest.facts)
    return hook.go_on(facts, lambda tensors: resume.load(island, chosen, tensors))
