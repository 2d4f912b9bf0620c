"""How an island that was left behind gets the agreed state of a fragment from one that is up to date."""

import asyncio
import time
from collections import Counter
from typing import Coroutine, Mapping

import torch
from torch import Tensor

from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.membership import Member
from diloco.exchange.hivemind.messages import StateHeader, StateRequest, Tip
from diloco.exchange.hivemind.network import Network, Stream, Traffic
from diloco.exchange.hivemind.surroundings import Surroundings
from diloco.outer_state import FragmentState

_LOOK_SECONDS = 1.0


class TransferFailed(Exception):
    """The state did not come, or is not what the others agreed on."""


def tip_to_adopt(own: Tip, others: Mapping[int, Tip]) -> Tip | None:
    """The state that the swarm stands on, where this island does not; None where it does.

    The greatest height wins; between lineages of one height the one with more members, then the lower hash. A tip
    counts only if most of those at its height and lineage say the same digest.
    """
    tips = [own, *others.values()]
    support = Counter((tip.height, tip.lineage) for tip in tips)
    height, lineage = max(support, key=lambda key: (key[0], support[key], bytes(255 - byte for byte in key[1])))
    if (height, lineage) == (own.height, own.lineage):
        return None
    agreeing = [tip for tip in others.values() if (tip.height, tip.lineage) == (height, lineage)]
    digests = Counter(tip.digest for tip in agreeing)
    digest, votes = digests.most_common(1)[0]
    if votes * 2 <= len(agreeing):
        return None
    return next(tip for tip in agreeing if tip.digest == digest)


async def serve_state(
    stream: Stream, request: StateRequest, state: FragmentState, members: tuple[int, ...], weights: tuple[float, ...]
) -> None:
    """Send the agreed state of a fragment, if it is the one asked for. ``members``: of the round that made it."""
    copy = await asyncio.to_thread(lambda: [tensor.clone() for tensor in state.agreed_tensors()])
    # What was agreed is only overwritten by the round after the next commit: unchanged lineage, consistent copy.
    if (state.height, bytes.fromhex(state.lineage)) != (request.height, request.lineage):
        await stream.send(messages.Refused(reason=f"at height {state.height}, lineage {state.lineage[:12]}"))
        return await stream.wait_for_end()
    raw = [tensor.view(torch.uint8) for tensor in copy]
    sizes = tuple(tensor.numel() for tensor in raw)
    await stream.send(StateHeader(sizes=sizes, members=members, weights=weights))
    for tensor in raw:
        await stream.send_plain(tensor)
    await stream.wait_for_end()


async def take_over(
    around: Surroundings, state: FragmentState, tip: Tip, traffic: Traffic, deadline: float
) -> StateHeader | str:
    """Write the state at ``tip`` beside the agreed one, from whichever member has it, and check it. Not committed.

    Returns:
        The donor's header, or in words why nobody gave it. ``deadline`` is in terms of ``time.monotonic()``.
    """
    problem = "no live member has it any more"
    for donor in around.membership.live():
        if donor.tips.get(tip.fragment) != tip:
            continue
        try:
            header = await _while_alive(donor, deadline, _fetch(around.network, donor.peer, tip, state, traffic))
            await asyncio.to_thread(_seal, state, tip)
            return header
        except (TransferFailed, OSError, EOFError, ValueError) as error:
            problem = f"island {donor.slot}: {error}"
    return problem


async def _while_alive(donor: Member, deadline: float, fetch: Coroutine[None, None, StateHeader]) -> StateHeader:
    task = asyncio.ensure_future(fetch)
    try:
        while not task.done() and donor.alive and time.monotonic() < deadline:
            await asyncio.wait({task}, timeout=_LOOK_SECONDS)
        if not task.done():
            raise TransferFailed("it took longer than exchange.round_deadline" if donor.alive else "it fell silent")
    finally:
        task.cancel()
        await asyncio.wait({task})  # so that nothing writes into the state any more
    return task.result()


async def _fetch(network: Network, peer: str, tip: Tip, state: FragmentState, traffic: Traffic) -> StateHeader:
    request = StateRequest(fragment=tip.fragment, height=tip.height, lineage=tip.lineage)
    stream = await network.open_stream(peer, request, traffic)
    try:
        header = await stream.receive()
        if not isinstance(header, StateHeader):
            raise TransferFailed(f"refused: {getattr(header, 'reason', header.kind)}")
        targets: list[Tensor] = [tensor.view(torch.uint8) for tensor in state.staged_tensors()]
        expected = tuple(target.numel() for target in targets)
        if header.sizes != expected:
            raise TransferFailed(f"its tensors have {header.sizes} bytes, this fragment's {expected}")
        for target in targets:
            await stream.receive_into(target)
        return header
    finally:
        stream.close()


def _seal(state: FragmentState, tip: Tip) -> None:
    if not all(torch.isfinite(tensor).all() for tensor in state.staged_tensors()):
        raise TransferFailed("the state received is not finite")
    digest = state.seal_received(tip.height, tip.lineage.hex())
    if digest != tip.digest.hex():
        agreed = tip.digest.hex()
        raise TransferFailed(f"the state received has digest {digest[:12]}, the others agreed on {agreed[:12]}")
