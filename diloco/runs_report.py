"""The page of real runs: of one, in its folder; of several side by side, in a folder of their own."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from diloco.html_report import write_page
from diloco.report_measures import DATA_PARALLEL, ISLANDS, Measured, measure
from diloco.report_study import Study, make_study, write_tables
from islands.config_file import ConfigError

#: Sections whose keys make runs worth comparing; the others tell where and how they ran.
_COMPARED = ("model", "data", "optimizer", "train", "outer", "swarm")
_NOT_COMPARED = ("train.resume", "swarm.slot", "swarm.listen", "swarm.initial_peers", "swarm.identity_file", "swarm.announce")


def write_run_page(run_dir: Path) -> None:
    """``report.html`` of one run, beside its ``summary.json``. Raises ConfigError where there is no run."""
    write_page(_study([run_dir], run_dir.resolve().name), run_dir, figures=False)


def write_comparison(run_dirs: Sequence[Path], out: Path) -> str:
    """The tables and the page of several runs.

    Returns:
        The answer in words.

    Raises:
        ConfigError: one of them is no run, or ``out`` can't be written to.
    """
    study = _study(run_dirs, " · ".join(_names(run_dirs)))
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_tables(study, out)
        return write_page(study, out)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}. Choose a folder that can be written to") from None


def _study(run_dirs: Sequence[Path], title: str) -> Study:
    runs = [measure(run_dir, name) for run_dir, name in zip(run_dirs, _names(run_dirs), strict=True)]
    differing = dict.fromkeys(key for kind in (ISLANDS, DATA_PARALLEL) for key in _differing(runs, kind))
    return make_study(title, runs, [key for key in differing if key.split(".")[0] in _COMPARED and key not in _NOT_COMPARED])


def _differing(runs: Sequence[Measured], kind: str) -> Iterator[str]:
    """Keys that all runs of a kind have, in which they differ: what only one has follows from another key, such as a type."""
    flat = [_flatten(run.raw) for run in runs if run.raw and run.row["kind"] == kind]
    for key in flat[0] if flat else ():
        if all(key in each for each in flat) and len({repr(each[key]) for each in flat}) > 1:
            yield key


def _names(run_dirs: Sequence[Path]) -> list[str]:
    """Names of the folders; with those above them where two are alike."""
    names = [run_dir.resolve().name for run_dir in run_dirs]
    return names if len(set(names)) == len(names) else [str(run_dir) for run_dir in run_dirs]


def _flatten(raw: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in raw.items():
        found |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found
