"""What ``diloco status`` makes of the records that islands publish, and what it refuses. Without a network."""

import io
import json
from pathlib import Path
from typing import Any

import msgpack
import pytest
from rich.console import Console

from diloco import cli
from diloco.exchange.hivemind import member_record
from diloco.exchange.hivemind.member_record import MAX_RECORD_BYTES, Link, MemberRecord, Standing, short
from diloco.exchange.hivemind.messages import BadMessage
from diloco.status import summarize
from diloco.status_table import render
from diloco.status_target import Target, find_target
from diloco.swarm_key import write_new_key
from islands.config_file import ConfigError

NOW = 1_000_000.0
PEERS = [f"QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5{letter}" for letter in "ABCD"]
ADDRESS = f"/ip4/10.0.0.1/tcp/31337/p2p/{PEERS[0]}"
AGREED, OTHER = "ab" * 8, "00" * 8


def standing(height: int = 5, **changes: Any) -> Standing:
    base = dict(fragment=0, height=height, lineage=AGREED, digest=AGREED, tokens=1000 * height)
    return Standing(**{**base, **changes})


def link(slot: int, **changes: Any) -> Link:
    return Link(**{"slot": slot, "alive": True, "silent_seconds": 1.0, "rtt_ms": 12.4, **changes})


def record(slot: int, *fragments: Standing, **changes: Any) -> MemberRecord:
    peer = changes.pop("peer", PEERS[slot])
    base = dict(run="test", slot=slot, epoch=0, peer=peer, address=f"/ip4/10.0.0.{slot + 1}/tcp/31337/p2p/{peer}")
    more = dict(state="training", step=100, tokens_per_second=4000.0, fragments=fragments, links=(), time=NOW - 2)
    return MemberRecord(**{**base, **more, **changes})


def shown(summary: dict[str, Any], width: int = 100, **more: Any) -> str:
    page = io.StringIO()
    Console(file=page, width=width).print(render(summary, width, **more))
    return page.getvalue()


def test_islands_that_agree() -> None:
    one = record(0, standing(), links=(link(1),))
    two = record(1, standing(), step=97, links=(link(0, rtt_ms=3.0),))
    summary = summarize("test", [two, one], now=NOW)
    assert list(summary) == ["run", "tokens", "members", "missing", "agree", "malformed"]
    assert (summary["run"], summary["tokens"], summary["agree"], summary["malformed"]) == ("test", 5000, True, 0)
    assert [member["slot"] for member in summary["members"]] == [0, 1]
    assert [member["lag"] for member in summary["members"]] == [0, 3]
    first = summary["members"][0]
    assert (first["round"], first["lineage"], first["agreement"], first["age_seconds"]) == (5, AGREED, "agrees", 2.0)
    assert first["links"] == [{"slot": 1, "alive": True, "silent_seconds": 1.0, "rtt_ms": 12.4}]
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    text = shown(summary)
    assert "test · 2 islands · 5,000 tokens committed · all agree" in text
    assert "97 −3" in text and "1: 12 ms" in text and "10.0.0.1:31337" in text and "ababab" in text


def test_the_lineage_with_most_tokens_leads_and_the_other_is_a_fork() -> None:
    summary = summarize("test", [record(0, standing(lineage=OTHER, tokens=10)), record(1, standing())], now=NOW)
    assert [member["agreement"] for member in summary["members"]] == ["fork", "agrees"] and not summary["agree"]
    text = shown(summary)
    assert "000000 FORK" in text and "NOT ALL AGREE" in text


@pytest.mark.parametrize(
    ("other", "agreement"),
    [
        (standing(height=4), "behind"),
        (standing(height=6, tokens=4999), "fork"),  # on one lineage tokens grow with the rounds
        (standing(digest=OTHER), "differs"),
        (standing(), "agrees"),
    ],
)
def test_how_another_stands_to_the_one_that_leads(other: Standing, agreement: str) -> None:
    summary = summarize("test", [record(0, standing()), record(1, other)], now=NOW)
    assert summary["members"][1]["agreement"] == agreement
    assert summary["agree"] == (agreement in ("agrees", "behind"))


def test_of_several_fragments_the_one_with_fewest_rounds_is_told_and_the_worst_agreement() -> None:
    one = record(0, standing(7, fragment=0), standing(6, lineage="cd" * 8, fragment=1))
    two = record(1, standing(7, lineage=OTHER, fragment=0, tokens=1), standing(5, fragment=1))
    first, second = summarize("test", [one, two], now=NOW)["members"]
    assert (first["round"], first["lineage"], first["agreement"], first["rounds_behind"]) == (6, "cd" * 8, "agrees", 0)
    assert (second["round"], second["agreement"], second["rounds_behind"]) == (5, "fork", 1)
    assert [fragment["agreement"] for fragment in second["fragments"]] == ["fork", "behind"]
    assert summarize("test", [one, two], now=NOW)["tokens"] == 6000


def test_links_that_are_gone_or_quiet_and_members_that_publish_nothing() -> None:
    links = (link(1, alive=False), link(2, silent_seconds=14.0), link(3, rtt_ms=None))
    summary = summarize("test", [record(0, standing(), links=links), record(3, standing())], malformed=2, now=NOW)
    assert summary["missing"] == [1, 2] and summary["malformed"] == 2
    text = " ".join(shown(summary).split())
    assert "1: gone" in text and "2: quiet 14 s" in text and "3: –" in text
    assert "islands 1, 2 publish nothing" in text and "2 records that are not those of an island were ignored" in text


def test_many_links_are_told_together_but_for_those_that_are_not_well() -> None:
    links = tuple(link(slot, rtt_ms=float(slot)) for slot in range(1, 8)) + (link(8, alive=False),)
    text = " ".join(shown(summarize("test", [record(0, standing(), links=links)], now=NOW)).split())
    assert "7 in 1–7 ms" in text and "8: gone" in text


def test_whoever_lost_its_slot_is_compared_with_nobody() -> None:
    old = record(1, standing(9, lineage=OTHER), step=900, peer=PEERS[2])
    new = record(1, epoch=1, state="recovering", step=0)
    summary = summarize("test", [old, new, record(0, standing())], now=NOW)
    assert [member["state"] for member in summary["members"]] == ["training", "recovering", "replaced"]
    assert [member["lag"] for member in summary["members"]] == [0, 100, 0]
    assert summary["agree"] and summary["tokens"] == 5000
    text = shown(summary)
    assert "1 (e1)" in text and "replaced" in text and "2 islands" in text


def test_before_the_first_round_there_is_nothing_to_agree_on() -> None:
    summary = summarize("test", [record(0, state="starting", step=0)], now=NOW)
    assert summary["members"][0]["round"] is None and summary["tokens"] == 0 and summary["agree"]
    assert "1 island · 0 tokens committed · nobody trains yet" in shown(summary)


def test_a_table_in_a_narrow_terminal_leaves_addresses_out_and_cuts_nothing_else() -> None:
    summary = summarize("test", [record(slot, standing(), links=(link(0), link(3))) for slot in range(3)], now=NOW)
    text = shown(summary, width=80)
    assert "…" not in text and "10.0.0.1" not in text and "3: 12 ms" in text
    assert max(map(len, shown(summary).splitlines())) <= 100


def test_a_clock_that_is_ahead_and_a_swarm_that_fell_silent() -> None:
    summary = summarize("test", [record(0, standing(), time=NOW + 5)], now=NOW)
    assert summary["members"][0]["age_seconds"] == 0
    assert "nobody has answered for 12 s" in shown(summary, unseen_seconds=12.0)


# -- records from a network -----------------------------------------------------------------------------------------


def test_a_record_arrives_as_it_was() -> None:
    sent = record(0, standing(), standing(fragment=1), links=(link(1),))
    assert member_record.decode(member_record.encode(sent), "test", PEERS[0]) == sent
    assert short(bytes.fromhex("ab" * 32)) == AGREED


def test_the_largest_record_fits() -> None:
    fragments = tuple(standing(1 << 40, fragment=index, tokens=1 << 60) for index in range(1024))
    raw = member_record.encode(record(0, *fragments, links=tuple(link(slot) for slot in range(64))))
    assert len(raw) <= MAX_RECORD_BYTES
    assert len(member_record.decode(raw, "test", PEERS[0]).fragments) == 1024


def as_dict(**changes: Any) -> dict[str, Any]:
    return {**record(0, standing(), links=(link(1),)).model_dump(), **changes}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x93",
        bytes(MAX_RECORD_BYTES + 1),
        b"\x91" * 5000,
        "text",
        None,
        msgpack.packb(7),
        msgpack.packb([1, 2]),
        msgpack.packb(as_dict(run="another")),
        msgpack.packb(as_dict(peer=PEERS[1])),
        msgpack.packb(as_dict(address=f"/ip4/10.0.0.1/tcp/1/p2p/{PEERS[1]}")),
        msgpack.packb(as_dict(address=f"/ip4/\x1b[2J/tcp/1/p2p/{PEERS[0]}")),
        msgpack.packb(as_dict(state="\x1b]0;x\x07")),
        msgpack.packb(as_dict(step=-1)),
        msgpack.packb(as_dict(step=1 << 63)),
        msgpack.packb(as_dict(step="7")),
        msgpack.packb(as_dict(tokens_per_second=float("nan"))),
        msgpack.packb(as_dict(tokens_per_second=1e300)),
        msgpack.packb(as_dict(time=float("inf"))),
        msgpack.packb(as_dict(links=[link(slot).model_dump() for slot in range(65)])),
        msgpack.packb(as_dict(fragments=[{**standing().model_dump(), "lineage": "AB" * 8}])),
        msgpack.packb(as_dict(fragments=[{**standing().model_dump(), "lineage": "ab"}])),
        msgpack.packb(as_dict(more=1)),
        msgpack.packb({key: value for key, value in as_dict().items() if key != "epoch"}),
    ],
)
def test_what_is_no_record_is_refused(raw: object) -> None:
    with pytest.raises(BadMessage):
        member_record.decode(raw, "test", PEERS[0])


def test_a_record_that_another_peer_stored_is_refused() -> None:
    with pytest.raises(BadMessage, match="another run or peer"):
        member_record.decode(member_record.encode(record(0)), "test", PEERS[1])


# -- what the command is pointed at ---------------------------------------------------------------------------------


def make_run(folder: Path, *addresses: str, ended: bool = False, peers: str = "[]") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.resolved.yaml").write_text(
        f"run: {{name: mine}}\nmodel: {{type: not_on_this_machine}}\nswarm: {{initial_peers: {peers}}}\n"
    )
    for index, address in enumerate(addresses):
        (folder / f"island-{index}").mkdir()
        rows = [dict(kind="event", what="start", detail={}), dict(kind="event", what="address", detail=address)]
        rows += [dict(kind="step", step=1), dict(kind="event", what="end", detail="")][: 2 if ended else 1]
        (folder / f"island-{index}" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_run_folder_tells_name_addresses_and_whether_it_ended(tmp_path: Path) -> None:
    addresses = [ADDRESS, ADDRESS.replace("0.1", "0.2")]
    assert find_target(str(make_run(tmp_path / "going", *addresses))) == Target("mine", addresses, b"", ended=False)
    assert find_target(str(make_run(tmp_path / "over", ADDRESS, ended=True))).ended


def test_where_an_island_was_last_counts(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", ADDRESS)
    island = folder / "island-0"
    (island / "metrics.jsonl").rename(island / "metrics.1.jsonl")
    later = ADDRESS.replace("31337", "4000")
    (island / "metrics.jsonl").write_text(json.dumps(dict(kind="event", what="address", detail=later)) + "\n")
    assert find_target(str(folder)).addresses == [later]


def test_a_configuration_tells_it_too_or_else_its_run_folder(tmp_path: Path) -> None:
    write_new_key(tmp_path / "swarm.key")
    config = tmp_path / "a.yaml"
    run = f"run: {{name: mine, dir: {tmp_path / 'run'}}}\n"
    config.write_text(f"{run}swarm: {{initial_peers: ['{ADDRESS}']}}\ntrain: {{}}\n")
    target = find_target(str(config), key_file=str(tmp_path / "swarm.key"))
    assert (target.run, target.addresses, len(target.key)) == ("mine", [ADDRESS], 32)
    config.write_text(run)
    with pytest.raises(ConfigError, match="names no swarm.initial_peers and there is no run in run.dir="):
        find_target(str(config))
    make_run(tmp_path / "run", ADDRESS)
    assert find_target(str(config)).addresses == [ADDRESS]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere"], "no such folder or file. Give the folder of a run"),
        (["missing.yaml"], "missing.yaml: no such file"),
        (["."], "holds no config.resolved.yaml"),
        (["empty"], "has noted an address"),
        ([ADDRESS], f"an address doesn't tell the name of the run: diloco status {ADDRESS} --run NAME"),
        ([f"{ADDRESS}0", "--run", "mine"], "is not an address such as"),
        ([ADDRESS, "--run", "mine", "--key-file", "none.key"], "none.key: No such file"),
    ],
)
def test_what_it_can_not_be_pointed_at(arguments: list[str], told: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "empty")
    assert cli.main(["status", *arguments]) == 2
    printed = capsys.readouterr()
    assert told in printed.err and "Traceback" not in printed.err and printed.out == ""
