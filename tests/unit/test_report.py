"""The report on rows written by hand, with figures computed by hand."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diloco.report import print_summary, summarize, write_report
from diloco.run_files import LineTail, RowTail, read_rows
from islands.config_file import ConfigError

PARAMETERS = 1000

SUMMARY_KEYS = {
    "tokens",
    "final_loss",
    "eval_loss",
    "wall_seconds",
    "compute_utilization",
    "bytes_sent",
    "bits_per_parameter_per_round",
    "rounds_committed",
    "rounds_skipped",
    "digests_agree",
    "eval_loss_start",
    "data_parallel_bytes",
    "islands",
    "samples_trained",
    "samples_lost",
    "samples_repeated",
    "seconds_lost",
    "steps_lost_to_crashes",
    "checkpoints",
}


def _rows(island: int, steps: int = 4, digest: str = "same", end: bool = True) -> list[dict[str, Any]]:
    """Steps of 10 s, of which the second and the fourth wait 1 s for a round that sends 2000 bytes."""
    start = dict(parameters=PARAMETERS, ranks=2, grid="shard 2", device="cpu")
    rows: list[dict[str, Any]] = [dict(kind="event", time=100.0, what="start", detail=start)]
    rows.append(dict(kind="eval", time=105.0, step=0, loss=5.0 + island))
    for step in range(1, steps + 1):
        stall, time = (step + 1) % 2 * 1.0, 100.0 + 10 * step
        timing = dict(tokens_per_second=6.4, step_seconds=10.0, stall_seconds=stall)
        rows.append(dict(kind="step", time=time, step=step, loss=4.0 - step / 2 + island, tokens=64, **timing))
        if step % 2 == 0:
            rows.append(_round(time, step // 2, step, digest if step == 4 else "first"))
    if end:
        rows.append(dict(kind="eval", time=141.0, step=steps, loss=2.0 + island))
        rows.append(dict(kind="event", time=141.0, what="end", detail=""))
    return [{"island": island, **row} for row in rows]


def _round(time: float, number: int, step: int, digest: str, outcome: str = "committed") -> dict[str, Any]:
    row = dict(kind="round", time=time, round=number, fragment=0, step=step, outcome=outcome, digest=digest)
    return row | dict(members=[0, 1], bytes_sent=2000, stall_seconds=1.0, reason="" if digest else "peer lost")


def _write(run: Path, *islands: list[dict[str, Any]]) -> Path:
    for island, rows in enumerate(islands):
        folder = run / f"island-{island}"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def _printed(run: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_summary(run, write_report(run), console)
    return console.file.getvalue()


def test_figures_of_two_islands(tmp_path):
    summary = summarize(_write(tmp_path, _rows(0), _rows(1)))
    assert summary.keys() == SUMMARY_KEYS
    assert summary["tokens"] == 2 * 4 * 64
    assert summary["final_loss"] == (2.0 + 3.0) / 2
    assert summary["eval_loss_start"] == (5.0 + 6.0) / 2
    assert summary["eval_loss"] == (2.0 + 3.0) / 2
    assert summary["wall_seconds"] == 141.0 - 100.0
    assert summary["compute_utilization"] == pytest.approx(1 - 2.0 / (141.0 - 110.0))
    assert summary["bytes_sent"] == 2 * 2 * 2000
    assert summary["bits_per_parameter_per_round"] == 8 * 2000 / PARAMETERS
    assert summary["data_parallel_bytes"] == 8 * (2 * (2 - 1) * 4 * PARAMETERS // 2)
    assert (summary["rounds_committed"], summary["rounds_skipped"]) == (2, 0)
    assert summary["digests_agree"] is True
    assert summary["islands"] == 2


def test_files_are_written_and_the_summary_is_told(tmp_path):
    printed = _printed(_write(tmp_path, _rows(0), _rows(1)))
    assert json.loads((tmp_path / "summary.json").read_text()) == summarize(tmp_path)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "5.500 → 2.500" in printed
    assert "8.0 kB, 4.0x less than data-parallel training of the same steps: 32.0 kB" in printed
    assert "equal on all islands" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["island-0", "island-1", "report.png", "summary.json"]


def test_islands_that_differ_are_told_loudly(tmp_path):
    run = _write(tmp_path, _rows(0), _rows(1, digest="other"))
    assert summarize(run)["digests_agree"] is False
    assert "DIFFERENT" in _printed(run)


def test_the_state_that_a_left_out_island_took_over_must_agree_too(tmp_path):
    rows = _rows(1)
    rows[-3] |= dict(outcome="left_out", digest="other")
    summary = summarize(_write(tmp_path, _rows(0), rows))
    assert summary["digests_agree"] is False
    assert (summary["rounds_committed"], summary["rounds_skipped"]) == (2, 0)


def test_a_skipped_round_counts_once_and_its_bytes_count(tmp_path):
    skipped = [{"island": island, **_round(131.0, 1, 3, "", "skipped")} for island in (0, 1)]
    summary = summarize(_write(tmp_path, [*_rows(0), skipped[0]], [*_rows(1), skipped[1]]))
    assert (summary["rounds_committed"], summary["rounds_skipped"]) == (2, 1)
    assert summary["digests_agree"] is True
    assert summary["bytes_sent"] == 2 * 3 * 2000
    assert summary["bits_per_parameter_per_round"] == 8 * 3 * 2000 / 2 / PARAMETERS


def test_bits_are_of_the_whole_model_where_a_round_carries_a_fragment(tmp_path):
    rows = _rows(0)
    rows[-3]["fragment"] = 1
    assert summarize(_write(tmp_path, rows))["bits_per_parameter_per_round"] == 8 * 2 * 2000 / PARAMETERS


def test_an_island_that_died_early_does_not_blur_the_end(tmp_path):
    run = _write(tmp_path, _rows(0), _rows(1, steps=2, end=False))
    summary = summarize(run)
    assert (summary["final_loss"], summary["eval_loss"]) == (2.0, 2.0)
    assert summary["tokens"] == (4 + 2) * 64
    assert summary["digests_agree"] is True
    assert "island 1 has not come to its end: its last step is 2" in _printed(run)


def test_one_plain_island_has_no_rounds(tmp_path):
    rows = [row for row in _rows(0) if row["kind"] != "round"]
    run = _write(tmp_path, [row | {"stall_seconds": 0.0} if row["kind"] == "step" else row for row in rows])
    summary = summarize(run)
    assert summary["compute_utilization"] == 1.0
    assert (summary["bytes_sent"], summary["data_parallel_bytes"]) == (0, 0)
    assert (summary["digests_agree"], summary["bits_per_parameter_per_round"]) == (None, None)
    assert "none were exchanged" in _printed(run)


@pytest.mark.parametrize("rows", [[], _rows(0)[:1], _rows(0)[:2], _rows(0)[:3]])
def test_a_run_that_hardly_began_has_unknown_figures(tmp_path, rows):
    run = _write(tmp_path, rows)
    summary = summarize(run)
    assert summary.keys() == SUMMARY_KEYS
    assert summary["compute_utilization"] is None
    assert summary["digests_agree"] is None
    assert "unknown" in _printed(run)


def test_an_island_without_metrics(tmp_path):
    run = _write(tmp_path, _rows(0))
    (run / "island-1").mkdir()
    assert summarize(run)["final_loss"] == 2.0
    assert "island 1 has not come to its end" in _printed(run)


def test_a_loss_that_is_not_a_number_is_unknown(tmp_path):
    rows = _rows(0)
    rows[-4]["loss"] = float("nan")
    run = _write(tmp_path, rows)
    _printed(run)
    assert json.loads((run / "summary.json").read_text(), parse_constant=pytest.fail)["final_loss"] is None


def test_folders_that_hold_no_run_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such folder"):
        summarize(tmp_path / "missing")
    with pytest.raises(ConfigError, match="holds no folder island-"):
        summarize(tmp_path)


def test_a_half_written_line_is_read_when_it_is_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tail = RowTail(path)
    assert tail.read() == []
    with path.open("w", buffering=1) as file:
        file.write('{"kind": "step", "step": 1}\n{"kind": "st')
        file.flush()
        assert [row["step"] for row in tail.read()] == [1]
        assert [row["step"] for row in read_rows(path)] == [1]
        file.write('ep", "step": 2}\n')
        file.flush()
        assert [row["step"] for row in tail.read()] == [2]
        assert tail.read() == []
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def test_a_torn_line_is_no_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "st\n[]\n{"kind": "step", "step": 3}\n')
    assert [row["step"] for row in read_rows(path)] == [3]


def test_letters_cut_in_two_are_put_together(tmp_path):
    path = tmp_path / "log.txt"
    tail, whole = LineTail(path), "Größe\n".encode()
    path.write_bytes(whole[:3])
    assert tail.read() == []
    path.write_bytes(whole)
    assert tail.read() == ["Größe"]
