"""The row of a round in ``metrics.jsonl``."""

from diloco.exchange.base import RoundOutcome
from diloco.flight import Flight
from islands.metrics import Metrics


def write_round(metrics: Metrics, flight: Flight, outcome: RoundOutcome, landed: int, fragments: int) -> None:
    """Tell how a round ended, what it cost, and where its time went.

    Args:
        landed: the inner step at which it did, in the run's count; ``step`` is that at which it was launched.
    """
    work = flight.work
    metrics.write(
        "round",
        round=outcome.height,
        fragment=outcome.fragment,
        fragments=fragments,
        step=work.step,
        landed=landed,
        slot=flight.slot,
        start=work.start,
        position=work.position,
        counted=None if outcome.seat else outcome.position,  # of this slot, as the swarm has it
        members=list(outcome.members),
        weight=work.tokens,
        tokens=outcome.tokens,
        outcome=outcome.kind,
        reason=outcome.reason,
        bytes_sent=outcome.bytes_sent,
        bytes_received=outcome.bytes_received,
        encoded_bytes=outcome.encoded_bytes,
        bits_per_parameter=8 * outcome.encoded_bytes / flight.numel,
        exchange_seconds=outcome.exchange_seconds,
        gather_seconds=flight.gather_seconds,
        encode_seconds=outcome.encode_seconds,
        waiting_seconds=outcome.waiting_seconds,
        transfer_seconds=outcome.transfer_seconds,
        decode_seconds=outcome.decode_seconds,
        step_seconds=outcome.step_seconds,
        recovering_seconds=outcome.recovering_seconds,
        scatter_seconds=flight.scatter_seconds,
        stall_seconds=flight.stall_seconds,
        pseudo_gradient_norm=outcome.pseudo_gradient_norm,
        cosine=outcome.cosine,
        digest=outcome.digest,
    )
