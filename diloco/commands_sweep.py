"""The command ``diloco sweep``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

_DESCRIPTION = """\
Run many cells of one configuration that differ in a few keys, side by side over the cores or GPUs of this
machine, with simulated islands, and compare them at equal tokens: loss, bytes, and what links of other
speeds would do. Every cell is checked before the first one starts. A cell that is finished is never run
again, so after Ctrl-C, or when some failed, the same command goes on."""

_EPILOG = """\
examples:
  diloco sweep configs/sweep_sync_frequency.yaml
  diloco sweep configs/sweep_sync_frequency.yaml sweep.jobs=1 train.steps=200
  diloco sweep configs/quickstart.yaml parallel.data_parallel_size=1 'sweep={grid: {outer.sync_every: [5, 20]}}'

The section 'sweep' of CONFIG names the cells:
  sweep:
    grid: {outer.sync_every: [1, 5, 20, 100], run.seed: [0, 1, 2]}  # every combination; or a list of such grids
    cells: [{outer.codec.type: int4, outer.sync_every: 20}]         # and single ones
    baseline: true        # add the data-parallel run of the same tokens, one for each seed
    equal_tokens: true    # refuse cells that train on unlike numbers of tokens
    jobs: 0               # cells side by side; 0: one a GPU, or one a core where there is none
    dir: sweeps/my-study  # default sweeps/<run.name>

Where swarm.islands varies, the batch of all islands together stays what it is in CONFIG and is divided among them.
Into sweep.dir go results.csv (a row a run), settings.csv (a row for runs that differ in their seed only), curves.jsonl,
report.html, figures/ and a folder for each cell, whose checkpoints are removed when it is finished.

exit code: 0 all cells are finished; 1 some failed, and why; 2 a cell can't be used, and none was started; 130 interrupted."""


def sweep_command(arguments: Sequence[str]) -> int:
    """compare many settings on this machine, with simulated islands"""
    parser = argparse.ArgumentParser(
        prog="diloco sweep", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file with a section 'sweep'")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set one key for all cells, or of the section sweep")
    chosen = parser.parse_intermixed_args(arguments)
    from diloco.sweep import sweep

    return sweep(chosen.config, chosen.overrides)
