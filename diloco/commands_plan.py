"""The command ``diloco plan``."""

import argparse
from pathlib import Path
from typing import Sequence

_DESCRIPTION = """\
Say what a run will need and how fast it will be, before anything is paid for: bytes on each rank and on the host, bytes
of a round, how long it takes, how much of the time is computing, and which settings reach a target. Starts nothing,
unless told to --probe; needs no data."""

_EPILOG = """\
examples:
  diloco plan configs/internet.yaml --bandwidth 200mbit --rtt 80ms --islands 4 --ranks 8 --step-seconds 0.6
  diloco plan configs/internet.yaml --bandwidth 1gbit --flops-per-second 1.5e14 model.preset=1B
  diloco plan configs/quickstart.yaml --bandwidth 20mbit --probe

What isn't given is shown as a function: without a step time or a bandwidth there is a table over some. The link is that of
each island to the others, the same each way; measure it with iperf3 and ping between two of the machines. --probe does not
measure bandwidth, as nobody answers there before the run. docs/planning.md has the formula, and how far it was checked.

exit code: 0 shown; 2 the configuration or an option can't be used, or a probe failed."""


def plan_command(arguments: Sequence[str]) -> int:
    """say what a run needs and how fast it will be, before it is started"""
    parser = argparse.ArgumentParser(
        prog="diloco plan", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file, such as configs/internet.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set one key of the configuration; as many as you like")
    parser.add_argument("--bandwidth", metavar="RATE", help="of each island's link, each way, such as 200mbit or 1gbit")
    parser.add_argument("--rtt", metavar="TIME", help="to another island and back, such as 80ms (50ms)")
    parser.add_argument("--islands", type=int, metavar="N", help="how many islands; the same as swarm.islands=N")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of an island; data-parallel where other sizes leave them")
    parser.add_argument("--target", type=float, default=0.95, metavar="SHARE", help="share of the time to spend computing (0.95)")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--step-seconds", type=float, metavar="S", help="of an inner step, if it is known")
    step.add_argument("--flops-per-second", type=float, metavar="F", help="that a rank achieves in training, such as 1.5e14")
    step.add_argument("--probe", action="store_true", help="do some steps here, and look how far swarm.initial_peers are")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    chosen = parser.parse_intermixed_args(arguments)
    from diloco.planner_page import plan

    return plan(chosen)
