"""One island, put together: mesh, model, optimizer, data."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from islands import plugins
from islands.config import IslandConfig
from islands.config_file import ConfigError
from islands.data.base import Batches, Corpus, Sampler, num_samples
from islands.evaluation import Evaluation
from islands.initialize import cast_parameters, parameter_dtype
from islands.mesh import Grid, IslandMesh, build_mesh, check_grid
from islands.parallelize import ParallelModel, parallelize
from islands.process import Process
from islands.traffic import Traffic
from islands.train_step import TrainStep
from islands.watchdog import Watchdog


def meta_model(config: IslandConfig) -> nn.Module:
    """The whole model without memory: for its names and shapes, and to be sharded before it is filled."""
    with torch.device("meta"):
        model = plugins.load("islands.models", config.model.type).build(config.model, config.data.seq_len)
    return cast_parameters(model, parameter_dtype(config))


def num_parameters(config: IslandConfig) -> int:
    """Of the whole model."""
    return sum(parameter.numel() for parameter in meta_model(config).parameters())


def load_corpus(config: IslandConfig) -> Corpus:
    """The text of the run.

    Raises:
        ConfigError: files are missing, too short for one sequence, or need a larger vocabulary than the model has.
    """
    corpus = plugins.build("islands.data", config.data)
    if not num_samples(corpus.train, config.data.seq_len):
        raise ConfigError(
            f"data.seq_len: {config.data.seq_len} is more than the {len(corpus.train)} tokens of the training text; "
            "give more text or a shorter sequence"
        )
    held_out, sequences = num_samples(corpus.held_out, config.data.seq_len), config.train.eval_sequences
    if held_out < sequences:
        raise ConfigError(
            f"train.eval_sequences: {sequences} sequences of data.seq_len={config.data.seq_len} are more than the {held_out} in "
            "the held-out text; lower either, or raise data.held_out"
        )
    if corpus.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {config.model.vocab_size} is less than the {corpus.vocab_size} tokens that "
            f"data.type={config.data.type} has; set it to at least that"
        )
    return corpus


@dataclass(frozen=True)
class Island:
    """What a rank needs to train: its part of the model, and how to step and evaluate it.

    Attributes:
        traffic: where the job has replicas, whose links may be slow.
    """

    config: IslandConfig
    process: Process
    grid: Grid
    mesh: IslandMesh
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    train_step: TrainStep
    evaluation: Evaluation
    corpus: Corpus
    watchdog: Watchdog
    traffic: Traffic | None = None

    def evaluate(self) -> float:
        """Held-out loss, in nats a token, of the parameters as they are."""
        return self.evaluation(self.model.forward_backward)

    def batches(self, max_slots: int = 1) -> Batches:
        """The training batches, of which each island takes those of its slot, and each of its replicas those of a slot of its own."""
        config, grid = self.config, self.grid
        replica, data_rank = divmod(self.mesh.data.get_local_rank(), grid.data)
        samples = num_samples(self.corpus.train, config.data.seq_len)
        return Batches(
            self.corpus.train,
            config.data.seq_len,
            config.train.global_batch_size,
            Sampler(samples, config.run.seed, max_slots),
            data_rank,
            grid.data,
            replica,
        )


def build_island(config: IslandConfig, process: Process, corpus: Corpus, grid: Grid | None = None, job: Process | None = None) -> Island:
    """Make this rank's part of the island; called on all ranks of the job alike.

    Args:
        grid: default that of an island which is all there is.
        job: this process among all ranks of the job, where they are several islands.
    """
    train, job = config.train, job or process
    grid = grid or check_grid(config, process.world_size)
    mesh = build_mesh(grid, job)
    model = parallelize(meta_model(config), grid, mesh, process, config)
    parameters = [parameter for part in model.parts for parameter in part.parameters()]
    optimizer = plugins.build("islands.optimizers", config.optimizer, parameters)
    data_group = mesh.data.get_group()
    watchdog = Watchdog(job, Path(config.run.dir) / "flight_recorder")
    return Island(
        config,
        process,
        grid,
        mesh,
        model,
        optimizer,
        TrainStep(model, optimizer, data_group, config.optimizer.clip_norm, watchdog.enter),
        Evaluation(corpus.held_out, config.data.seq_len, train.eval_sequences, data_group, process.device),
        corpus,
        watchdog,
        _traffic(grid, process),
    )


def _traffic(grid: Grid, process: Process) -> Traffic | None:
    many = grid.replicas * grid.islands > 1
    return Traffic(process, grid.replicas, process.world_size // grid.replicas) if many else None
