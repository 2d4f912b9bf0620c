"""Anchor and outer-optimizer state: the outer step, what is visible when, and memory that processes share."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from diloco.ledger import Counted
from diloco.outer_optimizers.adam import Adam, Config as AdamConfig
from diloco.outer_optimizers.base import OuterOptimizer
from diloco.outer_optimizers.delayed_nesterov import Config as DelayedConfig, DelayedNesterov
from diloco.outer_optimizers.sgd import Config, Sgd
from diloco.outer_state import FragmentState, Layout, OuterState
from diloco.reduction import CHUNK, chunk_slice, num_chunks
from diloco.shared_memory import SharedMemory


def state_of(numel: int = 1000, dtype: torch.dtype = torch.float32, **keys: object) -> FragmentState:
    """A fragment whose anchor is random."""
    state = OuterState(Layout([numel], Sgd(Config(**keys)), dtype)).fragments[0]
    state.anchor.copy_(random(numel, 99, dtype))
    state.initialize()
    return state


def random(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def commit(state: FragmentState, mean: Tensor) -> str:
    digest = state.stage(mean)
    state.commit(slot=0)
    return digest


# The outer step.


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.5, True), (0.5, False), (0.0, True)])
def test_the_step_is_that_of_torch_sgd_to_the_bit_where_nothing_is_rounded(momentum: float, nesterov: bool) -> None:
    """Small multiples of powers of two: every product and sum of three rounds is exact, so only the formula counts."""
    draw = torch.Generator().manual_seed(0)
    anchor, *means = (torch.randint(-64, 65, (1000,), generator=draw).float() / 16 for _ in range(4))
    state = state_of(lr=0.5, momentum=momentum, nesterov=nesterov)
    state.anchor.copy_(anchor)
    state.initialize()
    parameter = torch.nn.Parameter(anchor.clone())
    reference = torch.optim.SGD([parameter], lr=0.5, momentum=momentum, nesterov=nesterov and momentum > 0)
    for mean in means:
        commit(state, mean)
        parameter.grad = mean
        reference.step()
        assert torch.equal(state.anchor, parameter.detach())
    if momentum:
        assert torch.equal(state.optimizer_state["momentum"], reference.state[parameter]["momentum_buffer"])


def plain_step(anchor: np.ndarray, momentum: np.ndarray, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Nesterov with every product and sum rounded by itself, as numpy does."""
    share, rate = anchor.dtype.type(0.9), anchor.dtype.type(0.7)
    momentum = momentum * share + mean
    return anchor - (momentum * share + mean) * rate, momentum


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("numel", [1, 1000, CHUNK, CHUNK + 17])
def test_the_step_is_the_plain_formula_to_the_bit(dtype: torch.dtype, numel: int) -> None:
    """torch.optim.SGD itself fuses a product with a sum where the machine can; other machines then round twice."""
    state = state_of(numel, dtype)
    anchor, momentum = state.anchor.numpy().copy(), np.zeros(numel, dtype=state.anchor.numpy().dtype)
    for round_number in range(3):
        mean = random(numel, round_number, dtype)
        commit(state, mean)
        anchor, momentum = plain_step(anchor, momentum, mean.numpy())
        assert np.array_equal(state.anchor.numpy(), anchor)
        assert np.array_equal(state.optimizer_state["momentum"].numpy(), momentum)


def test_the_step_follows_torch_sgd_within_rounding() -> None:
    state = state_of()
    parameter = torch.nn.Parameter(state.anchor.clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for round_number in range(3):
        parameter.grad = random(1000, round_number)
        commit(state, parameter.grad)
        reference.step()
        torch.testing.assert_close(state.anchor, parameter.detach(), rtol=0, atol=5e-6)  # below 10, in 24 bits


def test_without_momentum_there_is_no_state() -> None:
    state = state_of(momentum=0.0, lr=1.0)
    before, mean = state.anchor.clone(), random(1000, 1)
    commit(state, mean)
    assert state.optimizer_state == {} and len(state.agreed_tensors()) == 1
    assert torch.equal(state.anchor, before - mean)


# What is visible when.


def visible(state: FragmentState) -> tuple:
    """All that others may read, copied."""
    momentum = [tensor.clone().numpy().tobytes() for tensor in state.optimizer_state.values()]
    return state.anchor.clone().numpy().tobytes(), momentum, state.height, state.digest, state.lineage


def test_what_is_staged_is_invisible_until_it_is_committed() -> None:
    state = state_of()
    commit(state, random(1000, 0))
    before, old_anchor = visible(state), state.anchor.clone()
    digest = state.stage(random(1000, 1))
    assert visible(state) == before and digest != state.digest
    state.stage(random(1000, 2))
    assert state.stage(random(1000, 1)) == digest  # staging again starts from what is agreed, not from what was staged
    state.commit(slot=0)
    assert state.digest == digest and state.height == 2 and not torch.equal(state.anchor, old_anchor)
    assert torch.equal(state.previous_anchor, old_anchor)


def chunks_of(values: Tensor) -> list[Tensor]:
    return [values[chunk_slice(values.numel(), chunk)] for chunk in range(num_chunks(values.numel()))]


@pytest.mark.parametrize("optimizer", [Sgd(Config()), Adam(AdamConfig()), DelayedNesterov(DelayedConfig())])
def test_chunks_are_staged_in_any_order_by_any_thread(optimizer: OuterOptimizer) -> None:
    """The same state and digest as all of it at once."""
    whole, pieces = (OuterState(Layout([3 * CHUNK + 17], optimizer, keeps_mean=True)).fragments[0] for _ in range(2))
    for round_number in range(2):
        mean = random(whole.numel, round_number)
        counted = [Counted(1, 10, 20 * round_number, 5, 2.0)]
        staging, chunks = pieces.begin_staging(counted), list(enumerate(chunks_of(mean)))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda each: staging.apply(*each), reversed(chunks)))
        assert staging.seal() == whole.stage(mean, counted) and torch.equal(pieces.mean, mean)
        for state in (whole, pieces):
            state.commit(slot=0)
            assert state.is_intact()
        assert visible(pieces) == visible(whole)


def test_half_of_a_step_is_nothing() -> None:
    state = state_of(2 * CHUNK)
    first, second = (chunks_of(random(state.numel, seed)) for seed in range(2))
    expected = state.stage(torch.cat(second))
    before, failed = visible(state), state.begin_staging()
    failed.apply(0, first[0])
    with pytest.raises(RuntimeError, match="1 chunks are not staged, the first of them 1"):
        failed.seal()
    assert visible(state) == before and state.staged.digest == state.staged.lineage == "00" * 32, "what was there is written over"
    with pytest.raises(RuntimeError, match="nothing can be committed"):
        state.commit(slot=0)
    staging = state.begin_staging()
    staging.apply(1, second[1])
    with pytest.raises(RuntimeError, match="1 chunks are not staged, the first of them 0"):
        staging.seal()  # the chunk that the failed one has staged is not this one's
    staging.apply(0, second[0])
    assert staging.seal() == expected


@pytest.mark.parametrize("over", ["another", "received", "committed"])
def test_a_step_that_is_over_writes_no_more(over: str) -> None:
    state = state_of()
    staging = state.begin_staging()
    staging.apply(0, random(1000, 0))
    match over:
        case "another":
            state.begin_staging()
        case "received":
            state.seal_received(7, "ab" * 32, state.ledger)
        case "committed":
            staging.seal()
            state.commit(slot=0)
    with pytest.raises(RuntimeError, match="over"):
        staging.apply(0, random(1000, 1))
    with pytest.raises(RuntimeError, match="over"):
        staging.seal()
    assert state.is_intact()


def test_the_mean_is_left_as_it_is() -> None:
    state, mean = state_of(), random(1000, 0)
    commit(state, mean)
    assert torch.equal(mean, random(1000, 0))


def test_a_fresh_state_has_no_history() -> None:
    state = state_of()
    first = visible(state)
    commit(state, random(1000, 0))
    state.anchor.copy_(random(1000, 99))
    state.initialize()
    assert visible(state) == first
    assert state.height == 0 and not state.optimizer_state["momentum"].any()


def test_fragments_do_not_touch_each_other() -> None:
    fragments = OuterState(Layout([7, 1, 100], Sgd(Config()))).fragments
    for value, fragment in enumerate(fragments):
        fragment.anchor.fill_(value)
        fragment.initialize()
    before = [visible(fragments[0]), visible(fragments[2])]
    commit(fragments[1], torch.ones(1))
    fragments[1].local.fill_(5.0)
    assert [visible(fragments[0]), visible(fragments[2])] == before
    assert [fragment.height for fragment in fragments] == [0, 1, 0]


def flip_a_bit(tensor: Tensor, index: int, bit: int) -> None:
    tensor.view(torch.uint8)[index] ^= 1 << bit


@pytest.mark.parametrize("pick", [lambda state: state.anchor, lambda state: state.optimizer_state["momentum"]])
def test_the_digest_changes_with_any_bit(pick: Callable[[FragmentState], Tensor]) -> None:
    numel = 3
    seen = set()
    for index in range(numel * 4):
        for bit in range(8):
            state = state_of(numel)
            commit(state, torch.ones(numel))
            flip_a_bit(pick(state), index, bit)
            for target, source in zip(state.staged_tensors(), state.agreed_tensors(), strict=True):
                target.copy_(source)
            seen.add(state.seal_received(1, state.lineage, state.ledger))
    assert len(seen) == numel * 32
    assert commit(state_of(numel), torch.ones(numel)) not in seen


def test_the_lineage_tells_the_way_and_the_digest_only_where_it_led() -> None:
    one, other = state_of(momentum=0.0, lr=1.0), state_of(momentum=0.0, lr=1.0)
    for state in (one, other):
        state.anchor.zero_()
        state.initialize()
    for mean in (1.0, 2.0):
        commit(one, torch.full((1000,), mean))
    for mean in (2.0, 1.0):
        commit(other, torch.full((1000,), mean))
    assert one.digest == other.digest and one.height == other.height
    assert one.lineage != other.lineage


def test_equal_rounds_give_equal_lineages() -> None:
    states = [state_of(), state_of()]
    for round_number in range(2):
        for state in states:
            commit(state, random(1000, round_number))
    assert visible(states[0]) == visible(states[1])


def test_a_state_received_from_another_member_is_that_members_state() -> None:
    donor, receiver = state_of(), state_of()
    for round_number in range(2):
        commit(donor, random(1000, round_number))
    before = visible(receiver)
    for target, source in zip(receiver.staged_tensors(), donor.agreed_tensors(), strict=True):
        target.copy_(source)
    digest = receiver.seal_received(donor.height, donor.lineage, donor.ledger)
    assert visible(receiver) == before and digest == donor.digest  # the caller compares them, and then commits
    receiver.commit(slot=0)
    assert visible(receiver) == visible(donor)
    for state in (donor, receiver):
        commit(state, random(1000, 2))
    assert visible(receiver) == visible(donor)


def test_a_received_state_that_was_damaged_has_another_digest() -> None:
    donor, receiver = state_of(), state_of()
    commit(donor, random(1000, 0))
    for target, source in zip(receiver.staged_tensors(), donor.agreed_tensors(), strict=True):
        target.copy_(source)
    flip_a_bit(receiver.staged_tensors()[1], 17, 3)
    assert receiver.seal_received(donor.height, donor.lineage, donor.ledger) != donor.digest


# Shared memory.

LARGE = 4_000_000  # five copies of it in fp32 are 80 MB: what many containers allow in /dev/shm is 64


def other_process(connection: Connection, outer: OuterState, alone: SharedMemory) -> None:
    """Does what the parent asks, and ends without any goodbye."""
    small, large = outer.fragments
    while (task := connection.recv()) != "end":
        if task == "read":
            connection.send(visible(small))
        elif task == "commit":
            connection.send(commit(small, random(small.numel, 5)))
        elif task == "fill":
            large.local[-1] = 3.5
            alone.bytes[-1] = 77
            connection.send("filled")


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[OuterState, SharedMemory, Callable[[str], object]]]:
    """A state and a block that a spawned process has too, and a way to ask it for things."""
    outer, alone = OuterState(Layout([1000, LARGE], Sgd(Config()))), SharedMemory(80_000_000)
    outer.fragments[0].anchor.copy_(random(1000, 99))
    outer.fragments[0].initialize()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=other_process, args=(theirs, outer, alone), daemon=True)
    process.start()
    theirs.close()

    def ask(task: str) -> object:
        ours.send(task)
        if task == "end":
            return process.join(30)
        assert ours.poll(60), "no answer"
        return ours.recv()

    yield outer, alone, ask
    process.kill()


def test_a_spawned_process_shares_the_state(shared: tuple) -> None:
    outer, alone, ask = shared
    state = outer.fragments[0]
    assert ask("read") == visible(state)  # what was written before it was started
    commit(state, random(1000, 4))
    assert ask("read") == visible(state)  # what the parent writes
    twin = state_of()
    commit(twin, random(1000, 4))
    digest = ask("commit")  # what the child writes
    assert state.height == 2 and state.digest == digest
    assert digest == commit(twin, random(1000, 5)) and visible(twin) == visible(state)


def test_shared_memory_is_large_and_outlives_the_process(shared: tuple) -> None:
    outer, alone, ask = shared
    assert not alone.bytes[-1] and not outer.fragments[1].local[-1]  # it begins as zeros
    assert ask("fill") == "filled"
    before = visible(outer.fragments[0])
    ask("end")
    assert outer.fragments[1].local[-1] == 3.5 and alone.bytes[-1] == 77
    assert visible(outer.fragments[0]) == before
    commit(outer.fragments[0], random(1000, 6))


def test_tensors_outlive_their_block() -> None:
    block = SharedMemory(64)
    tensor = block.bytes.view(torch.float32)
    del block
    tensor.fill_(2.0)
    assert tensor.sum() == 32.0
