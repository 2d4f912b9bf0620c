"""``python -m diloco CONFIG [key=value ...]`` under torchrun: one island. Any command of ``diloco`` works here too."""

import sys

from diloco.cli import COMMANDS, island_command, main, run_command


def run() -> int:
    """Run a command if the first argument names one, else an island. Returns the exit code."""
    arguments = sys.argv[1:]
    if not arguments or arguments[0] in COMMANDS or arguments[0].startswith("-"):
        return main(arguments)
    return run_command(island_command, arguments)


if __name__ == "__main__":
    sys.exit(run())
