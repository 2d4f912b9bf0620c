"""How an island that was left behind, or is new, gets the agreed state of a fragment from those who are up to date."""

import asyncio
import struct
import time
from collections import Counter
from typing import Callable, Mapping

import torch
from torch import Tensor

from diloco.exchange.hivemind.membership import Member
from diloco.exchange.hivemind.messages import BadMessage, StateHeader, StateRequest, Tip
from diloco.exchange.hivemind.stream import Traffic
from diloco.exchange.hivemind.scatter_reduce import all_or_none
from diloco.exchange.hivemind.surroundings import Surroundings
from diloco.ledger import Ledger
from diloco.outer_state import FragmentState

PART_BYTES = 8 << 20
_LOOK_SECONDS = 0.5


class TransferFailed(Exception):
    """The state did not come, or is not what the others agreed on."""


def tip_of(state: FragmentState) -> Tip:
    """Where this island's agreed state stands."""
    return Tip(
        fragment=state.index,
        height=state.height,
        lineage=bytes.fromhex(state.lineage),
        digest=bytes.fromhex(state.digest),
        tokens=state.ledger.tokens,
    )


def tip_to_adopt(own: Tip | None, others: Mapping[int, Tip]) -> Tip | None:
    """The state that the swarm stands on, where this island does not; None where it does.

    The lineage with most committed tokens wins; then the lower hash. A tip counts only if most of those at its lineage
    say the same digest. Without a state of its own (``own`` None) an island takes the best of the others'.
    """
    tips = [*([own] if own else []), *others.values()]
    if not tips:
        return None
    best = max(tips, key=lambda tip: (tip.tokens, tip.height, bytes(255 - byte for byte in tip.lineage)))
    if own and (best.height, best.lineage) == (own.height, own.lineage):
        return None
    agreeing = [tip for tip in others.values() if (tip.height, tip.lineage) == (best.height, best.lineage)]
    digests = Counter((tip.digest, tip.tokens) for tip in agreeing)
    (digest, tokens), votes = digests.most_common(1)[0]
    if votes * 2 <= len(agreeing):
        return None
    return next(tip for tip in agreeing if (tip.digest, tip.tokens) == (digest, tokens))


async def take_over(
    around: Surroundings,
    state: FragmentState,
    tip: Tip,
    traffic: Traffic,
    deadline: float,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> StateHeader | str:
    """Write the state at ``tip`` beside the agreed one, from whichever members have it, and check it. Not committed.

    A donor that dies half-way, or sends nothing for ``peer_timeout``, is followed by the next, which goes on where it ended.

    Args:
        deadline: in terms of ``time.monotonic()``.
        tell: called with the bytes that are there and those of the whole state.

    Returns:
        A donor's header, or in words why nobody gave it.
    """
    problem = "no live member has it any more"
    taking = _Taking(around, state, tip, traffic, deadline, tell)
    for donor in _in_order(around, tip):
        try:
            header = await taking.from_donor(donor)
            try:
                await asyncio.to_thread(_seal, state, tip, header)
                return header
            except (TransferFailed, ValueError, struct.error):
                taking.start_over()  # there is no telling which part is wrong
                raise
        except (TransferFailed, OSError, EOFError, ValueError, struct.error) as error:
            problem = f"island {donor.slot}: {error}"
    return problem


def _in_order(around: Surroundings, tip: Tip) -> list[Member]:
    """Those who have it; each joiner begins with another one, so that several joiners don't burden one donor."""
    donors = [member for member in around.membership.live() if member.tips.get(tip.fragment) == tip]
    start = sum(around.network.peer.encode()) % len(donors) if donors else 0
    return donors[start:] + donors[:start]


class _Taking:
    """One state on its way here, part by part."""

    def __init__(
        self,
        around: Surroundings,
        state: FragmentState,
        tip: Tip,
        traffic: Traffic,
        deadline: float,
        tell: Callable[[int, int], None],
    ) -> None:
        self._around, self._tip, self._traffic, self._deadline, self._tell = around, tip, traffic, deadline, tell
        self._target = state.staged_bytes
        self._num_bytes = sum(target.numel() for target in self._target)
        self._missing: list[int] = []
        self._header: StateHeader | None = None
        self.start_over()

    def start_over(self) -> None:
        """All parts are missing."""
        self._missing = list(range(0, self._num_bytes, PART_BYTES))

    async def from_donor(self, donor: Member) -> StateHeader:
        """All parts that are missing still. Raises TransferFailed, or what a broken stream raises."""
        if time.monotonic() >= self._deadline:
            raise TransferFailed("no time is left")
        lanes = min(self._around.network.lanes(donor.peer), max(1, len(self._missing)))
        fetching = asyncio.ensure_future(all_or_none([self._fetch_parts(donor, lane) for lane in range(lanes)]))
        received, since = self._traffic.received, time.monotonic()
        patience = self._around.membership.peer_timeout
        try:
            while not fetching.done() and donor.alive and time.monotonic() < min(self._deadline, since + patience):
                await asyncio.wait({fetching}, timeout=_LOOK_SECONDS)
                if self._traffic.received > received:
                    received, since = self._traffic.received, time.monotonic()
            if not fetching.done():
                late = "it took longer than exchange.round_deadline"
                raise TransferFailed(late if time.monotonic() >= self._deadline else "it sends no more")
            fetching.result()
        finally:
            fetching.cancel()
            await asyncio.wait({fetching})  # so that nothing writes into the state any more
        assert self._header is not None
        return self._header

    async def _fetch_parts(self, donor: Member, lane: int) -> None:
        while self._missing:
            start = self._missing.pop()
            try:
                await self._fetch(donor, start, min(start + PART_BYTES, self._num_bytes), lane)
            except BaseException:
                self._missing.append(start)
                raise
            self._tell(self._num_bytes - PART_BYTES * len(self._missing), self._num_bytes)

    async def _fetch(self, donor: Member, start: int, stop: int, lane: int) -> None:
        tip = self._tip
        request = StateRequest(fragment=tip.fragment, height=tip.height, lineage=tip.lineage, start=start, stop=stop)
        stream = await self._around.network.open_stream(donor.peer, request, self._traffic, lane)
        try:
            header = await stream.receive()
            if not isinstance(header, StateHeader):
                raise TransferFailed(f"refused: {getattr(header, 'reason', header.kind)}")
            if header.num_bytes != self._num_bytes:
                raise TransferFailed(f"its state has {header.num_bytes} bytes, this fragment's {self._num_bytes}")
            for piece in pieces(self._target, start, stop):
                await stream.receive_into(piece)
            self._header = header
        finally:
            stream.close()


def pieces(tensors: list[Tensor], start: int, stop: int) -> list[Tensor]:
    """Bytes ``start`` to ``stop`` of flat uint8 tensors that are taken as one."""
    found, offset = [], 0
    for tensor in tensors:
        piece = tensor[max(0, start - offset) : max(0, stop - offset)]
        if piece.numel():
            found.append(piece)
        offset += tensor.numel()
    return found


def _seal(state: FragmentState, tip: Tip, header: StateHeader) -> None:
    if not all(torch.isfinite(tensor).all() for tensor in state.staged_tensors()):
        raise TransferFailed("the state received is not finite")
    ledger = Ledger.from_bytes(header.ledger)
    if len(ledger.positions) != len(state.ledger.positions):
        raise BadMessage(f"a ledger of {len(ledger.positions)} slots, here are {len(state.ledger.positions)}")
    if ledger.rung < 0:
        raise BadMessage(f"a ledger on rung {ledger.rung}, and the first is 0")
    digest = state.seal_received(tip.height, tip.lineage.hex(), ledger)
    if digest != tip.digest.hex() or ledger.tokens != tip.tokens:
        agreed = tip.digest.hex()
        raise TransferFailed(f"the state received has digest {digest[:12]}, the others agreed on {agreed[:12]}")
