"""The members of a run as a table for people."""

from typing import Any

from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

Summary = dict[str, Any]

_STATE_STYLES = {"starting": "dim", "training": "cyan", "recovering": "yellow", "frozen": "bold red", "replaced": "dim"}
_QUIET_SECONDS = 10.0  # twice the longest interval at which islands speak to each other
_UNSEEN_SECONDS = 5.0
_LINEAGE_DIGITS = 6
_LINKS_TOLD, _LINKS_WIDTH = 3, 14
_LEAST_WIDTH_WITH_ADDRESS = 90


def render(summary: Summary, width: int = 100, unseen_seconds: float = 0.0) -> Group:
    """A headline that tells whether all is well, and a line for each island.

    Args:
        width: of the terminal; a narrow one has no room for addresses.
        unseen_seconds: how long ago it was that somebody answered.
    """
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("island", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "round"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("lineage", no_wrap=True)
    table.add_column("tok/s", justify="right", no_wrap=True)
    table.add_column("links", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    if width >= _LEAST_WIDTH_WITH_ADDRESS:
        table.add_column("address", overflow="fold", min_width=15)
    for member in summary["members"]:
        cells = _cells(member)[: len(table.columns)]
        table.add_row(*cells, style="dim" if member["state"] == "replaced" else "")
    return Group(Padding(headline(summary, unseen_seconds), (0, 0, 1, 0)), table)


def headline(summary: Summary, unseen_seconds: float = 0.0) -> Text:
    """Run, members, tokens, and what is wrong."""
    count = sum(member["state"] != "replaced" for member in summary["members"])
    line = Text.assemble((summary["run"], "bold"), f" · {count} island{'' if count == 1 else 's'}")
    line.append(f" · {summary['tokens']:,} tokens committed · ")
    if not any(member["round"] is not None for member in summary["members"]):
        line.append("nobody trains yet", "dim")
    elif summary["agree"]:
        line.append("all agree", "green")
    else:
        line.append(" NOT ALL AGREE ", "bold white on red")
    if summary["missing"]:
        slots = ", ".join(map(str, summary["missing"]))
        who = f"island {slots} publishes" if len(summary["missing"]) == 1 else f"islands {slots} publish"
        line.append(f"\n{who} nothing: gone, or about to come", "yellow")
    if summary["malformed"]:
        line.append(f"\n{summary['malformed']} records that are not those of an island were ignored", "yellow")
    if unseen_seconds > _UNSEEN_SECONDS:
        line.append(f"\nnobody has answered for {_duration(unseen_seconds)}; this is what was so before", "bold red")
    return line


def _cells(member: Summary) -> list[Text | str]:
    epoch = f" (e{member['epoch']})" if member["epoch"] else ""
    return [
        Text(str(member["slot"]), style="bold").append(epoch, "not bold dim"),
        Text(member["state"], style=_STATE_STYLES[member["state"]]),
        _behind(member["step"], member["lag"]),
        _behind(member["round"], member["rounds_behind"]),
        _lineage(member),
        f"{member['tokens_per_second']:,.0f}",
        _links(member["links"]),
        _duration(member["age_seconds"]),
        _place(member["address"]),
    ]


def _behind(reached: int | None, lag: int) -> Text:
    """How far, and how much less than the furthest. Records differ in age by seconds, so a little says nothing."""
    if reached is None:
        return Text("–", style="dim")
    return Text(f"{reached:,}").append(f" −{lag:,}" if lag else "", "dim")


def _lineage(member: Summary) -> Text:
    if member["lineage"] is None:
        return Text("–", style="dim")
    told, wrong = member["lineage"][:_LINEAGE_DIGITS], member["agreement"] in ("fork", "differs")
    if wrong:
        return Text(f"{told} {member['agreement'].upper()}", style="bold red")
    return Text(told, style="green" if member["agreement"] == "agrees" else "dim")


def _links(links: list[Summary]) -> Text:
    """Each, where there are few; else those that are well together, and what is wrong."""
    well = [link["rtt_ms"] for link in links if _is_well(link)]
    grouped = len(links) > _LINKS_TOLD and len(well) > 1
    told = []
    if grouped:
        told.append(Text(f"{len(well)} in {min(well):,.0f}–{max(well):,.0f} ms"))
    for link in links:
        if not (grouped and _is_well(link)):
            told.append(Text(f"{link['slot']}: ").append(*_link(link)))
    return _in_lines(told) if told else Text("–", style="dim")


def _in_lines(parts: list[Text]) -> Text:
    """Separated by commas, and a line ends between two of them only."""
    whole, used = parts[0].copy(), len(parts[0])
    for part in parts[1:]:
        fits = used + 2 + len(part) <= _LINKS_WIDTH
        whole.append(", " if fits else ",\n").append(part)
        used = used + 2 + len(part) if fits else len(part)
    return whole


def _is_well(link: Summary) -> bool:
    return link["alive"] and link["rtt_ms"] is not None and link["silent_seconds"] <= _QUIET_SECONDS


def _link(link: Summary) -> tuple[str, str]:
    if not link["alive"]:
        return "gone", "bold red"
    if link["silent_seconds"] > _QUIET_SECONDS:
        return f"quiet {_duration(link['silent_seconds'])}", "yellow"
    return ("–", "dim") if link["rtt_ms"] is None else (f"{link['rtt_ms']:,.0f} ms", "")


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def _place(address: str) -> str:
    """Host and port: the rest is in the JSON."""
    _, kind, host, _, port, *_ = [*address.split("/"), "", "", "", ""]
    return f"[{host}]:{port}" if kind == "ip6" else f"{host}:{port}"
