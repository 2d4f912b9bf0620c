"""The page that ``diloco plan`` prints, and what becomes of its options."""

import argparse
import json
from typing import Any, Callable, Sequence

from rich.console import Console
from rich.table import Table

from diloco.config import RunConfig
from diloco.link_model import parse_bandwidth, parse_time
from diloco.planner import Planner
from diloco.planner_answer import Question, answer
from diloco.planner_probe import probe_rtt, probe_step_seconds
from islands.config_file import ConfigError, load_config
from islands.memory import in_words, ranks_of

_DEFAULT_RTT = 0.05
_MEMORY_PARTS = {
    "rank": ("parameters", "gradients", "optimizer", "activations", "buffers"),
    "outer": ("anchor", "optimizer", "residual", "local", "mean", "buffers"),
}


def plan(chosen: argparse.Namespace) -> int:
    """Answer what the command line asks. Returns the exit code. Raises ConfigError."""
    overrides = [*(["parallel.data_parallel_size=-1"] if chosen.ranks else []), *chosen.overrides]
    overrides += [f"swarm.islands={chosen.islands}"] if chosen.islands is not None else []
    config = load_config(RunConfig, chosen.config, overrides)
    _check(chosen)
    bandwidth = parse_bandwidth(chosen.bandwidth) if chosen.bandwidth else None
    planner = Planner(config, chosen.ranks or ranks_of(config))
    rtt, rtt_from = _rtt(chosen, config)
    step, step_from = _step(chosen, planner, overrides)
    found = answer(planner, Question(bandwidth, rtt, rtt_from, step, step_from, chosen.target))
    if chosen.json:
        print(json.dumps(found))
    else:
        print_page(found, Console())
    return 0


def _check(chosen: argparse.Namespace) -> None:
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "ranks": (lambda ranks: ranks >= 1, "a whole number from 1"),
        "target": (lambda target: 0 < target < 1, "a share of the time, above 0 and below 1, such as 0.95"),
        "step_seconds": (lambda seconds: 0 < seconds < float("inf"), "seconds above 0, such as 0.6"),
        "flops_per_second": (lambda flops: 0 < flops < float("inf"), "operations a second above 0, such as 1.5e14"),
    }
    for name, (is_right, rule) in rules.items():
        value = getattr(chosen, name)
        if value is not None and not is_right(value):
            raise ConfigError(f"--{name.replace('_', '-')}={value} should be {rule}")


def _rtt(chosen: argparse.Namespace, config: RunConfig) -> tuple[float, str]:
    if chosen.rtt:
        return parse_time(chosen.rtt), "as given"
    if chosen.probe and config.swarm.initial_peers:
        return probe_rtt(config.swarm.initial_peers), "measured to swarm.initial_peers"
    return _DEFAULT_RTT, "assumed; give --rtt"


def _step(chosen: argparse.Namespace, planner: Planner, overrides: Sequence[str]) -> tuple[float | None, str]:
    if chosen.step_seconds is not None:
        return chosen.step_seconds, "as given"
    if chosen.flops_per_second is not None:
        return planner.step_seconds_at(chosen.flops_per_second), f"at {chosen.flops_per_second:.3g} FLOP/s a rank"
    if chosen.probe:
        return probe_step_seconds(chosen.config, overrides, planner.ranks), "measured here"
    return None, "unknown; give --step-seconds, --flops-per-second or --probe"


def print_page(found: dict[str, Any], console: Console) -> None:
    """For people."""
    console.print(f"\n[bold]Plan of {found['run']}[/]\n")
    console.print(_facts(_run_lines(found)))
    console.print("\n[bold]Memory[/] [dim](predicted)[/]\n")
    console.print(_facts(_memory_lines(found)))
    console.print("\n[bold]On the wire[/] [dim](predicted, of each island, each way)[/]\n")
    console.print(_facts(_traffic_lines(found)))
    if found["islands"] == 1:
        console.print("\nOne island has nobody to exchange with, and waits for nobody: ask with --islands N.\n")
        return
    console.print("\n[bold]Time[/] [dim](predicted by the link model: docs/planning.md)[/]\n")
    console.print(_facts(_time_lines(found)) if len(found["predictions"]) == 1 else _grid(found))
    _print_choices(found, console)


def _facts(lines: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, told in lines:
        table.add_row(name, told)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def _run_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    sizes, question = found["fragments"], found["question"]
    fragments = f"1 fragment of {_count(sizes[0])}" if len(sizes) == 1 else (
        f"{len(sizes)} fragments of {_count(min(sizes))} to {_count(max(sizes))}"
    )
    rate = question["bits_per_second"]
    link = f"{_rate(rate)} each way" if rate else "bandwidth unknown; give --bandwidth"
    step = question["step_seconds"]
    lines = [
        ("model", f"{_count(found['parameters'])} parameters, {fragments}"),
        ("islands", f"{found['islands']}, of {found['ranks']} rank{'s' if found['ranks'] > 1 else ''} each: {found['grid']}"),
        ("link", f"{link}, round trip {1000 * question['rtt']:g} ms ({question['rtt_from']})"),
        ("inner step", f"{_seconds(step)} ({question['step_from']})" if step else question["step_from"]),
    ]
    if found["pipeline_bubble"] is not None:
        lines.append(("pipeline bubble", f"{found['pipeline_bubble']:.1%} of a step, with {found['micro_batches']} micro-batches"))
    return lines


def _memory_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    in_job = found["exchange"] == "process_group"
    places = {"rank": "fullest rank", "outer": "outer state, a rank" if in_job else "host of rank 0"}
    lines = []
    for place, name in places.items():
        parts = found["memory"][place]
        told = ", ".join(f"{part} {in_words(parts[part])}" for part in _MEMORY_PARTS[place] if parts[part])
        lines.append((name, f"{in_words(parts['total'])}: {told}" if told else "none"))
    if host := found["memory"]["rank"]["host"]:
        lines.append(("offloaded to host", f"{in_words(host)} of each rank"))
    return lines


def _traffic_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    traffic, first = found["traffic"], found["predictions"][0]
    by_step = traffic["bytes_per_step"]
    every = f", every {first['sync_every'] / first['fragments']:g} inner steps" if by_step is not None else ""
    lines = [("a round", f"{_bytes(traffic['round_bytes'])} as {first['codec']}{every}")]
    if by_step:
        per_hour = f", {_bytes(traffic['bytes_per_hour'])} an hour at full speed" if traffic["bytes_per_hour"] else ""
        less = f"{traffic['data_parallel_bytes'] / by_step:,.0f}x less than gradients at every step"
        lines.append(("an inner step", f"{_bytes(by_step)}, {less}{per_hour}"))
    return lines


def _time_lines(found: dict[str, Any]) -> list[tuple[str, str]]:
    [told], question = found["predictions"], found["question"]
    lead = min(told["round_seconds"], told["overlap"] * told["inner_step_seconds"])
    color = "green" if told["utilization"] >= question["target"] else "yellow"
    return [
        ("a round", f"{_seconds(told['round_seconds'])}, of which {_seconds(lead)} behind {told['overlap']} inner steps (overlap)"),
        ("waiting", f"{_seconds(told['stall_seconds'])} a round"),
        ("a step, in all", _seconds(told["seconds_per_step"])),
        ("computing", f"[{color}]{told['utilization']:.1%}[/] of the time; the target is {question['target']:.1%}"),
        ("data parallel", f"{told['data_parallel_utilization']:.1%}, with gradients averaged at every step over the same link"),
    ]


def _grid(found: dict[str, Any]) -> Table:
    """Over what is open."""
    table = _table("bandwidth", "inner step", "a round", "computing", "data parallel")
    last = None
    for told in found["predictions"]:
        rate = _rate(told["bits_per_second"])
        good = told["utilization"] >= found["question"]["target"]
        computing = f"[green]{told['utilization']:.1%}[/]" if good else f"{told['utilization']:.1%}"
        cells = [_seconds(told["inner_step_seconds"]), _seconds(told["round_seconds"]), computing]
        table.add_row(rate if rate != last else "", *cells, f"{told['data_parallel_utilization']:.1%}")
        last = rate
    return table


def _print_choices(found: dict[str, Any], console: Console) -> None:
    target = found["question"]["target"]
    if found["choices"] is None:
        console.print("\nWith --bandwidth and a step time there are also settings that reach a target.\n")
        return
    if not found["choices"]:
        console.print(f"\n[yellow]Nothing that this command tries reaches {target:.0%} on this link.[/]\n")
        return
    console.print(f"\n[bold]Settings that compute {target:.0%} of the time[/] [dim](least harm to the loss first)[/]\n")
    table = _table("sync_every", "codec", "fragments", "overlap", "a round", "computing", "sent a step")
    for choice in found["choices"]:
        cells = [str(choice[key]) for key in ("sync_every", "codec", "fragments", "overlap")]
        table.add_row(*cells, _seconds(choice["round_seconds"]), f"{choice['utilization']:.1%}", _bytes(choice["bytes_per_step"]))
    console.print(table)
    console.print("\nThe first of them, to paste:\n")
    console.print(_yaml(found["choices"][0]), markup=False, highlight=False)
    console.print()


def _yaml(choice: dict[str, Any]) -> str:
    extra = "\n  optimizer: {lr: 1.2, momentum: 0}  # which topk needs\n  residual_decay: 0.9" if choice["codec"] == "topk" else ""
    return (
        f"outer:\n  sync_every: {choice['sync_every']}\n  codec: {{type: {choice['codec']}}}{extra}\n"
        f"  fragments: {choice['fragments']}\n  overlap: {choice['overlap']}"
    )


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _rate(bits_per_second: float) -> str:
    return f"{bits_per_second / 1e9:g} Gbit/s" if bits_per_second >= 1e9 else f"{bits_per_second / 1e6:g} Mbit/s"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if 0 < seconds < 0.1 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:,.0f} s"


def _bytes(number: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"
