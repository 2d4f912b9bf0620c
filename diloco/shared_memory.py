"""Memory that the trainer owns and the exchange process maps: how tensors cross without being serialized."""

import mmap
import os
import tempfile
from multiprocessing.reduction import DupFd

import torch
from torch import Tensor

_ALIGN = 64  # bytes


class SharedMemory:
    """A block of zeros that a spawned process can map too.

    An anonymous file, not ``/dev/shm``: containers often cap that at 64 MB, where exceeding it kills the process. It
    goes away with the last process that maps it, however that process ends.
    """

    def __init__(self, num_bytes: int, fd: int | None = None) -> None:
        if fd is None:
            fd = _anonymous_file()
            os.ftruncate(fd, num_bytes)
        self.num_bytes, self._fd = num_bytes, fd
        self._map = mmap.mmap(fd, num_bytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def __reduce__(self) -> tuple:
        # Only valid while a child process is being spawned, which is when the descriptor is handed over.
        return _attach, (self.num_bytes, DupFd(self._fd))

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)  # the mapping keeps the memory alive for tensors that still view it


class Arena:
    """Hands out aligned tensors from a block of memory, or only measures when there is none yet."""

    def __init__(self, memory: SharedMemory | None) -> None:
        self.used, self._memory = 0, memory

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next ``numel`` elements."""
        start, self.used = self.used, self.used + -(-numel * dtype.itemsize // _ALIGN) * _ALIGN
        if self._memory is None:
            return torch.empty(0, dtype=dtype)
        return self._memory.bytes[start : start + numel * dtype.itemsize].view(dtype)


def _attach(num_bytes: int, descriptor: DupFd) -> SharedMemory:
    return SharedMemory(num_bytes, descriptor.detach())


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("diloco")
    with tempfile.TemporaryFile() as file:  # macOS: an unlinked file
        return os.dup(file.fileno())
