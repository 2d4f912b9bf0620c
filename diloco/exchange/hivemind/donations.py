"""Serving agreed state to those who need it, from a copy, so that the donor goes on meanwhile."""

import asyncio
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.catch_up import PART_BYTES, pieces
from diloco.exchange.hivemind.messages import BadMessage, StateHeader, StateRequest
from diloco.exchange.hivemind.stream import Stream
from diloco.exchange.hivemind.surroundings import LastRound
from diloco.outer_state import FragmentState

_RECEIVERS_AT_ONCE = 2
_KEPT_SECONDS = 60.0
_COPIES = 2  # of a fragment at most: for one whose link is slow, and one that came later
_PAUSE_SECONDS = 3.0  # between two parts that the same receiver takes


@dataclass
class _Snapshot:
    tensors: list[Tensor]
    header: StateHeader
    used: float = field(default_factory=time.monotonic)
    receivers: dict[str, float] = field(default_factory=dict)


class Donations:
    """Copies of agreed state, few a fragment, kept as long as somebody takes from them."""

    def __init__(self) -> None:
        self._snapshots: dict[tuple[int, int, bytes], _Snapshot] = {}  # by fragment, height and lineage
        self._copying = asyncio.Lock()

    async def serve(self, stream: Stream, request: StateRequest, state: FragmentState, last: LastRound) -> None:
        """Send the part of the agreed state that is asked for, or say why not."""
        snapshot = await self._snapshot(request, state, last)
        refusal = ""
        if snapshot is None:
            refusal = f"at height {state.height}, lineage {state.lineage[:12]}"
        elif not self._has_room(snapshot, stream.peer):
            refusal = f"it serves {_RECEIVERS_AT_ONCE} others already"
        elif not request.start < request.stop <= min(snapshot.header.num_bytes, request.start + PART_BYTES):
            raise BadMessage(f"bytes {request.start} to {request.stop} of {snapshot.header.num_bytes}")
        if refusal:
            await stream.send(messages.Refused(reason=refusal))
        else:
            await stream.send(snapshot.header)
            for piece in pieces(snapshot.tensors, request.start, request.stop):
                await stream.send_plain(piece)
                snapshot.used = snapshot.receivers[stream.peer] = time.monotonic()
        await stream.wait_for_end()

    def forget_unused(self) -> None:
        """Free copies that nobody takes from any more."""
        now = time.monotonic()
        self._snapshots = {key: kept for key, kept in self._snapshots.items() if now - kept.used < _KEPT_SECONDS}

    async def _snapshot(self, request: StateRequest, state: FragmentState, last: LastRound) -> _Snapshot | None:
        wanted = (request.height, request.lineage)
        async with self._copying:
            kept = self._snapshots.get((request.fragment, *wanted))
            if kept:
                return kept
            if (state.height, bytes.fromhex(state.lineage)) != wanted:
                return None
            header = StateHeader(
                num_bytes=sum(tensor.nbytes for tensor in state.agreed_tensors()),
                ledger=state.ledger.to_bytes(),
                members=last.members,
                weights=last.weights,
                excluded=last.excluded,
            )
            copy = await asyncio.to_thread(lambda: [tensor.clone() for tensor in state.agreed_tensors()])
            # What was agreed is only overwritten by the round after the next commit: unchanged lineage, consistent copy.
            if (state.height, bytes.fromhex(state.lineage)) != wanted:
                return None
            made = _Snapshot([tensor.view(torch.uint8) for tensor in copy], header)
            self._forget_one(request.fragment)
            self._snapshots[request.fragment, *wanted] = made
            return made

    def _forget_one(self, fragment: int) -> None:
        """Make room for another copy of it: the one from which nobody took for longest goes."""
        copies = [key for key in self._snapshots if key[0] == fragment]
        if len(copies) >= _COPIES:
            del self._snapshots[min(copies, key=lambda key: self._snapshots[key].used)]

    def _has_room(self, snapshot: _Snapshot, peer: str) -> bool:
        now = time.monotonic()
        snapshot.receivers = {
            other: at for other, at in snapshot.receivers.items() if now - at < _PAUSE_SECONDS
        }
        if peer not in snapshot.receivers and len(snapshot.receivers) >= _RECEIVERS_AT_ONCE:
            return False
        snapshot.receivers[peer] = now
        return True
