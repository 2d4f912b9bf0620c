"""What a forward and backward pass keeps in memory, found by running it on tensors that have shapes and no memory."""

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from islands import plugins
from islands.config import IslandConfig, ModelSection
from islands.forward_backward import cross_entropy_sum
from islands.initialize import cast_parameters, parameter_dtype
from islands.strategies.recompute import recompute_blocks


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make, for as long as each of them lives.

    Attributes:
        now: bytes that live.
        peak: most bytes that lived at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Called by torch for every operation."""
        result = operation(*arguments, **(keywords or {}))
        before = {id(leaf.untyped_storage()) for leaf in tree_leaves((arguments, keywords)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and id(leaf.untyped_storage()) not in before:  # neither a view nor in place
                self._add(leaf.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self._known:
            return
        self._known.add(id(storage))
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, id(storage), storage.nbytes())

    def _remove(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def activation_bytes(config: IslandConfig, sequences: int) -> int:
    """Peak bytes of one micro-batch of ``sequences`` through the whole model, beside parameters and their gradients.

    Recomputation and bf16 are as the configuration says. With ``ddp`` they include the bf16 copies of weights that
    autocast keeps.
    """
    autocast = config.train.precision == "bf16" and config.parallel.data_parallel_strategy == "ddp"
    computes = torch.bfloat16 if config.train.precision == "bf16" and not autocast else parameter_dtype(config)
    return _peak(config.model, config.data.seq_len, sequences, computes, autocast, config.train.recompute)


@functools.lru_cache
def _peak(
    section: ModelSection, seq_len: int, sequences: int, dtype: torch.dtype, autocast: bool, recompute: str
) -> int:
    with FakeTensorMode():
        model = _one_device_model(section, seq_len, dtype, recompute)
        tokens = torch.zeros(sequences, seq_len, dtype=torch.int64)
        with LiveBytes() as live, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            logits = model(tokens)
            if logits.dtype == torch.bfloat16:
                logits = logits.float()  # as the strategies do
            cross_entropy_sum(logits, tokens).backward()
    return live.peak


def _one_device_model(section: ModelSection, seq_len: int, dtype: torch.dtype, recompute: str) -> nn.Module:
    """The model as a data-parallel rank computes with it; each gradient is dropped once it is there."""
    model = plugins.load("islands.models", section.type).build(section, seq_len)
    cast_parameters(model, dtype)
    model.init_buffers(torch.device("cpu"), dtype)
    if recompute != "none":
        recompute_blocks(model, recompute)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda done: setattr(done, "grad", None))
    return model
