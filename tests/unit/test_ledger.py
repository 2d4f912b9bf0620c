"""What committed rounds have counted: plain sums, the same bits everywhere, under the digest that islands compare."""

import struct
from statistics import median

import pytest
import torch

from diloco.outer_optimizers.sgd import Config, Sgd
from diloco.ledger import Counted, Ledger
from diloco.outer_state import FragmentState, Layout, OuterState

START = Ledger((0,) * 4)
ROUNDS = [
    [Counted(slot=0, tokens=100, position=8, step=5, norm=2.0), Counted(slot=2, tokens=60, position=4, step=3, norm=4.0)],
    [Counted(slot=2, tokens=50, position=9, step=4, norm=7.0)],
    [Counted(slot=0, tokens=7, position=20, step=9, norm=1.0), Counted(slot=3, tokens=1, position=1, step=9, norm=1.0)],
]


def ledger(rounds: int) -> Ledger:
    found = START
    for counted in ROUNDS[:rounds]:
        found = found.after(counted)
    return found


def state_of(max_slots: int = 4) -> FragmentState:
    state = OuterState(Layout([100], Sgd(Config()), max_slots=max_slots)).fragments[0]
    state.anchor.copy_(torch.linspace(-1, 1, 100))
    state.initialize()
    return state


def test_a_ledger_counts_positions_tokens_steps_and_what_norm_is_usual() -> None:
    assert ledger(1) == Ledger((8, 0, 4, 0), tokens=160, step=5, typical_norm=3.0)  # the first round sets what is usual
    assert ledger(2) == Ledger((8, 0, 9, 0), tokens=210, step=5, typical_norm=3.0 + (7.0 - 3.0) / 4)
    assert ledger(3) == Ledger((20, 0, 9, 1), tokens=218, step=9, typical_norm=4.0 + (1.0 - 4.0) / 4)


def test_one_large_norm_among_many_is_not_usual() -> None:
    norms = [1.0, 1e9, 2.0]
    counted = [Counted(slot, tokens=1, position=1, step=1, norm=norm) for slot, norm in enumerate(norms)]
    assert START.after(counted).typical_norm == median(norms) == 2.0


def test_a_round_of_nobody_changes_nothing() -> None:
    assert ledger(2).after([]) == ledger(2)


@pytest.mark.parametrize("rounds", range(4))
def test_a_ledger_survives_its_bytes(rounds: int) -> None:
    assert Ledger.from_bytes(ledger(rounds).to_bytes()) == ledger(rounds)


def test_bytes_of_another_size_are_no_ledger() -> None:
    for raw in (b"", START.to_bytes()[:-1], bytes(16)):
        with pytest.raises(struct.error):
            Ledger.from_bytes(raw)


def test_a_state_keeps_the_ledger_of_its_rounds() -> None:
    state = state_of()
    assert state.ledger == START
    for number, counted in enumerate(ROUNDS):
        state.stage(torch.ones(100), counted)
        assert state.ledger == ledger(number)  # until it is committed
        state.commit(slot=0)
        assert state.ledger == ledger(number + 1)


def test_the_digest_covers_the_ledger() -> None:
    digests = {state_of().stage(torch.ones(100), counted) for counted in ROUNDS}
    assert len(digests) == len(ROUNDS)
    assert state_of().stage(torch.ones(100), ROUNDS[0]) in digests


def test_a_received_state_has_the_digest_of_its_donor_only_with_the_same_ledger() -> None:
    donor, receiver = state_of(), state_of()
    donor.stage(torch.ones(100), ROUNDS[0])
    donor.commit(slot=0)
    for target, source in zip(receiver.staged_tensors(), donor.agreed_tensors(), strict=True):
        target.copy_(source)
    assert receiver.seal_received(1, donor.lineage, ledger(2)) != donor.digest
    assert receiver.seal_received(1, donor.lineage, donor.ledger) == donor.digest
    receiver.commit(slot=0)
    assert receiver.ledger == donor.ledger == ledger(1) and receiver.lineage == donor.lineage


@pytest.mark.parametrize("where", ["anchor", "momentum", "ledger"])
def test_a_flipped_bit_of_what_is_agreed_is_noticed(where: str) -> None:
    state = state_of()
    state.stage(torch.ones(100), ROUNDS[0])
    state.commit(slot=0)
    assert state.is_intact()
    tensor = dict(anchor=state.anchor, ledger=state._ledgers[state._now], **state.optimizer_state)[where].view(torch.uint8)
    for index in (0, len(tensor) // 2, len(tensor) - 1):
        tensor[index] ^= 4
        assert not state.is_intact()
        tensor[index] ^= 4
        assert state.is_intact()


def test_what_is_staged_can_not_make_the_agreed_state_look_broken() -> None:
    state = state_of()
    for tensor in state.staged_tensors():
        tensor.fill_(7.0)
    state.stage(torch.ones(100), ROUNDS[0])
    assert state.is_intact()
