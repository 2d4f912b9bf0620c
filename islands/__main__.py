"""``torchrun … -m islands CONFIG [key=value …]``: train one island alone."""

import argparse
import sys

from islands.config import OUTER_SECTIONS, IslandConfig
from islands.config_file import ConfigError, load_config
from islands.process import is_first_rank
from islands.run import run_alone


def main() -> int:
    """Parse the command line and train. Returns the exit code: 2 for a configuration that can't be used."""
    parser = argparse.ArgumentParser(
        prog="python -m islands",
        description="Train one island alone: a plain sharded trainer. Start it under torchrun for more than one rank.",
        epilog="example: torchrun --standalone --nproc-per-node 2 -m islands configs/quickstart.yaml train.steps=50\n"
        "exit code: 0 trained to the end, or stopped as asked (SIGTERM, Ctrl-C); 2 the configuration can't be used;\n"
        "else a rank failed and said why",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="YAML file; the sections outer, exchange and swarm are skipped")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="override a key, for example optimizer.lr=1e-3")
    arguments = parser.parse_intermixed_args()
    try:
        run_alone(load_config(IslandConfig, arguments.config, arguments.overrides, ignore=OUTER_SECTIONS))
    except ConfigError as error:
        if is_first_rank():
            print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
