"""What tensor-parallel ranks say to each other: as little as possible, and never logits."""

from collections import Counter
from typing import Any

import pytest
import torch
from rank_pool import RankPool
from small import small_config, small_corpus
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from islands.forward_backward import cross_entropy_sum
from islands.island import Island, build_island
from islands.process import Process
from islands.strategies import tensor

LAYERS, HALVES, NORMS = 2, 4, 5
#: What the loss reduces: the largest logit, the sum of exponentials, the target's logit.
LOSS = 3


class Collectives(TorchDispatchMode):
    """Counts collectives by name, and remembers the most elements that one of them got or gave."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.largest = Counter(), 0

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: tuple = (), keywords: dict | None = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # look inside
        result = operation(*arguments, **(keywords or {}))
        name = operation.__name__.split(".")[0]
        if operation.namespace == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.counts[name] += 1
            self.largest = max(self.largest, arguments[0].numel(), result.numel())
        return result


def tensor_island(process: Process, sequence_parallel: bool, recompute: str = "none") -> Island:
    parallel = dict(tensor_parallel_size=2, sequence_parallel=sequence_parallel)
    model = dict(pad_vocab_to_multiple_of=2)
    return build_island(small_config(parallel=parallel, model=model, train=dict(recompute=recompute)), process, small_corpus())


def one_batch(process: Process, sequence_parallel: bool, recompute: str) -> dict[str, Any]:
    island = tensor_island(process, sequence_parallel, recompute)
    inputs, targets = island.batches().at(0, 0)
    with tensor.loss_context(2):
        with Collectives() as forward:
            logits = island.model.parts[0](inputs)
            loss = cross_entropy_sum(logits, targets)
        with Collectives() as backward:
            loss.backward()
    return dict(
        logits=(tuple(logits.shape), tuple(logits.to_local().shape)),
        loss_is_plain=not isinstance(loss, DTensor),
        forward=dict(forward.counts),
        backward=dict(backward.counts),
        largest=max(forward.largest, backward.largest),
        stream=inputs.numel() * island.config.model.hidden_size,
    )


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "forward", "backward"),
    [
        # beside the halves: the sum of embeddings and the loss; backward, the sum of what the output layer hands down
        (False, "none", dict(all_reduce=HALVES + 1 + LOSS), dict(all_reduce=HALVES + 1)),
        # the first half of each block runs again, and its sum with it, unless the sum was kept; the second is not needed
        (False, "full", dict(all_reduce=HALVES + 1 + LOSS), dict(all_reduce=HALVES + 1 + LAYERS)),
        (False, "selective", dict(all_reduce=HALVES + 1 + LOSS), dict(all_reduce=HALVES + 1)),
        # norm weights have seen a share of the positions only, so that their gradients are summed too
        (
            True,
            "none",
            dict(all_gather_into_tensor=HALVES + 1, reduce_scatter_tensor=HALVES + 1, all_reduce=LOSS),
            dict(all_gather_into_tensor=HALVES + 1, reduce_scatter_tensor=HALVES + 1, all_reduce=NORMS),
        ),
    ],
)
def test_each_half_communicates_once_each_way_and_logits_never(
    ranks: RankPool, sequence_parallel: bool, recompute: str, forward: dict[str, int], backward: dict[str, int]
) -> None:
    for rank in ranks.run(one_batch, 2, sequence_parallel, recompute):
        assert (rank["forward"], rank["backward"]) == (forward, backward)
        assert rank["largest"] <= rank["stream"]
        assert rank["logits"] == ((8, 16, 258), (8, 16, 129))
        assert rank["loss_is_plain"]


def gathered_logits(process: Process) -> int:
    island = tensor_island(process, sequence_parallel=False)
    with torch.no_grad(), Collectives() as collectives:
        island.model.parts[0](island.batches().at(0, 0)[0]).full_tensor()
    return collectives.largest


def test_the_test_would_see_gathered_logits(ranks: RankPool) -> None:
    assert min(ranks.run(gathered_logits, 2)) >= 8 * 16 * 258


def kinds_of_parameters(process: Process, sequence_parallel: bool) -> set[tuple[bool, tuple[str, ...]]]:
    island = tensor_island(process, sequence_parallel)
    return {(isinstance(p, DTensor), p.device_mesh.mesh_dim_names) for p in island.model.parts[0].parameters()}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_all_parameters_live_on_one_mesh(ranks: RankPool, sequence_parallel: bool) -> None:
    assert ranks.run(kinds_of_parameters, 2, sequence_parallel)[0] == {(True, ("shard", "tensor"))}


def incomplete_plan(process: Process) -> None:
    island = tensor_island(process, sequence_parallel=False)
    model = torch.nn.Module()
    model.forgotten, model.tensor_plan, model.tie_weights = torch.nn.Linear(2, 2, bias=False), dict, lambda: None
    tensor.cut_model(model, island.mesh.root["tensor"], sequence_parallel=False)


def test_a_plan_that_forgets_a_parameter_is_refused(ranks: RankPool) -> None:
    with pytest.raises(AssertionError, match="the tensor plan of Module leaves out forgotten.weight"):
        ranks.run(incomplete_plan, 2)
