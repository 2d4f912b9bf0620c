"""What encoding loses comes back later: once, and only where the contribution that lost it has counted."""

import threading

import pytest
import torch
from torch import Tensor

from diloco.codecs import build_wire
from diloco.codecs.int4 import Config as Int4
from diloco.codecs.none import Config as NoCodec
from diloco.codecs.topk import Config as TopK
from diloco.config import CodecSection
from diloco.encoding import encode_contribution
from diloco.exchange.base import Work
from diloco.exchange.in_memory import Hub, InMemoryExchange
from diloco.ledger import Counted
from diloco.outer_optimizers.sgd import Config, Sgd
from diloco.outer_state import FragmentState, Layout, OuterState
from diloco.reduction import CHUNK, Wire, chunk_slice, num_chunks, sends_whole, through, weighted_mean

NUMEL = CHUNK + 4097
CODECS = [Int4(), TopK(k=64)]
NAMES = ["int4", "topk"]


def draw(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * 1e-3


def make_state(error_feedback: bool = True) -> FragmentState:
    """At anchor zero; plain averaging."""
    state = OuterState(Layout([NUMEL], Sgd(Config(lr=1.0, momentum=0.0)), error_feedback=error_feedback)).fragments[0]
    state.initialize()
    return state


def decoded(wire: Wire, chunks: list[Tensor]) -> Tensor:
    pieces = [chunk_slice(NUMEL, index) for index in range(num_chunks(NUMEL))]
    each = zip(pieces, chunks, strict=True)
    return torch.cat([wire.contribution.decode(chunk, piece.stop - piece.start, torch.float32) for piece, chunk in each])


def offer(state: FragmentState, wire: Wire, moved: Tensor, position: int, decay: float = 1.0) -> Tensor:
    """What others decode of an island that moved by ``moved`` since the anchor."""
    state.local.copy_(state.anchor - moved)
    return decoded(wire, encode_contribution(state, wire.contribution, position, decay).chunks)


def commit(state: FragmentState, mean: Tensor, position: int | None) -> None:
    """``position``: of this island's contribution; None where the others commit without it."""
    slot, at = (0, position) if position else (1, 8)
    state.stage(mean, [Counted(slot, 1, at, 1, 1.0)])
    state.commit(slot=0)


@pytest.mark.parametrize("codec", CODECS, ids=NAMES)
def test_a_sum_that_is_not_finite_is_not_sent(codec: CodecSection) -> None:
    """Both parts are numbers, and fp32 has none for what they add up to: no error, which would end the exchange process."""
    wire, state = build_wire(codec), make_state()
    state.residual.fill_(3e38)
    state.local.fill_(-3e38)
    encoded = encode_contribution(state, wire.contribution, 8)
    assert not encoded.finite and encoded.norm == float("inf")


@pytest.mark.parametrize("error_feedback", [False, True])
@pytest.mark.parametrize("codec", [*CODECS, NoCodec()], ids=[*NAMES, "none"])
def test_the_norm_of_what_is_sent_is_that_of_what_others_decode(codec: CodecSection, error_feedback: bool) -> None:
    wire, state = build_wire(codec), make_state(error_feedback)
    if state.residual is not None:
        state.residual.copy_(draw(7))
    state.local.copy_(draw(3))
    encoded = encode_contribution(state, wire.contribution, 8)
    assert encoded.sent_norm == pytest.approx(float(decoded(wire, encoded.chunks).double().norm()), rel=1e-12)


@pytest.mark.parametrize("codec", CODECS, ids=NAMES)
def test_what_was_sent_sums_up_to_what_was_moved(codec: CodecSection) -> None:
    wire, state, moved, sent = build_wire(codec), make_state(), torch.zeros(NUMEL).double(), torch.zeros(NUMEL).double()
    for number in range(1, 7):
        before = state.anchor.clone()
        values = offer(state, wire, draw(number), number)
        moved += (before - (before - draw(number))).double()  # as rounded
        sent += values.double()
        commit(state, values, number)
        assert float((moved - sent - state.residual.double()).abs().max()) < 1e-8
    assert float(state.residual.norm()) < 3 * float(draw(0).norm()) * (6 if codec.type == "topk" else 1)


def test_the_residual_decays() -> None:
    wire, state = build_wire(TopK(k=64)), make_state()
    first = offer(state, wire, draw(1), 1, decay=0.5)
    commit(state, torch.zeros(NUMEL), 1)
    assert torch.equal(state.residual, draw(1) - first)
    residual = state.residual.clone()
    offer(state, wire, torch.zeros(NUMEL), 2, decay=0.5)
    assert torch.equal(state.local, residual * 0.5)


@pytest.mark.parametrize("codec", CODECS, ids=NAMES)
def test_a_round_that_did_not_count_changes_no_residual(codec: CodecSection) -> None:
    wire, state = build_wire(codec), make_state()
    commit(state, offer(state, wire, draw(1), 1), 1)
    kept = state.residual.clone()
    assert float(kept.norm()) > 0
    offer(state, wire, draw(2), 2)  # skipped: nothing is committed
    assert torch.equal(state.residual, kept)
    offer(state, wire, draw(2), 2)
    commit(state, draw(3), None)  # the others go on without it
    assert torch.equal(state.residual, kept)


def test_a_contribution_that_counts_without_its_loss_being_known_leaves_none() -> None:
    wire, state = build_wire(TopK(k=64)), make_state()
    commit(state, offer(state, wire, draw(1), 10), 10)
    offer(state, wire, draw(2), 20)
    commit(state, torch.zeros(NUMEL), 15)  # by the agreed state, another one counted
    assert float(state.residual.norm()) == 0


def test_without_error_feedback_there_is_no_room_for_it() -> None:
    state = make_state(error_feedback=False)
    assert state.residual is None and state.next_residual is None
    commit(state, offer(state, build_wire(Int4()), draw(1), 1), 1)


def test_another_process_sees_the_residual_of_the_state_that_it_sees() -> None:
    outer = OuterState(Layout([NUMEL], Sgd(Config(lr=1.0, momentum=0.0)), error_feedback=True))
    view = OuterState(outer.layout, outer._memory)
    state, seen = outer.fragments[0], view.fragments[0]
    state.initialize()
    commit(state, offer(state, build_wire(TopK()), draw(1), 1), 1)
    assert torch.equal(seen.residual, state.residual) and seen.height == 1 and float(seen.residual.norm()) > 0


@pytest.mark.parametrize("num_islands", [1, 2, 3])
@pytest.mark.parametrize("codec", CODECS, ids=NAMES)
def test_islands_in_memory_equal_a_plain_loop(codec: CodecSection, num_islands: int) -> None:
    wire, hub, weights = build_wire(codec), Hub(num_islands), [3.0, 1.0, 2.0][:num_islands]
    layout = Layout([NUMEL], Sgd(Config(lr=0.7, momentum=0.9)), error_feedback=True)
    states = [OuterState(layout) for _ in range(num_islands)]

    def island(slot: int) -> None:
        exchange, state = InMemoryExchange(hub, slot, states[slot], wire, 60.0, residual_decay=0.9), states[slot].fragments[0]
        state.initialize()
        for number in range(4):
            state.local.copy_(state.anchor - draw(10 * number + slot))
            exchange.launch(0, Work(int(weights[slot]), number, number + 1, number + 1))
            assert exchange.outcome(0).kind == "committed"

    threads = [threading.Thread(target=island, args=(slot,)) for slot in range(num_islands)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    anchor, momentum, residuals = torch.zeros(NUMEL), torch.zeros(NUMEL), [torch.zeros(NUMEL) for _ in range(num_islands)]
    whole = {1: True, 2: True, 3: codec.type == "topk"}[num_islands]
    assert sends_whole(wire, num_islands) == whole
    for number in range(4):
        sent = []
        for slot in range(num_islands):
            values = (anchor - (anchor - draw(10 * number + slot))) + residuals[slot] * 0.9
            pieces = [values[chunk_slice(NUMEL, index)] for index in range(num_chunks(NUMEL))]
            sent.append(decoded(wire, [wire.contribution.encode(piece) for piece in pieces]))
            residuals[slot] = values - sent[-1]
        mean = weighted_mean(sent, weights)
        if not whole:
            mean = torch.cat([through(wire.mean, mean[chunk_slice(NUMEL, index)]) for index in range(num_chunks(NUMEL))])
        momentum = momentum * 0.9 + mean
        anchor = anchor - (momentum * 0.9 + mean) * 0.7
    for slot, state in enumerate(states):
        assert torch.equal(state.fragments[0].anchor, anchor)
        assert torch.equal(state.fragments[0].residual, residuals[slot])
