"""What the islands of a run recorded, put together over restarts."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

from diloco.run_files import Row, island_dirs, metrics_files, read_rows
from islands.config_file import ConfigError


@dataclass(frozen=True)
class Incarnation:
    """What one process of an island wrote, in order.

    Attributes:
        kept: how many of its steps later processes have built on; None: all. One that goes on from an older checkpoint does the others
            again.
    """

    rows: list[Row]
    kept: int | None = None

    @property
    def steps(self) -> list[Row]:
        """Inner steps that were built on."""
        return self.of("step")[: self.kept]

    @property
    def lost_steps(self) -> list[Row]:
        """Inner steps that a crash threw away."""
        return [] if self.kept is None else self.of("step")[self.kept :]

    @cached_property
    def evals(self) -> list[Row]:
        """Evaluations of what was built on."""
        lost = next(iter(self.lost_steps), None)
        return [row for row in takewhile(lambda row: row is not lost, self.rows) if row["kind"] == "eval"]

    def of(self, kind: str) -> list[Row]:
        """Rows of one kind."""
        return [row for row in self.rows if row["kind"] == kind]

    @property
    def start(self) -> dict[str, Any]:
        """What the process told of itself, if it came as far."""
        details = [row.get("detail") for row in self.events("start")]
        return next((detail for detail in details if isinstance(detail, dict)), {})

    @property
    def replicas(self) -> int:
        """Of the island, that average gradients at every step, each on sequences of its own."""
        return self.start.get("replicas", 1)

    @property
    def gradient_bytes(self) -> int:
        """That its replicas have sent to each other."""
        of_one_step = next((row["bytes_across"] for row in self.of("step") if "bytes_across" in row), 0)
        return of_one_step * self.replicas * len(self.of("step")) if self.replicas > 1 else 0

    def events(self, what: str) -> list[Row]:
        """Events of one name."""
        return [row for row in self.of("event") if row.get("what") == what]


@dataclass(frozen=True)
class IslandRecord:
    """One island of a run: all its processes, one after the other."""

    island: int
    incarnations: list[Incarnation]

    @cached_property
    def rows(self) -> list[Row]:
        """All of them, in the order in which they were written."""
        return [row for incarnation in self.incarnations for row in incarnation.rows]

    @cached_property
    def steps(self) -> list[Row]:
        """Inner steps that count: where a process began again further back, those that came after are not among them."""
        return [row for incarnation in self.incarnations for row in incarnation.steps]

    @property
    def num_lost_steps(self) -> int:
        """Inner steps that a crash threw away."""
        return sum(len(incarnation.lost_steps) for incarnation in self.incarnations)

    @cached_property
    def rounds(self) -> list[Row]:
        """Outer rounds, however they ended."""
        return self._of("round")

    @cached_property
    def evals(self) -> list[Row]:
        """Evaluations, without those of steps that a crash threw away."""
        return [row for incarnation in self.incarnations for row in incarnation.evals]

    @property
    def parameters(self) -> int | None:
        """Parameters of the model, if the island came as far as to tell."""
        return next((found for each in self.incarnations if (found := each.start.get("parameters"))), None)

    @property
    def ended(self) -> bool:
        """Whether the island came to the end of its run."""
        return bool(self.incarnations) and bool(self.incarnations[-1].events("end"))

    @property
    def bytes_sent(self) -> int:
        """Bytes that left this island, in rounds that came to nothing too, or its replicas."""
        gradients = sum(incarnation.gradient_bytes for incarnation in self.incarnations)
        return gradients + sum(row.get("bytes_sent", 0) for row in self.rounds)

    @cached_property
    def kept_rounds(self) -> list[Row]:
        """Rounds whose result this island holds. A round that it committed apart from the others, and gave up when they met
        again, is none: the state that followed had counted less of its work, or was not further on."""
        kept: list[Row] = []
        highest: dict[int, int] = {}  # round of each fragment
        for row in self.rounds:
            if row.get("outcome") not in ("committed", "left_out"):
                continue
            fragment, number = row.get("fragment", 0), row.get("round", 0)
            if row["outcome"] == "left_out" or number <= highest.get(fragment, 0):
                kept = [earlier for earlier in kept if not _gives_up(row, earlier)]
            kept.append(row)
            highest[fragment] = number
        return kept

    def count(self, outcome: str) -> int:
        """Rounds that ended like that."""
        return sum(row.get("outcome") == outcome for row in self.rounds)

    def events(self, what: str) -> list[Row]:
        """Events of one name."""
        return [row for incarnation in self.incarnations for row in incarnation.events(what)]

    def _of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row["kind"] == kind]


def read_run(run_dir: Path) -> list[IslandRecord]:
    """What all islands of a run recorded.

    Raises:
        ConfigError: there is no run in ``run_dir``.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"RUN_DIR={run_dir}: no such folder. Give the run.dir of a run, such as runs/quickstart")
    found = island_dirs(run_dir)
    if not found:
        raise ConfigError(f"RUN_DIR={run_dir} holds no folder island-<i>. Give the run.dir of a run")
    return [IslandRecord(island, list(_incarnations(run_dir, island))) for island in found]


def _incarnations(run_dir: Path, island: int) -> Iterator[Incarnation]:
    """Those of the run that wrote last: a process that started a run afresh leaves the files before it to an earlier run."""
    found = [Incarnation(read_rows(path)) for path in metrics_files(run_dir, island)]
    afresh = [number for number, each in enumerate(found) if each.start.get("continues") is False]
    yield from _without_what_was_lost(found[afresh[-1] if afresh else 0 :])


def _without_what_was_lost(incarnations: list[Incarnation]) -> list[Incarnation]:
    """A process takes the sequences of its slot in order. What an earlier one did with those from where it began on was lost."""
    begun: dict[int, int] = {}  # by slot, the first sequence of the processes after
    result: list[Incarnation] = []
    for each in reversed(incarnations):
        steps, size = each.of("step"), each.start.get("global_batch_size")
        built_on = takewhile(lambda row: row.get("position", 0) <= begun.get(row.get("slot", 0), math.inf), steps)
        result.insert(0, replace(each, kept=sum(1 for _ in built_on)))
        if steps and size and "position" in steps[0]:
            slot, first = steps[0].get("slot", 0), steps[0]["position"] - size
            begun[slot] = min(first, begun.get(slot, first))
    return result


def _gives_up(row: Row, earlier: Row) -> bool:
    """Whether the state after ``row`` is one without the round of ``earlier``."""
    if row.get("fragment") != earlier.get("fragment"):
        return False
    if row.get("round", 0) <= earlier.get("round", 0):
        return True
    counted, is_own = row.get("counted"), row.get("slot") == earlier.get("slot") and earlier["outcome"] == "committed"
    return row["outcome"] == "left_out" and counted is not None and is_own and counted < earlier.get("position", 0)
