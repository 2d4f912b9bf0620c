"""Before the first collective, ranks compare what they were started with: a difference is a message and not a hang.

They meet in the store, which needs no collective and waits for a bounded time.
"""

from collections import Counter
from typing import Any, Collection, Iterator

import torch

from islands.config import IslandConfig
from islands.config_file import ConfigError
from islands.fragments import schema_hash, schema_of
from islands.huggingface import open_weights
from islands.island import meta_model
from islands.mesh import check_grid
from islands.process import Process
from islands.sharing import tell_each_other

#: Paths may be others on each machine; all other keys decide what is computed and when ranks wait for each other.
MAY_DIFFER = ("run.dir", "data.paths", "model.init_from")

_ABSENT = "(absent)"


def check_agreement(config: IslandConfig, process: Process, may_differ: Collection[str] = (), replicas: int = 1) -> None:
    """Compare configuration, model and grid with the other ranks; called on all of them, before any other collective.

    Args:
        may_differ: keys, or whole sections, that need not be equal, beside ``MAY_DIFFER``.
        replicas: grids, all alike, that the ranks are divided into.

    Raises:
        ConfigError: on all ranks, naming those that differ from most, and in what; or weights can't be used.
        RuntimeError: a rank did not come within ``process.timeout`` seconds.
    """
    if process.world_size == 1:
        return
    model = meta_model(config)
    weights = open_weights(config.model, model)
    facts = {
        **dict(_flat(config.model_dump(), {*MAY_DIFFER, *may_differ})),
        "the model's schema": schema_hash(schema_of(model))[:16],
        "the weights in model.init_from": weights.fingerprint()[:16] if weights else "",
        "the grid": str(check_grid(config, process.world_size // replicas)),
        "the device": process.device.type,
        "torch": torch.__version__,
    }
    differences = list(_differences(_exchange(process, {key: repr(value) for key, value in facts.items()})))
    if differences:
        raise ConfigError("\n".join(["the ranks of this island were not started alike:", *differences]))


def _flat(values: dict[str, Any], skipped: Collection[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        key = prefix + name
        if key not in skipped:
            yield from _flat(value, skipped, f"{key}.") if isinstance(value, dict) else [(key, value)]


def _exchange(process: Process, facts: dict[str, str]) -> list[dict[str, str]]:
    """What every rank said, by rank."""
    try:
        return tell_each_other(process, "agreement", process.rank, process.world_size, facts)
    except TimeoutError as missing:
        raise RuntimeError(
            f"rank {missing} of {process.world_size} did not come within run.timeout={process.timeout:g} seconds; its own log says why"
        ) from missing


def _differences(said: list[dict[str, str]]) -> Iterator[str]:
    """A line for each key and rank that is not what most ranks have; what rank 0 has, where there are as many."""
    for key in dict.fromkeys(key for facts in said for key in facts):
        values = [facts.get(key, _ABSENT) for facts in said]
        usual = Counter(values).most_common(1)[0][0]  # of equals the first
        for rank, value in enumerate(values):
            if value != usual:
                yield f"  rank {rank}: {key} is {value}, and {usual} on most others"
