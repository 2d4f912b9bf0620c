"""The sections that describe one island. Each key carries its meaning and its check."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from islands.config_file import Plugin, PluginSection, Section

#: Sections of a file that only the packages above this one read; `python -m islands` skips them.
OUTER_SECTIONS = ("outer", "exchange", "swarm")


class RunSection(Section):
    """Who and where."""

    name: str = Field("run", min_length=1, description="name of the run and of its swarm")
    dir: str = Field("", description="folder for all that the run writes; default runs/<name>")
    seed: int = Field(0, ge=0, lt=2**31, description="seed of weights and data order; the same on all islands")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: one GPU a rank where there are enough")
    timeout: float = Field(300.0, gt=0, description="seconds until a collective operation that hangs is an error")
    tensorboard: bool = Field(False, description="also write TensorBoard events (needs the extra 'tensorboard')")

    @model_validator(mode="before")
    @classmethod
    def _default_dir(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or raw.get("dir"):
            return raw
        return {**raw, "dir": f"runs/{raw.get('name', 'run')}"}

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, value: str) -> str:
        fitting = re.sub(r"[^A-Za-z0-9._-]+", "-", value).lstrip(".-") or "run"
        if value != fitting:
            rule = "should hold only letters, digits and . _ -, and not begin with . or -"
            raise ValueError(f"{rule}; such as {fitting}")
        return value

    @field_validator("dir")
    @classmethod
    def _expand_home(cls, value: str) -> str:
        return str(Path(value).expanduser())


class DdpSection(Section):
    """Options of torch's DistributedDataParallel, for ``data_parallel_strategy: ddp`` without tensor or pipeline parallel."""

    bucket_mb: int = Field(25, ge=1, description="megabytes of gradients that are reduced together")
    gradient_as_bucket_view: bool = Field(True, description="gradients live in the buckets: saves a copy of all of them")
    static_graph: bool = Field(False, description="promise that every step uses the same parameters in the same way")
    find_unused_parameters: bool = Field(False, description="allow parameters that a forward pass does not use")


class ParallelSection(Section):
    """How the ranks of one island divide the work."""

    data_parallel_strategy: Literal["ddp", "zero1", "zero2", "zero3", "hybrid_shard"] = Field(
        "zero3",
        description="what data-parallel ranks shard: nothing; optimizer state; and gradients; and parameters; or, "
        "hybrid_shard, as shard_strategy says inside groups of shard_size ranks and nothing across them",
    )
    data_parallel_size: int = Field(-1, ge=-1, description="data-parallel ranks; -1: all that the other axes leave")
    shard_size: int = Field(0, ge=0, description="hybrid_shard: ranks that shard among themselves, such as those of a node")
    shard_strategy: Literal["zero2", "zero3"] = Field("zero3", description="hybrid_shard: what is sharded inside a group")
    tensor_parallel_size: int = Field(1, ge=1, description="ranks that share each matrix product; at most those of a node")
    sequence_parallel: bool = Field(
        False, description="between the halves of blocks, tensor-parallel ranks hold a share of the positions each, not all"
    )
    pipeline_parallel_size: int = Field(1, ge=1, description="ranks that the layers are divided among, in order")
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = Field(
        "1f1b",
        description="order of micro-batches: all forward, then all backward; backward as soon as possible, which holds "
        "fewer activations; the same with several stages a rank, which wait less; and weight gradients while waiting",
    )
    pipeline_stages_per_rank: int = Field(
        2, ge=2, description="interleaved_1f1b, zero_bubble: stages of each rank, pipeline_parallel_size apart"
    )
    cpu_offload: bool = Field(False, description="keep sharded parameters, gradients and optimizer state on the CPU")
    ddp: DdpSection = DdpSection()

    @model_validator(mode="after")
    def _keys_belong_together(self) -> "ParallelSection":
        hybrid = self.data_parallel_strategy == "hybrid_shard"
        if hybrid and not self.shard_size:
            raise ValueError("data_parallel_strategy=hybrid_shard needs shard_size: the ranks that shard among themselves")
        if self.shard_size and not hybrid:
            raise ValueError(
                f"shard_size={self.shard_size} belongs to data_parallel_strategy=hybrid_shard, which here is "
                f"{self.data_parallel_strategy}; drop shard_size or change the strategy"
            )
        if self.cpu_offload and self.data_parallel_strategy == "ddp":
            raise ValueError("cpu_offload=true keeps shards on the CPU and ddp has none; use zero1, zero2, zero3 or hybrid_shard")
        return self


class OptimizerSection(PluginSection):
    """Keys that every inner optimizer has."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises linearly to its peak")
    schedule: Literal["cosine", "constant"] = Field("cosine", description="what follows the warmup")
    final_lr_ratio: float = Field(0.1, ge=0, le=1, description="cosine ends at this share of the peak")
    clip_norm: float = Field(1.0, ge=0, description="largest global gradient norm; 0: never clip")
    batch_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how lr grows with global_batch_size / reference_batch_size"
    )
    reference_batch_size: int = Field(0, ge=0, description="sequences for which lr was found; needed by batch_scaling")

    @model_validator(mode="after")
    def _scaling_has_a_reference(self) -> "OptimizerSection":
        if (self.batch_scaling == "none") != (self.reference_batch_size == 0):
            raise ValueError(
                f"batch_scaling={self.batch_scaling} and reference_batch_size={self.reference_batch_size} go together: "
                "give the batch size for which lr was found, or neither"
            )
        return self


class DataSection(PluginSection):
    """Keys that every data source has."""

    seq_len: int = Field(256, ge=2, description="tokens in a sequence")
    held_out: float = Field(0.05, gt=0, lt=1, description="share of the files that is kept for evaluation")


class ModelSection(PluginSection):
    """Keys that every model family has."""

    num_layers: int = Field(0, ge=0, description="blocks: what strategies wrap, and what pipeline stages are made of")
    init_from: str = Field(
        "",
        description="folder with config.json and *.safetensors, as Hugging Face has them, whose sizes (in place of a preset's) and "
        "weights the model begins with; empty: fresh weights",
    )


class TrainSection(Section):
    """How long, on how much, how exactly."""

    steps: int = Field(..., ge=1, description="inner steps of the run")
    global_batch_size: int = Field(..., ge=1, description="sequences in one inner step of one island")
    micro_batch_size: int = Field(0, ge=0, description="sequences in one forward pass of one rank; 0: all of its share")
    precision: Literal["fp32", "bf16", "fp64"] = Field("fp32", description="arithmetic; bf16 keeps fp32 master weights")
    recompute: Literal["none", "full", "selective"] = Field(
        "none", description="activations that are computed again in the backward pass: none, all, or all but matrix products"
    )
    compile: bool = Field(False, description="compile each block with torch.compile")
    resume: str = Field(
        "auto",
        min_length=1,
        description="auto: go on from the newest whole checkpoint in checkpoint.dir, if there is one; never: start afresh; else the "
        "path of a checkpoint, of the checkpoints of one step, or of a run",
    )
    eval_every: int = Field(0, ge=0, description="inner steps between evaluations; 0: only at start and end")
    eval_sequences: int = Field(64, ge=1, description="held-out sequences in one evaluation")
    profile: list[int] = Field([], description="[first, last]: steps that each rank traces into run.dir/profile; empty: none")

    @model_validator(mode="after")
    def _profiles_steps(self) -> "TrainSection":
        if self.profile and (len(self.profile) != 2 or not 1 <= self.profile[0] <= self.profile[1] <= self.steps):
            raise ValueError(
                f"train.profile={self.profile} should be [first, last] with 1 <= first <= last <= train.steps={self.steps}, "
                f"such as [{min(10, self.steps)}, {min(12, self.steps)}]; or leave it away"
            )
        return self


class CheckpointSection(Section):
    """What is kept of a run, so that it can go on after anything."""

    every: int = Field(0, ge=0, description="inner steps between checkpoints; 0: only the last, at the end or when asked to stop")
    keep: int = Field(3, ge=1, description="newest checkpoints that are kept")
    keep_every: int = Field(0, ge=0, description="checkpoints of steps that it divides are kept for ever; 0: none")
    dir: str = Field("", description="folder that all ranks of the island can write to; default run.dir/checkpoints")
    grace: float = Field(30.0, gt=0, description="seconds from the wish to stop (SIGTERM, Ctrl-C) until the process ends, come what may")

    @field_validator("dir")
    @classmethod
    def _expand_home(cls, value: str) -> str:
        return str(Path(value).expanduser()) if value else value


class IslandConfig(Section):
    """All that one island needs to train alone."""

    run: RunSection = RunSection.model_validate({})
    model: Annotated[ModelSection, Plugin("islands.models", "llama")]
    data: Annotated[DataSection, Plugin("islands.data", "python_stdlib")]
    parallel: ParallelSection = ParallelSection()
    optimizer: Annotated[OptimizerSection, Plugin("islands.optimizers", "adamw")]
    train: TrainSection
    checkpoint: CheckpointSection = CheckpointSection()

    @property
    def checkpoint_root(self) -> Path:
        """Where the checkpoints of the run lie."""
        return Path(self.checkpoint.dir or Path(self.run.dir) / "checkpoints")

    @model_validator(mode="after")
    def _warmup_ends(self) -> "IslandConfig":
        if self.optimizer.warmup_steps > self.train.steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} is more than train.steps={self.train.steps}; "
                "warm up for at most all of the steps"
            )
        return self
