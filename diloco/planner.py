"""What a run will need and how fast it will be, from its configuration, a link and the time of a step; and what else would do.

Nothing is started: the model has shapes and no memory. What a round costs the processor is timed on one chunk
(:mod:`diloco.planner_costs`).
"""

from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from diloco.codecs import build_wire
from diloco.config import RunConfig
from diloco.from_config import make_layout, make_wire
from diloco.link_model import GRADIENT_BYTES, Link, Pace, Prediction, RoundLoad, data_parallel, data_parallel_bytes, predict
from diloco.planner_costs import ChunkCosts, measure_costs
from diloco.planner_state import OuterBytes, host_bytes, shard_bytes
from diloco.reduction import CHUNK, Wire, num_chunks
from diloco.round_bytes import RoundBytes, all_reduce_bytes, round_bytes
from islands import plugins
from islands.config_file import ConfigError, parse_config
from islands.fragments import Schema, cut, schema_of
from islands.island import meta_model
from islands.memory import Estimate, estimate
from islands.mesh import Grid, check_grid
from islands.strategies.pipeline_plan import num_micro_batches, predicted_bubble


@dataclass(frozen=True)
class Setting:
    """How an exchange is done: what a plan varies. ``overlap`` in inner steps."""

    sync_every: int
    codec: str
    fragments: int
    overlap: int

    @property
    def keys(self) -> dict[str, object]:
        """As keys of the section ``outer``."""
        return {"sync_every": self.sync_every, "codec": {"type": self.codec}, "fragments": self.fragments, "overlap": self.overlap}


@dataclass(frozen=True)
class Traffic:
    """Of an island.

    Attributes:
        round_bytes: that it sends in a round, mean over the fragments.
        bytes_per_step: that it sends, mean over the inner steps.
        data_parallel_bytes: that it would send in each inner step, were gradients averaged then.
    """

    round_bytes: float
    bytes_per_step: float
    data_parallel_bytes: float


class Planner:
    """Predicts for one model, many settings and links.

    Args:
        config: of the run.
        ranks: of an island.

    Attributes:
        in_job: the islands are one job, whose ranks average their shards where they lie (``exchange.type: process_group``).

    Raises:
        ConfigError: the ranks don't make up the grid, or the model can't be cut into the fragments.
    """

    def __init__(self, config: RunConfig, ranks: int) -> None:
        self.config, self.ranks, self.islands = config, ranks, config.swarm.islands
        self.in_job = config.exchange.type == "process_group"
        self.grid: Grid = check_grid(config, ranks)
        self.schema: Schema = schema_of(meta_model(config))
        self.numel = sum(parameter.numel for parameter in self.schema)
        self.sizes(config.outer.fragments)
        self._costs, self._loads = cache(self._measure), cache(self._make_loads)  # many settings share them

    def sizes(self, fragments: int) -> tuple[int, ...]:
        """Elements of each fragment. Raises ConfigError where the model can't be cut into so many."""
        outer = self.config.outer
        separate = outer.separate_embeddings and fragments > 1
        return tuple(part.numel for part in cut(self.schema, fragments, outer.fragment_pattern, separate))

    def setting(self, step_seconds: float) -> Setting:
        """That of the configuration; a period or an overlap that is not in steps as the steps that it comes to."""
        outer = self.config.outer
        period = outer.sync_every if outer.sync_seconds is None else max(outer.fragments, round(outer.sync_seconds / step_seconds))
        return Setting(period, outer.codec.type, outer.fragments, period if outer.overlap == "eager" else min(outer.overlap, period))

    def wire(self, codec: str) -> Wire:
        """The run's own codec with all its keys; another one as it is by default."""
        if codec == self.config.outer.codec.type:
            return make_wire(self.config)
        return build_wire(plugins.load("diloco.codecs", codec).Config())

    def rounds(self, setting: Setting) -> list[RoundBytes]:
        """Of each fragment."""
        if self._at_every_step(setting):
            return [RoundBytes(self._gradient_ring, self._gradient_ring, num_chunks(self.numel))]
        wire = self.wire(setting.codec)
        return [self._round_bytes(wire, numel) for numel in self.sizes(setting.fragments)]

    def traffic(self, setting: Setting) -> Traffic:
        """What goes over the link."""
        sent = [each.sent for each in self.rounds(setting)]
        return Traffic(fmean(sent), sum(sent) / setting.sync_every, self._gradient_ring)

    def loads(self, setting: Setting) -> list[RoundLoad]:
        """Of a round of each fragment."""
        return self._loads(setting.codec, setting.fragments)

    def predict(self, setting: Setting, link: Link, step_seconds: float) -> Prediction:
        """Mean over the fragments; the round is the longest."""
        if self._at_every_step(setting):
            return self.data_parallel(link, step_seconds)
        pace = Pace(step_seconds, setting.sync_every, setting.fragments, setting.overlap)
        link = replace(link, daemons=not self.in_job)
        found = [predict(link, load, pace) for load in self.loads(setting)]
        seconds = fmean(each.seconds_per_step for each in found)
        longest, stall = max(each.round_seconds for each in found), fmean(each.stall_seconds for each in found)
        return Prediction(longest, stall, step_seconds / seconds, seconds)

    def data_parallel(self, link: Link, step_seconds: float) -> Prediction:
        """Of islands that average their gradients at every step instead."""
        return data_parallel(link, self.islands, GRADIENT_BYTES * self.numel, step_seconds)

    def memory(self) -> Estimate:
        """Of a rank."""
        every_step = self.in_job and self.config.outer.sync_every == 1
        return estimate(self.config, replace(self.grid, replicas=self.islands) if every_step else self.grid)

    def outer(self, step_seconds: float = 1.0) -> OuterBytes:
        """Of the exchange: on the host of rank 0, or on every rank where the islands are one job."""
        setting, grid = self.setting(step_seconds), self.grid
        if self._at_every_step(setting):
            return OuterBytes(0, 0, 0, 0, 0, 0)
        layout = make_layout(self.config, self.sizes(setting.fragments))
        pace = Pace(step_seconds, setting.sync_every, setting.fragments, setting.overlap)
        if self.in_job:
            return shard_bytes(layout, grid.pipeline * grid.shard * grid.tensor, pace)
        return host_bytes(layout, self.wire(setting.codec), self.islands, pace)

    def bubble(self) -> float | None:
        """Share of a step in which pipeline stages wait for each other; None without a pipeline."""
        if self.grid.pipeline == 1:
            return None
        return predicted_bubble(self.config.parallel, num_micro_batches(self.config, self.grid.data))

    def step_seconds_at(self, flops_per_second: float) -> float:
        """Of an inner step, where each rank does so many floating-point operations a second while it is not in the bubble."""
        model = plugins.load("islands.models", self.config.model.type)
        tokens = self.config.train.global_batch_size * self.config.data.seq_len
        flops = model.num_flops_per_token(self.config.model, self.config.data.seq_len) * tokens
        return flops / self.ranks / flops_per_second / (1 - (self.bubble() or 0.0))

    def is_valid(self, setting: Setting) -> bool:
        """Whether the run's configuration takes it."""
        raw = self.config.model_dump()
        codec = raw["outer"]["codec"] if setting.codec == self.config.outer.codec.type else {"type": setting.codec}
        feedback = {"error_feedback": None, "residual_decay": None}  # by default, as the codec needs it
        merge = {} if setting.overlap else {"merge_alpha": 0.0}
        raw["outer"] = {**raw["outer"], **feedback, **setting.keys, "codec": codec, **merge}
        try:
            parse_config(RunConfig, raw)
        except ConfigError:
            return False
        return True

    def _at_every_step(self, setting: Setting) -> bool:
        """Whether gradients are averaged (:func:`diloco.cluster.run_cluster`): there are no rounds and no outer state."""
        return self.in_job and setting.sync_every == 1

    @property
    def _gradient_ring(self) -> float:
        """Bytes of gradients that an island sends at every step of data-parallel training."""
        return data_parallel_bytes(self.numel, self.islands)

    def _measure(self, codec: str) -> ChunkCosts:
        return measure_costs(self.wire(codec), make_layout(self.config, (CHUNK,)), self.islands)

    def _round_bytes(self, wire: Wire, numel: int) -> RoundBytes:
        if self.in_job:
            return all_reduce_bytes(wire, numel, self.islands, self.grid.copies)
        return round_bytes(wire, numel, self.islands)

    def _make_loads(self, codec: str, fragments: int) -> list[RoundLoad]:
        sizes, wire = self.sizes(fragments), self.wire(codec)
        if self.in_job:  # on the device, beside which all that the processor would do is little
            each_way = [self._round_bytes(wire, numel).each_way for numel in sizes]
            return [RoundLoad(self.islands, num_bytes, 0.0, 0.0, 0.0) for num_bytes in each_way]
        costs = self._costs(codec)
        return [self._load(self._round_bytes(wire, numel), numel, costs) for numel in sizes]

    def _load(self, traffic: RoundBytes, numel: int, costs: ChunkCosts) -> RoundLoad:
        return RoundLoad(
            self.islands,
            traffic.each_way,
            encode_seconds=costs.encode * numel / CHUNK,
            decode_seconds=costs.decode_seconds(numel, self.islands),
            step_seconds=costs.step * numel / CHUNK,
            chunks=traffic.chunks,
            copy_seconds=costs.copy * numel / CHUNK,
        )
