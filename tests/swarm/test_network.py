"""Two ends of the wire in one process, with real libp2p daemons: keys that differ, carriers, limits, those who stall."""

import asyncio
import os
import socket
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Awaitable, Callable

import pytest
import torch

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")  # before hivemind is imported

from hivemind.p2p import PeerID  # noqa: E402
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, P2PHandlerError  # noqa: E402

from diloco.exchange.base import ExchangeEvent, JoinError  # noqa: E402
from diloco.exchange.hivemind import limits, messages, network, stream  # noqa: E402
from diloco.exchange.hivemind.carriers import Carriers, described, start_carriers  # noqa: E402
from diloco.exchange.hivemind.daemon import addresses, host_and_port, start_daemon  # noqa: E402
from diloco.exchange.hivemind.door import Door, come_in  # noqa: E402
from diloco.exchange.hivemind.messages import Ack, Carrier, Hello, Leave, StateHeader, StateRequest  # noqa: E402
from diloco.exchange.hivemind.network import REFUSAL, KeyDiffers, Network  # noqa: E402
from diloco.exchange.hivemind.seal import Seal  # noqa: E402
from diloco.exchange.hivemind.raw_socket import Stalled  # noqa: E402
from diloco.exchange.hivemind.stream import Stream, Traffic  # noqa: E402

pytestmark = pytest.mark.timeout(60)

KEY, OTHER, NONE = Seal(b"k" * 32), Seal(b"o" * 32), Seal(b"")
REQUEST = StateRequest(fragment=1, height=2, lineage=bytes(32), start=0, stop=3)
HEADER = StateHeader(num_bytes=3, ledger=bytes(32), members=(0,), weights=(1.0,), excluded=())


class End:
    """A network that answers every request with an ack and serves streams as told."""

    def __init__(self, seal: Seal, num_carriers: int = 0) -> None:
        self.seal, self.num_carriers = seal, num_carriers
        self.requests: list[Any] = []
        self.streams: list[tuple[str, Any]] = []
        self.events: list[ExchangeEvent] = []
        self.serve: Callable[[Stream], Awaitable[None]] = self._greet

    async def __aenter__(self) -> "End":
        self.daemon = await start_daemon("127.0.0.1:0", "", None)
        self.daemons = await start_carriers("127.0.0.1:0", "", self.num_carriers)
        own = Carriers(self.daemons, await described(self.daemons))
        self.network = Network(self.daemon, lambda peer: None, self.seal, own, self.events.append)
        self.peer, self.addresses = self.network.peer, await addresses(self.daemon)
        await self.network.serve(self._on_request, self._on_stream)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.gather(*(daemon.shutdown() for daemon in (self.daemon, *self.daemons)))

    def meet(self, other: "End") -> None:
        """As members do: each knows where the other is, and both have told their carriers and heard an answer."""
        for one, two in ((self, other), (other, self)):
            one.network.know(two.peer, two.addresses)
            one.network.learn_carriers(two.peer, two.network.carriers, answered=True)

    async def _on_request(self, peer: str, request: messages.Request) -> messages.Reply:
        self.requests.append((peer, request))
        return Ack()

    async def _on_stream(self, peer: str, header: messages.Header, opened: Stream) -> None:
        self.streams.append((peer, header))
        await self.serve(opened)

    async def _greet(self, opened: Stream) -> None:
        await opened.send(HEADER)
        await opened.send_chunk(7, torch.arange(3, dtype=torch.uint8))
        await opened.wait_for_end()


def with_ends(check: Callable[..., Awaitable[None]], *ends: End) -> None:
    """Run ``check`` with ends that live as long as it does."""

    async def run() -> None:
        async with AsyncExitStack() as stack:
            await check(*await asyncio.gather(*(stack.enter_async_context(end) for end in ends)))

    asyncio.run(run())


async def raw_stream(end: End, to: End, *writes: bytes, daemon: Any = None) -> bytes:
    """Write bytes on a new stream, and return what comes back until the other end closes it."""
    target = to.daemon if daemon is None else daemon
    await end.daemon.dial(target.peer_id.to_base58(), *await addresses(target))
    _, reader, writer = await end.daemon.call_binary_stream_handler(PeerID(target.peer_id.to_bytes()), "diloco/bulk/1")
    for write in writes:
        writer.write(write)
    try:
        return await asyncio.wait_for(reader.read(), 30)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(("ours", "theirs"), [(KEY, KEY), (NONE, NONE), (KEY, OTHER), (KEY, NONE), (NONE, KEY)])
def test_keys_have_to_be_equal(ours: Seal, theirs: Seal) -> None:
    """Else no request is handled, no stream opened, and the one who asks is told why, whichever of the two has a key."""

    async def check(us: End, them: End) -> None:
        us.network.know(them.peer, them.addresses)
        hello = Hello(run="test", settings={}, slot=-1, addresses=(), ticket=bytes(32))
        if ours == theirs:
            assert await us.network.call(them.peer, Leave(), 10) == Ack()
            opened = await us.network.open_stream(them.peer, REQUEST, Traffic())
            assert await opened.receive() == HEADER and opened._ends.there == them.peer
            number, values = await opened.receive_chunk(lambda number: 3)
            assert number == 7 and values.tolist() == [0, 1, 2]
            opened.close()
            assert them.requests == [(us.peer, Leave())] and them.streams == [(us.peer, REQUEST)]
            assert us.network.refused.total() == them.network.refused.total() == 0
            return
        with pytest.raises(KeyDiffers, match="swarm.key_file"):
            await us.network.call(them.peer, Leave(), 10)
        with pytest.raises(JoinError, match="answers, but .*swarm.key_file and run.name"):
            door = Door("test", {}, 2, 2, first=False, tell=lambda event: None)
            await come_in(door, us.network, hello, [them.addresses[0]], 30)
        opened = await us.network.open_stream(them.peer, REQUEST, Traffic())
        with pytest.raises((EOFError, ConnectionError)):
            await opened.receive()
        assert them.requests == them.streams == []
        assert them.network.refused.total() == 3 and (theirs == NONE or them.network.refused["stranger"] == 3)

    with_ends(check, End(ours), End(theirs))


def test_a_stranger_always_gets_the_same_short_answer_and_nothing_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(us: End, them: End) -> None:
        monkeypatch.setattr(network.messages, "decode", lambda raw: pytest.fail("parsed"))
        good = messages.encode(Leave())
        await us.daemon.dial(them.peer, *them.addresses)
        for raw in (b"", good, bytes(32) + good, OTHER.close("request", us.peer, them.peer, good), bytes(900 << 10)):
            assert await us.daemon.request(them.peer, "diloco/control/1", raw) == REFUSAL
        sealed_for_another = KEY.close("request", us.peer, us.peer, good)
        assert await us.daemon.request(them.peer, "diloco/control/1", sealed_for_another) == REFUSAL
        assert them.network.refused["stranger"] == 6 and len(REFUSAL) < 100
        for raw in (b"\xff\xff\xff\xff", bytes(4), b"\x50\x00\x00\x00" + bytes(80), b"\x40\x00\x00\x00" + bytes(64)):
            assert await raw_stream(us, them, raw) == b""
        assert them.streams == [] and them.network.refused == {"stranger": 8, "malformed": 2}

    with_ends(check, End(OTHER), End(KEY))


def test_bulk_goes_over_carriers_and_comes_from_their_island() -> None:
    """The peer that a stream comes from is the island, whichever carrier it used; each lane uses its own."""

    async def check(us: End, them: End) -> None:
        us.meet(them)
        assert us.network.lanes(them.peer) == them.network.lanes(us.peer) == 2, "the fewer of the two"
        assert us.network.lanes("another") == 1
        used = []
        for lane in (0, 1, 2):
            opened = await us.network.open_stream(them.peer, REQUEST, Traffic(), lane)
            used.append((opened.peer, opened._ends.here, opened._ends.there))
            assert await opened.receive() == HEADER
            opened.close()
        ours, theirs = ([carrier.peer for carrier in end.network.carriers] for end in (us, them))
        pairs = [(ours[0], theirs[0]), (ours[1], theirs[1]), (ours[0], theirs[0])]
        assert used == [(them.peer, *pair) for pair in pairs]
        assert [peer for peer, _ in them.streams] == [us.peer] * 3
        assert us.events == []

    with_ends(check, End(KEY, 3), End(KEY, 2))


def test_a_carrier_that_can_not_be_reached_is_done_without() -> None:
    """The control connection carries its bytes, the user is told once, and it is not tried again for every stream."""

    async def check(us: End, them: End) -> None:
        us.meet(them)
        await us.network.call(them.peer, Leave(), 10)
        await them.daemons[0].shutdown()
        for _ in range(2):
            opened = await us.network.open_stream(them.peer, REQUEST, Traffic())
            assert opened._ends.there == them.peer and await opened.receive() == HEADER
            opened.close()
        assert [event.what for event in us.events] == ["fallback"]
        assert "data connection 1 to /ip4/127.0.0.1" in us.events[0].detail
        us.network.learn_carriers(them.peer, (Carrier(peer="0", addresses=("nonsense",)),), answered=True)
        opened = await us.network.open_stream(them.peer, REQUEST, Traffic())
        assert opened._ends.there == them.peer and "no address of a peer" in us.events[1].detail
        assert len(us.events) == 2
        opened.close()

    with_ends(check, End(KEY, 1), End(KEY, 1))


def test_a_carrier_of_nobody_is_a_stranger() -> None:
    """Before its island has named it, and after its island names others; a carrier is no way in for anybody else."""

    async def check(us: End, them: End) -> None:
        header = messages.encode(REQUEST)
        carrier = them.daemons[0].peer_id.to_base58()
        raw = KEY.close("stream", us.peer, carrier, header)
        raw = len(raw).to_bytes(4, "little") + raw
        assert await raw_stream(us, them, raw, daemon=them.daemons[0]) == b""
        assert them.streams == [] and them.network.refused == {"stranger": 1}
        us.meet(them)
        assert await raw_stream(us, them, raw, daemon=them.daemons[0]) == b"", "the island itself has no business there"
        assert them.streams == [] and them.network.refused == {"stranger": 2}

    with_ends(check, End(KEY, 1), End(KEY, 1))


def test_a_daemon_does_not_dial_from_the_port_that_it_listens_on() -> None:
    """Both sides may dial at once, and over a long link that would be one TCP connection that both opened."""

    async def check(us: End, them: End) -> None:
        await us.daemon.dial(them.peer, *them.addresses)
        listening, dialed = (host_and_port(end.addresses[0])[1] for end in (us, them))
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ports = [[int(place.rpartition(":")[2], 16) for place in row[1:3]] for row in rows if row[3] == "01"]
        dialed_from = [mine for mine, theirs in ports if theirs == dialed]
        assert dialed_from and listening not in dialed_from

    with_ends(check, End(KEY), End(KEY))


def test_carriers_listen_at_the_ports_after_that_of_the_island() -> None:
    """And are announced at those after the announced one; on loopback, unless announced, at any. A taken port is told."""

    async def places(listen: str, announce: str) -> list[tuple[str, int]]:
        daemons = await start_carriers(listen, announce, 2)
        try:
            return [host_and_port(carrier.addresses[0]) for carrier in await described(daemons)]
        finally:
            await asyncio.gather(*(daemon.shutdown() for daemon in daemons))

    async def check() -> None:
        assert await places("127.0.0.9:23000", "10.1.2.3:4000") == [("10.1.2.3", 4001), ("10.1.2.3", 4002)]
        assert {port for _, port in await places("127.0.0.9:23000", "")}.isdisjoint({23000, 23001, 23002})
        with socket.create_server(("127.0.0.9", 23002)), pytest.raises(JoinError) as refusal:
            await places("127.0.0.9:23000", "10.1.2.3:4000")
        assert "swarm.data_connections=2: number 2 on swarm.listen=127.0.0.9:23002: can't listen" in str(refusal.value)

    asyncio.run(check())


class TestCarriers:
    """Whose a carrier is, and when it may be used."""

    ONE, TWO = Carrier(peer="one", addresses=()), Carrier(peer="two", addresses=())

    def test_it_belongs_to_the_island_that_named_it_first_until_that_names_others(self) -> None:
        carriers = Carriers([object(), object()])
        carriers.learn("a", (self.ONE, self.TWO))
        carriers.learn("b", (self.ONE,))
        assert (carriers.island_of("one"), carriers.island_of("two")) == ("a", "a")
        carriers.learn("a", (self.TWO,))
        carriers.learn("b", (self.ONE,))
        assert (carriers.island_of("one"), carriers.island_of("two")) == ("b", "a")
        carriers.learn("a", ())
        carriers.learn("b", ())
        assert not carriers._island and not carriers._theirs

    def test_none_is_used_before_the_other_island_knows_ours(self) -> None:
        carriers = Carriers([object()])
        carriers.learn("a", (self.ONE,))
        assert carriers.lanes("a") == 0 and carriers.pair("a", 0) is None
        carriers.acknowledged("a")
        assert carriers.lanes("a") == 1 and carriers.pair("a", 5) == (0, self.ONE)
        carriers.learn("a", (self.TWO,))  # its exchange process was started again, and knows nothing
        assert carriers.lanes("a") == 0

    def test_one_that_failed_is_tried_again_later_or_when_the_other_is_new(self, monkeypatch: pytest.MonkeyPatch) -> None:
        carriers, now = Carriers([object()]), [100.0]
        monkeypatch.setattr("diloco.exchange.hivemind.carriers.time.monotonic", lambda: now[0])
        carriers.learn("a", (self.ONE,))
        carriers.acknowledged("a")
        assert carriers.failed("a", 0) and not carriers.failed("a", 0)
        assert carriers.pair("a", 0) is None
        now[0] += 61
        assert carriers.pair("a", 0) == (0, self.ONE)
        carriers.failed("a", 0)
        carriers.learn("a", (self.TWO,))
        carriers.acknowledged("a")
        assert carriers.pair("a", 0) == (0, self.TWO)


def test_streams_of_a_stranger_are_few_and_leave_room_for_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that say nothing are closed; meanwhile a member is served, even one whose peer id is not known yet."""
    monkeypatch.setattr(network, "_HEADER_SECONDS", 3.0)

    async def check(us: End, them: End, stranger: End) -> None:
        us.meet(them)
        await us.network.call(them.peer, Leave(), 10)
        idle = [asyncio.create_task(raw_stream(stranger, them, b"\x40")) for _ in range(40)]
        async with asyncio.timeout(2.5):
            while sum(task.done() for task in idle) < 36:
                await asyncio.sleep(0.05)
        assert sum(task.done() for task in idle) == 36 and them.network.refused == {"malformed": 36}
        opened = await us.network.open_stream(them.peer, REQUEST, Traffic())
        assert await opened.receive() == HEADER
        opened.close()
        assert await asyncio.gather(*idle) == [b""] * 40
        assert not them.network._open_streams._of_peer[stranger.peer]

    with_ends(check, End(KEY), End(KEY), End(OTHER))


def test_a_stranger_that_asks_too_often_loses_its_connection() -> None:
    """And is let in as a member would be, once it is one."""

    async def check(us: End, them: End) -> None:
        await us.daemon.dial(them.peer, *them.addresses)
        raw = KEY.close("request", us.peer, them.peer, messages.encode(Leave()))
        with pytest.raises((P2PDaemonError, P2PHandlerError)):
            for _ in range(1000):
                await us.daemon.request(them.peer, "diloco/control/1", raw)
        assert 100 <= len(them.requests) < 300 and them.network.refused["stranger"] >= 1
        them.network.know(us.peer, us.addresses)
        await us.daemon.dial(them.peer, *them.addresses)
        asked = len(them.requests)
        for _ in range(150):
            await us.daemon.request(them.peer, "diloco/control/1", raw)
        assert len(them.requests) == asked + 150

    with_ends(check, End(KEY), End(KEY))


def test_the_memory_of_who_asked_is_bounded() -> None:
    rate = limits.RequestRate()
    assert all(rate.allows(str(peer)) for peer in range(5000)) and len(rate._left) == 1024


def test_one_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that never closes. A slow reader is neither: it takes something all the time."""
    monkeypatch.setattr(stream, "_STALL_SECONDS", 0.3)
    monkeypatch.setattr(stream, "_END_SECONDS", 0.3)
    plenty, ended = torch.zeros(64 << 20, dtype=torch.uint8), asyncio.Queue()

    async def send(opened: Stream) -> None:
        try:
            await opened.send_plain(plenty)
            await opened.wait_for_end()
        except Exception as error:
            ended.put_nowait(error)
            raise

    async def check(us: End, them: End) -> None:
        us.meet(them)
        await us.network.call(them.peer, Leave(), 10)
        them.serve = send
        opened = await us.network.open_stream(them.peer, REQUEST, Traffic())
        assert isinstance(await asyncio.wait_for(ended.get(), 20), Stalled)
        opened.close()
        opened = await us.network.open_stream(them.peer, REQUEST, Traffic())
        for _ in range(8):
            await asyncio.sleep(0.1)
            await opened.receive_into(torch.empty(8 << 20, dtype=torch.uint8))
        assert isinstance(await asyncio.wait_for(ended.get(), 20), TimeoutError)
        opened.close()

    with_ends(check, End(KEY), End(KEY))
