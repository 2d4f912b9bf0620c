"""What ranks tell each other through the store, which needs no collective and waits for a bounded time."""

import json
import pickle
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from islands.process import Process


#: A rank may be this many values behind rank 0. Ranks meet at every inner step, and far fewer are told between two.
_KEPT = 1000


def tell_each_other(process: Process, topic: str, place: int, places: int, value: Any) -> list[Any]:
    """What each of so many ranks says about ``topic``, by place; ``value``, which JSON holds, is what this one does.

    Raises:
        TimeoutError: not all did within ``process.timeout`` seconds; it holds the places of those that are missing.
    """
    keys = [f"{topic}/{each}" for each in range(places)]
    process.store.set(keys[place], json.dumps(value))
    try:
        process.store.wait(keys, timedelta(seconds=process.timeout))
    except dist.DistStoreError as error:
        missing = [each for each, key in enumerate(keys) if not process.store.check([key])]
        raise TimeoutError(", ".join(map(str, missing))) from error
    return [json.loads(process.store.get(key)) for key in keys]


class FirstRankSays:
    """Passes values from rank 0 to all ranks, however long rank 0 has to wait for them.

    Through the store and not by a collective: that would fail after ``run.timeout``, and the world outside may take longer. Called on
    all ranks alike.
    """

    def __init__(self, process: Process, topic: str) -> None:
        self._process, self._topic, self._count = process, topic, 0

    def __call__(self, value: Any, seconds: float) -> Any:
        """``value`` of rank 0; what the others give is ignored.

        Raises:
            RuntimeError: rank 0 said nothing within ``seconds``.
        """
        process = self._process
        if process.world_size == 1:
            return value
        self._count += 1
        key = f"{self._topic}/{self._count}"
        if process.rank == 0:
            process.store.set(key, pickle.dumps(value))
            if self._count > _KEPT:
                process.store.delete_key(f"{self._topic}/{self._count - _KEPT}")
            return value
        try:
            process.store.wait([key], timedelta(seconds=seconds))
        except dist.DistStoreError as error:
            raise RuntimeError(
                f"rank {process.rank} waited {seconds:g} s for rank 0 to tell the {self._topic}; rank 0's log says why it did not"
            ) from error
        return pickle.loads(process.store.get(key))
