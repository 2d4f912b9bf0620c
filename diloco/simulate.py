"""Many islands in one process, on one device, with the outer code of a real run: ``exchange.type: in_memory`` and several islands.

Each island runs the ordinary training loop, and one of them runs at a time (:mod:`diloco.turns`). They share the
model, which holds the parameters of the one whose turn it is, the text, and all that they agree on. So a simulation is
deterministic, and what an island of one rank does over a network it does here, to the bit.
"""

from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any, Callable

from diloco.config import RunConfig
from diloco.exchange.base import Seat
from diloco.exchange.in_memory import InMemoryExchange
from diloco.from_config import make_fragments, make_layout, make_schedule, make_wire
from diloco.idle_state import IdleState
from diloco.meeting import Hub
from diloco.outer_round import Coordinator, OuterRound
from diloco.outer_state import OuterState
from diloco.report import write_report
from diloco.run_files import island_dirs, set_aside
from diloco.script import IslandScript, Life, check_script, parts
from diloco.turns import Turns
from islands.config_file import ConfigError
from islands.data.base import Corpus
from islands.fragments import schema_of
from islands.island import Island, build_island, load_corpus, meta_model
from islands.mesh import check_grid
from islands.metrics import Metrics
from islands.parameter_mover import ParameterMover
from islands.process import Process, pick_device, process_group, world_size
from islands.progress import Progress
from islands.run import open_metrics
from islands.train_loop import train

Clock = Callable[[], float]

#: Makes the metrics of the island in a slot. Told whether it was there before, and simulated time where that plays a part.
OpenMetrics = Callable[[Island, int, bool, Clock | None], Metrics]


def run_simulation(config: RunConfig) -> None:
    """Check everything, simulate all islands to the end, and write the report.

    Raises:
        ConfigError: before anything is started.
    """
    check_simulation(config, world_size())
    corpus, device = load_corpus(config), pick_device(config.run.device)
    with process_group(device, config.run.timeout) as process:
        for folder in island_dirs(Path(config.run.dir)).values():
            set_aside(folder)
        print(f"simulating {config.swarm.islands} islands on {device.type}; what follows is island 0's", flush=True)
        Simulation(config, process, corpus, _open_metrics).run()
        write_report(config.run.dir)


def check_simulation(config: RunConfig, ranks: int = 1) -> None:
    """Whether a run can be simulated.

    Raises:
        ConfigError: it asks for what a simulation does not do; with what to do instead.
    """
    _check_ranks_asked_for(config)
    if ranks != 1:
        raise ConfigError(
            f"exchange.type=in_memory simulates all {config.swarm.islands} islands (swarm.islands) in one process, and this is one of "
            f"{ranks} ranks; start it without torchrun, as python -m diloco CONFIG"
        )
    check_grid(config, ranks)
    resume = config.train.resume
    for key, value, advice in (
        ("checkpoint.every", config.checkpoint.every, "it keeps no checkpoints, and one that was ended is simply run again"),
        ("train.resume", resume not in ("auto", "never") and resume, "all islands begin afresh; set it to never"),
        ("train.profile", config.train.profile, "it traces nothing; trace one island alone, by python -m islands CONFIG"),
        ("outer.adaptive.target", config.outer.adaptive.target, "it has no link to adapt to; try each codec and period by itself"),
    ):
        if value:
            raise ConfigError(f"{key}={value} does not go with a simulation (exchange.type=in_memory, several islands): {advice}")
    check_script(config.exchange.script, config.swarm.islands, config.train.steps)


def _check_ranks_asked_for(config: RunConfig) -> None:
    sizes = {key: getattr(config.parallel, f"{key}_parallel_size") for key in ("data", "tensor", "pipeline")}
    for key, size in sizes.items():
        if size > 1:
            raise ConfigError(
                f"parallel.{key}_parallel_size={size}: exchange.type=in_memory simulates all {config.swarm.islands} islands "
                "(swarm.islands) in one process, so each has one rank. Set it to 1, or exchange.type to hivemind, where it may have more"
            )


def _has_clock(config: RunConfig) -> bool:
    """Whether simulated time plays a part. Else each island goes on until it has to wait, and the model changes hands less often."""
    return bool(config.exchange.script) or config.outer.sync_seconds is not None or config.outer.late == "land_late"


class Simulation:
    """All islands of a run, and what they share.

    Attributes:
        island: the only one, whose model they use in turn.
    """

    def __init__(self, config: RunConfig, process: Process, corpus: Corpus, open_metrics: OpenMetrics) -> None:
        self._config, self._open_metrics = config, open_metrics
        self.island = build_island(config, process, corpus)
        fragments = make_fragments(config, schema_of(meta_model(config)))
        self._mover = ParameterMover(self.island.model.parts, fragments, process, beside=False)
        self._schedule, self._wire = make_schedule(config, len(fragments)), make_wire(config)
        self._start = OuterState(make_layout(config, [fragment.numel for fragment in fragments]))
        self._turns, self._furthest = Turns(), 0
        self._hub, self._present = Hub(0, self._turns), dict[int, OuterState]()
        self._simulated = self._turns.clock if _has_clock(config) else None

    def run(self) -> None:
        """To the end.

        Raises:
            BaseException: what an island raised that failed.
        """
        first = IdleState(self.island, self._config.exchange.idle_on_cpu)
        players = [_Player(self, part, first) for part in parts(self._config.exchange.script, self._config.swarm.islands)]
        for player in players:
            if not player.part.lives[0].joins:
                self._hub.join(player.part.island)
        self._turns.run(players)

    def take_part(self, part: IslandScript, life: Life) -> None:
        """What one island does from when it comes to when it leaves."""
        slot = part.island
        self._turns.wait_for(lambda: self._furthest >= life.joins)
        self.island.optimizer.state = defaultdict(dict)  # of one that comes back nothing is left
        state, seat = self._come(slot, life)
        self._present[slot] = state
        metrics = self._open_metrics(self.island, slot, seat.late, self._simulated)
        exchange = self._exchange(slot, state)
        outer_round = self._outer_round(Coordinator(exchange, state), metrics)
        progress = outer_round.start(seat)
        hooks = [_Stepped(partial(self._stepped, part.speed)), outer_round]
        batches = self.island.batches(self._config.swarm.max_slots)
        ended = train(self.island, batches, metrics, hooks, progress, stop=_Leaving(life, progress))
        exchange.close()
        del self._present[slot]
        what, detail = ("end", "all steps done") if ended else ("stopped", f"left after step {progress.step}, as scripted")
        metrics.write("event", what=what, detail=detail)
        metrics.close()

    def _come(self, slot: int, life: Life) -> tuple[OuterState, Seat]:
        if not life.joins:
            return self._start.twin(), Seat(slot)
        may_count = self._hub.join(slot)
        member = max(self._present.values(), key=lambda state: sum(fragment.height for fragment in state.fragments))
        ledgers = [fragment.ledger for fragment in member.fragments]
        position = max(may_count, *(ledger.positions[slot] for ledger in ledgers))
        tokens = max(ledger.tokens for ledger in ledgers)
        return member.twin(), Seat(slot, position=position, step=self._furthest, tokens=tokens, late=True)

    def _stepped(self, speed: float, progress: Progress) -> None:
        """An inner step is done. What follows it has to wait until others have done what they do before that."""
        if self._simulated:
            self._turns.pass_time(self._config.exchange.step_seconds / speed)
        self._furthest = max(self._furthest, progress.step)

    def _exchange(self, slot: int, state: OuterState) -> InMemoryExchange:
        section, decay = self._config.exchange, self._config.outer.residual_decay
        limits = section.round_deadline, section.min_islands, decay, section.max_weight_ratio
        return InMemoryExchange(self._hub, slot, state, self._wire, *limits, self._clock)

    def _outer_round(self, coordinator: Coordinator, metrics: Metrics) -> OuterRound:
        outer, deadline, process = self._config.outer, self._config.exchange.round_deadline, self.island.process
        return OuterRound(self._schedule, outer, self._mover, coordinator, metrics, process, deadline, clock=self._clock)

    @property
    def _clock(self) -> Clock:
        """By which an island measures: simulated time, or what it has itself spent."""
        return self._simulated or self._turns.own_clock


class _Player:
    """An island among the :class:`~diloco.turns.Turns`."""

    def __init__(self, simulation: Simulation, part: IslandScript, first: IdleState) -> None:
        self._simulation, self.part, self._idle = simulation, part, first.of_another()
        self.enter, self.leave = self._idle.enter, self._idle.leave

    def play(self) -> None:
        for life in self.part.lives:
            self._simulation.take_part(self.part, life)


class _Stepped:
    """A hook that tells of each step, and takes no time of the island's."""

    def __init__(self, tell: Callable[[Progress], None]) -> None:
        self._tell = tell

    def after_step(self, progress: Progress, tokens: int) -> float:
        self._tell(progress)
        return 0.0


class _Leaving:
    """The wish to stop of an island that leaves by the script."""

    def __init__(self, life: Life, progress: Progress) -> None:
        self._life, self._progress = life, progress

    def agreed(self, step: int) -> bool:
        return self._life.leaves is not None and self._progress.step >= self._life.leaves


class _Metrics(Metrics):
    """Rows of one island among many: steps tell the simulated time."""

    def __init__(self, *arguments: Any, clock: Clock | None, console: bool) -> None:
        super().__init__(*arguments, console=console)
        self._clock = clock

    def write(self, kind: str, **values: Any) -> None:
        """See :class:`~islands.metrics.Metrics`."""
        if kind == "step" and self._clock:
            values["simulated_seconds"] = self._clock()
        super().write(kind, **values)


def _open_metrics(island: Island, slot: int, continues: bool, clock: Clock | None) -> Metrics:
    return open_metrics(island, slot, continues, partial(_Metrics, clock=clock, console=slot == 0))
