"""``diloco status`` and real islands: what it shows, whom it tells nothing, and what strangers can't do to it."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator

import msgpack
import pytest
from harness import Island, Swarm, eventually, running, settings

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")  # before hivemind is imported

from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.p2p import PeerID  # noqa: E402
from hivemind.utils import get_dht_time  # noqa: E402

from diloco.exchange.hivemind import member_record  # noqa: E402
from diloco.exchange.hivemind.daemon import addresses, start_client, start_daemon  # noqa: E402
from diloco.exchange.hivemind.directory import Found, look_up  # noqa: E402
from diloco.exchange.hivemind.member_record import MemberRecord  # noqa: E402
from diloco.reduction import CHUNK  # noqa: E402
from diloco.swarm_key import write_new_key  # noqa: E402

SIZES = [CHUNK + 77, 5]
WEIGHTS = [1000.0, 3000.0]
_STATUS = [sys.executable, "-c", "import sys; from diloco.cli import main; sys.exit(main())", "status"]

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of the swarm's key and of another one."""
    folder = tmp_path_factory.mktemp("keys")
    for name in ("right", "wrong"):
        write_new_key(folder / name)
    return {name: str(folder / name) for name in ("right", "wrong")}


@pytest.fixture(scope="module")
def swarm(keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    """Two islands with a key that have committed a round of each fragment."""
    folder = tmp_path_factory.mktemp("status")
    common = {"islands": 2, "key_file": keys["right"]}
    timing = {"peer_timeout": 10.0}
    first = Island(folder / "0", settings(swarm={**common, "slot": 0}, exchange=timing), SIZES)
    first.ask("join")
    address = eventually(first.address)
    with running([first]) as islands:
        second = settings(swarm={**common, "initial_peers": [address]}, exchange=timing)
        islands.append(Island(folder / "1", second, SIZES))
        islands[1].ask("join")
        for island in islands:
            island.answer()
        swarm = Swarm(islands)
        swarm.address = address
        for number, island in enumerate(islands):
            island.call("progress", 17 - 3 * number, 100.0 + number)
        for fragment in range(len(SIZES)):
            swarm.launch(fragment, 1, WEIGHTS)
            assert {outcome.kind for outcome in swarm.outcomes(fragment)} == {"committed"}
        yield swarm


def status(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, as a person runs it."""
    command = [*_STATUS, address, "--run", "test", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_whoever_has_the_key_sees_both_islands(swarm: Swarm, keys: dict[str, str]) -> None:
    """Asked through the one that is not the first."""
    seen: dict[str, Any] = {}

    def is_there() -> bool:
        done = status(swarm.islands[1].call("address"), "--key-file", keys["right"], "--json")
        assert done.stderr == "" or done.returncode == 1, done.stderr
        seen.update(json.loads(done.stdout or "{}"))
        return [member["round"] for member in seen.get("members", [])] == [1, 1]

    eventually(is_there, lambda: str(seen), timeout=30)
    assert (seen["run"], seen["agree"], seen["malformed"], seen["missing"], seen["tokens"]) == ("test", True, 0, [], 4000)
    told = [[one[key] for key in ("slot", "epoch", "step", "lag", "tokens_per_second")] for one in seen["members"]]
    assert told == [[0, 0, 17, 0, 100.0], [1, 0, 14, 3, 101.0]]
    assert {one["state"] for one in seen["members"]} == {"training"}
    agreed = swarm.agreed(0)[0]
    for member in seen["members"]:
        assert agreed["digest"].startswith(member["digest"]) and agreed["lineage"].startswith(member["lineage"])
        assert [fragment["fragment"] for fragment in member["fragments"]] == [0, 1]
        [link] = member["links"]
        assert link["slot"] == 1 - member["slot"] and link["alive"] and 0 < link["rtt_ms"] < 5000
        assert member["address"].endswith(member["peer"]) and member["age_seconds"] < 30
    assert swarm.address in [member["address"] for member in seen["members"]]


def test_strangers_are_told_nothing_and_why(swarm: Swarm, keys: dict[str, str]) -> None:
    for arguments, told in [
        (["--key-file", keys["wrong"]], "it refuses this key: the swarm has another one"),
        (["--json"], "it refuses whoever has no key: give the swarm's with --key-file"),
    ]:
        done = status(swarm.address, *arguments)
        assert done.returncode == 1 and done.stdout == "" and "Traceback" not in done.stderr
        assert swarm.address in done.stderr and told in done.stderr


def test_in_a_pipe_the_table_is_printed_once(swarm: Swarm, keys: dict[str, str]) -> None:
    done = status(swarm.address, "--key-file", keys["right"])
    assert done.returncode == 0, done.stderr
    assert "test · 2 islands · 4,000 tokens committed · all agree" in done.stdout
    assert "17" in done.stdout and "14 −3" in done.stdout and "\x1b" not in done.stdout


async def found_among_noise() -> tuple[Found, list[int]]:
    """A member without a key, at which a stranger has stored all sorts of things; and how much more it holds after a look."""
    daemons = [await start_daemon("127.0.0.1:0", "", None), await start_client(), await start_client()]
    member, stranger, onlooker = daemons
    try:
        [address] = await addresses(member)
        node = await DHTNode.create(p2p=member)
        record = record_of(member.peer_id.to_base58(), address)
        await node.store("test.members", member_record.encode(record), get_dht_time() + 60, subkey=record.peer)
        await stranger.dial(record.peer, address)
        await store_noise(await DHTNode.create(p2p=stranger, client_mode=True), member.peer_id, record)

        def sizes() -> list[int]:
            inside = node.protocol
            return [len(part) for part in (inside.cache, inside.storage, inside.routing_table.uid_to_peer_id)]

        before = sizes()
        found = await look_up(onlooker, "test", [address, address[:-4] + "1111"])
        await asyncio.sleep(0.2)
        return found, [after - then for after, then in zip(sizes(), before, strict=True)]
    finally:
        await asyncio.gather(*(daemon.shutdown() for daemon in daemons))


def record_of(peer: str, address: str) -> MemberRecord:
    """Of an island in slot 3 at step 5."""
    place = dict(run="test", slot=3, epoch=0, peer=peer, address=address)
    return MemberRecord(**place, state="training", step=5, tokens_per_second=1.0, fragments=(), links=(), time=1e9)


async def store_noise(node: DHTNode, there: PeerID, record: MemberRecord) -> None:
    """Values that are not msgpack, not bytes, empty, too long; and the member's record, changed and under another id."""
    forged = member_record.encode(record.model_copy(update={"step": 999}))
    values = {"a": b"\xc1", "b": b"\x93", "c": b"", 7: b"\x01"}
    values |= {"d": msgpack.packb(bytes(200_000)), "e": msgpack.packb(forged)}
    expiry = [get_dht_time() + 60 + number for number in range(len(values))]
    keys = [DHTID.generate("test.members")] * len(values)
    assert all(await node.protocol.call_store(there, keys, list(values.values()), expiry, subkeys=list(values)))


def test_what_strangers_stored_is_counted_and_hides_nobody() -> None:
    """Where hivemind's own get would never come back. The onlooker leaves nothing behind, not even itself."""
    found, left_behind = asyncio.run(found_among_noise())
    assert [(record.slot, record.step) for record in found.records.values()] == [(3, 5)]
    assert found.malformed == 6
    [(where, what)] = found.problems.items()
    assert where.endswith("1111") and what
    assert left_behind == [0, 0, 0]
