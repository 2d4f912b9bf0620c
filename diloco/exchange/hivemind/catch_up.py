"""How an island that was left behind gets the agreed state of a fragment from one that is up to date."""

import asyncio
from collections import Counter
from typing import Mapping

import torch
from torch import Tensor

from diloco.exchange.hivemind import messages
from diloco.exchange.hivemind.messages import StateHeader, StateRequest, Tip
from diloco.exchange.hivemind.network import Network, Stream, Traffic
from diloco.outer_state import FragmentState


class TransferFailed(Exception):
    """The state did not come, or is not what the others agreed on."""


def tip_to_adopt(own: Tip, others: Mapping[int, Tip]) -> Tip | None:
    """The state that the swarm stands on, where this island does not; None where it does.

    The greatest height wins; between lineages of one height the one with more members, then the lower hash. A tip counts
    only if most of those at its height and lineage say the same digest.
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


async def fetch_state(network: Network, peer: str, tip: Tip, state: FragmentState, traffic: Traffic) -> StateHeader:
    """Write the state at ``tip`` beside the agreed one, from ``peer``. Not sealed, not committed.

    Raises:
        TransferFailed: refused, or sizes that are not this fragment's.
        BadMessage, EOFError, OSError: the peer broke off or sent what it may not.
    """
    request = StateRequest(fragment=tip.fragment, height=tip.height, lineage=tip.lineage)
    stream = await network.open_stream(peer, request, traffic)
    try:
        header = await stream.receive()
        if not isinstance(header, StateHeader):
            raise TransferFailed(f"the donor refused: {getattr(header, 'reason', header.kind)}")
        targets: list[Tensor] = [tensor.view(torch.uint8) for tensor in state.staged_tensors()]
        expected = tuple(target.numel() for target in targets)
        if header.sizes != expected:
            raise TransferFailed(f"the donor's tensors have {header.sizes} bytes, this fragment's {expected}")
        for target in targets:
            await stream.receive_into(target)
        return header
    finally:
        stream.close()


def seal(state: FragmentState, tip: Tip) -> str:
    """Check what :func:`fetch_state` wrote; returns its digest (hex). The caller commits.

    Raises:
        TransferFailed: not finite, or not the digest that the others named.
    """
    if not all(torch.isfinite(tensor).all() for tensor in state.staged_tensors()):
        raise TransferFailed("the state received is not finite")
    digest = state.seal_received(tip.height, tip.lineage.hex())
    if digest != tip.digest.hex():
        raise TransferFailed(f"the state received has digest {digest[:12]}, the others agreed on {tip.digest.hex()[:12]}")
    return digest
