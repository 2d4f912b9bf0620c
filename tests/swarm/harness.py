"""Islands as real processes, driven step by step: a trainer process each, with its exchange process and libp2p daemon.

A trainer does what a test asks over a pipe. Its exchange process carries faults that a test arms at run time; a fault
leaves a file when it has fired, so that a test can prove that it did.
"""

import asyncio
import hashlib
import inspect
import multiprocessing
import os
import random
import re
import signal
import socket
import struct
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Awaitable, Callable, Iterable, Iterator

import msgpack
import numpy as np
import torch
from torch import Tensor

from diloco.config import RunConfig
from diloco.exchange import hivemind
from diloco.exchange.base import Work
from diloco.exchange.hivemind import process
from diloco.exchange.hivemind.seal import Seal
from diloco.outer_state import Layout, OuterState
from islands import plugins
from islands.config_file import parse_config

ANSWER_SECONDS = 240.0
PEER_TIMEOUT = 5.0

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["diloco.exchange.hivemind"])


def settings(**changes: dict[str, Any]) -> dict[str, Any]:
    """A run's settings; ``changes`` are sections with the keys to change, such as ``swarm={"slot": 1}``."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "test"},
        "model": {"preset": "quickstart"},
        "train": {"steps": 10, "global_batch_size": 2},
        "outer": {},
        "exchange": {"type": "hivemind", "peer_timeout": PEER_TIMEOUT, "round_deadline": 40.0},
        "swarm": {"max_slots": 4, "join_timeout": 240.0},
    }
    return {section: {**base.get(section, {}), **changes.get(section, {})} for section in base | changes}


def first_anchor(fragment: int, numel: int) -> Tensor:
    """Where every island starts."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 + fragment))


def drift(fragment: int, numel: int, seed: int) -> Tensor:
    """How far an island moves before a round; made from the seed alone."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(10 * seed + fragment))


def layout_of(config: RunConfig, sizes: list[int]) -> Layout:
    """Of the outer state."""
    optimizer = plugins.build("diloco.outer_optimizers", config.outer.optimizer)
    return Layout(sizes, optimizer, max_slots=config.swarm.max_slots, error_feedback=config.outer.error_feedback)


class Trainer:
    """What runs in an island's trainer process. Every public method can be asked for over the pipe."""

    def __init__(self, raw: dict[str, Any], sizes: list[int], faults: str) -> None:
        config = parse_config(RunConfig, raw)
        self._state = OuterState(layout_of(config, sizes))
        for index, fragment in enumerate(self._state.fragments):
            fragment.anchor.copy_(first_anchor(index, fragment.numel))
            fragment.initialize()
        os.environ["TEST_FAULTS"] = faults
        process.main = exchange_with_faults  # the exchange process starts here instead
        self._exchange = hivemind.build(config, self._state, schema=str(sizes))

    def join(self) -> Any:
        """The seat."""
        seat = self._seat = self._exchange.join()
        self._done = {fragment: seat.position for fragment in range(len(self._state.fragments))}
        self._offered = dict(self._done)
        self._exchange.started()
        return seat

    def launch(self, fragment: int, weight: float, seed: int, poison: bool = False, scale: float = 1.0) -> Work:
        """Drift from the anchor and offer that to the next round."""
        state = self._state.fragments[fragment]
        state.local.copy_(state.anchor - scale * drift(fragment, state.numel, seed))
        if poison:
            state.local[state.numel // 2] = float("nan")
        start = self._done[fragment]
        self._offered[fragment] += 10
        work = Work(int(weight), start, self._offered[fragment], state.height + 1)
        self._exchange.launch(fragment, work)
        return work

    def outcome(self, fragment: int) -> Any:
        """How the round ended."""
        outcome = self._exchange.outcome(fragment)
        if outcome.kind == "committed" or outcome.rejected or outcome.position > self._done[fragment]:
            self._done[fragment] = self._offered[fragment]  # it counts, or never will
        return outcome

    def address(self) -> str:
        """Where others can join through it."""
        return self._seat.address

    def progress(self, step: int, speed: float) -> None:
        """Tell the others how far it is."""
        self._exchange.progress(step, speed)

    def damage(self, fragment: int) -> None:
        """Flip a bit of the agreed anchor, as bad memory does."""
        self._state.fragments[fragment].anchor.view(torch.uint8)[2] ^= 1

    def events(self) -> Any:
        """What happened since the last call."""
        return self._exchange.events()

    def agreed(self, fragment: int) -> dict[str, Any]:
        """The agreed state, copied."""
        state = self._state.fragments[fragment]
        tensors = {"anchor": state.anchor, **state.optimizer_state}
        return {
            "height": state.height,
            "digest": state.digest,
            "lineage": state.lineage,
            "ledger": state.ledger,
            "tensors": {name: tensor.numpy().copy() for name, tensor in tensors.items()},
        }

    def residual(self, fragment: int) -> np.ndarray | None:
        """What was lost of the contributions that counted, copied."""
        residual = self._state.fragments[fragment].residual
        return None if residual is None else residual.numpy().copy()

    def close(self) -> None:
        """Leave the swarm."""
        self._exchange.close()


class Island:
    """A test's handle on one island.

    Attributes:
        pid: of the trainer process.
        folder: where its faults are armed.
    """

    def __init__(self, folder: Path, raw: dict[str, Any], sizes: list[int]) -> None:
        self.num_fragments = len(sizes)
        self.folder, self._log = folder, folder / "log.txt"
        folder.mkdir(parents=True)
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_trainer_main, args=(theirs, raw, sizes, str(folder)))
        self._process.start()
        theirs.close()
        self.pid = self._process.pid

    def ask(self, method: str, *arguments: Any, **keywords: Any) -> None:
        """Have the trainer call a method of :class:`Trainer`, without waiting."""
        self._pipe.send((method, arguments, keywords))

    def answer(self, timeout: float = ANSWER_SECONDS) -> Any:
        """What the method that was asked for returned; raises what it raised."""
        if not self._pipe.poll(timeout):
            raise TimeoutError(f"the trainer did not answer within {timeout:g} s")
        kind, value = self._pipe.recv()
        if kind == "error":
            raise value
        return value

    def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Ask and wait for the answer."""
        self.ask(method, *arguments, **keywords)
        return self.answer()

    def exchange_pid(self) -> int:
        """The exchange process."""
        return eventually(lambda: next((pid for pid in children(self.pid) if "spawn_main" in command(pid)), None))

    def daemon_pid(self) -> int:
        """The libp2p daemon."""
        exchange = self.exchange_pid()
        return eventually(lambda: next(iter(_daemons(exchange)), None))

    def carrier_pids(self) -> list[int]:
        """The libp2p daemons of its data connections."""
        return _daemons(self.exchange_pid())[1:]

    def arm(self, fault: str, content: str = "") -> None:
        """Have a fault of :func:`exchange_with_faults` happen at the next occasion."""
        (self.folder / fault).write_text(content)

    def disarm(self, fault: str) -> None:
        """Have it not happen any more."""
        (self.folder / fault).unlink(missing_ok=True)

    def fired(self, fault: str) -> bool:
        """Whether it has happened."""
        return (self.folder / f"{fault}.fired").exists()

    def address(self) -> str:
        """What the first island prints for the others; empty before it does."""
        found = re.search(r"initial_peers=\[(.+)\]", self._log.read_text()) if self._log.exists() else None
        return found[1] if found else ""

    def wait_until_fired(self, fault: str) -> None:
        """Wait for an armed fault to happen."""
        eventually(lambda: (self.folder / f"{fault}.fired").exists())

    def wait_for_event(self, what: str) -> list[Any]:
        """Events up to the first of that kind."""
        seen: list[Any] = []

        def arrived() -> bool:
            seen.extend(self.call("events"))
            return any(event.what == what for event in seen)

        eventually(arrived, lambda: f"no event {what!r} among {seen}")
        return seen

    def alive(self) -> bool:
        """Whether its trainer is."""
        return self._process.is_alive()

    def kill_trainer(self) -> None:
        """kill -9 of the trainer alone."""
        self._process.kill()
        self._process.join()

    def end(self) -> None:
        """Leave if it still can, and end the trainer."""
        if self._process.is_alive():
            self._pipe.close()
            self._process.join(3)
            self._process.kill()
        self._process.join()


@contextmanager
def running(islands: Iterable[Island]) -> Iterator[list[Island]]:
    """The islands, which are ended after the block, whatever happens in it."""
    started: list[Island] = []
    try:
        for island in islands:
            started.append(island)
        yield started
    finally:
        for island in started:
            island.end()


@dataclass
class Swarm:
    """Islands of one run that have all joined."""

    islands: list[Island]

    def launch(
        self, fragment: int, seed: int, weights: list[float], only: list[int] | None = None, poisoned: int | None = None
    ) -> dict[int, Work]:
        """Launch a round; island i drifts by ``seed + i``. What each offers; the one that is ``poisoned`` has nothing."""
        return {
            index: self.islands[index].call("launch", fragment, weights[index], seed + index, poison=index == poisoned)
            for index in self._those(only)
        }

    def outcomes(self, fragment: int, only: list[int] | None = None) -> list[Any]:
        """Wait for the round to end everywhere."""
        chosen = [self.islands[index] for index in self._those(only)]
        for island in chosen:
            island.ask("outcome", fragment)
        return [island.answer() for island in chosen]

    def agreed(self, fragment: int, only: list[int] | None = None) -> list[dict[str, Any]]:
        """The agreed states."""
        return [self.islands[index].call("agreed", fragment) for index in self._those(only)]

    def _those(self, only: list[int] | None) -> list[int]:
        return list(range(len(self.islands))) if only is None else only


def assert_same(swarm: Swarm, only: list[int] | None = None) -> None:
    """Height, digest, lineage, ledger and every bit of the agreed states are equal, fragment by fragment."""
    for fragment in range(swarm.islands[0].num_fragments):
        first, *others = swarm.agreed(fragment, only)
        for other in others:
            for key in ("height", "digest", "lineage", "ledger"):
                assert other[key] == first[key]
            for name, values in other["tensors"].items():
                np.testing.assert_array_equal(values, first["tensors"][name])


@contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """SIGSTOP for the time of the block."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        eventually(lambda: status(pid) == "T")
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def eventually(condition: Callable[[], Any], what: Callable[[], str] | None = None, timeout: float = 90.0) -> Any:
    """The first true value of ``condition``, asked for again and again."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, what() if what else f"still not so after {timeout:g} s"
        time.sleep(0.05)
    return value


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def children(pid: int) -> list[int]:
    """Child processes of a process, dead ones left out."""
    found = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [child for child in found if _stat(child)[1:2] == [str(pid)] and status(child) not in ("Z", "")]


def _daemons(exchange: int) -> list[int]:
    """In the order in which they were started."""
    return sorted(pid for pid in children(exchange) if "p2pd" in command(pid))


def command(pid: int) -> str:
    """Command line of a process; empty when there is none."""
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def status(pid: int) -> str:
    """State letter of a process (Z: dead, T: stopped); empty when there is none."""
    return "".join(_stat(pid)[:1])


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    return status(pid) in ("", "Z")


def _stat(pid: int) -> list[str]:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _trainer_main(pipe: Connection, raw: dict[str, Any], sizes: list[int], faults: str) -> None:
    sys.stderr = open(Path(faults) / "log.txt", "w", buffering=1)
    trainer = Trainer(raw, sizes, faults)
    while True:
        try:
            method, arguments, keywords = pipe.recv()
        except (EOFError, OSError):
            return trainer.close()
        try:
            pipe.send(("value", getattr(trainer, method)(*arguments, **keywords)))
        except Exception as error:
            pipe.send(("error", error))


# -- faults, in the exchange process ---------------------------------------------------------------------------------


def exchange_with_faults(pipe: Connection, start: Any) -> None:
    """:func:`diloco.exchange.hivemind.process.main` with faults that wait to be armed.

    ``hang_in_transfer``: half of the first tensor is sent, and then nothing more on that stream.
    ``hang_before_vote``: the result is staged, and no vote is sent.
    ``stop_before_vote``: the whole process stops (SIGSTOP) once all others' votes are there, before it sends its own.
    ``lose_vote_to_<slot>``: the vote for that member gets lost, once.
    ``hang_donation``: half a part of the state is served, and then nothing more.
    ``slow_donation``: every part of a state takes so many seconds more, as long as the file is there.
    ``garbage_to_<slot>``: :func:`throw_garbage` at that member, in place of a vote for it.
    ``cut``: no message passes between this island and the peers that the file lists, as long as it is there.
    ``cut_after_vote``: the cut, from all, once every other member has acknowledged this island's vote.
    ``break_transfer``: one of its streams breaks; what it offers to the attempts is written down in ``offered``.
    ``skip_round``: its round has no result. ``die_after_vote``: kill -9, when the others have all that they need to commit.
    ``exaggerate`` and ``break``: what is sent is a hundred times what was claimed, or holds a NaN.
    ``corrupt_mean``: one byte of a mean that this island reduced is changed on its way to one member.
    """
    os.environ["HIVEMIND_LOGLEVEL"] = "CRITICAL"  # as process.main does, before hivemind is imported
    from diloco.exchange.hivemind import messages, voting
    from diloco.exchange.hivemind.stream import Stream
    from diloco.exchange.hivemind.surroundings import Surroundings

    folder = Path(os.environ["TEST_FAULTS"])

    def fires(fault: str) -> bool:
        armed = folder / fault
        if not armed.exists():
            return False
        armed.rename(folder / f"{fault}.fired")
        return True

    send_chunk, send_plain = Stream.send_chunk, Stream.send_plain
    cast_vote, call = voting.cast_vote, Surroundings.call

    async def send_chunk_or_hang(self: Stream, number: int, values: Tensor) -> None:
        if fires("break_transfer"):
            raise ConnectionResetError("broken by a test")
        if fires("hang_in_transfer"):
            await self._write(struct.pack("<II", number, values.numel()))
            await self.send_plain(values[: values.numel() // 2])
            await asyncio.Event().wait()
        await send_chunk(self, number, values)

    async def send_plain_or_hang(self: Stream, values: Tensor) -> None:
        if (folder / "slow_donation").exists() and inspect.currentframe().f_back.f_code.co_name == "serve":
            await asyncio.sleep(float((folder / "slow_donation").read_text()))
        if inspect.currentframe().f_back.f_code.co_name == "serve" and fires("hang_donation"):
            await send_plain(self, values[: values.numel() // 2])
            await asyncio.Event().wait()
        await send_plain(self, values)

    async def vote_or_hang(*arguments: Any) -> None:
        if fires("hang_before_vote"):
            await asyncio.Event().wait()
        if (folder / "stop_before_vote").exists():
            attempt = arguments[1]
            while len(attempt.ballots) < len(attempt.members) - 1:
                await asyncio.sleep(0.01)
            if fires("stop_before_vote"):
                os.kill(os.getpid(), signal.SIGSTOP)
        await cast_vote(*arguments)
        if fires("die_after_vote"):
            os.kill(os.getpid(), signal.SIGKILL)

    async def call_or_lose(self: Surroundings, slot: int, request: messages.Request, *more: Any) -> Any:
        if isinstance(request, messages.Vote) and fires(f"lose_vote_to_{slot}"):
            return "lost"
        if isinstance(request, messages.Vote) and fires(f"garbage_to_{slot}"):
            await throw_garbage(self.network._daemon, self.membership.members[slot].peer, self.network._seal)
        return await call(self, slot, request, *more)

    Stream.send_plain = send_plain_or_hang
    Stream.send_chunk, voting.cast_vote, Surroundings.call = send_chunk_or_hang, vote_or_hang, call_or_lose
    _add_skips(folder, fires)
    _add_cuts(folder, fires)
    _add_lies(fires)
    _process_main(pipe, start)


_process_main = process.main


def _add_skips(folder: Path, fires: Callable[[str], bool]) -> None:
    """Rounds that come to nothing, and a record of what was offered to each attempt."""
    from diloco.exchange.hivemind.round import Round

    advance, accept = Round._advance, Round._accept

    async def advance_or_skip(self: Round) -> Any:
        return self._ending.skipped("a test wants it so") if fires("skip_round") else await advance(self)

    def accept_and_note(self: Round, proposal: Any) -> Any:
        sent = hashlib.sha256(b"".join(chunk.numpy().tobytes() for chunk in self._contribution.own.chunks)).hexdigest()
        with (folder / "offered").open("a") as file:
            file.write(f"{proposal.fragment} {proposal.height} {proposal.attempt} {sent}\n")
        return accept(self, proposal)

    Round._advance, Round._accept = advance_or_skip, accept_and_note


def _add_cuts(folder: Path, fires: Callable[[str], bool]) -> None:
    """Links that are cut, as a firewall that drops everything would: nobody is told."""
    from diloco.exchange.hivemind.network import Network, Unreachable

    call, open_stream, answer = Network.call, Network.open_stream, Network._answer
    accepted: dict[bytes, int] = {}

    def is_cut(peer: str) -> bool:
        try:
            listed = (folder / "cut").read_text()
        except FileNotFoundError:
            return False
        return listed == "all" or peer in listed

    async def call_unless_cut(self: Any, peer: str, request: Any, timeout: float) -> Any:
        reply = None if is_cut(peer) else await call(self, peer, request, timeout)
        if reply is None or is_cut(peer):
            await asyncio.sleep(timeout)
            raise Unreachable("no answer", gone=False)
        if request.kind == "vote" and (folder / "cut_after_vote").exists():
            accepted[request.proposal] = accepted.get(request.proposal, 0) + (reply.kind == "ack")
            if accepted[request.proposal] == 2 and fires("cut_after_vote"):
                (folder / "cut").write_text("all")
        return reply

    async def open_unless_cut(self: Any, peer: str, *arguments: Any) -> Any:
        if is_cut(peer):
            await asyncio.sleep(60)
        return await open_stream(self, peer, *arguments)

    async def answer_unless_cut(self: Any, raw: bytes, peer: str, *arguments: Any) -> Any:
        if is_cut(peer):
            await asyncio.sleep(600)
        return await answer(self, raw, peer, *arguments)

    Network.call, Network.open_stream, Network._answer = call_unless_cut, open_unless_cut, answer_unless_cut


def _add_lies(fires: Callable[[str], bool]) -> None:
    """Contributions that are not what they claim to be, and a reducer that does not tell all the same."""
    from diloco.exchange.hivemind.stream import Stream
    from diloco.exchange.hivemind.contribution import Contribution

    prepare, send_chunk = Contribution.prepare, Stream.send_chunk

    def prepare_lie(self: Contribution) -> None:
        prepare(self)
        if fires("exaggerate"):
            self.own.chunks[:] = [(chunk.view(torch.float32) * 100).view(torch.uint8) for chunk in self.own.chunks]
        if fires("break"):
            self.own.chunks[0].view(torch.float32)[3] = float("nan")

    async def send_or_corrupt(self: Stream, number: int, values: Tensor) -> None:
        if "serve" in inspect.currentframe().f_back.f_code.co_qualname and fires("corrupt_mean"):
            values = values.clone()
            values[2] ^= 1
        await send_chunk(self, number, values)

    Contribution.prepare, Stream.send_chunk = prepare_lie, send_or_corrupt


async def throw_garbage(daemon: Any, peer: str, seal: Seal = Seal(b"")) -> list[bytes]:
    """Send a peer everything that it must not take, under a seal; returns its answers."""
    from hivemind.p2p import PeerID

    me = daemon.peer_id.to_base58()
    control = [
        b"",
        b"\x93",
        os.urandom(1000),
        bytes(300 << 10),
        b"\x91" * 5000,
        b"\xdd\xff\xff\xff\xff",
        msgpack.packb(7),
        msgpack.packb({"kind": "nonsense"}),
        msgpack.packb({"kind": "welcome", "members": []}),
        msgpack.packb({"kind": "vote", "proposal": b"short", "digest": bytes(32)}),
        msgpack.packb({"kind": "settle", "proposal": bytes(32), "reason": "x", "final": 1}),
        msgpack.packb({"kind": "proposal", "run": "test", "fragment": 1 << 40, "height": -1, "attempt": 0}),
        msgpack.packb(msgpack.ExtType(5, b"code")),
    ]
    control = [seal.close("request", me, peer, raw) for raw in control]
    control += broken(control[-1])
    answers = [await asyncio.wait_for(daemon.request(peer, "diloco/control/1", raw), 10) for raw in control]
    header = msgpack.packb({"kind": "state_request", "fragment": 999, "height": 1, "lineage": bytes(32)})
    header = seal.close("stream", me, peer, header)
    streams = [
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x00",
        b"\x10\x00\x00\x00" + os.urandom(16),
        *(len(raw).to_bytes(4, "little") + raw for raw in (header, *broken(header))),
    ]
    for raw in streams:
        _, reader, writer = await daemon.call_binary_stream_handler(PeerID.from_base58(peer), "diloco/bulk/1")
        writer.write(raw)
        answers.append(await asyncio.wait_for(reader.read(), 10))
        writer.close()
    return answers


def broken(raw: bytes, number: int = 8) -> list[bytes]:
    """The same bytes with one bit flipped somewhere, and cut somewhere, so many times each; alike at every call."""
    generator = random.Random(len(raw))
    flipped = [bytearray(raw) for _ in range(number)]
    for one in flipped:
        one[generator.randrange(len(raw))] ^= 1 << generator.randrange(8)
    return [*map(bytes, flipped), *(raw[: generator.randrange(1, len(raw))] for _ in range(number))]


class Stranger:
    """A process with a libp2p daemon of its own that belongs to no run, connects to an address, and does something there.

    Args:
        act: called with the daemon and the address.
    """

    def __init__(self, address: str, act: Callable[[Any, str], Awaitable[Any]] | None = None) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_stranger_main, args=(theirs, address, act or _throw_garbage_at), daemon=True)
        self._process.start()

    def answers(self) -> Any:
        """What ``act`` returned: what it got back."""
        assert self._pipe.poll(ANSWER_SECONDS), "the stranger has not ended"
        return self._pipe.recv()


async def _throw_garbage_at(daemon: Any, address: str) -> list[bytes]:
    return await throw_garbage(daemon, address.rpartition("/")[2])


def _stranger_main(pipe: Connection, address: str, act: Callable[[Any, str], Awaitable[Any]]) -> None:
    os.environ["HIVEMIND_LOGLEVEL"] = "CRITICAL"
    from diloco.exchange.hivemind.daemon import start_daemon

    async def run() -> None:
        daemon = await start_daemon("127.0.0.1:0", "", None)
        await daemon.dial(address.rpartition("/")[2], address)
        pipe.send(await act(daemon, address))
        await daemon.shutdown()

    asyncio.run(run())
