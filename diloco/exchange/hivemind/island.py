"""The inside of the exchange process: everything put together on one asyncio loop."""

import asyncio
import contextlib
import logging
from multiprocessing.connection import Connection

from diloco.config import RunConfig
from diloco.exchange.base import ExchangeEvent, Seat
from diloco.exchange.hivemind import carriers, daemon, ipc, messages
from diloco.exchange.hivemind.directory import KeyAuthorizer, publish_for_ever
from diloco.exchange.hivemind.door import Door, ask_to_join, wait_for_all
from diloco.exchange.hivemind.membership import Membership
from diloco.exchange.hivemind.network import Network, Stream, Unreachable
from diloco.exchange.hivemind.rounds import Rounds
from diloco.exchange.hivemind.seal import Seal, subkey
from diloco.exchange.hivemind.settings import shared_settings
from diloco.exchange.hivemind.surroundings import Surroundings
from diloco.swarm_key import read_key
from islands import plugins
from islands.config_file import parse_config

_END_SECONDS = 2.0
_logger = logging.getLogger(__name__)


class DaemonDied(RuntimeError):
    """libp2p's daemon is gone; the trainer starts this process again."""


async def take_part(pipe: Connection, start: ipc.Start) -> None:
    """Join, exchange, leave.

    Raises:
        JoinError: this island can't take part.
        DaemonDied: the libp2p daemon ended.
    """
    island = _Island(pipe, start)
    work = asyncio.create_task(island.run())
    closed = asyncio.create_task(island.closed.wait())
    try:
        await asyncio.wait({work, closed}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            try:
                work.result()
            except BaseExceptionGroup as group:
                raise _first(group) from None
    finally:
        work.cancel()
        await asyncio.wait({work}, timeout=_END_SECONDS)
        await island.shut_down()


class _Island:
    def __init__(self, pipe: Connection, start: ipc.Start) -> None:
        self._pipe, self._start = pipe, start
        self._config = parse_config(RunConfig, start.settings)
        key_file = self._config.swarm.key_file
        self._key = read_key(key_file) if key_file else b""
        self.closed = asyncio.Event()
        self._launches: asyncio.Queue[ipc.Launch] = asyncio.Queue()
        self._daemon: daemon.Daemon | None = None
        self._carriers: list[daemon.Daemon] = []
        self._network: Network | None = None
        self._membership: Membership | None = None
        self._rounds: Rounds | None = None
        self._door = self._make_door()
        loop = asyncio.get_running_loop()
        # Errors of ours end the process, with their traceback. What else arrives here are hivemind's own tasks, which
        # complain when the daemon has died, and that is noticed anyway.
        loop.set_exception_handler(lambda loop, context: _logger.debug("%s", context))
        loop.add_reader(pipe.fileno(), self._read_pipe)

    async def run(self) -> None:
        """Until cancelled. Raises JoinError, DaemonDied."""
        swarm = self._config.swarm
        self._daemon = await daemon.start_daemon(self._start.listen, swarm.announce, self._start.identity_path)
        self._carriers = await carriers.start_carriers(swarm.listen, swarm.announce, swarm.data_connections)
        network = self._network = await self._open_network()
        addresses = await daemon.addresses(self._daemon)
        await network.serve(self._answer, self._stream)
        self._send(ipc.Listening(addresses[0]))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_daemon())
            places = self._start.rejoin or await self._join(network, addresses)
            self._door.complete(places)
            place = next(place for place in places if place.peer == network.peer)
            self._begin(network, place, places, tasks)
            others = [other for other in places if other is not place]
            await self._connect_to_all(network, others)
            tasks.create_task(self._membership.run())
            tasks.create_task(self._report_refused(network))
            interval = self._membership.interval
            tasks.create_task(
                publish_for_ever(
                    self._daemon, self._config.run.name, place, others, self._start.state, interval, self._authorizer()
                )
            )
            await self._membership.wait_until_known()
            self._send(ipc.Joined(Seat(place.slot, addresses[0]), places, self._listen(addresses[0])))
            while True:
                launch = await self._launches.get()
                tasks.create_task(self._rounds.launch(launch.fragment, launch.weight))

    async def shut_down(self) -> None:
        """Leave the swarm, if the trainer said so, and end the daemon."""
        if self._membership and self.closed.is_set():
            await self._membership.leave()
        await asyncio.gather(*(one.shutdown() for one in (self._daemon, *self._carriers) if one))

    async def _open_network(self) -> Network:
        own = carriers.Carriers(self._carriers, await carriers.described(self._carriers))
        return Network(self._daemon, self._heard, Seal(self._subkey("messages")), own, self._send)

    def _authorizer(self) -> KeyAuthorizer | None:
        return KeyAuthorizer(self._subkey("directory")) if self._key else None

    def _subkey(self, use: str) -> bytes:
        """Empty in a swarm without a key."""
        return subkey(self._key, self._config.run.name, use) if self._key else b""

    async def _join(self, network: Network, addresses: tuple[str, ...]) -> tuple[ipc.Place, ...]:
        swarm = self._config.swarm
        if self._door.first:
            self._door.enter(network.peer, addresses, swarm.slot)
            await wait_for_all(self._door, addresses[0], swarm.join_timeout)
            return tuple(self._door.places[slot] for slot in sorted(self._door.places))
        hello = messages.Hello(
            run=self._config.run.name, settings=self._door.settings, slot=swarm.slot, addresses=addresses
        )
        return await ask_to_join(network, hello, swarm.initial_peers, swarm.join_timeout)

    def _make_door(self) -> Door:
        swarm = self._config.swarm
        return Door(
            self._config.run.name,
            shared_settings(self._config, self._start.schema),
            swarm.max_slots,
            swarm.islands,
            first=not swarm.initial_peers,
            tell=self._send,
            first_addresses=tuple(swarm.initial_peers),
        )

    def _begin(
        self, network: Network, place: ipc.Place, places: tuple[ipc.Place, ...], tasks: asyncio.TaskGroup
    ) -> None:
        exchange = self._config.exchange
        self._membership = Membership(network, place.slot, exchange.peer_timeout, self._send)
        around = Surroundings(
            self._config.run.name,
            network,
            self._membership,
            plugins.build("diloco.codecs", self._config.outer.codec),
            exchange.round_deadline,
            exchange.min_islands,
            report=self._send,
            background=tasks.create_task,
        )
        self._rounds = Rounds(around, self._start.state, end=self._send)
        self._membership.start(places)

    async def _connect_to_all(self, network: Network, others: list[ipc.Place]) -> None:
        async def connect(place: ipc.Place) -> None:
            with contextlib.suppress(Unreachable, TimeoutError):  # its silence will be noticed by the membership
                async with asyncio.timeout(self._config.exchange.peer_timeout):
                    await network.connect(place.peer)

        await asyncio.gather(*(connect(place) for place in others))

    async def _answer(self, peer: str, request: messages.Request) -> messages.Reply:
        if isinstance(request, messages.Hello):
            reply = self._door.answer(peer, request)
            if isinstance(reply, messages.Welcome):
                self._network.know(peer, request.addresses)  # a member that was restarted may listen elsewhere
            return reply
        member = self._membership.of_peer(peer) if self._membership else None
        if member is None:
            if self._membership:  # before that it may be a member who heard earlier that all are there
                self._network.refused["stranger"] += 1
            return messages.Refused(reason="not a member of this run; say hello first")
        return await self._rounds.answer(member, request)

    async def _stream(self, peer: str, header: messages.Header, stream: Stream) -> None:
        member = self._membership.of_peer(peer) if self._membership else None
        if member is None:
            self._network.refused["stranger"] += 1
            return
        await self._rounds.stream(member, header, stream)

    async def _watch_daemon(self) -> None:
        deaths = [asyncio.create_task(one.died()) for one in (self._daemon, *self._carriers)]
        [first, *_], _ = await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        raise DaemonDied(f"the libp2p daemon of this island ended: {first.result()}")

    async def _report_refused(self, network: Network) -> None:
        reported = 0
        while True:
            await asyncio.sleep(self._membership.interval)
            if network.refused.total() > reported:
                reported = network.refused.total()
                counts = ", ".join(f"{count} {why}" for why, count in sorted(network.refused.items()))
                self._send(ExchangeEvent("refused", f"messages so far: {counts}"))

    def _heard(self, peer: str) -> None:
        if self._membership:
            self._membership.heard(peer)

    def _read_pipe(self) -> None:
        try:
            while self._pipe.poll():
                message = self._pipe.recv()
                if isinstance(message, ipc.Close):
                    self.closed.set()
                else:
                    self._launches.put_nowait(message)
        except (EOFError, OSError):  # the trainer is gone
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self.closed.set()

    def _send(self, message: ipc.FromExchange) -> None:
        with contextlib.suppress(BrokenPipeError):  # the trainer is gone, which _read_pipe notices
            self._pipe.send(message)

    def _listen(self, address: str) -> str:
        """Where to listen if this process has to be started again: at the same port."""
        host = self._start.listen.rpartition(":")[0]
        place = daemon.host_and_port(address)
        announced = bool(self._config.swarm.announce)
        return self._start.listen if announced or place is None else f"{host}:{place[1]}"


def _first(group: BaseExceptionGroup) -> BaseException:
    """The error that ended the others."""
    first = group.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else first
