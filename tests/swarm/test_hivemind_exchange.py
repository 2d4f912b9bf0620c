"""Three real islands over loopback: agreement to the bit, and faults. The tests share one swarm and run in order."""

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import pytest
import torch
from harness import (
    PEER_TIMEOUT,
    Island,
    Stranger,
    Swarm,
    children,
    drift,
    eventually,
    first_anchor,
    frozen,
    is_gone,
    running,
    settings,
)

from diloco.codecs import build_wire
from diloco.config import RunConfig
from diloco.exchange.base import JoinError, Work
from diloco.exchange.hivemind import messages
from diloco.exchange.in_memory import Hub, InMemoryExchange
from diloco.launch import make_identity
from diloco.outer_state import Layout, OuterState
from diloco.reduction import CHUNK
from islands import plugins
from islands.config_file import parse_config

SIZES = [2 * CHUNK + 4321, 5]  # three chunks, the last one short; and one chunk for three islands
WEIGHTS = [1000.0, 3000.0, 500.0]

pytestmark = pytest.mark.timeout(300)


class First:
    """The first island, which waits in ``join`` for two more."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.listen = f"127.0.0.1:{probe.getsockname()[1]}"
        peer = make_identity(folder / "key")
        self.address = f"/ip4/127.0.0.1/tcp/{self.listen.rpartition(':')[2]}/p2p/{peer}"
        swarm = {"islands": 3, "slot": 0, "listen": self.listen, "identity_file": str(folder / "key")}
        self.island = Island(folder / "faults-0", settings(swarm=swarm), SIZES)
        self.island.ask("join")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[First]:
    """The first island on its own."""
    first = First(tmp_path_factory.mktemp("first"))
    with running([first.island]):
        yield first


@pytest.fixture(scope="module")
def swarm(first: First, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Three islands that have joined; the third asks for no particular slot."""
    folder = tmp_path_factory.mktemp("islands")
    common = {"islands": 3, "initial_peers": [first.address]}
    raws = [settings(swarm={**common, "slot": slot}) for slot in (1, -1)]
    with running(Island(folder / str(number), raw, SIZES) for number, raw in enumerate(raws)) as joiners:
        swarm = Swarm([first.island, *joiners])
        for island in joiners:
            island.ask("join")
        seats = [island.answer() for island in swarm.islands]
        assert [seat.slot for seat in seats] == [0, 1, 2]
        assert seats[0].address == first.address
        yield swarm


def commit(swarm: Swarm, fragment: int, seed: int) -> list[Any]:
    """A round that all three islands commit; returns the outcomes."""
    swarm.launch(fragment, seed, WEIGHTS)
    outcomes = swarm.outcomes(fragment)
    assert [outcome.kind for outcome in outcomes] == ["committed"] * 3, outcomes
    assert {outcome.members for outcome in outcomes} == {(0, 1, 2)}
    assert_same_state(swarm, fragment)
    return outcomes


def assert_same_state(swarm: Swarm, fragment: int, only: list[int] | None = None) -> None:
    """Height, digest, lineage and every bit of the agreed state are equal."""
    first, *others = swarm.agreed(fragment, only)
    for other in others:
        assert [other[key] for key in ("height", "digest", "lineage")] == [
            first[key] for key in ("height", "digest", "lineage")
        ]
        for name, values in other["tensors"].items():
            np.testing.assert_array_equal(values, first["tensors"][name])


def test_refusals(first: First, tmp_path: Path) -> None:
    """Each way of not getting in is told with what is wrong and what to do; the first island is not disturbed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"/ip4/127.0.0.1/tcp/{probe.getsockname()[1]}/p2p/{first.address.rpartition('/')[2]}"
    cases = {
        "config": {"swarm": {"initial_peers": [first.address]}, "outer": {"sync_every": 31}},
        "slot": {"swarm": {"initial_peers": [first.address], "slot": 0}},
        "port": {"swarm": {"initial_peers": [first.address], "listen": first.listen}},
        "nobody": {"swarm": {"initial_peers": [nobody], "join_timeout": 1.0}},
    }
    eventually(lambda: children(first.island.exchange_pid()))  # it listens from about here on
    said = {}
    with running(Island(tmp_path / name, settings(**changes), SIZES) for name, changes in cases.items()) as islands:
        for island in islands:
            island.ask("join")
        for name, island in zip(cases, islands):
            with pytest.raises(JoinError) as refusal:
                island.answer()
            said[name] = str(refusal.value)
    assert "outer.sync_every is 30 there and 31 here" in said["config"] and first.address in said["config"]
    assert f"slot 0 is taken by {first.address}" in said["slot"] and "swarm.slot" in said["slot"]
    assert f"swarm.listen={first.listen}" in said["port"] and "choose another port" in said["port"]
    assert "no island answered" in said["nobody"] and f"{nobody}: Connection refused" in said["nobody"]


def test_rounds_equal_in_memory_and_a_plain_reference(swarm: Swarm) -> None:
    """Three rounds of both fragments, side by side, unequal weights: the same bits as computed in two other ways."""
    rounds = []
    for number in range(3):
        for fragment in (0, 1):
            swarm.launch(fragment, 100 * number, WEIGHTS)
        rounds.append([swarm.outcomes(fragment) for fragment in (0, 1)])
        for fragment in (0, 1):
            assert_same_state(swarm, fragment)
    outcomes = [outcome for both in rounds for each in both for outcome in each]
    assert {(outcome.kind, outcome.members, outcome.weights) for outcome in outcomes} == {
        ("committed", (0, 1, 2), tuple(WEIGHTS))
    }
    for fragment, numel in enumerate(SIZES):
        ours = swarm.agreed(fragment)[0]
        for anchor, momentum, digest in (in_memory(fragment), (*plain_diloco(fragment, numel), None)):
            np.testing.assert_array_equal(ours["tensors"]["anchor"], anchor.numpy())
            np.testing.assert_array_equal(ours["tensors"]["momentum"], momentum.numpy())
            assert digest in (ours["digest"], None)
    large = [outcome for outcome in outcomes if outcome.fragment == 0]
    payload = 4 * SIZES[0]
    # Three chunks, one a member: each sends two of its own and the mean of one to two others.
    assert sum(outcome.bytes_sent for outcome in large[:3]) == pytest.approx(4 * payload, rel=0.01)
    assert sum(outcome.bytes_received for outcome in large[:3]) == pytest.approx(4 * payload, rel=0.01)
    assert all(outcome.cosine > 0 and outcome.pseudo_gradient_norm > 0 for outcome in large)


def in_memory(fragment: int) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The same three rounds by islands that are threads."""
    config = parse_config(RunConfig, settings())
    optimizer, wire = plugins.build("diloco.outer_optimizers", config.outer.optimizer), build_wire(config.outer.codec)
    hub, states = Hub(3), [OuterState(Layout(SIZES, optimizer, max_slots=4)) for _ in range(3)]

    def island(slot: int) -> None:
        exchange, state = InMemoryExchange(hub, slot, states[slot], wire, 60.0), states[slot].fragments[fragment]
        state.anchor.copy_(first_anchor(fragment, state.numel))
        state.initialize()
        for number in range(3):
            state.local.copy_(state.anchor - drift(fragment, state.numel, 100 * number + slot))
            work = Work(int(WEIGHTS[slot]), 10 * number, 10 * number + 10, state.height + 1)
            exchange.launch(fragment, work)
            assert exchange.outcome(fragment).kind == "committed"

    threads = [threading.Thread(target=island, args=(slot,)) for slot in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = states[0].fragments[fragment]
    return state.anchor, state.optimizer_state["momentum"], state.digest


def plain_diloco(fragment: int, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """DiLoCo with nothing of ours: weighted mean of anchor minus local, then Nesterov SGD (0.7, 0.9)."""
    anchor, momentum = first_anchor(fragment, numel), torch.zeros(numel)
    for number in range(3):
        mean = torch.zeros(numel)
        for slot, weight in enumerate(WEIGHTS):
            local = anchor - drift(fragment, numel, 100 * number + slot)
            mean += (anchor - local) * (weight / sum(WEIGHTS))
        momentum = momentum * 0.9 + mean
        anchor = anchor - (momentum * 0.9 + mean) * 0.7
    return anchor, momentum


def test_a_contribution_that_is_not_finite_does_not_count(swarm: Swarm) -> None:
    """The others commit without it; its island says why, and takes over what they agreed on."""
    swarm.launch(0, 1, WEIGHTS, only=[0, 2])
    swarm.islands[1].call("launch", 0, WEIGHTS[1], 2, poison=True)
    healthy, poisoned, other = swarm.outcomes(0)
    assert [healthy.kind, healthy.members, other.kind] == ["committed", (0, 2), "committed"]
    assert poisoned.kind == "left_out" and "not finite" in poisoned.reason and poisoned.members == (0, 2)
    assert_same_state(swarm, 0)
    commit(swarm, 0, 11)


def test_a_frozen_island_is_left_out_and_catches_up(swarm: Swarm) -> None:
    """Frozen for longer than peer_timeout: the others go on; it takes over their state, and is in the next round."""
    sleeper = swarm.islands[2]
    for island in swarm.islands:
        island.call("events")
    with frozen(sleeper.exchange_pid(), sleeper.daemon_pid()):
        swarm.launch(0, 20, WEIGHTS)
        outcomes = swarm.outcomes(0, only=[0, 1])
        assert [(outcome.kind, outcome.members) for outcome in outcomes] == [("committed", (0, 1))] * 2
        lost = [event.detail for event in swarm.islands[0].wait_for_event("lost")]
        assert lost == [f"island 2 was silent for {PEER_TIMEOUT:g} s"]
    [late] = swarm.outcomes(0, only=[2])
    assert (late.kind, late.height, late.digest) == ("left_out", outcomes[0].height, outcomes[0].digest)
    assert "without this island" in late.reason and late.members == (0, 1)
    assert_same_state(swarm, 0)
    commit(swarm, 0, 21)


def test_garbage_does_no_harm(swarm: Swarm, first: First) -> None:
    """From a stranger and from a member in the middle of a round: refused, counted, and rounds go on."""
    stranger = Stranger(first.address)
    answers = stranger.answers()
    replies = [messages.decode(answer) for answer in answers if answer]
    assert replies and all(isinstance(reply, (messages.Refused, messages.NotAMember)) for reply in replies)
    first.island.wait_for_event("refused")
    swarm.islands[1].arm("garbage_to_0")
    commit(swarm, 1, 30)
    swarm.islands[1].wait_until_fired("garbage_to_0")
    commit(swarm, 0, 31)


def test_a_lost_vote_does_not_split_the_swarm(swarm: Swarm) -> None:
    """One member's vote reaches one other and not the second: those who can't commit by themselves find out."""
    swarm.islands[2].arm("lose_vote_to_1")
    outcomes = commit(swarm, 0, 40)
    swarm.islands[2].wait_until_fired("lose_vote_to_1")
    assert len({outcome.digest for outcome in outcomes}) == 1


@pytest.mark.parametrize("victim", ["exchange", "daemon"])
def test_an_exchange_process_that_dies_is_started_again(swarm: Swarm, victim: str) -> None:
    """The round in flight is skipped and says so; the new process has the same slot, and the next round counts it."""
    island = swarm.islands[1]
    island.call("events")
    swarm.launch(1, 50, WEIGHTS, only=[1])
    os.kill(island.exchange_pid() if victim == "exchange" else island.daemon_pid(), signal.SIGKILL)
    [outcome] = swarm.outcomes(1, only=[1])
    assert outcome.kind == "skipped" and "exchange process" in outcome.reason
    events = {event.what: event.detail for event in island.wait_for_event("rejoined")}
    assert ("killed by SIGKILL" if victim == "exchange" else "libp2p daemon") in events["restarted"]
    swarm.launch(1, 51, WEIGHTS)
    outcomes = swarm.outcomes(1)
    assert [(outcome.kind, outcome.members) for outcome in outcomes] == [("committed", (0, 1, 2))] * 3
    assert_same_state(swarm, 1)


def test_kill_9_in_the_middle_of_a_transfer(swarm: Swarm) -> None:
    """The trainer dies with half a chunk sent: its processes go with it, the others agree without it and go on."""
    victim = swarm.islands[2]
    pids = [victim.pid, victim.exchange_pid(), victim.daemon_pid()]
    victim.arm("hang_in_transfer")
    swarm.launch(0, 60, WEIGHTS)
    victim.wait_until_fired("hang_in_transfer")
    victim.kill_trainer()
    eventually(lambda: all(is_gone(pid) for pid in pids))
    for number in (60, 61):
        if number > 60:
            swarm.launch(0, number, WEIGHTS, only=[0, 1])
        outcomes = swarm.outcomes(0, only=[0, 1])
        assert [(outcome.kind, outcome.members) for outcome in outcomes] == [("committed", (0, 1))] * 2
        assert_same_state(swarm, 0, only=[0, 1])


def test_kill_9_before_the_vote(swarm: Swarm) -> None:
    """Its result is staged and its vote not cast: the survivor does not count it."""
    victim = swarm.islands[1]
    pids = [victim.exchange_pid(), victim.daemon_pid()]
    victim.arm("hang_before_vote")
    swarm.launch(0, 70, WEIGHTS, only=[0, 1])
    victim.wait_until_fired("hang_before_vote")
    victim.kill_trainer()
    [outcome] = swarm.outcomes(0, only=[0])
    assert (outcome.kind, outcome.members) == ("committed", (0,))
    eventually(lambda: all(is_gone(pid) for pid in pids))


def test_nothing_lives_on_after_close(swarm: Swarm) -> None:
    """close() ends the exchange process and its daemon, and may be called twice."""
    island = swarm.islands[0]
    pids = [island.exchange_pid(), island.daemon_pid()]
    island.call("close")
    assert all(is_gone(pid) for pid in pids)
    island.call("close")
