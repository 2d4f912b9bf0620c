"""What each of several islands has of its own in a model that they train in turns: parameters, optimizer state, random numbers."""

import copy
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from islands.checkpoint_state import random_states, set_random_states
from islands.initialize import named_parameters
from islands.island import Island


class _Moved(NamedTuple):
    """What was on the accelerator: in pinned memory, and how it was cut up, if it was."""

    values: Tensor
    spec: Any


class IdleState:
    """Of one island, while others train. It begins with the weights that the model has now, and no optimizer state.

    Args:
        on_cpu: it is kept in the CPU's memory; else where the model is, and then the optimizer state is never copied.
    """

    def __init__(self, island: Island, on_cpu: bool) -> None:
        self._island, self._device = island, island.process.device
        self._on_cpu = on_cpu and self._device.type != "cpu"
        self._parameters = [_local(parameter.detach()) for parameter in named_parameters(island.model.parts).values()]
        self._copies = [self._memory(parameter).copy_(parameter) for parameter in self._parameters]
        self._copies_are_own = True
        self._optimizer: dict[nn.Parameter, dict[str, Any]] = defaultdict(dict)
        self._pinned: dict[tuple[nn.Parameter, str], Tensor] = {}
        self._random = random_states(island.process)

    def of_another(self) -> "IdleState":
        """Of an island that begins with the same weights, of which there is one copy until they differ."""
        other = copy.copy(self)
        other._copies_are_own, other._optimizer, other._pinned = False, defaultdict(dict), {}
        return other

    @torch.no_grad()
    def enter(self) -> None:
        """Into the model and its optimizer."""
        torch._foreach_copy_(self._parameters, self._copies, non_blocking=True)  # whatever comes after is behind it in the same stream
        for state in self._optimizer.values():
            state.update({key: self._back(value) for key, value in state.items() if isinstance(value, _Moved)})
        self._island.optimizer.state = self._optimizer
        set_random_states(self._island.process, self._random)

    @torch.no_grad()
    def leave(self) -> None:
        """Out of them."""
        if not self._copies_are_own:
            self._copies, self._copies_are_own = [self._memory(parameter) for parameter in self._parameters], True
        torch._foreach_copy_(self._copies, self._parameters, non_blocking=True)
        self._optimizer = self._island.optimizer.state
        if self._on_cpu:
            for parameter, state in self._optimizer.items():
                state.update({key: self._away(parameter, key, value) for key, value in state.items() if _is_on_accelerator(value)})
        self._random = random_states(self._island.process)

    def _memory(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="cpu", pin_memory=True) if self._on_cpu else torch.empty_like(tensor)

    def _away(self, parameter: nn.Parameter, key: str, value: Tensor) -> _Moved:
        local = _local(value)
        if (parameter, key) not in self._pinned:
            self._pinned[parameter, key] = self._memory(local)
        pinned = self._pinned[parameter, key]
        return _Moved(pinned.copy_(local, non_blocking=True), value._spec if isinstance(value, DTensor) else None)

    def _back(self, moved: _Moved) -> Tensor:
        values = moved.values.to(self._device, non_blocking=True)
        return DTensor(values, moved.spec, requires_grad=False) if moved.spec else values


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _is_on_accelerator(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"
