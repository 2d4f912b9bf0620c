"""The section ``sweep`` of a configuration: which cells a sweep has, and how they are run."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable

from pydantic import Field, field_validator, model_validator

from islands.config_file import ConfigError, Section, parse_config, read_raw

SECTION = "sweep"

#: Keys that a sweep sets for each cell, or that all cells would share.
_NOT_SWEPT = {
    "run.dir": "each cell has a folder of its own",
    "run.name": "cells are named by what they differ in",
    "run.device": "all cells compute on the same kind of device, or their step times can't be compared",
    "train.resume": "a cell that was interrupted is run afresh",
    "checkpoint.every": "a cell that was interrupted is run afresh",
    "checkpoint.dir": "each cell has a folder of its own",
    "exchange.type": "the islands of a cell are simulated: in_memory",
    "swarm.slot": "a simulation gives the slots",
}

_Grid = dict[str, list[Any]]


class SweepSection(Section):
    """What to try. A cell is one run; its keys are those in which it differs from the file."""

    dir: str = Field("", description="folder for all that the sweep writes; default sweeps/<run.name>")
    grid: list[_Grid] = Field(
        [], description="lists of values by key: a cell for every combination; or a list of such grids, one after the other"
    )
    cells: list[dict[str, Any]] = Field([], description="single cells, each a value by key")
    baseline: bool = Field(True, description="add the data-parallel run of the same tokens that each cell is compared with")
    equal_tokens: bool = Field(True, description="refuse cells that train on unlike numbers of tokens")
    jobs: int = Field(0, ge=0, description="cells that run side by side; 0: one a GPU, or one a core where there is none")

    @field_validator("grid", mode="before")
    @classmethod
    def _may_be_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value

    @field_validator("dir")
    @classmethod
    def _expand_home(cls, value: str) -> str:
        return str(Path(value).expanduser()) if value else value

    @model_validator(mode="after")
    def _has_cells(self) -> "SweepSection":
        if not self.grid and not self.cells:
            raise ValueError(
                "sweep names no cell; give sweep.grid, such as {outer.sync_every: [1, 5, 20, 100], run.seed: [0, 1]}, or sweep.cells"
            )
        for key in {key for one in (*self.grid, *self.cells) for key in one}:
            _check_key(key)
        for key, values in ((key, values) for grid in self.grid for key, values in grid.items()):
            if not values:
                raise ValueError(f"sweep.grid: {key} has no values; give at least one, or leave it away")
        return self

    @property
    def combinations(self) -> list[dict[str, Any]]:
        """The keys of each cell, in the order of the file; none twice."""
        found = [dict(zip(grid, values)) for grid in self.grid for values in itertools.product(*grid.values())]
        distinct: list[dict[str, Any]] = []
        for keys in (*found, *self.cells):
            if keys not in distinct:
                distinct.append(keys)
        return distinct


@dataclass(frozen=True)
class SweepFile:
    """A sweep as it was read.

    Attributes:
        raw: the configuration that all cells begin with, not checked yet.
    """

    section: SweepSection
    raw: dict[str, Any]
    source: str

    @property
    def folder(self) -> Path:
        """Where the sweep writes."""
        return Path(self.section.dir or Path("sweeps") / self.run_name)

    @property
    def run_name(self) -> str:
        """Of the file."""
        run = self.raw.get("run")
        return str((run.get("name") if isinstance(run, dict) else None) or "run")


def read_sweep(path: str | Path, overrides: Iterable[str] = ()) -> SweepFile:
    """The sweep that a file describes.

    Raises:
        ConfigError: it can't be read, has no section ``sweep``, or one that can't be used.
    """
    raw = read_raw(path, overrides)
    section = raw.pop(SECTION, None)
    if section is None:
        raise ConfigError(
            f"{path} has no section 'sweep'. Name the keys to try in it, such as\n"
            "  sweep:\n    grid: {outer.sync_every: [1, 5, 20, 100], run.seed: [0, 1]}\n"
            "or start from configs/sweep_sync_frequency.yaml"
        )
    whole = parse_config(_Root, {SECTION: section}, source=str(path))
    return SweepFile(whole.sweep, raw, str(path))


class _Root(Section):
    """So that problems name their keys from the top."""

    sweep: SweepSection


def _check_key(key: str) -> None:
    if key in _NOT_SWEPT:
        raise ValueError(f"sweep: {key} can't be swept: {_NOT_SWEPT[key]}")
    if not all(key.split(".")) or key.split(".")[0] == SECTION:
        raise ValueError(f"sweep: {key!r} is not a key of a run, such as outer.sync_every")
