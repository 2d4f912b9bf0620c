"""A seal holds for one sender, one receiver, one purpose and these bytes, and nothing else."""

import asyncio
import itertools
import random
from typing import Any

import pytest
from hivemind.proto import dht_pb2

from diloco.exchange.hivemind.directory import KeyAuthorizer
from diloco.exchange.hivemind.messages import MAX_MESSAGE_BYTES
from diloco.exchange.hivemind.seal import SEAL_BYTES, NotSealed, Seal, joined, subkey

SEAL = Seal(bytes(32))
BODY = b"a message of some length"


def test_what_was_closed_can_be_opened() -> None:
    for body in (b"", BODY, bytes(MAX_MESSAGE_BYTES)):
        sealed = SEAL.close("request", "a", "b", body)
        assert len(sealed) == len(body) + SEAL_BYTES == len(body) + SEAL.size
        assert SEAL.open("request", "a", "b", sealed) == body


def test_without_a_key_nothing_is_added() -> None:
    none = Seal(b"")
    assert none.close("request", "a", "b", BODY) == BODY == none.open("answer", "c", "d", BODY) and none.size == 0


@pytest.mark.parametrize(
    "other",
    [
        ("answer", "a", "b"),
        ("stream", "a", "b"),
        ("request", "b", "a"),
        ("request", "a", "c"),
        ("request", "ab", ""),
        ("request", "", "ab"),
    ],
)
def test_it_holds_for_nobody_and_nothing_else(other: tuple) -> None:
    with pytest.raises(NotSealed):
        SEAL.open(*other, SEAL.close("request", "a", "b", BODY))


def test_every_flipped_bit_and_every_cut_is_noticed() -> None:
    sealed = SEAL.close("stream", "a", "b", BODY)
    for position, bit in itertools.product(range(len(sealed)), range(8)):
        changed = bytearray(sealed)
        changed[position] ^= 1 << bit
        with pytest.raises(NotSealed):
            SEAL.open("stream", "a", "b", bytes(changed))
    for changed in (*(sealed[:length] for length in range(len(sealed))), sealed + b"\0", b"\0" + sealed):
        with pytest.raises(NotSealed):
            SEAL.open("stream", "a", "b", changed)


def test_noise_and_what_is_too_long_is_refused() -> None:
    generator = random.Random(0)
    for length in (*range(100), 1000, MAX_MESSAGE_BYTES + SEAL_BYTES, MAX_MESSAGE_BYTES + SEAL_BYTES + 1):
        with pytest.raises(NotSealed):
            SEAL.open("request", "a", "b", generator.randbytes(length))
    with pytest.raises(NotSealed, match="can't be a sealed message"):
        SEAL.open("request", "a", "b", SEAL.close("request", "a", "b", bytes(MAX_MESSAGE_BYTES + 1)))


def test_subkeys_differ_by_key_run_and_use() -> None:
    keys = {
        subkey(key, run, use) for key in (bytes(32), bytes(31) + b"1") for run in ("a", "b", "") for use in ("x", "xa")
    }
    assert len(keys) == 12 and {len(key) for key in keys} == {32}
    with pytest.raises(NotSealed):
        Seal(bytes(31) + b"1").open("request", "a", "b", SEAL.close("request", "a", "b", BODY))


def test_parts_are_told_apart() -> None:
    assert len({joined(b"ab", b"c"), joined(b"a", b"bc"), joined(b"abc"), joined(b"", b"abc")}) == 4


class TestDirectory:
    """Requests to the DHT and its answers: of this swarm, of now, once, and to this request."""

    def exchange(self, asker: KeyAuthorizer, server: KeyAuthorizer, change: Any = None) -> tuple[bool, bool]:
        """Whether the server takes a request, and the asker its answer; ``change`` happens to both on their way."""

        async def run() -> tuple[bool, bool]:
            request = dht_pb2.StoreRequest(keys=[b"key"], values=[b"value"], expiration_time=[1.0])
            await asker.sign_request(request, None)
            sent = dht_pb2.StoreRequest.FromString(request.SerializeToString())
            if change:
                change(sent)
            taken = await server.validate_request(sent)
            answer = dht_pb2.StoreResponse(store_ok=[1])
            await server.sign_response(answer, sent)
            came = dht_pb2.StoreResponse.FromString(answer.SerializeToString())
            if change:
                change(came)
            return taken, await asker.validate_response(came, request)

        return asyncio.run(run())

    def test_members_understand_each_other_and_strangers_do_not(self) -> None:
        key, other = KeyAuthorizer(b"k" * 32), KeyAuthorizer(b"o" * 32)
        assert self.exchange(key, KeyAuthorizer(b"k" * 32)) == (True, True)
        assert self.exchange(key, other) == self.exchange(other, key) == (False, False)

    @pytest.mark.parametrize("field", ["time", "nonce", "signature"])
    def test_a_changed_field_is_noticed(self, field: str) -> None:
        def change(message: Any) -> None:
            if hasattr(message.auth, field):
                value = getattr(message.auth, field)
                setattr(message.auth, field, value + 1 if field == "time" else bytes(len(value)))

        taken, _ = self.exchange(KeyAuthorizer(b"k" * 32), KeyAuthorizer(b"k" * 32), change)
        assert not taken

    def test_once_and_now(self) -> None:
        async def run() -> list[bool]:
            asker, server = KeyAuthorizer(b"k" * 32), KeyAuthorizer(b"k" * 32)
            request = dht_pb2.FindRequest(keys=[b"key"])
            await asker.sign_request(request, None)
            raw, taken = request.SerializeToString(), []
            for _ in range(2):
                taken.append(await server.validate_request(dht_pb2.FindRequest.FromString(raw)))
            request.auth.time -= 3600
            request.auth.signature = asker._seal("request", request, b"")
            taken.append(await server.validate_request(request))
            return taken

        assert asyncio.run(run()) == [True, False, False]
