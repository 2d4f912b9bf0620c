"""One who watches a run and takes no part in it: reads what members publish, and finds out why nobody is there."""

import asyncio
from contextlib import asynccontextmanager
from typing import AsyncIterator

from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.carriers import Carriers
from diloco.exchange.hivemind.daemon import Daemon, start_client
from diloco.exchange.hivemind.directory import Found, KeyAuthorizer, look_up
from diloco.exchange.hivemind.network import KeyDiffers, Network, Unreachable
from diloco.exchange.hivemind.seal import Seal, subkey

_ANSWER_SECONDS = 5.0


class Onlooker:
    """Looks at a run as often as one likes.

    Args:
        key: of the swarm; empty: none.
        addresses: where to begin. Members that were found are asked as well, so those may end.
    """

    def __init__(self, run: str, key: bytes, addresses: list[str]) -> None:
        self._run, self._key, self._given = run, key, addresses
        self._seen: list[str] = []
        self._daemon: Daemon | None = None
        self._died: asyncio.Task[str] | None = None

    async def look(self) -> Found:
        """Who publishes what now."""
        authorizer = KeyAuthorizer(subkey(self._key, self._run, "directory")) if self._key else None
        places = list(dict.fromkeys([*self._given, *self._seen]))
        found = await look_up(await self._client(), self._run, places, authorizer)
        self._seen = [record.address for record in found.records.values()] or self._seen
        return found

    async def explain(self, found: Found) -> dict[str, str]:
        """Where nobody was found: what each of the given addresses said."""
        said = await asyncio.gather(*(self._ask(address, found.problems.get(address)) for address in self._given))
        return dict(zip(self._given, said, strict=True))

    async def close(self) -> None:
        """End the daemon."""
        if self._daemon:
            self._died.cancel()
            await self._daemon.shutdown()

    async def _client(self) -> Daemon:
        if self._died and self._died.done():
            await self.close()
            self._daemon = None
        if self._daemon is None:
            self._daemon = await start_client()
            self._died = asyncio.create_task(self._daemon.died())
        return self._daemon

    async def _ask(self, address: str, problem: str | None) -> str:
        """Put a member's question, which nobody but members is told the answer of, and see how it is refused."""
        if problem:
            return _in_words(problem)
        seal = Seal(subkey(self._key, self._run, "messages") if self._key else b"")
        network = Network(await self._client(), lambda peer: None, seal, Carriers([], ()), lambda event: None)
        peer = address.rpartition("/p2p/")[2]
        network.know(peer, (address,))
        try:
            reply = await network.call(peer, messages.RosterRequest(), _ANSWER_SECONDS)
        except KeyDiffers:
            if not self._key:
                return "it refuses whoever has no key: give the swarm's with --key-file"
            return f"it refuses this key: the swarm has another one, or none, or is not of run {self._run!r}"
        except Unreachable as error:
            return _in_words(str(error))
        if isinstance(reply, messages.NotAMember):
            return (
                f"an island answers, but knows nobody of run {self._run!r}: is that its run.name? Right after the start, "
                "try again"
            )
        return "an island answers, and waits for the others: it does not train yet"


@asynccontextmanager
async def watching(run: str, key: bytes, addresses: list[str]) -> AsyncIterator[Onlooker]:
    """An onlooker for the time of the block."""
    onlooker = Onlooker(run, key, addresses)
    try:
        yield onlooker
    finally:
        await onlooker.close()


def _in_words(problem: str) -> str:
    """What libp2p says, without its list of all it tried."""
    last = problem.strip().splitlines()[-1].rpartition("] ")[2]
    if "peer id mismatch" in last:
        return (
            "another island listens there now: it was started again without swarm.identity_file, or is one of another run"
        )
    if "connection refused" in last:
        return "nothing listens there: connection refused"
    return last
