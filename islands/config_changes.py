"""What has changed in a configuration since a checkpoint was written, and whether one can go on all the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

_MODEL = "the weights in the checkpoint are those of another model"
_SAMPLES = "the data position in the checkpoint means other samples"
_OUTER = "the state of the outer loop in the checkpoint is cut up for that"

#: Patterns of keys that can't change, and why. Those of sections that a configuration does not have play no part.
_FIXED = {
    "run.seed": _SAMPLES,
    "model.*": _MODEL,
    "data.type": _SAMPLES,
    "data.seq_len": _SAMPLES,
    "data.held_out": "text that was held out would be trained on, or the other way round",
    "optimizer.type": "the optimizer state in the checkpoint is that of another optimizer",
    "swarm.max_slots": _SAMPLES,
    "outer.optimizer.type": "the state of the outer optimizer in the checkpoint is that of another one",
    "outer.fragments": _OUTER,
    "outer.fragment_pattern": _OUTER,
    "outer.separate_embeddings": _OUTER,
}

#: Of the model, how its sizes or first weights were given: what came of them is in the other keys, and in the checkpoint.
_FREE = ("model.preset", "model.init_from")

#: Where a process runs and what it meets there: other at each start, and not worth a word.
_SILENT = ("train.resume", "swarm.slot", "swarm.listen", "swarm.announce", "swarm.initial_peers", "swarm.identity_file")

_ABSENT = object()


@dataclass(frozen=True)
class Change:
    """A key whose value differs.

    Attributes:
        harm: why one can't go on with that; empty where one can.
    """

    key: str
    before: Any
    now: Any
    harm: str

    def __str__(self) -> str:
        return f"{self.key}: {self.before!r} -> {self.now!r}"


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[Change]:
    """Keys that both configurations (nested, resolved) have, with different values.

    Keys of one only are no change: they belong to another type of plug-in, whose ``type`` differs then, or to another version.
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    different = [key for key in new if key not in _SILENT and old.get(key, _ABSENT) not in (_ABSENT, new[key])]
    return [Change(key, old[key], new[key], _harm(key, old[key], new[key])) for key in different]


def _harm(key: str, before: Any, now: Any) -> str:
    if key == "train.precision" and "fp64" in (before, now):  # fp32 and bf16 both keep fp32
        return "the weights in the checkpoint are of another dtype"
    if key == "outer.overlap" and "eager" in (before, now):
        return "with eager overlap rounds in flight, and what follows them, have another state"
    if key == "outer.sync_every" and isinstance(before, str) != isinstance(now, str):
        return "where rounds go by the clock, how far the run is was counted in tokens, and else in steps"
    if key == "exchange.type" and "process_group" in (before, now):
        return "replicas of one job keep the state of the outer loop in another form than islands of a swarm"
    if key in _FREE:
        return ""
    return next((why for pattern, why in _FIXED.items() if fnmatch(key, pattern)), "")


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield from _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]
