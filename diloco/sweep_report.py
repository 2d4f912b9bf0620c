"""What a sweep came to: its tables and its page."""


from diloco.html_report import write_page
from diloco.report_measures import DATA_PARALLEL, ISLANDS, Measured, Measures, measure
from diloco.report_study import make_study, write_tables
from diloco.sweep_cells import Cell
from diloco.sweep_config import SweepFile


def write_sweep_report(sweep: SweepFile, cells: list[Cell], done: set[str], failed: dict[str, str]) -> str:
    """Write ``results.csv``, ``settings.csv``, ``curves.jsonl``, ``report.html`` and the figures into the sweep's folder.

    Args:
        done: names of the cells that are finished.
        failed: why, by the names of those that failed.

    Returns:
        The answer in a sentence or two.
    """
    names = {cell.digest: cell.name for cell in cells}
    runs = [_measured(cell, names) for cell in cells if cell.name in done]
    missing = [_missing(cell, failed) for cell in cells if cell.name not in done]
    swept = list(dict.fromkeys(key for keys in sweep.section.combinations for key in keys))
    study = make_study(sweep.run_name, runs, swept, missing, one_machine=True)
    write_tables(study, sweep.folder)
    return write_page(study, sweep.folder)


def _measured(cell: Cell, names: dict[str, str]) -> Measured:
    found = measure(cell.folder, cell.name, cell.workers)
    found.row["baseline"] = names.get(cell.baseline)
    return found


def _missing(cell: Cell, failed: dict[str, str]) -> Measures:
    status = "failed" if cell.name in failed else "not run"
    kind = DATA_PARALLEL if cell.is_baseline else ISLANDS
    return dict(cell=cell.name, status=status, **cell.keys, kind=kind, error=failed.get(cell.name))
