"""The outer loop around real islands, for tests: islands are threads of one process, or the exchange says what a test wants."""

import threading
from dataclasses import replace
from typing import Any, Callable

import numpy as np
import torch
from small import small_config, small_corpus, whole_parameters
from torch import Tensor

from diloco.config import RunConfig
from diloco.exchange.base import RoundOutcome, Seat, Work
from diloco.exchange.in_memory import Hub, InMemoryExchange
from diloco.from_config import make_fragments, make_layout, make_schedule, make_wire
from diloco.ledger import Counted
from diloco.outer_round import Coordinator, OuterRound
from diloco.outer_state import OuterState
from islands.data.base import Corpus, num_samples, windows
from islands.fragments import schema_of
from islands.island import Island, build_island, meta_model
from islands.metrics import Metrics
from islands.parameter_mover import ParameterMover
from islands.process import Process
from islands.train_loop import StepHook, train
from islands.train_step import StepResult


class Recorded(Metrics):
    """Metrics kept in a list."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, kind: str, **values: Any) -> None:
        self.rows.append(dict(kind=kind, **values))

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Rows of one kind."""
        return [row for row in self.rows if row["kind"] == kind]


class Watched:
    """A train step that notes which samples it got."""

    def __init__(self, island: Island) -> None:
        self._step, self.samples = island.train_step, []
        seq_len, tokens = island.config.data.seq_len, island.corpus.train
        inputs, _ = windows(tokens, np.arange(num_samples(tokens, seq_len)), seq_len)
        self._numbers = {tuple(row): number for number, row in enumerate(inputs.tolist())}
        assert len(self._numbers) == len(inputs), "samples that can't be told apart"

    def __call__(self, inputs: Tensor, targets: Tensor, lr: float) -> StepResult:
        self.samples.append([self._numbers[tuple(row)] for row in inputs.tolist()])
        return self._step(inputs, targets, lr)


def watched(island: Island) -> Island:
    """The island, whose ``train_step.samples`` tells what it trained on, a list for each step."""
    return replace(island, train_step=Watched(island))


def outer_round(island: Island, exchange: Callable[[OuterState], Any], metrics: Metrics) -> OuterRound:
    """The hook of an island whose exchange is made by ``exchange``; not started."""
    config = island.config
    fragments = make_fragments(config, schema_of(meta_model(config)))
    coordinator = None
    if island.process.rank == 0:
        state = OuterState(make_layout(config, [fragment.numel for fragment in fragments]))
        coordinator = Coordinator(exchange(state), state)
    schedule, mover = make_schedule(config, len(fragments)), ParameterMover(island.model.parts, fragments, island.process)
    return OuterRound(schedule, config.outer, mover, coordinator, metrics, island.process, 30.0)


def islands_as_threads(
    process: Process,
    num_islands: int,
    overrides: dict[str, Any],
    hooks: Callable[[int], list[StepHook]] = lambda slot: [],
    corpus: Corpus | None = None,
    exchange: type[InMemoryExchange] = InMemoryExchange,
    config: RunConfig | None = None,
) -> list[dict[str, Any]]:
    """Train ``num_islands`` islands, each a thread; what each ends with.

    Args:
        config: in place of the small one with ``overrides``; then samples are not noted, as texts repeat themselves.
        hooks: of the island in a slot, called before that of the outer round.
    """
    slots, note = (config.swarm.max_slots, lambda island: island) if config else (num_islands, watched)
    config, hub, corpus = config or small_config(**overrides), Hub(num_islands), corpus or small_corpus()
    wire, outer = make_wire(config), config.outer
    islands = [note(build_island(config, process, corpus)) for _ in range(num_islands)]
    results: list[dict[str, Any]] = [{} for _ in range(num_islands)]

    def run(slot: int) -> None:
        metrics, island = Recorded(), islands[slot]
        exchanges: list[InMemoryExchange] = []

        def made(state: OuterState) -> InMemoryExchange:
            exchanges.append(exchange(hub, slot, state, wire, 30.0, 1, outer.residual_decay))
            return exchanges[0]

        hook = outer_round(island, made, metrics)
        progress = hook.start(exchanges[0].join())
        train(island, island.batches(slots), metrics, [*hooks(slot), hook], progress)
        exchanges[0].close()
        seen = getattr(island.train_step, "samples", [])
        results[slot] = dict(rows=metrics.rows, parameters=whole_parameters(island), progress=progress, samples=seen)

    threads = [threading.Thread(target=run, args=(slot,), daemon=True) for slot in range(num_islands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


class Scripted:
    """An exchange that says what the test wants.

    Args:
        outcomes: in the order of rounds; norm and height are filled in. What is not skipped moves the anchor by -0.25.
        seat: what joining gives; where it is late, the anchor of the swarm is 0.5 everywhere.
    """

    def __init__(self, state: OuterState, outcomes: list[RoundOutcome], seat: Seat = Seat(0)) -> None:
        self.state, self.outcomes, self.seat = state.fragments[0], list(outcomes), seat
        self.offers: list[tuple[Tensor, Work]] = []
        self.calls: list[Any] = []
        self.others_wait = False
        if seat.late:
            self.state.anchor.fill_(0.5)
            self.state.initialize()

    def join(self) -> Seat:
        return self.seat

    def started(self) -> None:
        self.calls.append("started")

    def progress(self, step: int, tokens_per_second: float) -> None:
        assert tokens_per_second > 0
        self.calls.append(step)

    def is_late(self, fragment: int) -> bool:
        return False

    def called(self, fragment: int) -> bool:
        return self.others_wait

    def launch(self, fragment: int, work: Work) -> None:
        self.offers.append((self.state.local.clone(), work))

    def arrived(self, fragment: int) -> bool:
        return True

    def outcome(self, fragment: int) -> RoundOutcome:
        outcome, work = self.outcomes.pop(0), self.offers[-1][1]
        if outcome.kind == "committed" and not outcome.position:
            outcome = replace(outcome, position=work.position)
        if outcome.kind != "skipped":
            counted = Counted(0, work.tokens, outcome.position, work.step, 1.0)
            self.state.stage(torch.full_like(self.state.anchor, 0.25), [counted])  # lr 1, no momentum: it sinks by 0.25
            self.state.commit(slot=0)
        return replace(outcome, height=self.state.height)

    def events(self) -> list:
        return []

    def close(self) -> None:
        pass


def said(kind: str, **values: Any) -> RoundOutcome:
    """An outcome of an island whose own parameters were numbers."""
    return RoundOutcome(kind, 0, 0, reason="as scripted", **{"pseudo_gradient_norm": 1.0, **values})


def scripted_training(
    process: Process, outcomes: list[RoundOutcome], overrides: dict[str, Any], seat: Seat = Seat(0), calls: bool = False
) -> dict[str, Any]:
    """Train to the end with a :class:`Scripted` exchange, over however many ranks.

    Returns:
        Parameters at the start, after each inner step and after the hook of each; rows; what was offered; progress;
        what was called; samples.
    """
    outer = dict(optimizer=dict(lr=1.0, momentum=0.0), **overrides.pop("outer", {}))
    config = small_config(outer=outer, **overrides)
    island, metrics, made = watched(build_island(config, process, small_corpus())), Recorded(), []

    def exchange(state: OuterState) -> Scripted:
        made.append(Scripted(state, outcomes, seat))
        made[0].others_wait = calls
        return made[0]

    snapshots: dict[str, list[dict[str, Tensor]]] = dict(locals=[], landed=[])

    class Snapshot:
        """Keeps the parameters between two hooks."""

        def __init__(self, name: str) -> None:
            self._name = name

        def after_step(self, progress: Any, tokens: int) -> float:
            snapshots[self._name].append(whole_parameters(island))
            return 0.0

    hook = outer_round(island, exchange, metrics)
    progress = hook.start(seat)
    start = whole_parameters(island)
    train(island, island.batches(4), metrics, [Snapshot("locals"), hook, Snapshot("landed")], progress)
    offers = [work for _, work in made[0].offers] if made else []
    called = made[0].calls if made else []
    samples = island.train_step.samples
    return dict(start=start, rows=metrics.rows, offers=offers, progress=progress, calls=called, samples=samples, **snapshots)
