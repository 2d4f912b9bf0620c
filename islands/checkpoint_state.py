"""The tensors of a checkpoint, and a copy of them in memory."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from islands.initialize import named_parameters
from islands.island import Island
from islands.process import Process


def tensors_of(island: Island) -> dict[str, Tensor]:
    """What a checkpoint holds of model and inner optimizer on this rank, by key: the tensors themselves, not copies."""
    tensors, state = {}, island.optimizer.state
    for name, parameter in named_parameters(island.model.parts).items():
        tensors[f"model.{name}"] = parameter.detach()
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def random_states(process: Process) -> dict[str, Tensor]:
    """Those of this rank's generators, by key: uint8, on the CPU."""
    states = {f"rng.{process.rank}.cpu": torch.get_rng_state()}
    if process.device.type != "cpu":
        states[f"rng.{process.rank}.device"] = torch.get_device_module(process.device).get_rng_state(process.device)
    return states


def set_random_states(process: Process, states: dict[str, Tensor]) -> None:
    """The reverse; generators without a state among ``states`` stay as they are."""
    for key, state in states.items():
        if key == f"rng.{process.rank}.cpu":
            torch.set_rng_state(state)
        elif key == f"rng.{process.rank}.device":
            torch.get_device_module(process.device).set_rng_state(state, process.device)


class Staging:
    """Memory on the CPU that every checkpoint is copied into: after the first one its pages are there.

    Args:
        device: where the tensors are; what comes from an accelerator goes to pinned memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[str, Tensor] = {}

    def copy(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies by the same keys, cut up among the ranks in the same way. The next call overwrites them."""
        copies = {key: self._memory(key, tensor) for key, tensor in tensors.items()}
        for key, copy in copies.items():
            _local(copy).copy_(_local(tensors[key]), non_blocking=True)
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return copies

    def _memory(self, key: str, tensor: Tensor) -> Tensor:
        if key not in self._copies:
            memory = torch.empty_like(_local(tensor), device="cpu", pin_memory=self._device.type != "cpu")
            self._copies[key] = sharded_like(tensor, memory)
        return self._copies[key]


def sharded_like(tensor: Tensor, local: Tensor) -> Tensor:
    """``local`` as this rank's part of a tensor that is cut up like ``tensor``; it may be on another device."""
    if not isinstance(tensor, DTensor):
        return local
    return DTensor(local, tensor._spec, requires_grad=False)  # not by from_local: that would move it to the device of the mesh


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
