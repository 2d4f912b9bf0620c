"""How far an island is, as a person who watches reads it."""

import json
from pathlib import Path

from diloco.live_view import IslandProgress, progress_line
from diloco.run_files import RowTail


def step(number: int, time: float, lr_step: int | None = None) -> dict[str, object]:
    return dict(kind="step", step=number, lr_step=lr_step or number, time=time, loss=3.0, tokens_per_second=8.0)


def event(what: str, detail: object = "") -> dict[str, object]:
    return dict(kind="event", what=what, detail=detail)


def test_time_left_follows_the_pace_over_steps_that_an_island_did_not_do() -> None:
    island = IslandProgress(0, steps=100)
    for row in (step(11, 0.0), step(12, 1.0), step(60, 49.0)):  # it stood still, and went on where the others were
        island.apply(row)
    assert island.seconds_left() == 40.0 and progress_line(island).startswith("training 60/100 ")


def test_an_island_whose_steps_went_back_has_no_time_left_yet() -> None:
    island = IslandProgress(0, steps=100)
    for row in (step(11, 0.0), step(5, 1.0)):
        island.apply(row)
    assert island.seconds_left() is None and "left" not in progress_line(island)


def test_an_island_that_begins_again_has_a_pace_of_its_own() -> None:
    island = IslandProgress(0, steps=100)
    for row in (step(1, 0.0), step(40, 39.0)):
        island.apply(row)
    assert island.apply(event("start")) is None and "begun" not in progress_line(island)
    assert island.apply(event("start")) is None and "begun again 1x" in progress_line(island)
    assert island.state == "joining" and island.seconds_left() is None
    for row in (step(41, 1000.0), step(51, 1020.0)):
        island.apply(row)
    assert island.seconds_left() == 2.0 * 49


def test_checkpoints_are_shown_and_those_that_failed_are_told() -> None:
    island = IslandProgress(0, steps=100)
    assert island.apply(event("checkpoint", dict(step=40, folder="runs/x"))) is None
    assert progress_line(island).endswith("saved at 40")
    assert island.apply(event("checkpoint_failed", "step 50: disk full")) == "checkpoint_failed: step 50: disk full"
    assert island.apply(event("resumed", dict(step=40, changes=[]))) == "goes on from the checkpoint of step 40"
    island.apply(event("stopped", "on request"))
    assert island.state == "stopped" and not island.finished
    island.apply(event("end"))
    assert island.state == "done" and island.finished


def test_where_steps_say_little_the_share_of_the_run_counts() -> None:
    island = IslandProgress(0, steps=100)
    island.apply(step(250, 0.0, lr_step=70))
    assert island.step == 70


def test_rows_of_the_process_that_took_over_are_read_from_their_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step(number, 0.0)) + "\n" for number in (1, 2, 3)))
    tail = RowTail(path)
    assert len(tail.read()) == 3
    path.rename(tmp_path / "metrics.1.jsonl")
    path.write_text(json.dumps(step(4, 0.0)) + "\n")
    assert [row["step"] for row in tail.read()] == [4]
    assert tail.read() == []
