"""Islands that are threads of one process: for tests and for runs with one island."""

import threading
import time
from typing import Literal

from torch import Tensor

from diloco.config import ExchangeSection, RunConfig
from diloco.exchange.base import ExchangeEvent, JoinError, RoundOutcome, Seat
from diloco.outer_state import OuterState
from diloco.pseudo_gradient import Health, cosine, pseudo_gradient
from diloco.reduction import Codec, chunk_slice, num_chunks, reduce_chunk
from islands import plugins


class Config(ExchangeSection):
    """``exchange.type: in_memory``"""

    type: Literal["in_memory"] = "in_memory"


class Hub:
    """Where the islands of one process meet. Thread-safe; tensors are shared, never copied."""

    def __init__(self, num_islands: int) -> None:
        self.condition = threading.Condition()
        self.expected = set(range(num_islands))
        self.offers: dict[tuple[int, int], dict[int, tuple[list[Tensor], float]]] = {}
        self.means: dict[tuple[int, int], list[Tensor]] = {}


class InMemoryExchange:
    """One island's end of a :class:`Hub`. The same encoding, order and reduction as between machines."""

    def __init__(self, hub: Hub, slot: int, state: OuterState, codec: Codec, round_deadline: float) -> None:
        self._hub, self._slot, self._state, self._codec = hub, slot, state, codec
        self._deadline = round_deadline
        self._launched: dict[int, tuple[float, Health]] = {}

    def join(self) -> Seat:
        """See :class:`diloco.exchange.base.Exchange`."""
        return Seat(self._slot)

    def launch(self, fragment: int, weight: float) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""
        state = self._state.fragments[fragment]
        health = pseudo_gradient(state.anchor, state.local, out=state.local)
        self._launched[fragment] = (time.monotonic(), health)
        pieces = [state.local[chunk_slice(state.numel, index)] for index in range(num_chunks(state.numel))]
        with self._hub.condition:
            if health.finite:
                key = (fragment, state.height)
                encoded = [self._codec.encode(piece) for piece in pieces]
                self._hub.offers.setdefault(key, {})[self._slot] = (encoded, weight)
            self._hub.condition.notify_all()

    def outcome(self, fragment: int) -> RoundOutcome:
        """See :class:`diloco.exchange.base.Exchange`."""
        state = self._state.fragments[fragment]
        started, health = self._launched.pop(fragment)
        key = (fragment, state.height)
        if not health.finite:
            return RoundOutcome("skipped", fragment, state.height, reason="own pseudo-gradient is not finite")
        with self._hub.condition:
            offers = self._hub.offers[key]
            everyone = self._hub.condition.wait_for(lambda: offers.keys() >= self._hub.expected, self._deadline)
            if not everyone:
                missing = sorted(self._hub.expected - offers.keys())
                offers.pop(self._slot, None)
                reason = f"islands {missing} offered nothing within {self._deadline:g} s"
                return RoundOutcome("skipped", fragment, state.height, reason=reason)
            members = sorted(offers)
            weights = tuple(offers[slot][1] for slot in members)
            if key not in self._hub.means:
                self._hub.means[key] = self._reduce([offers[slot][0] for slot in members], weights, fragment)
                before = (fragment, state.height - 1)  # all have moved on from it, or they would not be here
                self._hub.offers.pop(before, None)
                self._hub.means.pop(before, None)
            mean = self._decode(self._hub.means[key], fragment)
        similarity = cosine(state.local, mean)
        digest = state.stage(mean)
        state.commit()
        return RoundOutcome(
            "committed",
            fragment,
            state.height,
            tuple(members),
            weights,
            digest=digest,
            exchange_seconds=time.monotonic() - started,
            pseudo_gradient_norm=health.norm,
            cosine=similarity,
        )

    def events(self) -> list[ExchangeEvent]:
        """See :class:`diloco.exchange.base.Exchange`."""
        return []

    def close(self) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""
        with self._hub.condition:
            self._hub.expected.discard(self._slot)
            self._hub.condition.notify_all()

    def _reduce(self, encoded: list[list[Tensor]], weights: tuple[float, ...], fragment: int) -> list[Tensor]:
        state = self._state.fragments[fragment]
        return [
            reduce_chunk(self._codec, chunk, weights, self._chunk_numel(fragment, index), state.dtype)
            for index, chunk in enumerate(zip(*encoded, strict=True))
        ]

    def _decode(self, encoded: list[Tensor], fragment: int) -> Tensor:
        state = self._state.fragments[fragment]
        mean = state.local.new_empty(state.numel)
        for index, chunk in enumerate(encoded):
            piece = chunk_slice(state.numel, index)
            mean[piece] = self._codec.decode(chunk, piece.stop - piece.start, state.dtype)
        return mean

    def _chunk_numel(self, fragment: int, index: int) -> int:
        piece = chunk_slice(self._state.fragments[fragment].numel, index)
        return piece.stop - piece.start


def build(config: RunConfig, state: OuterState, schema: str) -> InMemoryExchange:
    """An exchange for a run with one island: every round is its own mean.

    Raises:
        JoinError: the run has more islands, which in memory can't be reached from here.
    """
    if config.swarm.islands != 1:
        raise JoinError(
            f"exchange.type=in_memory joins the islands of one process, and swarm.islands={config.swarm.islands}; "
            "use exchange.type=hivemind between processes"
        )
    codec = plugins.build("diloco.codecs", config.outer.codec)
    return InMemoryExchange(Hub(1), max(config.swarm.slot, 0), state, codec, config.exchange.round_deadline)
