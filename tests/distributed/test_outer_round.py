"""The outer loop around a real island: islands are threads of one process, or the only one over two ranks."""

import threading
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from rank_pool import RankPool
from small import plain_training, small_config, small_corpus, whole_parameters

from diloco.exchange.base import RoundOutcome, Seat
from diloco.exchange.in_memory import Hub, InMemoryExchange
from diloco.outer_round import Coordinator, OuterRound
from diloco.outer_state import OuterState
from diloco.schedule import Schedule
from islands import plugins
from islands.data.base import Sampler, num_samples, windows
from islands.fragments import ParameterMover, schema_of, whole_model
from islands.initialize import parameter_dtype
from islands.island import Island, build_island, meta_model
from islands.metrics import Metrics
from islands.process import Process
from islands.train_loop import train

#: fp64 rounding; see test_parity.
TOLERANCE = 1e-10


class Recorded(Metrics):
    """Metrics kept in a list."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, kind: str, **values: Any) -> None:
        self.rows.append(dict(kind=kind, **values))


def outer_round(island: Island, exchange: Callable[[OuterState], Any], metrics: Metrics) -> OuterRound:
    config = island.config
    fragments = whole_model(schema_of(meta_model(config)))
    coordinator = None
    if island.process.rank == 0:
        optimizer = plugins.build("diloco.outer_optimizers", config.outer.optimizer)
        state = OuterState([fragment.numel for fragment in fragments], optimizer, parameter_dtype(config))
        coordinator = Coordinator(exchange(state), state)
    schedule = Schedule(config.train.steps, config.outer.sync_every, len(fragments))
    hook = OuterRound(schedule, ParameterMover(island.model.parts, fragments), coordinator, metrics, island.process, 30.0)
    hook.start()
    return hook


def islands_as_threads(process: Process, num_islands: int, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Train ``num_islands`` islands, each a thread; what each ends with."""
    config, hub = small_config(**overrides), Hub(num_islands)
    codec = plugins.build("diloco.codecs", config.outer.codec)
    islands = [build_island(config, process, small_corpus()) for _ in range(num_islands)]
    results: list[dict[str, Any]] = [{} for _ in range(num_islands)]

    def run(slot: int) -> None:
        metrics, island = Recorded(), islands[slot]
        hook = outer_round(island, lambda state: InMemoryExchange(hub, slot, state, codec, 30.0), metrics)
        train(island, island.batches(slot, num_islands), metrics, [hook])
        results[slot] = dict(rows=metrics.rows, parameters=whole_parameters(island))

    threads = [threading.Thread(target=run, args=(slot,), daemon=True) for slot in range(num_islands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_rounds_at_every_step_equal_data_parallel_training(ranks: RankPool) -> None:
    overrides = dict(
        optimizer=dict(type="sgd", lr=0.5, clip_norm=0.0, schedule="constant", warmup_steps=0),
        outer=dict(sync_every=1, optimizer=dict(lr=1.0, momentum=0.0)),
        swarm=dict(islands=3),
    )
    (results,) = ranks.run(islands_as_threads, 1, 3, overrides)
    config, corpus = small_config(**overrides), small_corpus()
    seq_len, size = config.data.seq_len, config.train.global_batch_size
    order = Sampler(num_samples(corpus.train, seq_len), config.run.seed)  # position p of slot s is sample 3 p + s
    joint = [windows(corpus.train, order(torch.arange(3 * size * i, 3 * size * (i + 1)).numpy()), seq_len) for i in range(5)]
    expected = plain_training(config, joint, [0.5] * 5)
    for result in results:
        for name, parameter in expected["parameters"].items():
            assert float((result["parameters"][name] - parameter).abs().max()) < TOLERANCE
    losses = [[row["loss"] for row in result["rows"] if row["kind"] == "step"] for result in results]
    assert [sum(step) / 3 for step in zip(*losses)] == pytest.approx(expected["losses"], abs=TOLERANCE)


def test_islands_drift_apart_between_rounds_and_agree_after_each(ranks: RankPool) -> None:
    overrides = dict(outer=dict(sync_every=2), swarm=dict(islands=2))
    (results,) = ranks.run(islands_as_threads, 1, 2, overrides)
    rounds = [[row for row in result["rows"] if row["kind"] == "round"] for result in results]
    assert [row["step"] for row in rounds[0]] == [2, 4, 5]  # the last step ends with a round, whatever H
    assert [row["outcome"] for row in rounds[0]] == ["committed"] * 3
    assert [row["digest"] for row in rounds[0]] == [row["digest"] for row in rounds[1]]
    assert len({row["digest"] for row in rounds[0]}) == 3
    assert rounds[0][0]["weight"] == 2 * 8 * 16  # tokens of two steps
    assert rounds[0][2]["weight"] == 8 * 16
    assert all(0 < row["cosine"] < 1 for row in rounds[0])
    for name, parameter in results[0]["parameters"].items():
        assert torch.equal(parameter, results[1]["parameters"][name])


class Scripted:
    """An exchange that says what the test wants."""

    def __init__(self, state: OuterState, kinds: list[str]) -> None:
        self.state, self.kinds = state.fragments[0], list(kinds)
        self.offers: list[tuple[torch.Tensor, float]] = []

    def join(self) -> Seat:
        return Seat(0)

    def launch(self, fragment: int, weight: float) -> None:
        self.offers.append((self.state.local.clone(), weight))

    def outcome(self, fragment: int) -> RoundOutcome:
        kind, _, health = self.kinds.pop(0).partition(" ")
        if kind != "skipped":
            self.state.stage(torch.full_like(self.state.anchor, 0.25))  # lr 1, no momentum: the anchor sinks by 0.25
            self.state.commit()
        norm = float("nan") if health == "poisoned" else 1.0
        return RoundOutcome(kind, fragment, self.state.height, reason="as scripted", pseudo_gradient_norm=norm)

    def events(self) -> list:
        return []

    def close(self) -> None:
        pass


def scripted_island(process: Process, kinds: list[str]) -> dict[str, Any]:
    """Parameters of the model before and after each outcome, over however many ranks."""
    config = small_config(outer=dict(sync_every=1, optimizer=dict(lr=1.0, momentum=0.0)), train=dict(steps=len(kinds)))
    island, made = build_island(config, process, small_corpus()), []

    def exchange(state: OuterState) -> Scripted:
        made.append(Scripted(state, kinds))
        return made[0]

    hook, batches = outer_round(island, exchange, Recorded()), island.batches()
    anchors, locals_, landed = [whole_parameters(island)], [], []
    for step in range(len(kinds)):
        tokens = island.train_step(*batches[step], 1e-3).tokens
        locals_.append(whole_parameters(island))
        hook.after_step(step + 1, tokens)
        landed.append(whole_parameters(island))
    return dict(start=anchors[0], locals=locals_, landed=landed, weights=[weight for _, weight in made[0].offers] if made else None)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_becomes_of_the_parameters_after_each_outcome(ranks: RankPool, world_size: int) -> None:
    for result in ranks.run(scripted_island, world_size, ["skipped", "committed", "left_out"]):
        for name, start in result["start"].items():
            skipped, committed, left_out = (landed[name] for landed in result["landed"])
            assert torch.equal(skipped, result["locals"][0][name])
            assert torch.equal(committed, start - 0.25)
            moved = (start - 0.25) - 0.25 - (start - 0.25)  # new anchor - old anchor, rounded as computed
            assert torch.equal(left_out, result["locals"][2][name] + moved)
    weights = ranks.run(scripted_island, 1, ["skipped", "committed", "left_out", "committed"])[0]["weights"]
    assert weights == [128.0, 256.0, 128.0, 256.0]  # work that was not averaged counts again in the next offer


@pytest.mark.parametrize("kind", ["skipped poisoned", "left_out poisoned"])
def test_parameters_that_are_not_finite_are_replaced_by_the_anchor(ranks: RankPool, kind: str) -> None:
    result = ranks.run(scripted_island, 1, [kind, "committed"])[0]
    for name, start in result["start"].items():
        assert torch.equal(result["landed"][0][name], start if kind.startswith("skipped") else start - 0.25)
    assert result["weights"] == [128.0, 128.0]  # the work is lost, and does not count


def rows_of_plain_training(process: Process, folder: str) -> list[dict[str, float]]:
    import json

    island = build_island(small_config(), process, small_corpus())
    metrics = Metrics(Path(folder), 0, enabled=process.rank == 0)
    train(island, island.batches(), metrics)
    metrics.close()
    text = (Path(folder) / "metrics.jsonl").read_text() if process.rank == 0 else ""
    return [json.loads(line) for line in text.splitlines()]


def losses_of_bare_steps(process: Process) -> tuple[list[float], float]:
    from islands.learning_rate import learning_rate

    island = build_island(small_config(), process, small_corpus())
    batches, rates = island.batches(), [learning_rate(island.config.optimizer, step, 5, 8) for step in range(5)]
    return [island.train_step(*batches[step], rates[step]).loss for step in range(5)], island.evaluate()


def test_without_hooks_the_loop_is_plain_training_bit_for_bit(ranks: RankPool, tmp_path: Path) -> None:
    rows = ranks.run(rows_of_plain_training, 2, str(tmp_path))[0]
    losses, evaluation = ranks.run(losses_of_bare_steps, 2)[0]
    assert [row["loss"] for row in rows if row["kind"] == "step"] == losses
    assert [row["loss"] for row in rows if row["kind"] == "eval"][-1] == evaluation
