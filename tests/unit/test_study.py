"""What a comparison says: drift against plain vectors, figures against hand-made runs, and a page whose every number is in its tables."""

import csv
import itertools
import json
import math
import re
import statistics
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from study_runs import PARAMETER_BITS, STEPS, pseudo_gradients, write_run

from diloco import cli, html_report
from diloco.html_report import write_page
from diloco.link_model import Link, Pace, RoundLoad, data_parallel, predict
from diloco.report_drift import drift_of
from diloco.report_measures import Measured, measure
from diloco.report_study import Study, choose, make_study, write_tables
from diloco.runs_report import write_comparison

KEYS = ["outer.sync_every", "run.seed"]
LOSSES = {1: (3.0, 3.02), 5: (3.01, 3.02), 20: (3.2, 3.3)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Measured]:
    """Three islands at H 1, 5 and 20, and data-parallel training, with two seeds each."""
    folder, found = tmp_path_factory.mktemp("runs"), []
    for seed in (0, 1):
        found.append(measure(write_run(folder / f"dp-{seed}", loss=3.0, seed=seed, outer=False), f"dp-{seed}", workers=3))
        for sync_every, losses in LOSSES.items():
            name = f"h{sync_every}-{seed}"
            run = write_run(folder / name, 3, sync_every, losses[seed] - 0.01, seed)  # islands end 0.01 apart
            found.append(measure(run, name))
            found[-1].row["baseline"] = f"dp-{seed}"
    return found


@pytest.fixture(scope="module")
def study(runs: list[Measured]) -> Study:
    failed = dict(cell="h7-0", status="failed", kind="islands", error="failed with exit code 1: boom")
    return make_study("a study", runs, KEYS, [failed])


@pytest.fixture(scope="module")
def page(study: Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    write_tables(study, folder)
    write_page(study, folder)
    return folder


@pytest.mark.parametrize("islands", [1, 2, 5])
def test_drift_is_that_of_the_vectors(islands: int) -> None:
    vectors = pseudo_gradients(islands, seed=3)
    mean, norms = vectors.mean(0), vectors.norm(dim=1)
    found = drift_of(norms.tolist(), torch.cosine_similarity(vectors, mean.expand_as(vectors)).tolist())
    assert found.norm == pytest.approx(float(norms.mean()))
    assert found.distance == pytest.approx(float((vectors - mean).square().sum(1).mean().sqrt()), abs=1e-6)
    pairs = [(float(a @ b), float(a.norm() * b.norm())) for a, b in itertools.combinations(vectors, 2)]
    expected = sum(product for product, _ in pairs) / sum(norms for _, norms in pairs) if pairs else None
    assert found.cosine == (pytest.approx(expected) if pairs else None)


def test_measures_of_a_simulation(runs: list[Measured]) -> None:
    run = next(run for run in runs if run.row["cell"] == "h5-0")
    row, parameters = run.row, run.row["parameters"]
    encoded = parameters * PARAMETER_BITS / 8
    assert (row["kind"], row["islands"], row["sync_every"], row["rounds"], row["tokens"]) == ("islands", 3, 5, 4, 3 * STEPS * 128)
    assert row["eval_loss"] == pytest.approx(3.01)
    assert row["bytes_each_way_per_round"] == pytest.approx(2 * 2 * encoded)  # through the link of the one that reduces
    assert row["bytes_per_island"] == pytest.approx(4 * 2 / 3 * 2 * encoded)  # rounds; contribution and mean, from two of three each
    assert row["decode_seconds"] == pytest.approx(0.02 * (1 + 1 / 3)) and row["bytes_are"] == "computed"
    assert [tokens for tokens, _ in run.curves.rounds] == [3 * 128 * step for step in (5, 10, 15, 20)]
    vectors = pseudo_gradients(3, seed=2)
    assert run.curves.rounds[1][1].distance == pytest.approx(float((vectors - vectors.mean(0)).square().sum(1).mean().sqrt()))
    assert run.curves.losses[0] == (3 * 128, pytest.approx(3.0 + math.exp(-1) + 0.01))


def test_bytes_that_were_counted_are_taken_as_they_are(tmp_path: Path) -> None:
    run = write_run(tmp_path / "real")
    for file in run.glob("island-*/metrics.jsonl"):
        counted = {'"bytes_sent": 0': '"bytes_sent": 700', '"bytes_received": 0': '"bytes_received": 600'}
        text = file.read_text()
        for before, after in counted.items():
            text = text.replace(before, after)
        file.write_text(text)
    config = run / "config.resolved.yaml"
    config.write_text(config.read_text().replace("type: in_memory", "type: hivemind"))
    row = measure(run, "real").row
    assert (row["bytes_each_way_per_round"], row["bytes_per_island"], row["bytes_are"]) == (700, 2800, "counted")
    assert row["decode_seconds"] == 0.02


def _edit(run: Path, edit: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Path:
    """Change the rows of all its islands."""
    for file in run.glob("island-*/metrics.jsonl"):
        rows = edit([json.loads(line) for line in file.read_text().splitlines()])
        file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return run


def test_a_run_that_goes_on_is_measured_by_what_it_has_done(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "swarm", 3), write_run(tmp_path / "alone", outer=False)]
    for run in runs:
        _edit(run, lambda rows: [row for row in rows if row.get("step", 0) <= 10 and row.get("what") != "end"])
    study = make_study("", [measure(run, run.name, 3) for run in runs], KEYS)
    swarm, alone = study.rows
    assert [(row["status"], row["steps"]) for row in study.rows] == [("unfinished", 10)] * 2
    assert swarm["times_fewer_bytes"] == pytest.approx(5) and alone["rounds"] == 10
    assert alone["bytes_per_island"] == pytest.approx(2 * 2 / 3 * 4 * alone["parameters"] * 10)
    assert choose(study) is None


def test_replicas_that_average_gradients_are_as_many_as_they_say(tmp_path: Path) -> None:
    def of_replicas(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows[0]["detail"]["replicas"] = 4
        return [row | ({"bytes_across": 700} if row["kind"] == "step" else {}) for row in rows if row["kind"] != "round"]

    run = _edit(write_run(tmp_path / "k1", 1, sync_every=1), of_replicas)
    config = run / "config.resolved.yaml"
    config.write_text(config.read_text().replace("type: in_memory", "type: process_group"))
    (row,) = make_study("", [measure(run, "k1")], KEYS).rows
    assert (row["islands"], row["bytes_per_island"], row["bytes_are"]) == (4, 700 * STEPS, "counted")
    assert row["times_fewer_bytes"] == pytest.approx(2 * 3 / 4 * 4 * row["parameters"] / 700)


def test_a_simulation_has_no_share_of_real_time(tmp_path: Path) -> None:
    run = _edit(write_run(tmp_path / "run"), lambda rows: [row | {"simulated_seconds": 1.0, "stall_seconds": 9.0} for row in rows])
    assert measure(run, "run").row["measured_utilization"] is None


def test_settings_are_means_over_seeds_with_their_spread(study: Study) -> None:
    rows = {setting.label: setting.row for setting in study.settings}
    assert list(rows) == ["data-parallel", "H=1", "H=5", "H=20"]
    assert rows["H=20"]["eval_loss"] == pytest.approx(3.25)
    assert rows["H=20"]["eval_loss_spread"] == pytest.approx(statistics.stdev((3.2, 3.3)))
    assert rows["H=20"]["loss_above_baseline_percent"] == pytest.approx(100 * (3.25 / 3.0 - 1))
    assert rows["H=5"]["times_fewer_bytes"] == pytest.approx(5)
    assert [name for name, row in rows.items() if not row["on_frontier"]] == ["H=1"]  # it sends as much as data-parallel


def test_the_cheapest_of_those_that_are_as_good_is_named(study: Study) -> None:
    assert choose(study).label == "H=5"


def test_predictions_are_those_of_the_link_model(study: Study) -> None:
    link = Link(100e6, 0.08)
    row = next(row for row in study.rows if row["cell"] == "h5-1")
    load = RoundLoad(3, row["bytes_each_way_per_round"], 0.01, 0.02 * 4 / 3, 0.005, chunks=1, copy_seconds=0.002)
    expected = predict(link, load, Pace(0.05, 5, 1, 0))
    assert row["predicted_utilization_100mbit"] == pytest.approx(expected.utilization)
    assert row["predicted_seconds_100mbit"] == pytest.approx(expected.seconds_per_step * STEPS)
    alone = next(row for row in study.rows if row["cell"] == "dp-1")
    reduced = data_parallel(link, 3, 4 * row["parameters"], 0.05)  # of an island's step, not of the whole batch's
    assert alone["predicted_utilization_100mbit"] == pytest.approx(reduced.utilization)


def test_on_one_machine_what_runs_have_alike_takes_as_long_as_in_the_fastest(runs: list[Measured]) -> None:
    slowed = [replace(run, row=dict(run.row)) for run in runs]
    for run in slowed:
        if run.row["sync_every"] == 5:
            run.row.update(step_seconds=0.5, encode_seconds=0.1)
    rows, together = (make_study("", slowed, KEYS, one_machine=alike).rows for alike in (False, True))
    assert [row["least_step_seconds"] for row in rows if row["sync_every"] == 5] == [0.5, 0.5]
    assert {row["least_step_seconds"] for row in together} == {0.05} and {row["least_encode_seconds"] for row in together} == {0.01, None}
    assert [row["step_seconds"] for row in together if row["sync_every"] == 5] == [0.5, 0.5]  # as it was measured


def test_unlike_steps_and_codecs_take_as_long_as_they_do(runs: list[Measured]) -> None:
    swept = ["train.precision", "outer.codec.block", "run.seed"]
    fast, slow = (replace(run, row=dict(run.row)) for run in runs if run.row["sync_every"] == 5 and run.row["kind"] == "islands")
    slow.row.update({"step_seconds": 0.5, "train.precision": "bf16"})
    slow.row.update({"encode_seconds": 0.1, "outer.codec.block": 64})
    rows = make_study("", [fast, slow], swept, one_machine=True).rows
    assert [row["least_step_seconds"] for row in rows] == [0.05, 0.5]
    assert [row["least_encode_seconds"] for row in rows] == [0.01, 0.1]
    assert {row["least_outer_step_seconds"] for row in rows} == {0.005}


class _Page(HTMLParser):
    """Every number of a page, what it refers to, and all text that is no number."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.numbers: list[tuple[dict[str, str], str]] = []
        self.words, self._open, self._skipped = [], None, 0
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.links += [value for key, value in given.items() if key in ("src", "href", "xlink:href") and not value.startswith("#")]
        self._skipped += tag in ("svg", "style")
        if tag == "data":
            self._open = given

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in ("svg", "style")
        if tag == "data":
            self._open = None

    def handle_data(self, text: str) -> None:
        if self._open is not None:
            self.numbers.append((self._open, text))
        elif not self._skipped:
            self.words.append(text)


def test_every_number_on_the_page_is_that_of_the_tables(page: Path) -> None:
    parsed = _Page((page / "report.html").read_text())
    tables = {
        "results": {row["cell"]: row for row in csv.DictReader((page / "results.csv").open())},
        "settings": {row["setting"]: row for row in csv.DictReader((page / "settings.csv").open())},
    }
    assert len(parsed.numbers) > 100
    for where, shown in parsed.numbers:
        value = tables[where["data-table"]][where["data-row"]][where["data-column"]]
        assert where["value"] == value, where
        if where["data-column"] == "status":
            assert shown == value
            continue
        scale = float(where["data-scale"])
        mantissa, _, exponent = shown.replace(",", "").partition("e")
        rounding = 0.5 * 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2])) * scale
        assert abs(float(mantissa + "e" + (exponent or "0")) * scale - float(value)) <= rounding * (1 + 1e-9), (where, shown)


def test_the_page_tells_no_number_beside_them_and_needs_nothing_else(page: Path) -> None:
    text = (page / "report.html").read_text()
    parsed = _Page(text)
    said = " ".join(parsed.words)
    known = r"within 2 %|\d+ M?bit/s|\d+ [MG]bit/s|80 ms|fp32|H=\d+|h\d+-\d|dp-\d|exit code 1|L2|: 1 where|, 0 where"
    assert not re.findall(r"\d", re.sub(known, "", said)), re.sub(known, "", said)
    assert parsed.links == [] and "@import" not in text and "http-equiv" not in text
    assert not re.findall(r"url\((?!#)", text)
    assert said.count("predicted") >= 3 and "measured" in said and "H=5 loses" in said and "boom" in said
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))


def test_each_figure_is_a_picture_too(page: Path) -> None:
    names = {file.stem for file in (page / "figures").iterdir()}
    expected = "loss_over_tokens final_loss loss_above_baseline loss_over_bytes utilization wall_clock drift pseudo_gradient cosine"
    assert names == set(expected.split())
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in (page / "figures").iterdir())
    lines = (page / "curves.jsonl").read_text().splitlines()
    assert sum('"kind": "round"' in line for line in lines) == 2 * (20 + 4 + 1)


def test_report_of_several_runs_puts_them_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = html_report.pictures
    monkeypatch.setattr(html_report, "pictures", lambda study: drawn(study)[:1])  # all of them take seconds
    first, second = (write_run(tmp_path / name, sync_every=each, loss=loss) for name, each, loss in (("a", 5, 3.0), ("b", 20, 3.1)))
    assert cli.main(["report", str(first), str(second), "--out", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "settings.csv").open()))
    assert [row["setting"] for row in rows] == ["H=5", "H=20"]
    assert "H=20 ends" not in capsys.readouterr().out
    assert "H=5 ends at a held-out loss of" in (tmp_path / "out" / "report.html").read_text()
    assert cli.main(["report", str(first), str(tmp_path / "missing")]) == 2


def test_a_data_parallel_run_beside_a_swarm_is_called_just_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_report, "pictures", lambda study: [])
    runs = [write_run(tmp_path / "alone", outer=False), write_run(tmp_path / "swarm"), write_run(tmp_path / "rarer", sync_every=10)]
    folder = tmp_path / "out"
    write_comparison(runs[:2], folder)
    assert [row["setting"] for row in csv.DictReader((folder / "settings.csv").open())] == ["data-parallel", "swarm"]
    assert "unlike numbers of tokens" in (folder / "report.html").read_text()
    write_comparison(runs[1:], folder)
    assert "unlike numbers of tokens" not in (folder / "report.html").read_text()
    write_comparison(runs, folder)
    assert [row["setting"] for row in csv.DictReader((folder / "settings.csv").open())] == ["data-parallel", "H=5", "H=10"]


def test_report_of_one_run_makes_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_report, "pictures", lambda study: [])
    run = write_run(tmp_path / "one")
    before = {file.name for file in run.iterdir()}
    assert cli.main(["report", str(run)]) == 0
    assert {file.name for file in run.iterdir()} - before == {"summary.json", "report.png", "report.html"}
    assert "one ends at a held-out loss of" in (run / "report.html").read_text()
