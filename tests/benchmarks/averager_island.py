"""``python -m diloco`` with hivemind's own ``DecentralizedAverager`` in the place of the exchange, to be compared with.

Everything else is the same: the trainer, the schedule, the outer optimizer. The averager forks and averages in fp32; its peers
don't end with the same bits, and nothing tells a whole mean from part of one: hivemind 1.1.12 promises neither.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any, Callable

sys.path.insert(0, str(Path(__file__).parent.parent / "swarm"))

import faulty_island  # noqa: E402

from diloco import __main__ as diloco_main  # noqa: E402
from diloco.config import RunConfig  # noqa: E402
from diloco.exchange import hivemind as ours  # noqa: E402
from diloco.exchange.base import ExchangeEvent, RoundOutcome, Seat, Work  # noqa: E402
from diloco.ledger import Counted  # noqa: E402
from diloco.outer_state import OuterState  # noqa: E402
from diloco.pseudo_gradient import pseudo_gradient  # noqa: E402

_MATCHMAKING_SECONDS, _REQUEST_SECONDS = 1.0, 0.9  # far below the defaults, which suit groups that meet by chance


class AveragerExchange:
    """See :class:`diloco.exchange.base.Exchange`: one fragment, and nothing overlaps."""

    def __init__(self, config: RunConfig, state: OuterState) -> None:
        os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")
        import hivemind

        swarm = config.swarm
        host, _, port = swarm.listen.rpartition(":")
        self._config, self._fragment, self._launched = config, state.fragments[0], 0.0
        self._mean = self._fragment.local.clone()
        self._dht = self._join_dht(hivemind.DHT, f"/ip4/{host}/tcp/{port}")
        self._averager = hivemind.averaging.DecentralizedAverager(
            [self._mean],
            self._dht,
            start=True,
            prefix="bench",
            target_group_size=swarm.islands,
            min_group_size=swarm.islands,
            min_matchmaking_time=_MATCHMAKING_SECONDS,
            request_timeout=_REQUEST_SECONDS,
            allow_state_sharing=False,
        )

    def _join_dht(self, make: Callable[..., Any], address: str) -> Any:
        """It does not wait for the first island by itself."""
        swarm, until = self._config.swarm, time.monotonic() + self._config.swarm.join_timeout
        while True:
            try:
                return make(
                    start=True,
                    host_maddrs=[address],
                    initial_peers=swarm.initial_peers,
                    identity_path=swarm.identity_file,
                    use_relay=False,
                    use_auto_relay=False,
                )
            except Exception:
                if time.monotonic() > until:
                    raise
                time.sleep(0.5)

    def join(self, waiting: Callable[[], None] = lambda: None) -> Seat:
        """See :class:`diloco.exchange.base.Exchange`."""
        return Seat(self._config.swarm.slot)

    def started(self) -> None:
        """Nothing to tell."""

    def progress(self, step: int, tokens_per_second: float) -> None:
        """Nothing to tell."""

    def called(self, fragment: int) -> bool:
        """Nobody calls."""
        return False

    def is_late(self, fragment: int) -> bool:
        """Never."""
        return False

    def launch(self, fragment: int, work: Work) -> None:
        """See :class:`diloco.exchange.base.Exchange`."""
        self._launched, self._work = time.monotonic(), work
        state = self._fragment
        self._health = pseudo_gradient(state.anchor, state.local, out=state.local)

    def arrived(self, fragment: int) -> bool:
        """Nothing goes on by itself."""
        return True

    def outcome(self, fragment: int) -> RoundOutcome:
        """Average now, and step."""
        state, slot, work = self._fragment, self._config.swarm.slot, self._work
        with self._averager.get_tensors() as tensors:
            tensors[0].copy_(state.local)
        self._averager.step(weight=float(work.tokens), timeout=600.0)
        with self._averager.get_tensors() as tensors:
            self._mean.copy_(tensors[0])
        digest = state.stage(self._mean, [Counted(slot, work.tokens, work.position, work.step, self._health.norm)])
        state.commit(slot)
        return RoundOutcome(
            "committed",
            fragment,
            state.height,
            members=(0, 1),
            weights=(1.0, 1.0),
            digest=digest,
            bytes_sent=self._mean.nbytes,
            bytes_received=self._mean.nbytes,
            exchange_seconds=time.monotonic() - self._launched,
            pseudo_gradient_norm=self._health.norm,
            position=work.position,
            step=work.step,
            tokens=state.ledger.tokens,
        )

    def events(self) -> list[ExchangeEvent]:
        """None."""
        return []

    def close(self, hurry: bool = False) -> None:
        """Its processes may live on after it, so whoever started them kills them."""


def main() -> None:
    """Put it in the place of the exchange, and run diloco."""
    ours.build = lambda config, state, schema, prefers: AveragerExchange(config, state)
    faulty_island.pad_steps(float(os.environ.get("TEST_STEP_SECONDS", "0")))
    sys.exit(diloco_main.run())


if __name__ == "__main__":
    main()
