"""Who takes part in a run and how far everyone is, seen from anywhere: ``diloco status``."""

import asyncio
import json
import time
from typing import TYPE_CHECKING, Iterable, Literal, Sequence

from rich.console import Console
from rich.live import Live

from diloco.exchange.hivemind.member_record import MemberRecord, Standing
from diloco.exchange.hivemind.process import quiet_hivemind
from diloco.status_table import Summary, render
from diloco.status_target import Target

if TYPE_CHECKING:
    from diloco.exchange.hivemind.onlooker import Onlooker

Form = Literal["json", "once", "live"]
Agreement = Literal["agrees", "behind", "fork", "differs"]

REFRESH_SECONDS = 2.0
_PIPE_WIDTH = 100


class NobodyFound(Exception):
    """Nobody publishes anything for this run; says who was asked, and what each of them said."""


def watch(target: Target, form: Form) -> int:
    """Print who takes part: as JSON, as a table, or as a table that lives until Ctrl-C. Returns the exit code.

    Raises:
        NobodyFound: at the first look.
    """
    quiet_hivemind()  # which is loaded only now: it takes seconds
    try:
        asyncio.run(_watch(target, form))
    except KeyboardInterrupt:
        if form != "live":
            raise
    return 0


async def _watch(target: Target, form: Form) -> None:
    from diloco.exchange.hivemind.onlooker import watching

    async with watching(target.run, target.key, target.addresses) as onlooker:
        found = await onlooker.look()
        if not found.records:
            raise NobodyFound(_nobody(target, found.malformed, await onlooker.explain(found)))
        summary, console = summarize(target.run, found.records.values(), found.malformed), Console()
        if form == "json":
            print(json.dumps(summary, indent=2))
        elif form == "live" and console.is_terminal:
            await _live(target, onlooker, summary, console)
        else:
            console = console if console.is_terminal else Console(width=_PIPE_WIDTH)
            console.print(render(summary, console.width))


async def _live(target: Target, onlooker: "Onlooker", summary: Summary, console: Console) -> None:
    """Redraw the table for ever; where nobody answers any more, the last one, saying so."""
    seen = time.monotonic()
    with Live(render(summary, console.width), console=console, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            found = await onlooker.look()
            if found.records:
                summary, seen = summarize(target.run, found.records.values(), found.malformed), time.monotonic()
            live.update(render(summary, console.width, time.monotonic() - seen), refresh=True)


def _nobody(target: Target, malformed: int, said: dict[str, str]) -> str:
    lines = [f"nobody of run {target.run!r} was found. Asked:"]
    lines += [f"  {where}\n    {what}" for where, what in said.items()]
    if malformed:
        lines.append(f"There were {malformed} records that are not those of an island, and were ignored.")
    if target.ended:
        lines.append("The run has come to its end; diloco report RUN_DIR tells what came of it.")
    else:
        lines.append(
            "If the run goes on: islands print their address when they have joined, and note it in\n"
            "island-<i>/metrics.jsonl; that of any member will do. It must be reachable from here (127.0.0.1 is so\n"
            "on its own machine only)."
        )
    return "\n".join(lines)


# -- what there is to tell ---------------------------------------------------------------------------------------------


def summarize(run: str, records: Iterable[MemberRecord], malformed: int = 0, now: float | None = None) -> Summary:
    """All that ``--json`` tells: plain values under fixed names.

    Of two that claim a slot the one with the earlier epoch has lost it: ``replaced``, and compared with nobody.
    ``tokens`` are those that all fragments have; ``agree`` is False where a fragment has a ``fork`` (another lineage than
    the one with most tokens) or ``differs`` (the same lineage, other bits). One that is ``behind`` may yet be either.
    """
    now = time.time() if now is None else now
    ordered = sorted(records, key=lambda record: (record.slot, -record.epoch, record.peer))
    epochs = {record.slot: record.epoch for record in reversed(ordered)}
    current = [record for record in ordered if record.epoch == epochs[record.slot]]
    leading = _leading(current)
    furthest = max((record.step for record in current), default=0)
    members = [_member(record, record not in current, leading, furthest, now) for record in ordered]
    held = {link.slot for record in current for link in record.links}
    return {
        "run": run,
        "tokens": min((standing.tokens for standing in leading.values()), default=0),
        "members": members,
        "missing": sorted(held - epochs.keys()),
        "agree": not any(member["agreement"] in ("fork", "differs") for member in members),
        "malformed": malformed,
    }


def _leading(records: Sequence[MemberRecord]) -> dict[int, Standing]:
    """Of each fragment, where the lineage with most tokens stands: the one that the others would rejoin."""
    leading: dict[int, Standing] = {}
    for standing in (standing for record in records for standing in record.fragments):
        best = leading.get(standing.fragment)
        if best is None or _rank(standing) > _rank(best):
            leading[standing.fragment] = standing
    return leading


def _rank(standing: Standing) -> tuple[int, int, int]:
    return standing.tokens, standing.height, -int(standing.lineage, 16)


def _agreement(standing: Standing, leading: Standing) -> Agreement:
    if standing.height < leading.height:
        return "behind"  # its lineage may be one that the leading one went through: the record doesn't tell
    if (standing.height, standing.lineage) != (leading.height, leading.lineage):
        return "fork"
    return "agrees" if standing.digest == leading.digest else "differs"


def _member(record: MemberRecord, replaced: bool, leading: dict[int, Standing], furthest: int, now: float) -> Summary:
    lowest = min(record.fragments, key=lambda standing: (standing.height, standing.fragment), default=None)
    fragments = [
        standing.model_dump() | ({} if replaced else {"agreement": _agreement(standing, leading[standing.fragment])})
        for standing in record.fragments
    ]
    found = {fragment.get("agreement") for fragment in fragments}
    worst = next((what for what in ("differs", "fork", "behind", "agrees") if what in found), None)
    return {
        "slot": record.slot,
        "epoch": record.epoch,
        "state": "replaced" if replaced else record.state,
        "step": record.step,
        "lag": max(0, furthest - record.step),
        "round": lowest and lowest.height,
        "rounds_behind": 0 if replaced or not lowest else max(0, leading[lowest.fragment].height - lowest.height),
        "lineage": lowest and lowest.lineage,
        "digest": lowest and lowest.digest,
        "tokens": lowest and lowest.tokens,
        "agreement": worst,
        "tokens_per_second": record.tokens_per_second,
        "age_seconds": round(max(0.0, now - record.time), 1),
        "peer": record.peer,
        "address": record.address,
        "fragments": fragments,
        "links": [link.model_dump() for link in record.links],
    }
