"""Two real islands with a key and data connections, and strangers who want in. The tests share one swarm and run in order."""

import asyncio
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any, Awaitable, Callable, Iterator

import numpy as np
import pytest
import torch
from harness import Island, Stranger, Swarm, drift, eventually, first_anchor, is_gone, running, settings, throw_garbage

from diloco.exchange.base import JoinError
from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.seal import SEAL_BYTES, Seal, subkey
from diloco.launch import make_identity
from diloco.reduction import CHUNK, num_chunks
from diloco.swarm_key import read_key, write_new_key

NUMEL = 5 * CHUNK + 123  # six chunks
CARRIERS = 2
WEIGHTS = [1000.0, 3000.0]
ROUND_DEADLINE = 10.0
_PAYLOAD = 4 * NUMEL  # fp32, whole, as there are two islands

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The swarm's key."""
    path = tmp_path_factory.mktemp("key") / "swarm.key"
    write_new_key(path)
    return str(path)


@pytest.fixture(scope="module")
def swarm(key_file: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Two islands that have joined."""
    folder = tmp_path_factory.mktemp("islands")
    common = {"islands": 2, "key_file": key_file, "data_connections": CARRIERS}
    listen = f"127.0.0.1:{free_port()}"
    address = f"/ip4/127.0.0.1/tcp/{listen.rpartition(':')[2]}/p2p/{make_identity(folder / 'identity')}"
    owns = [
        {"slot": 0, "listen": listen, "identity_file": str(folder / "identity")},
        {"initial_peers": [address]},
    ]
    raws = [settings(swarm={**common, **own}, exchange={"round_deadline": ROUND_DEADLINE}) for own in owns]
    with running(Island(folder / str(number), raw, [NUMEL]) for number, raw in enumerate(raws)) as islands:
        for island in islands:
            island.ask("join")
        assert [island.answer().slot for island in islands] == [0, 1]
        swarm = Swarm(islands)
        swarm.address = address
        yield swarm


def free_port() -> int:
    """One that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def commit(swarm: Swarm, seed: int) -> list[Any]:
    """A round that both islands commit, to the same bits; returns the outcomes."""
    swarm.launch(0, seed, WEIGHTS)
    outcomes = swarm.outcomes(0)
    assert [(outcome.kind, outcome.members) for outcome in outcomes] == [("committed", (0, 1))] * 2, outcomes
    one, two = swarm.agreed(0)
    assert outcomes[0].digest == outcomes[1].digest == one["digest"] == two["digest"]
    np.testing.assert_array_equal(one["tensors"]["anchor"], two["tensors"]["anchor"])
    return outcomes


def bytes_of_a_round() -> int:
    """What each island sends and receives: the payload, a head for each chunk and the end of a lane, a sealed one for a lane."""
    head = messages.encode(messages.ContributionHeader(proposal=bytes(32), lane=0, lanes=CARRIERS))
    return _PAYLOAD + 8 * num_chunks(NUMEL) + CARRIERS * (4 + SEAL_BYTES + len(head) + 8)


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def written(pid: int) -> int:
    """Bytes that a process has written so far, to sockets too."""
    lines = (Path("/proc") / str(pid) / "io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def test_rounds_are_exact_and_their_bytes_go_over_the_data_connections(swarm: Swarm) -> None:
    """The same bits as computed plainly; every byte is accounted for; the carriers have carried it, each a share."""
    island = swarm.islands[0]
    carriers, control = island.carrier_pids(), island.daemon_pid()
    assert len(carriers) == CARRIERS
    before = {pid: written(pid) for pid in (control, *carriers)}
    rounds = [commit(swarm, 100 * number) for number in range(3)]
    moved = {pid: written(pid) - count for pid, count in before.items()}
    anchor, momentum = first_anchor(0, NUMEL), torch.zeros(NUMEL)
    for number in range(3):
        mean = torch.zeros(NUMEL)
        for slot, weight in enumerate(WEIGHTS):
            mean += (anchor - (anchor - drift(0, NUMEL, 100 * number + slot))) * (weight / sum(WEIGHTS))
        momentum = momentum * 0.9 + mean
        anchor = anchor - (momentum * 0.9 + mean) * 0.7
    np.testing.assert_array_equal(swarm.agreed(0)[0]["tensors"]["anchor"], anchor.numpy())
    counted = {(outcome.bytes_sent, outcome.bytes_received) for outcomes in rounds for outcome in outcomes}
    assert counted == {(bytes_of_a_round(), bytes_of_a_round())}
    # A daemon writes what it sends to the other, and what it receives to its exchange process.
    assert moved[control] < 0.1 * _PAYLOAD and sum(moved[pid] for pid in carriers) > 3 * 2 * _PAYLOAD
    assert min(moved[pid] for pid in carriers) > 0.3 * _PAYLOAD  # the faster one takes more
    assert not any(event.what == "fallback" for island in swarm.islands for event in island.call("events"))


def test_a_stranger_is_refused_at_once_and_told_why(swarm: Swarm, tmp_path: Path) -> None:
    """Without a key and with another one, while rounds go on."""
    write_new_key(tmp_path / "other.key")
    strangers = {"none": {}, "other": {"key_file": str(tmp_path / "other.key")}}
    raws = {name: settings(swarm={"initial_peers": [swarm.address], **own}) for name, own in strangers.items()}
    with running(Island(tmp_path / name, raw, [NUMEL]) for name, raw in raws.items()) as islands:
        for island in islands:
            island.ask("join")
        commit(swarm, 1)
        started = time.monotonic()
        for island in islands:
            with pytest.raises(JoinError, match=f"{swarm.address} answers, but .* use the same swarm.key_file"):
                island.answer()
        assert time.monotonic() - started < 60, "long before swarm.join_timeout"
    commit(swarm, 2)
    assert "stranger" in swarm.islands[0].wait_for_event("refused")[-1].detail


async def members_in_directory(daemon: Any, address: str, key: bytes) -> list[str]:
    """The members that the DHT tells one who has this key; b"": none."""
    from hivemind.dht.node import DHTNode

    from diloco.exchange.hivemind.directory import KeyAuthorizer

    authorizer = KeyAuthorizer(subkey(key, "test", "directory")) if key else None
    node = await DHTNode.create(
        p2p=daemon, initial_peers=[address], authorizer=authorizer, ensure_bootstrap_success=False
    )
    found = await node.get("test.members", latest=True)
    return sorted(found.value) if found else []


async def read_directory(daemon: Any, address: str) -> list[str]:
    """As a stranger without a key."""
    return await members_in_directory(daemon, address, b"")


class ReadDirectory:
    """As one with a key."""

    def __init__(self, key: bytes) -> None:
        self.key = key

    async def __call__(self, daemon: Any, address: str) -> list[str]:
        return await members_in_directory(daemon, address, self.key)


def test_the_directory_tells_members_only(swarm: Swarm, key_file: str) -> None:
    acts = [read_directory, ReadDirectory(bytes(32)), ReadDirectory(read_key(key_file))]
    without, other, right = [stranger.answers() for stranger in [Stranger(swarm.address, act) for act in acts]]
    assert without == other == []
    assert len(right) == 2 and swarm.address.rpartition("/")[2] in right


class Attack:
    """What a stranger with another key can do to an island in a few seconds: noise, floods, streams that say nothing."""

    seconds = 3.0

    async def __call__(self, daemon: Any, address: str) -> tuple[int, list[bytes]]:
        peer, seal = address.rpartition("/")[2], Seal(b"o" * 32)
        answers = await throw_garbage(daemon, peer, seal)
        ends = time.monotonic() + self.seconds
        counts = await asyncio.gather(
            *(self._ask(daemon, address, size, ends) for size in [100] * 24 + [900 << 10] * 8),
            *(self._say_nothing(daemon, address, ends) for _ in range(16)),
        )
        return sum(counts), answers

    async def _ask(self, daemon: Any, address: str, size: int, ends: float) -> int:
        peer, raw = address.rpartition("/")[2], os.urandom(size)
        return await self._repeat(daemon, address, ends, lambda: daemon.request(peer, "diloco/control/1", raw))

    async def _say_nothing(self, daemon: Any, address: str, ends: float) -> int:
        from hivemind.p2p import PeerID

        async def open_and_wait() -> None:
            peer = PeerID.from_base58(address.rpartition("/")[2])
            _, reader, writer = await daemon.call_binary_stream_handler(peer, "diloco/bulk/1")
            writer.write(b"\x60\x00\x00\x00" + bytes(50))
            await reader.read()
            writer.close()

        return await self._repeat(daemon, address, ends, open_and_wait)

    async def _repeat(self, daemon: Any, address: str, ends: float, act: Callable[[], Awaitable[Any]]) -> int:
        done = 0
        while time.monotonic() < ends:
            try:
                async with asyncio.timeout(ends - time.monotonic()):
                    await daemon.dial(address.rpartition("/")[2], address)
                    await act()
                done += 1
            except Exception:  # whatever it is, try again: this is an attack
                await asyncio.sleep(0.05)
        return done


def test_noise_and_floods_of_a_stranger_do_no_harm(swarm: Swarm) -> None:
    """All of it is refused with one short answer and counted; rounds go on meanwhile, and no memory piles up."""
    island = swarm.islands[0]
    exchange = island.exchange_pid()
    before = memory_mib(exchange)
    attack, rounds = Stranger(swarm.address, Attack()), 0
    while not attack._pipe.poll():
        commit(swarm, 300 + rounds)
        rounds += 1
    count, answers = attack.answers()
    [answer] = {answer for answer in answers if answer}
    assert "swarm.key_file" in messages.decode(answer).reason and len(answer) < 100
    assert count > 50 and rounds > 3
    commit(swarm, 400)
    assert memory_mib(exchange) < before + 64
    assert island.exchange_pid() == exchange, "it was not started again"
    assert "stranger" in island.wait_for_event("refused")[-1].detail


def test_noise_under_the_seal_of_a_member_does_no_harm(swarm: Swarm) -> None:
    """In the middle of a round; it is counted as malformed, and what was changed on the way as a stranger's."""
    exchange, before = swarm.islands[0].exchange_pid(), memory_mib(swarm.islands[0].exchange_pid())
    swarm.islands[1].arm("garbage_to_0")
    commit(swarm, 500)
    swarm.islands[1].wait_until_fired("garbage_to_0")
    counted = swarm.islands[0].wait_for_event("refused")[-1].detail
    assert "malformed" in counted and "stranger" in counted
    commit(swarm, 501)
    assert swarm.islands[0].exchange_pid() == exchange and memory_mib(exchange) < before + 64


@pytest.mark.slow
def test_one_that_stops_sending_and_stays_alive_costs_a_deadline_at_most(swarm: Swarm) -> None:
    """Its other lane, and its signs of life, go on."""
    swarm.islands[1].arm("hang_in_transfer")
    started = time.monotonic()
    swarm.launch(0, 550, WEIGHTS)
    outcomes = swarm.outcomes(0)
    swarm.islands[1].wait_until_fired("hang_in_transfer")
    assert time.monotonic() - started < ROUND_DEADLINE + 5
    assert [outcome.kind for outcome in outcomes] == ["skipped"] * 2
    assert any(f"not finished within exchange.round_deadline={ROUND_DEADLINE:g} s" in one.reason for one in outcomes)
    commit(swarm, 551)


def test_a_carrier_that_dies_is_noticed(swarm: Swarm) -> None:
    """As when any daemon dies: the exchange process is started again, with new carriers, and rounds go on."""
    island = swarm.islands[1]
    old = [island.daemon_pid(), *island.carrier_pids()]
    island.call("events")
    os.kill(old[-1], signal.SIGKILL)
    events = {event.what: event.detail for event in island.wait_for_event("rejoined")}
    assert "libp2p daemon of this island ended" in events["restarted"]
    eventually(lambda: all(is_gone(pid) for pid in old))
    assert len(island.carrier_pids()) == CARRIERS
    # Until the other has told the new carriers apart from the old ones, the control connection carries its bytes.
    eventually(lambda: {outcome.bytes_sent for outcome in commit(swarm, 600)} == {bytes_of_a_round()})
    pids = [island.exchange_pid(), island.daemon_pid(), *island.carrier_pids()]
    island.call("close")
    assert all(is_gone(pid) for pid in pids), "nothing lives on after close"
