"""What all islands of a run must have in common, and how to say what differs."""

import hashlib
import json
from typing import Any, Mapping

from diloco.config import RunConfig

_OWN_AFFAIR = {
    "outer.overlap",  # when and how a result is taken, not what it is: one behind a slow link may need longer
    "outer.merge_alpha",
    "outer.late",
    "model.init_from",
    "run.dir",
    "run.device",
    "run.timeout",
    "run.tensorboard",
    "swarm.slot",
    "swarm.initial_peers",
    "swarm.listen",
    "swarm.announce",
    "swarm.identity_file",
    "swarm.key_file",
    "swarm.data_connections",
    "swarm.public",
    "swarm.join_timeout",
    "train.micro_batch_size",
    "train.precision",
    "train.resume",
}
_OWN_SECTIONS = ("checkpoint.", "parallel.")
_LONGEST_VALUE = 200
_MOST_NAMED = 5


def shared_settings(config: RunConfig, schema: str) -> dict[str, str]:
    """Every key that must be equal on all islands, flattened, with its value as JSON; long values as their hash.

    How an island divides its work and where it keeps its files is its own affair and not in here. Nor is how many islands
    it waits for, except where rounds go by the clock: then the end of the run is counted in the tokens of that many.
    """
    own_affair = _OWN_AFFAIR if isinstance(config.outer.sync_every, str) else _OWN_AFFAIR | {"swarm.islands"}
    settings = {
        key: json.dumps(value)
        for key, value in _flatten(config.model_dump(), "")
        if key not in own_affair and not key.startswith(_OWN_SECTIONS)
    }
    settings["model schema"] = f"sha256 {hashlib.sha256(schema.encode()).hexdigest()}"
    return {key: value if len(value) <= _LONGEST_VALUE else _hashed(value) for key, value in settings.items()}


def run_hash(settings: Mapping[str, str]) -> bytes:
    """SHA-256 of :func:`shared_settings`."""
    return hashlib.sha256(json.dumps(dict(settings), sort_keys=True).encode()).digest()


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The keys that differ with both values, such as ``outer.sync_every is 30 there and 20 here``."""
    keys = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    named = [f"{key} is {ours.get(key, 'absent')} there and {theirs.get(key, 'absent')} here" for key in keys]
    more = [f"and {len(named) - _MOST_NAMED} more keys"] if len(named) > _MOST_NAMED else []
    return "; ".join(named[:_MOST_NAMED] + more)


def _flatten(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)]
    children = ((f"{prefix}.{key}" if prefix else key, child) for key, child in value.items())
    return [pair for key, child in children for pair in _flatten(child, key)]


def _hashed(value: str) -> str:
    return f"sha256 {hashlib.sha256(value.encode()).hexdigest()} of {len(value)} characters"
