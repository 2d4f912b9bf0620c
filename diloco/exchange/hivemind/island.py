"""The inside of the exchange process: everything put together on one asyncio loop."""

import asyncio
import contextlib
import logging
from multiprocessing.connection import Connection

from diloco.from_config import make_wire
from diloco.config import RunConfig
from diloco.exchange.base import ExchangeEvent, Seat
from diloco.exchange.hivemind import carriers, daemon, ipc, messages
from diloco.exchange.hivemind.address_book import AddressBook
from diloco.exchange.hivemind.directory import KeyAuthorizer, publish_for_ever
from diloco.exchange.hivemind.door import Door, come_in
from diloco.exchange.hivemind.joining import late_seat, take_over_all
from diloco.exchange.hivemind.membership import Membership, SeatLost
from diloco.exchange.hivemind.network import Network, Unreachable
from diloco.exchange.hivemind.roster import Roster
from diloco.exchange.hivemind.rounds import Rounds
from diloco.exchange.hivemind.seal import Seal, subkey
from diloco.exchange.hivemind.settings import shared_settings
from diloco.exchange.hivemind.stream import Stream
from diloco.exchange.hivemind.surroundings import Surroundings
from diloco.swarm_key import read_key
from islands.config_file import parse_config

_END_SECONDS = 2.0
_LOOK_SECONDS = 0.2
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
    closed = asyncio.create_task(island.done())
    try:
        await asyncio.wait({work, closed}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            try:
                work.result()
            except BaseExceptionGroup as group:
                error = _first(group)
                if not isinstance(error, SeatLost):
                    raise error from None
                island.tell_seat_lost(error)
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
        self.closed, self._hurry = asyncio.Event(), False
        self._launches: asyncio.Queue[ipc.Launch] = asyncio.Queue()
        self._started = start.started
        self._daemon: daemon.Daemon | None = None
        self._carriers: list[daemon.Daemon] = []
        self._network: Network | None = None
        self._membership: Membership | None = None
        self._rounds: Rounds | None = None
        self._door = self._make_door()
        self._book = AddressBook(self._config.swarm.identity_file, self._config.run.name)
        loop = asyncio.get_running_loop()
        # Errors of ours end the process, with their traceback. What else arrives here are hivemind's own tasks, which
        # complain when the daemon has died, and that is noticed anyway.
        loop.set_exception_handler(lambda loop, context: _logger.debug("%s", context))
        loop.add_reader(pipe.fileno(), self._read_pipe)

    async def run(self) -> None:
        """Until cancelled. Raises JoinError, DaemonDied, SeatLost."""
        swarm = self._config.swarm
        self._daemon = await daemon.start_daemon(self._start.listen, swarm.announce, self._start.identity_path)
        self._carriers = await carriers.start_carriers(swarm.listen, swarm.announce, swarm.data_connections)
        network = self._network = await self._open_network()
        addresses = await daemon.addresses(self._daemon)
        await network.serve(self._answer, self._stream)
        self._send(ipc.Listening(addresses[0]))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_daemon())
            roster = self._start.rejoin or await self._come_in(network, addresses)
            around = self._begin(network, roster, tasks)
            membership, rounds = around.membership, self._rounds
            await self._connect_to_all(network)
            tasks.create_task(membership.run())
            tasks.create_task(rounds.granting.run())
            tasks.create_task(self._report_refused(network))
            tasks.create_task(self._remember_addresses())
            tasks.create_task(publish_for_ever(self._daemon, self._config.run.name, membership, self._authorizer()))
            seat = await self._take_seat(around, addresses[0])
            self._send(ipc.Joined(seat, membership.roster, self._listen(addresses[0])))
            tasks.create_task(rounds.watch_trainer())
            while True:
                launch = await self._launches.get()
                tasks.create_task(rounds.launch(launch.fragment, launch.work))

    async def done(self) -> None:
        """Wait until the trainer has said that it leaves, and those who are behind have got the state: nobody may be left."""
        await self.closed.wait()
        if self._rounds and self._started and not self._hurry:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._membership.peer_timeout):
                    while self._rounds.is_needed():
                        await asyncio.sleep(_LOOK_SECONDS)

    def tell_seat_lost(self, error: SeatLost) -> None:
        """The trainer will start this process again, as a newcomer."""
        self._send(ipc.SeatLost(str(error)))

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

    async def _come_in(self, network: Network, addresses: tuple[str, ...]) -> Roster:
        swarm = self._config.swarm
        hello = messages.Hello(
            run=self._config.run.name,
            settings=self._door.settings,
            slot=-1 if self._start.any_slot else swarm.slot,
            prefers=self._start.prefers,
            addresses=addresses[: messages.MAX_ADDRESSES],
            ticket=self._start.ticket,
        )
        others = [address for address in swarm.initial_peers if not address.endswith(f"/p2p/{network.peer}")]
        self._door.first = not swarm.initial_peers or swarm.initial_peers[0].endswith(f"/p2p/{network.peer}")
        remembered = [address for address in self._book.read() if not address.endswith(f"/p2p/{network.peer}")]
        return await come_in(self._door, network, hello, list(dict.fromkeys([*others, *remembered])), swarm.join_timeout)

    async def _take_seat(self, around: Surroundings, address: str) -> Seat:
        """A newcomer takes over the swarm's state; others wait until the members have taken notice of them."""
        own, state = around.membership.own, self._start.state
        if not self._takes_over(own):
            await around.membership.wait_until_known()
            return Seat(own.slot, address, own.epoch)
        patience = self._config.swarm.join_timeout
        await take_over_all(around, state, patience, lambda *progress: self._send(ipc.Taking(*progress)))
        if self._started:  # it had a slot before; until here it was recovering, whatever its trainer did
            self._rounds.start()
        return late_seat(around, state, address)

    def _takes_over(self, own: messages.Entry) -> bool:
        """Whether it comes into a run in progress: not so if it began the run, or is back where it was."""
        return own.since > 0 and not (self._start.started and self._start.rejoin)

    def _make_door(self) -> Door:
        swarm = self._config.swarm
        return Door(
            self._config.run.name,
            shared_settings(self._config, self._start.schema),
            swarm.max_slots,
            swarm.islands,
            first=False,
            tell=self._send,
            first_addresses=tuple(swarm.initial_peers),
        )

    def _begin(self, network: Network, roster: Roster, tasks: asyncio.TaskGroup) -> Surroundings:
        exchange, config = self._config.exchange, self._config
        self._door.open(roster)
        self._membership = Membership(network, roster, self._start.ticket, exchange.peer_timeout, self._send)
        around = Surroundings(
            config.run.name,
            network,
            self._membership,
            make_wire(config),
            exchange.round_deadline,
            exchange.min_islands,
            exchange.max_weight_ratio,
            carry=config.outer.left_out == "carry",
            report=self._send,
            background=tasks.create_task,
            residual_decay=config.outer.residual_decay,
        )
        max_slots = config.swarm.max_slots
        started = self._started and not self._takes_over(self._membership.own)
        self._rounds = Rounds(around, self._start.state, max_slots, end=self._send, started=started)
        self._door.begin(self._membership, self._rounds.granting)
        return around

    async def _connect_to_all(self, network: Network) -> None:
        async def connect(peer: str) -> None:
            with contextlib.suppress(Unreachable, TimeoutError):  # its silence will be noticed by the membership
                async with asyncio.timeout(self._config.exchange.peer_timeout):
                    await network.connect(peer)

        await asyncio.gather(*(connect(member.peer) for member in self._membership.members.values()))

    async def _remember_addresses(self) -> None:
        height = -1
        while True:
            roster = self._membership.roster
            if roster.height != height:
                height = roster.height
                self._book.write([address for entry in roster.entries for address in entry.addresses])
            await asyncio.sleep(self._membership.interval)

    async def _answer(self, peer: str, request: messages.Request) -> messages.Reply:
        if isinstance(request, messages.Hello):
            reply = self._door.answer(peer, request)
            if isinstance(reply, messages.Welcome):
                self._network.know(peer, request.addresses)  # a member that was restarted may listen elsewhere
            return reply
        member = self._membership.of_peer(peer) if self._membership else None
        if member is None and self._membership:
            self._network.refused["stranger"] += 1
            roster = self._membership.roster
            return messages.NotAMember(roster_height=roster.height, roster_lineage=roster.lineage)
        if member is None:  # it may be a member who heard earlier that all are there, or one of a run in progress
            if isinstance(request, messages.Status):
                self._door.hint(peer)
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
                    self._hurry = message.hurry
                    self.closed.set()
                elif isinstance(message, ipc.Started):
                    self._started = True
                    if self._rounds:
                        self._rounds.start()
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
