"""One island of a run: what ``torchrun … -m diloco CONFIG`` does on every rank."""

import time
from contextlib import ExitStack
from functools import partial

from diloco.config import RunConfig, SwarmSection
from diloco.exchange.base import Exchange, JoinError, Seat
from diloco.from_config import make_fragments, make_layout, make_schedule
from diloco.outer_facts import OuterFacts
from diloco.outer_resume import OuterResume
from diloco.outer_round import Coordinator, OuterRound
from diloco.outer_state import OuterState
from diloco.report import write_report
from islands import plugins, resume
from islands.agreement import check_agreement
from islands.checkpoint import Checkpointer
from islands.config_file import ConfigError
from islands.data.base import Corpus
from islands.fragments import Fragment, schema_hash, schema_of
from islands.initialize import parameter_dtype
from islands.island import Island, build_island, load_corpus, meta_model
from islands.mesh import check_grid
from islands.metrics import Metrics
from islands.parameter_mover import ParameterMover
from islands.process import Process, is_first_rank, num_restarts, pick_device, process_group, world_size
from islands.progress import Progress
from islands.resume import Chosen
from islands.run import open_metrics
from islands.sharing import FirstRankSays
from islands.stopping import Stopped, Stopping
from islands.train_loop import train

_GRACE_SECONDS = 400.0  # on top of swarm.join_timeout: more than an exchange allows its own start on a busy machine
_TOLD = partial(print, flush=True)  # what a person should know at the start
_WAITING_SECONDS = 30.0  # between two signs of rank 0 that it still waits

#: Where the ranks of one island may differ: only rank 0 meets the others. How much data a run has, all ranks must know alike.
_OWN_AFFAIR = [f"swarm.{key}" for key in SwarmSection.model_fields if key not in ("islands", "max_slots")]

_STAGING_SECONDS = 5e-7  # for each parameter: an exchange that has begun to stage a result ends that after its deadline too


def run_island(config: RunConfig) -> None:
    """Check everything, meet the other islands, train; from a checkpoint, where ``train.resume`` leads to one.

    Raises:
        ConfigError: before anything is started, or when the ranks were started with different configurations.
        JoinError: the swarm refused this island, or did not come together in time.
        Stopped: someone wanted it to stop before it could begin.
    """
    check_grid(config, world_size())
    corpus, device = load_corpus(config), pick_device(config.run.device)
    schema = schema_of(meta_model(config))
    fragments = make_fragments(config, schema)
    chosen, coordinator = _choose(config, corpus) if is_first_rank() else None, None
    with ExitStack() as stack:
        if is_first_rank():  # first of all: the exchange process takes seconds to start, while the ranks meet
            prefers = chosen.manifest.slot if chosen else -1
            coordinator = _coordinator(config, fragments, f"{schema_hash(schema)} {parameter_dtype(config)}", prefers)
            stack.callback(coordinator.exchange.close)
        process = stack.enter_context(process_group(device, config.run.timeout))
        stopping = stack.enter_context(Stopping(process, config.checkpoint.grace))
        check_agreement(config, process, may_differ=_OWN_AFFAIR)
        chosen = FirstRankSays(process, "checkpoint to resume from")(chosen, config.run.timeout)
        island = build_island(config, process, corpus)
        seat = _take_seat(coordinator and coordinator.exchange, process, config.swarm.join_timeout, stopping)
        metrics = open_metrics(island, seat.slot, continues=seat.late or chosen is not None)
        stack.callback(metrics.close)
        if seat.address:
            metrics.write("event", what="address", detail=seat.address)
        outer_round = _outer_round(config, island, fragments, coordinator, metrics, stopping)
        if is_first_rank():
            resume.leave_behind(config, _fixed_slot(config), chosen, _TOLD, restarted=num_restarts() > 0)
        if chosen:
            progress = _go_on(island, chosen, outer_round, seat, fragments, coordinator and coordinator.state)
            metrics.write("event", what="resumed", detail=chosen.event)
        else:
            progress = outer_round.start(seat)
        batches = island.batches(config.swarm.max_slots)
        with Checkpointer(island, metrics, outer_round, saved=progress if chosen and not seat.late else None) as checkpointer:
            ended = train(island, batches, metrics, [outer_round], progress, checkpointer, stopping)
        if coordinator and not ended:
            coordinator.exchange.close(hurry=True)  # a grace is running
        what, detail = ("end", "all steps done") if ended else ("stopped", f"on request after step {progress.step}")
        metrics.write("event", what=what, detail=detail)
    if ended and is_first_rank():  # else a grace is running, and to draw a figure takes seconds
        write_report(config.run.dir)


def _fixed_slot(config: RunConfig) -> int | None:
    """Whose checkpoints are this island's; None: all in its folder, as it may have had any slot."""
    return config.swarm.slot if config.swarm.slot >= 0 else None


def _choose(config: RunConfig, corpus: Corpus) -> Chosen | None:
    """What can't be gone on with is refused before the island joins: others would begin with it, and without what it brings."""
    chosen = resume.choose(config, _fixed_slot(config), _TOLD, restarted=num_restarts() > 0)
    if chosen and not chosen.manifest.facts:
        raise ConfigError(
            f"{chosen.folder} is of an island that trained alone, outside of any swarm; to begin a swarm's run with its weights, export "
            "them (diloco export) and set model.init_from to that folder"
        )
    if chosen:
        resume.check_corpus(chosen, corpus)
    return chosen


def _outer_round(
    config: RunConfig,
    island: Island,
    fragments: list[Fragment],
    coordinator: Coordinator | None,
    metrics: Metrics,
    stopping: Stopping,
) -> OuterRound:
    staging = _STAGING_SECONDS * sum(fragment.numel for fragment in fragments)
    return OuterRound(
        make_schedule(config, len(fragments)),
        config.outer,
        ParameterMover(island.model.parts, fragments, island.process),
        coordinator,
        metrics,
        island.process,
        config.exchange.round_deadline + staging,
        stopping.presses,
    )


def _go_on(
    island: Island, chosen: Chosen, outer_round: OuterRound, seat: Seat, fragments: list[Fragment], state: OuterState | None
) -> Progress:
    outer = OuterResume(OuterFacts.from_json(chosen.manifest.facts), seat, outer_round, fragments, state)
    stored = resume.stored_names(chosen)
    targets = {name: target for name, target in outer.targets().items() if name in stored}  # error feedback may be new
    return outer.go_on(resume.load(island, chosen, targets))


def _coordinator(config: RunConfig, fragments: list[Fragment], schema: str, prefers: int) -> Coordinator:
    state = OuterState(make_layout(config, [fragment.numel for fragment in fragments]))
    exchange = plugins.load("diloco.exchange", config.exchange.type)
    return Coordinator(exchange.build(config, state, schema, prefers), state)


def _take_seat(exchange: Exchange | None, process: Process, join_seconds: float, stopping: Stopping) -> Seat:
    """Rank 0 joins the swarm; the others learn the seat, or why there is none, from it, however long it takes."""
    say, limit = FirstRankSays(process, "place in the swarm"), join_seconds + _GRACE_SECONDS
    seat: Seat | JoinError | Stopped | None = None
    told = time.monotonic()

    def waiting() -> None:
        nonlocal told
        stopping.raise_if_asked()
        if time.monotonic() > told + _WAITING_SECONDS:
            told = time.monotonic()
            say(None, limit)

    if exchange:
        try:
            seat = exchange.join(waiting)
        except (JoinError, Stopped) as error:
            seat = error
        say(seat, limit)
    else:
        while seat is None:
            seat = say(None, limit)
    if isinstance(seat, BaseException):
        raise seat
    return seat
