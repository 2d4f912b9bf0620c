"""Any codec over real islands: the same bits as in memory, error feedback included, whatever happens to a round."""

from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
from harness import Island, Swarm, assert_same, drift, eventually, first_anchor, layout_of, running, settings

from diloco.codecs import build_wire
from diloco.config import RunConfig
from diloco.exchange.base import Work
from diloco.exchange.in_memory import Hub, InMemoryExchange
from diloco.outer_state import OuterState
from diloco.reduction import CHUNK
from islands.config_file import parse_config

SIZES = [2 * CHUNK + 4321, 5]  # three chunks, the last one short; and less than one
WEIGHTS = [1000.0, 3000.0, 500.0]

pytestmark = pytest.mark.timeout(300)


class Mirror:
    """The same rounds by islands of one process."""

    def __init__(self, raw: dict[str, Any], count: int) -> None:
        config, hub = parse_config(RunConfig, raw), Hub(count)
        self._states = [OuterState(layout_of(config, SIZES)) for _ in range(count)]
        wire, decay = build_wire(config.outer.codec), config.outer.residual_decay
        self._exchanges = [
            InMemoryExchange(hub, slot, state, wire, 60.0, residual_decay=decay) for slot, state in enumerate(self._states)
        ]
        for fragment in (part for state in self._states for part in state.fragments):
            fragment.anchor.copy_(first_anchor(fragment.index, fragment.numel))
            fragment.initialize()

    def round(self, fragment: int, seed: int, works: dict[int, Work], poisoned: int | None = None) -> None:
        """One that all members of the swarm commit, but the one that has nothing to offer."""
        for slot, work in works.items():
            state = self._states[slot].fragments[fragment]
            state.local.copy_(state.anchor - drift(fragment, state.numel, seed + slot))
            if slot == poisoned:
                state.local[0] = float("nan")
            self._exchanges[slot].launch(fragment, work)
        for slot in works:
            assert self._exchanges[slot].outcome(fragment).kind == ("left_out" if slot == poisoned else "committed")

    def assert_equal(self, swarm: Swarm) -> None:
        """Every bit of the agreed state, and of what each island keeps for itself."""
        assert_same(swarm)
        for index, size in enumerate(SIZES):
            there = swarm.islands[0].call("agreed", index)
            here = self._states[0].fragments[index]
            tensors = {"anchor": here.anchor, **here.optimizer_state}
            for name, values in tensors.items():
                np.testing.assert_array_equal(there["tensors"][name], values.numpy())
            assert (there["digest"], there["height"]) == (here.digest, here.height)
            for slot, island in enumerate(swarm.islands):
                residual = self._states[slot].fragments[index].residual
                if residual is not None:
                    np.testing.assert_array_equal(island.call("residual", index), residual.numpy())


@contextmanager
def islands(folder: Path, count: int, outer: dict[str, Any]) -> Iterator[tuple[Swarm, Mirror]]:
    """A swarm that has joined, and its mirror."""
    first = Island(folder / "0", settings(outer=outer, swarm={"islands": count, "slot": 0}), SIZES)
    with running([first]) as started:
        first.ask("join")
        peers = [eventually(first.address)]
        others = [{"islands": count, "slot": slot, "initial_peers": peers} for slot in range(1, count)]
        with running(
            Island(folder / str(keys["slot"]), settings(outer=outer, swarm=keys), SIZES) for keys in others
        ) as joined:
            for island in joined:
                island.ask("join")
            swarm = Swarm([*started, *joined])
            assert [island.answer().slot for island in swarm.islands] == list(range(count))
            yield swarm, Mirror(settings(outer=outer), count)


def play(swarm: Swarm, mirror: Mirror, seed: int, fragments: tuple[int, ...] = (0, 1), poisoned: int | None = None) -> list[Any]:
    """A round of each fragment, side by side, here and there; the outcomes."""
    works = {part: swarm.launch(part, seed, WEIGHTS, poisoned=poisoned) for part in fragments}
    outcomes = [outcome for part in fragments for outcome in swarm.outcomes(part)]
    for part in fragments:
        mirror.round(part, seed, works[part], poisoned)
    expected = ["left_out" if slot == poisoned else "committed" for slot in works[fragments[0]]] * len(fragments)
    assert [outcome.kind for outcome in outcomes] == expected, outcomes
    mirror.assert_equal(swarm)
    return outcomes


def offered(island: Island, fragment: int, height: int) -> list[str]:
    """Hashes of what it has offered to each attempt of a round."""
    lines = [line.split() for line in (island.folder / "offered").read_text().splitlines()]
    return [line[3] for line in lines if line[:2] == [str(fragment), str(height)]]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Swarm, Mirror]]:
    """Three islands that lose much in encoding, and remember it."""
    outer = {"codec": {"type": "topk"}, "error_feedback": True, "residual_decay": 0.9}
    with islands(tmp_path_factory.mktemp("three"), 3, outer) as started:
        yield started


def test_rounds_equal_those_in_memory(three: tuple[Swarm, Mirror]) -> None:
    outcomes = [play(*three, seed=100 * number) for number in range(2)][-1]
    for outcome in outcomes[:3]:
        assert outcome.encoded_bytes < 0.03 * SIZES[0]  # a fifth of a bit a parameter
        assert outcome.bytes_sent < 2.2 * outcome.encoded_bytes, "whole, to two others"
        assert min(outcome.encode_seconds, outcome.decode_seconds, outcome.step_seconds) > 0


def test_an_attempt_that_failed_is_made_again_with_the_same_bytes(three: tuple[Swarm, Mirror]) -> None:
    swarm, mirror = three
    swarm.islands[1].arm("break_transfer")
    [outcome, *_] = play(swarm, mirror, seed=300)
    assert swarm.islands[1].fired("break_transfer")
    sent = [[offered(island, part, outcome.height) for part in (0, 1)] for island in swarm.islands]
    assert any(len(attempts) > 1 for island in sent for attempts in island)
    assert all(len(set(attempts)) == 1 for island in sent for attempts in island)


def test_a_skipped_round_and_one_without_an_island_lose_nothing(three: tuple[Swarm, Mirror]) -> None:
    swarm, mirror = three
    swarm.islands[2].arm("skip_round")
    swarm.launch(0, 400, WEIGHTS, only=[2])
    [outcome] = swarm.outcomes(0, only=[2])
    assert outcome.kind == "skipped" and swarm.islands[2].fired("skip_round")
    play(swarm, mirror, seed=410)
    play(swarm, mirror, seed=420, fragments=(0,), poisoned=1)
    play(swarm, mirror, seed=430)


def test_one_that_dies_in_doubt_finds_out_what_counted(three: tuple[Swarm, Mirror]) -> None:
    """Its contribution has counted, and so has what was lost of it; it hears of that before it makes the next one."""
    swarm, mirror = three
    victim = swarm.islands[1]
    victim.arm("die_after_vote")
    works = swarm.launch(0, 500, WEIGHTS)
    outcomes = swarm.outcomes(0)
    assert victim.fired("die_after_vote")
    assert [outcome.kind for outcome in outcomes] == ["committed", "skipped", "committed"], outcomes
    mirror.round(0, 500, works)
    victim.wait_for_event("rejoined")
    swarm.launch(0, 510, WEIGHTS, only=[1])
    [outcome] = swarm.outcomes(0, only=[1])
    assert outcome.kind == "left_out" and "had counted its sequences up to" in outcome.reason
    assert outcome.position == works[1].position and not outcome.rejected
    mirror.assert_equal(swarm)
    play(swarm, mirror, seed=520)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("codec", ["none", "bf16", "int8", "int4", "e3m0", "topk", "statistical2"])
def test_every_codec(tmp_path: Path, codec: str, count: int) -> None:
    with islands(tmp_path, count, {"codec": {"type": codec}, "error_feedback": codec != "none"}) as (swarm, mirror):
        for number in range(3):
            play(swarm, mirror, seed=100 * number)
