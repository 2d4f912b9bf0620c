"""The ``diloco`` command. A command is one function, listed in ``COMMANDS``, that takes its arguments as text."""

import argparse
import difflib
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Sequence

from diloco.commands_plan import plan_command
from diloco.commands_sweep import sweep_command
from diloco.exchange.base import JoinError
from islands.config_file import ConfigError

if TYPE_CHECKING:
    from diloco.saved_weights import SavedWeights

NOT_FOUND = 1
REFUSED = 2
INTERRUPTED = 130

OVERRIDE_HELP = "set one key of the configuration, such as train.steps=100; as many as you like"


def launch_command(arguments: Sequence[str]) -> int:
    """start all islands of a run on this machine and watch them"""
    parser = _parser(
        "launch",
        "Start all islands of a run on this machine, each under torchrun, and watch them until all are done. "
        "Everything is checked before the first process starts. Ctrl-C (or SIGTERM) has them write a last checkpoint and "
        "stop; the same command goes on from there. A second Ctrl-C ends them at once. A run in run.dir that is finished, "
        "or has no checkpoint, is moved aside.",
        "examples:\n"
        "  diloco launch configs/quickstart.yaml\n"
        "  diloco launch configs/quickstart.yaml --islands 3 outer.sync_every=10 train.steps=100\n"
        "  diloco launch configs/quickstart.yaml run.name=second run.device=cpu\n"
        "  diloco launch configs/quickstart.yaml checkpoint.every=100 --max-restarts 3\n"
        "  diloco launch configs/quickstart.yaml train.resume=never\n\n"
        "GPUs are divided among the islands if there is one for every rank; else all compute on the CPU.\n"
        "The run writes to run.dir (default runs/<run.name>): summary.json, report.png, island-<i>/log.txt, ...\n\n"
        "exit code: 0 all islands are done, or have stopped as asked; 2 the configuration can't be used; 130 they were\n"
        "ended at once; otherwise that of the island that failed, after the end of its log.",
    )
    _add_config(parser)
    parser.add_argument("--islands", type=int, metavar="N", help="how many islands; the same as swarm.islands=N")
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="how often an island of which a rank died starts again (0)"
    )
    chosen = parser.parse_intermixed_args(arguments)
    from diloco.launch import launch

    return launch(chosen.config, chosen.overrides, chosen.islands, chosen.max_restarts)


def status_command(arguments: Sequence[str]) -> int:
    """show who takes part in a run, and how far everyone is"""
    parser = _parser(
        "status",
        "Show the members of a run as they publish themselves: state, step, round and lineage, speed and links. Works "
        "from anywhere that reaches one of them, and takes no part. In a terminal the table lives until Ctrl-C; in a pipe "
        "it is printed once.",
        "examples:\n"
        "  diloco status runs/quickstart\n"
        "  diloco status configs/internet.yaml --key-file ~/keys/my-run.key\n"
        "  diloco status /ip4/10.0.0.1/tcp/31337/p2p/Qm... --run my-run --json\n\n"
        "Round and lineage are those of the fragment with the fewest rounds. −N: so many fewer than the furthest. FORK:\n"
        "another lineage than the one with most tokens, which its island will rejoin. DIFFERS: other bits at the same\n"
        "lineage, which should never be. (e1): the slot has been given away once. Age: of what the island published.\n\n"
        "exit code: 0 shown; 1 nobody was found, and what each address said; 2 TARGET or the key can't be used.",
    )
    parser.add_argument("target", metavar="TARGET", help="folder of a run, its YAML file, or the address of an island")
    parser.add_argument("--run", metavar="NAME", help="run.name; an address doesn't tell it")
    parser.add_argument("--key-file", metavar="FILE", help="the swarm's key; in place of swarm.key_file")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", dest="form", action="store_const", const="json", help="print one JSON object")
    form.add_argument("--once", dest="form", action="store_const", const="once", help="print the table once")
    chosen = parser.parse_args(arguments)
    from diloco.status import NobodyFound, watch
    from diloco.status_target import find_target

    try:
        return watch(find_target(chosen.target, chosen.run, chosen.key_file), chosen.form or "live")
    except NobodyFound as nobody:
        print(nobody, file=sys.stderr)
        return NOT_FOUND


def report_command(arguments: Sequence[str]) -> int:
    """summarize a run, or compare several: summary.json, report.png, report.html, and a few lines here"""
    parser = _parser(
        "report",
        "Read what the islands of a run recorded, write summary.json, report.png and report.html into RUN_DIR, and print the "
        "summary. Works on runs that go on still, or ended early: what was not measured is null in summary.json. Of several "
        "runs, do so for each, but make one page with all of them side by side, and tables.",
        "examples:\n  diloco report runs/quickstart\n  diloco report runs/first runs/second --out comparison",
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="folder of a run, such as runs/quickstart")
    parser.add_argument("--out", type=Path, default=Path("comparison"), metavar="DIR", help="where to compare several (comparison)")
    chosen = parser.parse_args(arguments)
    from diloco.report import print_summary, write_report
    from diloco.runs_report import write_comparison, write_run_page

    for run_dir in chosen.run_dirs:
        print_summary(run_dir, write_report(run_dir))
    if len(chosen.run_dirs) == 1:
        write_run_page(chosen.run_dirs[0])
    else:
        print(f"\n{write_comparison(chosen.run_dirs, chosen.out)}\nside by side: {chosen.out / 'report.html'}")
    return 0


def export_command(arguments: Sequence[str]) -> int:
    """write the weights of a run for other programs"""
    parser = _parser(
        "export",
        "Write the weights of a run as a folder that transformers loads: config.json, safetensors, and the tokenizer of "
        "model.init_from where the run has one. The checkpoint is checked first, and the folder appears whole or not at all.",
        "examples:\n"
        "  diloco export runs/quickstart\n"
        "  diloco export runs/quickstart --out models/mine --dtype bf16\n"
        "  diloco export runs/quickstart --weights own --island 1 --step 100\n\n"
        "then, in Python:\n"
        "  transformers.AutoModelForCausalLM.from_pretrained('runs/quickstart/export/step-200')\n\n"
        "A checkpoint holds a pickle: export only runs of people whom you trust; what is written holds none.\n\n"
        "exit code: 0 written; 2 there is no such checkpoint, or the folder exists or can't be written.",
    )
    _add_checkpoint(parser)
    parser.add_argument("--format", choices=["hf"], default="hf", help="hf: as Hugging Face's LlamaForCausalLM (default)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="new folder to write (RUN_DIR/export/step-N)")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the tensors written (fp32)")
    parser.add_argument("--shard-size", type=_positive, metavar="MB", default=5000, help="most megabytes of a file (5000)")
    chosen = parser.parse_args(arguments)
    from diloco.export import export, print_written

    saved = _saved_weights(chosen)
    target = chosen.out or chosen.run_dir / "export" / f"step-{saved.step}"
    print_written(saved, export(saved, target, chosen.shard_size * 10**6, chosen.dtype))
    return 0


def generate_command(arguments: Sequence[str]) -> int:
    """continue a text with the model of a run"""
    parser = _parser(
        "generate",
        "Continue a text with the model of a run, from its newest checkpoint. The text appears as it is made, after the "
        "prompt, on standard output; all else is on standard error.",
        "examples:\n"
        "  diloco generate runs/quickstart --prompt 'def main('\n"
        "  diloco generate runs/quickstart --prompt 'import ' --tokens 500 --temperature 0\n"
        "  diloco generate runs/quickstart --top-k 50 --top-p 0.9 --seed 1 < beginning.txt\n\n"
        "A checkpoint holds a pickle: use only runs of people whom you trust.\n\n"
        "exit code: 0 done; 2 there is no such checkpoint, or no prompt; 130 interrupted.",
    )
    _add_checkpoint(parser)
    parser.add_argument("--prompt", metavar="TEXT", help="what to continue; by default what standard input has")
    parser.add_argument("--tokens", type=_positive, metavar="N", default=200, help="how many to add (200)")
    parser.add_argument(
        "--temperature", type=_number(0, 100), metavar="T", default=0.8, help="0: always the likeliest; 1: as the model says (0.8)"
    )
    parser.add_argument("--top-k", type=_positive, metavar="K", default=0, help="only from the K likeliest tokens (all)")
    parser.add_argument(
        "--top-p", type=_number(1e-9, 1), metavar="P", default=1.0, help="only from the likeliest that have probability P together (1)"
    )
    parser.add_argument("--seed", type=int, metavar="S", help="draw the same each time")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to compute (auto)")
    chosen = parser.parse_args(arguments)
    from diloco.generate import print_continuation

    prompt = chosen.prompt if chosen.prompt is not None else "" if sys.stdin.isatty() else sys.stdin.read()
    print_continuation(
        _saved_weights(chosen), prompt, chosen.tokens, chosen.device, chosen.temperature, chosen.top_k, chosen.top_p, chosen.seed
    )
    return 0


def key_command(arguments: Sequence[str]) -> int:
    """make the key of a private swarm"""
    parser = _parser(
        "key",
        "Make the key of a private swarm: a small file that every island needs, and that keeps out all who don't have "
        "it. An existing file is never overwritten.",
        "examples:\n"
        "  diloco key new\n"
        "  diloco key new ~/keys/my-run.key\n\n"
        "docs/security.md tells what a key protects, and what not.",
    )
    parser.add_argument("action", choices=["new"], metavar="new", help="make a new key")
    parser.add_argument("path", type=Path, nargs="?", default=Path("swarm.key"), help="file to write (swarm.key)")
    chosen = parser.parse_args(arguments)
    from diloco.swarm_key import KeyFileError, write_new_key

    try:
        write_new_key(chosen.path)
    except KeyFileError as error:
        raise ConfigError(str(error)) from None
    print(
        f"wrote {chosen.path}, readable by you alone. Now:\n"
        f"  1. copy it to every island over a safe way, such as: scp -p {chosen.path} OTHER:\n"
        f"  2. start every island with swarm.key_file={chosen.path}\n"
        "Whoever has this file can take part and read the model. Never commit it to a repository."
    )
    return 0


def island_command(arguments: Sequence[str]) -> int:
    """one island, on the ranks that torchrun started: what ``python -m diloco CONFIG`` runs"""
    parser = argparse.ArgumentParser(prog="torchrun ... -m diloco", description="Run one island.")
    _add_config(parser)
    chosen = parser.parse_intermixed_args(arguments)
    from diloco.config import RunConfig
    from islands.config_file import load_config

    config = load_config(RunConfig, chosen.config, chosen.overrides)
    from diloco.run import run

    run(config)
    return 0


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "plan": plan_command,
    "launch": launch_command,
    "sweep": sweep_command,
    "status": status_command,
    "report": report_command,
    "export": export_command,
    "generate": generate_command,
    "key": key_command,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The console script ``diloco``. Returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else REFUSED
    name, *rest = arguments
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(COMMANDS)}"
        print(f"diloco: {name!r} is not a command; {hint}", file=sys.stderr)
        return REFUSED
    return run_command(COMMANDS[name], rest)


def run_command(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run ``command``; what it refuses becomes one message, printed once an island, and exit code 2."""
    try:
        return command(arguments)
    except (ConfigError, JoinError) as error:
        from islands.process import is_first_rank

        if is_first_rank():
            print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file, such as configs/quickstart.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDE_HELP)


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    """Which run, and which of its weights."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="folder of the run, such as runs/quickstart")
    parser.add_argument(
        "--weights",
        choices=["anchor", "own"],
        help="what the islands last agreed on, or what one island has itself (anchor, if there is one)",
    )
    parser.add_argument("--island", type=int, metavar="N", help="from a checkpoint of this island (any)")
    parser.add_argument("--step", type=int, metavar="N", help="from the checkpoint of this step (the newest)")


def _saved_weights(chosen: argparse.Namespace) -> "SavedWeights":
    from diloco.saved_weights import open_saved

    return open_saved(
        chosen.run_dir, chosen.weights, chosen.island, chosen.step, tell=lambda text: print(text, file=sys.stderr)
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} should be at least 1")
    return value


def _number(least: float, most: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = float(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} should be from {least:g} to {most:g}")
        return value

    return number


def _parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"diloco {name}",
        description=textwrap.fill(description, 100),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = [f"  {name:<{width}}  {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: diloco COMMAND ...",
            "",
            "Train language models on islands of GPUs that exchange what they learned only now and then.",
            "",
            "commands (each explains itself: diloco COMMAND --help):",
            *commands,
            "",
            "one island by itself, as on a cluster; the first island prints the address that the others need:",
            "  torchrun --nproc-per-node 2 -m diloco CONFIG 'swarm.initial_peers=[/ip4/10.0.0.1/tcp/31337/p2p/Qm...]'",
            "",
            "examples:",
            "  diloco launch configs/quickstart.yaml",
            "  diloco status runs/quickstart",
            "  diloco report runs/quickstart",
            "  diloco generate runs/quickstart --prompt 'def main('",
        ]
    )
