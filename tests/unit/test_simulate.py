"""Many islands by turns in one process: what threads of their own models give, to the bit; scripts; what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from outer_loop import Recorded, islands_as_threads
from small import plain_training, small_config, small_corpus, whole_parameters

from diloco.script import Life
from diloco.simulate import Simulation, check_simulation
from diloco.turns import Turns
from islands.config_file import ConfigError
from islands.data.base import Sampler, num_samples, windows
from islands.island import Island
from islands.process import Process, process_group

TOKENS = 8 * 16  # of an inner step

STREAMING = dict(sync_every=4, fragments=2, overlap=1, merge_alpha=0.5)
RECIPES = [
    pytest.param(dict(STREAMING, codec=dict(type="int4"), error_feedback=True), id="streaming, int4"),
    pytest.param(dict(sync_every=2, overlap="eager"), id="eager", marks=pytest.mark.slow),
    pytest.param(dict(sync_every=2), id="blocking", marks=pytest.mark.slow),
    pytest.param(STREAMING, id="streaming", marks=pytest.mark.slow),
    pytest.param(
        dict(sync_every=3, codec=dict(type="statistical2"), optimizer=dict(type="adam", lr=1e-3)), id="2 bits", marks=pytest.mark.slow
    ),
]


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with process_group(torch.device("cpu"), 30.0) as process:
        yield process


class Simulated:
    """What a simulation comes to, by island: rows of all that it was, one list after the other, and its parameters at the end."""

    def __init__(self, process: Process, *, vocab: int = 257, **sections: Any) -> None:
        config = small_config(parallel=dict(data_parallel_strategy="ddp"), **sections)
        check_simulation(config)
        self.rows: dict[int, list[dict[str, Any]]] = {slot: [] for slot in range(config.swarm.islands)}
        self.parameters: dict[int, dict[str, torch.Tensor]] = {}
        self.late: list[int] = []
        Simulation(config, process, small_corpus(40_000, vocab), self._open).run()

    def _open(self, island: Island, slot: int, late: bool, clock: Callable[[], float] | None) -> Recorded:
        return _Kept(self, island, slot, late, clock)

    def of(self, slot: int, kind: str, *keys: str) -> list[Any]:
        """Rows of one kind; with keys their values alone."""
        rows = [row for row in self.rows[slot] if row["kind"] == kind]
        return [tuple(row[key] for key in keys) if len(keys) > 1 else row[keys[0]] for row in rows] if keys else rows


class _Kept(Recorded):
    def __init__(self, simulated: Simulated, island: Island, slot: int, late: bool, clock: Callable[[], float] | None) -> None:
        self.rows, self._simulated, self._island, self._slot, self._clock = simulated.rows[slot], simulated, island, slot, clock
        simulated.late += [slot] if late else []

    def write(self, kind: str, **values: Any) -> None:
        super().write(kind, **values, now=self._clock() if self._clock else None)

    def close(self) -> None:
        self._simulated.parameters[self._slot] = whole_parameters(self._island)


def agree(simulated: Simulated, *slots: int) -> bool:
    """Whether the parameters of the islands are equal, to the bit."""
    first, *others = (simulated.parameters[slot] for slot in slots)
    return all(torch.equal(parameter, other[name]) for other in others for name, parameter in first.items())


@pytest.mark.parametrize("outer", RECIPES)
def test_a_simulation_equals_islands_that_run_side_by_side_to_the_bit(process: Process, outer: dict[str, Any]) -> None:
    sections = dict(outer=outer, swarm=dict(islands=3), train=dict(steps=9))
    simulated = Simulated(process, **sections)
    config = small_config(parallel=dict(data_parallel_strategy="ddp"), **sections)
    threads = islands_as_threads(process, 3, {}, config=config, corpus=small_corpus(40_000))
    for slot, result in enumerate(threads):
        for name, parameter in result["parameters"].items():
            assert torch.equal(simulated.parameters[slot][name], parameter), f"island {slot}: {name}"
        keys = ("fragment", "round", "step", "landed", "outcome", "digest", "pseudo_gradient_norm", "cosine", "weight", "encoded_bytes")
        rounds = [row for row in result["rows"] if row["kind"] == "round"]
        assert simulated.of(slot, "round", *keys) == [tuple(row[key] for key in keys) for row in rounds]
        losses = [(row["step"], row["loss"], row["position"]) for row in result["rows"] if row["kind"] == "step"]
        assert simulated.of(slot, "step", "step", "loss", "position") == losses
        evals = [row["loss"] for row in result["rows"] if row["kind"] == "eval"]
        assert simulated.of(slot, "eval", "loss") == evals


def test_rounds_at_every_step_equal_data_parallel_training(process: Process) -> None:
    sections = dict(
        optimizer=dict(type="sgd", lr=0.5, clip_norm=0.0, schedule="constant", warmup_steps=0),
        outer=dict(sync_every=1, optimizer=dict(lr=1.0, momentum=0.0)),
        swarm=dict(islands=4, max_slots=4),
    )
    simulated, config, corpus = Simulated(process, **sections), small_config(**sections), small_corpus(40_000)
    order = Sampler(num_samples(corpus.train, 16), config.run.seed)  # position p of slot s is sample 4 p + s
    joint = [windows(corpus.train, order(torch.arange(32 * step, 32 * step + 32).numpy()), 16) for step in range(5)]
    expected = plain_training(config, joint, [0.5] * 5)
    for parameters in simulated.parameters.values():
        for name, parameter in expected["parameters"].items():
            assert float((parameters[name] - parameter).abs().max()) < 1e-10
    losses = [sum(step) / 4 for step in zip(*(simulated.of(slot, "step", "loss") for slot in range(4)), strict=True)]
    assert losses == pytest.approx(expected["losses"], abs=1e-10)


@pytest.mark.slow
def test_sixty_four_islands_train_one_model(process: Process) -> None:
    sizes = dict(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32)
    simulated = Simulated(
        process,
        model=sizes,
        outer=dict(sync_every=2),
        swarm=dict(islands=64, max_slots=64),
        train=dict(steps=2, global_batch_size=1, eval_sequences=1),
    )
    assert agree(simulated, *range(64))
    assert {tuple(row["members"]) for row in simulated.of(63, "round")} == {tuple(range(64))}
    positions = [simulated.of(slot, "step", "position") for slot in range(64)]
    assert positions == [[1, 2]] * 64 and len({simulated.of(slot, "step", "loss")[0] for slot in range(64)}) > 60


@pytest.mark.slow
def test_by_steps_all_wait_for_the_slowest_and_the_clock_shows_it(process: Process) -> None:
    script = [dict(island=1, speed=0.5)]
    simulated = Simulated(process, outer=dict(sync_every=2), swarm=dict(islands=2), exchange=dict(script=script))
    assert simulated.of(0, "step", "now") == [1, 4, 5, 8, 10]  # a row is written after the round
    assert simulated.of(0, "step", "stall_seconds") == [0, 2, 0, 2, 1] and simulated.of(1, "step", "stall_seconds") == [0] * 5
    alike = Simulated(process, outer=dict(sync_every=2), swarm=dict(islands=2))
    assert simulated.of(0, "round", "digest") == alike.of(0, "round", "digest") == alike.of(1, "round", "digest")


BY_THE_CLOCK = dict(
    outer=dict(sync_every="4s"),
    swarm=dict(islands=2),
    train=dict(steps=24),
    exchange=dict(script=[dict(island=1, speed=0.5)]),
)


def test_by_the_clock_islands_of_unlike_speed_weigh_unlike_and_end_together(process: Process) -> None:
    simulated = Simulated(process, **BY_THE_CLOCK)
    weights = [simulated.of(slot, "round", "weight") for slot in (0, 1)]
    assert weights[0][:4] == [4 * TOKENS] * 4 and weights[1][:4] == [2 * TOKENS] * 4
    assert simulated.of(0, "round", "now")[:4] == [4, 8, 12, 16]
    assert sum(weights[0]) + sum(weights[1]) == 48 * TOKENS  # all that the run was to train on
    assert len(simulated.of(0, "step")) == 32 and len(simulated.of(1, "step")) == 16
    assert agree(simulated, 0, 1)


@pytest.mark.slow
def test_the_same_script_gives_the_same_bits(process: Process) -> None:
    first, second = (Simulated(process, **BY_THE_CLOCK) for _ in range(2))
    assert agree(first, 0, 1) and all(torch.equal(first.parameters[0][name], second.parameters[0][name]) for name in first.parameters[0])
    assert first.of(0, "round", "digest", "now") == second.of(0, "round", "digest", "now")


def test_an_island_that_leaves_is_gone_and_comes_back_with_the_state_of_the_others(process: Process) -> None:
    script = [dict(island=2, leaves=5, joins=9)]
    simulated = Simulated(
        process, outer=dict(sync_every=4), swarm=dict(islands=3), train=dict(steps=16), exchange=dict(script=script)
    )
    assert simulated.of(0, "round", "step") == [4, 8, 12, 16]
    assert simulated.of(0, "round", "members") == [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1, 2]]
    assert simulated.late == [2]
    assert simulated.of(2, "step", "step") == [1, 2, 3, 4, 5, *range(10, 17)]
    assert simulated.of(2, "step", "position") == [8, 16, 24, 32, 40, *(32 + 8 * step for step in range(1, 8))]  # step 5 never counted
    told = [(row["what"], row["detail"]) for row in simulated.of(2, "event")]
    assert told == [("stopped", "left after step 5, as scripted"), ("end", "all steps done")]
    assert simulated.of(2, "round", "weight") == [4 * TOKENS, 3 * TOKENS, 4 * TOKENS]
    assert agree(simulated, 0, 1, 2)


@pytest.mark.parametrize(
    "outer", [dict(overlap=3, late="land_late"), *(pytest.param(dict(overlap=tau), marks=pytest.mark.slow) for tau in (3, "eager"))]
)
def test_who_joins_while_a_round_is_on_follows_it_and_is_in_the_next(process: Process, outer: dict[str, Any]) -> None:
    script = [dict(island=1, joins=5), dict(island=0, speed=0.9)]
    simulated = Simulated(
        process, outer=dict(sync_every=4, **outer), swarm=dict(islands=3), train=dict(steps=20), exchange=dict(script=script)
    )
    first, *later = simulated.of(1, "round")
    assert (first["outcome"], first["reason"]) == ("left_out", "the round had begun before this island was there")
    assert all(row["outcome"] == "committed" for row in later if row["fragment"] == first["fragment"])
    assert [row["members"] for row in simulated.of(0, "round")][-1] == [0, 1, 2]
    for slot in (1, 2):
        known = {(row["fragment"], row["round"]): row["digest"] for row in simulated.of(0, "round")}
        assert all(known[row["fragment"], row["round"]] == row["digest"] for row in simulated.of(slot, "round"))
    assert agree(simulated, 0, 1, 2)


@pytest.mark.slow
def test_who_joins_by_the_clock_is_called(process: Process) -> None:
    script = [dict(island=1, joins=5), dict(island=2, speed=3.0, leaves=18)]
    simulated = Simulated(
        process, outer=dict(sync_every="4s", overlap=2), swarm=dict(islands=3), train=dict(steps=20), exchange=dict(script=script)
    )
    assert [0, 1, 2] in simulated.of(0, "round", "members") and simulated.of(0, "round", "members")[-1] == [0, 1]
    assert simulated.of(0, "round", "tokens")[-1] >= 60 * TOKENS
    assert agree(simulated, 0, 1)


def test_what_one_island_raises_ends_all_of_them_with_its_own_traceback(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.simulate._Stepped.after_step", lambda self, progress, tokens: 1 / (4 - progress.step))
    with pytest.raises(ZeroDivisionError) as caught:
        Simulated(process, outer=dict(sync_every=2), swarm=dict(islands=3))
    assert caught.traceback[-1].frame.code.name == "<lambda>"


class Waits:
    """A player who waits for what never comes."""

    def __init__(self, turns: Turns, patience: float | None, tell: Callable[[float], None] = lambda clock: None) -> None:
        self._turns, self._patience, self._tell = turns, patience, tell
        self.enter = self.leave = lambda: None

    def play(self) -> None:
        self.waited = self._turns.wait_for(lambda: False, self._patience)
        self._tell(self._turns.clock())


def test_where_nobody_can_go_on_that_is_an_error_and_no_hang() -> None:
    turns = Turns()
    with pytest.raises(RuntimeError, match="islands 0, 1 wait for each other"):
        turns.run([Waits(turns, None), Waits(turns, None)])


@pytest.mark.parametrize("patiences", [(10.0, 7.0), (7.0, 10.0), (10.0, 15.0, 100.0)])
def test_where_nobody_can_go_on_time_passes_until_the_first_gives_up(patiences: tuple[float, ...]) -> None:
    turns, gave_up = Turns(), []
    players = [Waits(turns, patience, gave_up.append) for patience in patiences]
    turns.run(players)
    assert all(player.waited is False for player in players)
    assert gave_up == sorted(patiences)  # each when its own patience was at an end, and in that order


@pytest.mark.parametrize(
    "sections, message",
    [
        (dict(checkpoint=dict(every=5)), "checkpoint.every=5 does not go with a simulation .* simply run again"),
        (dict(train=dict(resume="runs/old")), "train.resume=runs/old does not go with a simulation .* begin afresh; set it to never"),
        (dict(parallel=dict(data_parallel_size=2)), "parallel.data_parallel_size=2: .* Set it to 1, or exchange.type to hivemind"),
        (dict(train=dict(profile=[1, 2])), r"train.profile=\[1, 2\] does not go with a simulation"),
        (dict(outer=dict(adaptive=dict(target=0.9))), "outer.adaptive.target=0.9 does not go with a simulation"),
        (dict(exchange=dict(script=[dict(island=2)])), "there is no island 2 with swarm.islands=2, whose last one is island 1"),
        (dict(exchange=dict(script=[dict(island=1), dict(island=1)])), "island 1 has 2 entries; put all of it into one"),
        (dict(exchange=dict(script=[dict(island=1, joins=5)])), r"changes at step 5, and the run ends with step 5 .* up to 4"),
        (dict(exchange=dict(script=[dict(island=0, leaves=2), dict(island=1, joins=2)])), "at step 2 no island is there that was there"),
        (dict(exchange=dict(script=[dict(island=0, leaves=2), dict(island=1, leaves=3)])), "at step 3 no island is there"),
        (dict(exchange=dict(script=[dict(island=0, joins=2), dict(island=1, joins=2)])), "at step 0 no island is there"),
        (dict(exchange=dict(script=[dict(island=0, leaves=2, joins=2)])), "island 0 leaves and joins at step 2; give two steps"),
        (dict(exchange=dict(script=[dict(island=0, speed=0)])), r"exchange.script.*speed"),
        (dict(exchange=dict(script=[dict(island=0, sped=2)])), "unknown key"),
    ],
)
def test_what_can_not_be_simulated_is_refused_with_what_to_do(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_simulation(small_config(swarm=dict(islands=2), **sections))


def test_more_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"this is one of 2 ranks; start it without torchrun"):
        check_simulation(small_config(swarm=dict(islands=2)), ranks=2)


@pytest.mark.parametrize(
    "keys, lives",
    [
        (dict(), (Life(),)),
        (dict(leaves=3), (Life(0, 3),)),
        (dict(joins=3), (Life(3),)),
        (dict(joins=3, leaves=5), (Life(3, 5),)),
        (dict(leaves=3, joins=5), (Life(0, 3), Life(5))),
    ],
)
def test_when_an_island_takes_part(keys: dict[str, int], lives: tuple[Life, ...]) -> None:
    config = small_config(exchange=dict(script=[dict(island=0, **keys)]))
    assert config.exchange.script[0].lives == lives
