"""What each cell of a sweep runs, checked before the first one starts.

Cells are compared at equal tokens. Where they differ in ``swarm.islands`` the batch of all islands together stays what it is in
the file and is divided among them, as in the scaling laws of DiLoCo (arXiv 2503.09799); so does the number of steps. The
data-parallel run that a cell is compared with is one island with all of that batch.
"""

import copy
import hashlib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Iterator

from diloco.config import RunConfig
from diloco.sweep_config import SweepFile
from islands import plugins
from islands.config import OUTER_SECTIONS, IslandConfig
from islands.config_file import ConfigError, parse_config, set_key

SEED = "run.seed"
_ISLANDS, _BATCH, _SLOTS = "swarm.islands", "train.global_batch_size", "swarm.max_slots"
_SIMULATED = "in_memory"
_MOST_TOLD = 8  # cells of which problems are told
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        keys: in which it differs from the file.
        config: all of what it runs; a data-parallel cell is an island by itself.
        digest: of the configuration, wherever it runs.
        baseline: digest of the data-parallel cell that it is compared with; empty: there is none.
        workers: islands, or replicas that a data-parallel cell stands for.
    """

    keys: dict[str, Any]
    config: IslandConfig
    digest: str
    folder: Path
    workers: int
    baseline: str = ""

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.folder.name

    @property
    def is_baseline(self) -> bool:
        """Whether it is a data-parallel one."""
        return not isinstance(self.config, RunConfig)

    @property
    def tokens(self) -> int:
        """That all islands of it train on."""
        islands = 1 if self.is_baseline else self.workers
        return self.config.train.steps * self.config.train.global_batch_size * self.config.data.seq_len * islands


def make_cells(sweep: SweepFile) -> list[Cell]:
    """All cells of a sweep, the data-parallel ones last, in an order that depends on the file alone.

    Raises:
        ConfigError: naming each cell that can't be used, and why; or cells that train on unlike numbers of tokens.
    """
    cells, problems = [], _Problems(sweep.source)
    for keys in sweep.section.combinations:
        with problems.of(_told(keys)):
            cells.append(_cell(sweep, keys))
    baselines: dict[str, Cell] = {}
    if sweep.section.baseline:
        cells = [replace(cell, baseline=_add_baseline(sweep, cell, baselines)) for cell in cells]
    check = _Checks()
    for cell in (*cells, *baselines.values()):
        with problems.of(_told(cell.keys) if not cell.is_baseline else f"data-parallel {_told(cell.keys)}"):
            check(cell.config)
    problems.raise_any()
    _check_tokens(cells, sweep)
    return [*_without_repeats(cells), *baselines.values()]


def key_label(key: str) -> str:
    """The key in a word: ``outer.codec.type`` is ``codec``."""
    short = {"outer.sync_every": "H", _ISLANDS: "M", "outer.overlap": "tau", "outer.optimizer.lr": "outer_lr"}
    parts = key.split(".")
    return short.get(key) or (parts[-2] if parts[-1] == "type" and len(parts) > 1 else parts[-1])


def label(keys: dict[str, Any]) -> str:
    """What a cell or setting differs in, for people."""
    return ", ".join(f"{key_label(key)}={_plain(value)}" for key, value in keys.items())


def _cell(sweep: SweepFile, keys: dict[str, Any]) -> Cell:
    raw = copy.deepcopy(sweep.raw)
    before = _numbers(raw)
    for section in OUTER_SECTIONS:
        if raw.get(section) is None:
            raw[section] = {}
    if isinstance(raw["exchange"], dict):
        raw["exchange"] = _in_memory(raw["exchange"])
    for key, value in keys.items():
        set_key(raw, key, value)
    _divide_batch(raw, keys, *before)
    if isinstance(raw["swarm"], dict):
        raw["swarm"].setdefault("max_slots", raw["swarm"].get("islands", 1))  # all samples are some island's
    set_key(raw, "train.resume", "never")
    set_key(raw, "checkpoint.every", 0)  # what is interrupted is run afresh
    config = parse_config(RunConfig, raw, source="it")
    return _placed(sweep.folder, keys, config, config.swarm.islands)


def _in_memory(section: dict[str, Any]) -> dict[str, Any]:
    """The file's ``exchange``, of a simulation: a file of a real run will do, without the keys that only its own type has."""
    try:
        own = plugins.load("diloco.exchange", section.get("type", _SIMULATED)).Config.model_fields
    except ValueError as error:
        raise ConfigError(f"exchange.type: {error}") from None
    kept = plugins.load("diloco.exchange", _SIMULATED).Config.model_fields
    return {key: value for key, value in section.items() if key in kept or key not in own} | {"type": _SIMULATED}


def _numbers(raw: dict[str, Any]) -> tuple[Any, Any]:
    """Batch and islands of the file, whatever they are."""
    train, swarm = raw.get("train"), raw.get("swarm")
    batch = train.get("global_batch_size") if isinstance(train, dict) else None
    return batch, (swarm.get("islands", 1) if isinstance(swarm, dict) else 1)


def _divide_batch(raw: dict[str, Any], keys: dict[str, Any], batch: Any, islands: Any) -> None:
    """Keep the batch of all islands together where their number is swept and their batch is not."""
    asked = keys.get(_ISLANDS)
    if asked is None or _BATCH in keys or not all(type(each) is int and each > 0 for each in (asked, batch, islands)):
        return  # what is no number is refused with the rest
    total = batch * islands
    if total % asked:
        fitting = [number for number in range(1, min(total, 64) + 1) if total % number == 0]
        raise ConfigError(
            f"{_ISLANDS}={asked} does not divide the batch of all islands, {_BATCH}={batch} x {_ISLANDS}={islands} = {total} "
            f"sequences, which a sweep keeps; {', '.join(map(str, fitting))} do. Or give {_BATCH} in each cell"
        )
    set_key(raw, _BATCH, total // asked)


def _add_baseline(sweep: SweepFile, cell: Cell, found: dict[str, Cell]) -> str:
    """The digest of the cell's data-parallel counterpart, which is added to ``found``; shared by all that have the same."""
    raw = {key: value for key, value in cell.config.model_dump().items() if key not in OUTER_SECTIONS}
    raw["train"]["global_batch_size"] *= cell.workers
    keys = {key: value for key, value in cell.keys.items() if key.split(".")[0] not in OUTER_SECTIONS and key != _BATCH}
    made = _placed(sweep.folder, keys, parse_config(IslandConfig, raw, source="it"), cell.workers)
    known = found.get(made.digest, made)
    found[made.digest] = replace(known, workers=max(known.workers, cell.workers))
    return made.digest


def _placed(folder: Path, keys: dict[str, Any], config: IslandConfig, workers: int) -> Cell:
    place = {"dir": ".", "name": "cell"}
    nowhere = config.model_copy(update={"run": config.run.model_copy(update=place)})
    digest = hashlib.sha256(nowhere.model_dump_json().encode()).hexdigest()[:16]
    words = [] if isinstance(config, RunConfig) else ["data-parallel"]
    words += [f"{key_label(key)}-{_plain(value)}" for key, value in keys.items()]
    readable = re.sub(r"[^A-Za-z0-9.=-]+", "-", "_".join(words) or "cell").strip("-.")[:_LONGEST_NAME]
    own = folder / "cells" / f"{readable}-{digest[:8]}"
    placed = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(own)})})
    return Cell(keys, placed, digest, own, workers)


class _Checks:
    """All that can be found out before a cell runs; texts are read once."""

    def __init__(self) -> None:
        self._texts: set[str] = set()

    def __call__(self, config: IslandConfig) -> None:
        from diloco.from_config import make_fragments
        from diloco.simulate import check_simulation
        from islands.fragments import schema_of
        from islands.island import load_corpus, meta_model  # imports torch, which `diloco --help` does not need
        from islands.mesh import check_grid
        from islands.process import pick_device

        check_grid(config, 1)
        pick_device(config.run.device)
        schema = schema_of(meta_model(config))
        if isinstance(config, RunConfig):
            make_fragments(config, schema)
            if config.swarm.islands > 1:
                check_simulation(config)
        text = f"{config.data!r} {config.model.vocab_size} {config.train.eval_sequences}"
        if text not in self._texts:
            load_corpus(config)
            self._texts.add(text)


def _check_tokens(cells: list[Cell], sweep: SweepFile) -> None:
    least, most = min(cells, key=lambda cell: cell.tokens), max(cells, key=lambda cell: cell.tokens)
    if sweep.section.equal_tokens and least.tokens != most.tokens:
        raise ConfigError(
            f"{sweep.source}: the cells train on unlike numbers of tokens, so their losses say little about what else they differ in:\n"
            f"  {_told(least.keys)}: {least.tokens:,}\n  {_told(most.keys)}: {most.tokens:,}\n"
            f"Give all the same train.steps x {_BATCH} x data.seq_len x {_ISLANDS}, or set sweep.equal_tokens: false"
        )


def _without_repeats(cells: list[Cell]) -> list[Cell]:
    """Two sets of keys may come to the same configuration."""
    return list({cell.digest: cell for cell in reversed(cells)}.values())[::-1]


class _Problems:
    """Collects what is wrong with cells, so that all of it is told at once."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._found: dict[str, list[str]] = {}  # cells, by what is wrong with them

    def of(self, cell: str) -> "_Problems":
        """A block in which a ConfigError is one of ``cell``."""
        self._cell = cell
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, ConfigError):
            return False
        self._found.setdefault(str(error).removeprefix("it can't be used:\n"), []).append(self._cell)
        return True

    def raise_any(self) -> None:
        """Raises ConfigError if there was one."""
        if self._found:
            raise ConfigError("\n".join([f"{self._source} has cells that can't be used:", *self._lines()]))

    def _lines(self) -> Iterator[str]:
        for problem, cells in list(self._found.items())[:_MOST_TOLD]:
            others = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
            yield f"  {cells[0]}{others}: " + " ".join(problem.split("\n  ")).strip()
        if len(self._found) > _MOST_TOLD:
            yield f"  and {len(self._found) - _MOST_TOLD} other problems"


def _told(keys: dict[str, Any]) -> str:
    """A cell, in messages: its keys as the file has them."""
    return f"cell {{{', '.join(f'{key}: {_plain(value)}' for key, value in keys.items())}}}"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).replace("'", "")
