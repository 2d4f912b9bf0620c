"""What the report says was lost, on rows written by hand: restarts, rounds without an island, samples that count twice."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diloco.report import print_summary, summarize, write_report
from diloco.report_figure import _positions
from diloco.run_record import read_run

Rows = list[dict[str, Any]]

#: Each inner step takes 10 s, 8 sequences and 64 tokens.
BATCH, TOKENS, SECONDS = 8, 64, 10.0


class Process:
    """Writes the rows of one process of an island."""

    def __init__(self, slot: int, began: float = 100.0, step: int = 0, position: int = 0, continues: bool = False) -> None:
        self.slot, self.time, self.step, self.position = slot, began, step, position
        detail = dict(parameters=1000, global_batch_size=BATCH, continues=continues)
        self.rows: Rows = []
        self.write("event", what="start", detail=detail)
        if step == 0:
            self.write("eval", step=0, loss=5.0)

    def write(self, kind: str, **values: Any) -> "Process":
        self.rows.append(dict(kind=kind, island=self.slot, time=self.time, **values))
        return self

    def train(self, steps: int = 1, stall: float = 0.0) -> "Process":
        """Inner steps, of which the last one waits."""
        for number in range(steps):
            self.step, self.position, self.time = self.step + 1, self.position + BATCH, self.time + SECONDS
            place = dict(step=self.step, lr_step=self.step, slot=self.slot, position=self.position)
            waited = stall if number == steps - 1 else 0.0
            rates = dict(tokens_per_second=6.4 + self.slot, step_seconds=SECONDS - waited, stall_seconds=waited)
            self.write("step", loss=5.0 - self.step / 10, tokens=TOKENS, **place, **rates)
        return self

    def round(self, number: int, start: int, outcome: str = "committed", fragment: int = 0, **values: Any) -> "Process":
        """A round on the sequences from ``start`` to where the island is."""
        work = dict(step=self.step, slot=self.slot, start=start, position=self.position, weight=TOKENS)
        counted = self.position if outcome == "committed" else start
        digest = "" if outcome == "skipped" else f"{fragment} {number}"
        row = dict(round=number, fragment=fragment, outcome=outcome, digest=digest, counted=counted, reason="", bytes_sent=500)
        return self.write("round", **{**work, **row, **values})

    def checkpoint(self) -> "Process":
        """One of this step, for which training stood still half a second."""
        return self.write("event", what="checkpoint", detail=dict(step=self.step, folder="", bytes=1, stall_seconds=0.5, write_seconds=2.0))

    def resumed(self) -> "Process":
        """It goes on from a checkpoint of this step."""
        return self.write("event", what="resumed", detail=dict(step=self.step, folder="", changes=[]))

    def end(self) -> Rows:
        """The rows of an island that came to its end."""
        self.write("eval", step=self.step, loss=4.0)
        return self.write("event", what="end", detail="").rows


def write(run: Path, *islands: list[Rows]) -> Path:
    """Files of each island, one for each of its processes."""
    for island, processes in enumerate(islands):
        folder = run / f"island-{island}"
        folder.mkdir(parents=True)
        names = [*(f"metrics.{number}.jsonl" for number in range(1, len(processes))), "metrics.jsonl"]
        for name, rows in zip(names, processes, strict=True):
            (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run


def samples(run: Path) -> tuple[int | None, int | None, int | None]:
    summary = summarize(run)
    return summary["samples_trained"], summary["samples_lost"], summary["samples_repeated"]


def printed(run: Path) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_summary(run, write_report(run), console)
    return console.file.getvalue()


def undisturbed(slot: int) -> Rows:
    return Process(slot).train(2).round(1, 0).train(2).round(2, 16).end()


def restarted(slot: int = 1) -> list[Rows]:
    """Killed two steps after its first round; what it did in them is done again by the process that takes its place."""
    first = Process(slot).train(2).round(1, 0, waiting_seconds=1.0).train(2)
    second = Process(slot, began=1000.0, step=2, position=16, continues=True)
    return [first.rows, second.train(2, stall=2.5).round(2, 16, waiting_seconds=0.5, recovering_seconds=2.0).end()]


def test_an_undisturbed_run_lost_nothing(tmp_path: Path) -> None:
    run = write(tmp_path, [undisturbed(0)], [undisturbed(1)])
    assert samples(run) == (64, 0, 0)
    assert summarize(run)["seconds_lost"]["by_island"]["1"] == dict(waiting=0, transferring=0, recovering=0, skipped=0)
    told = printed(run)
    assert "data       64 samples trained, 0 lost, 0 repeated" in told and "time lost" not in told


def test_the_files_of_a_restarted_island_are_one_record(tmp_path: Path) -> None:
    run = write(tmp_path, [undisturbed(0)], restarted())
    summary = summarize(run)
    assert summary["tokens"] == 8 * TOKENS
    assert samples(run) == (64, 16, 0)  # the two steps before it was killed
    assert summary["steps_lost_to_crashes"] == 2
    assert (summary["rounds_committed"], summary["digests_agree"]) == (2, True)
    assert summary["data_parallel_bytes"] == 8 * 2 * 4 * 1000 // 2
    assert summary["bytes_sent"] == 4 * 500
    assert summary["eval_loss_start"] == 5.0 and summary["eval_loss"] == 4.0
    waits = 1 - 2.5 / (30.0 + 10.0)  # after the first step of each process; while it was down nobody waited
    assert summary["compute_utilization"] == pytest.approx((1.0 + waits) / 2)
    assert summary["wall_seconds"] == pytest.approx(40.0 + 20.0)  # not the time until somebody started it again
    assert "64 samples trained, 16 lost, 0 repeated" in printed(run)
    assert "checkpoints  2 steps lost to crashes" in printed(run)
    assert "island 1 has not come" not in printed(run)


def swarm_stopped_and_gone_on(slot: int) -> list[Rows]:
    """Killed a step after the checkpoint of step 3, with round 2 after it; the second process stops, the third ends."""
    first = Process(slot).train(2).round(1, 0).train(1).checkpoint().train(1).round(2, 16)
    second = Process(slot, began=1000.0, step=3, position=24, continues=True).resumed()
    second.train(1).round(2, 16).write("event", what="checkpoint_failed", detail="step 4: no space left").checkpoint()
    third = Process(slot, began=2000.0, step=4, position=32, continues=True).resumed()
    return [first.rows, second.write("event", what="stopped", detail="").rows, third.train(2).round(3, 32).end()]


def test_a_swarm_that_went_on_from_checkpoints_is_one_run(tmp_path: Path) -> None:
    run = write(tmp_path, *[swarm_stopped_and_gone_on(slot) for slot in (0, 1)])
    summary = summarize(run)
    assert summary["tokens"] == 2 * 6 * TOKENS
    assert samples(run) == (2 * 6 * BATCH, 2 * BATCH, 0)  # round 2 was done twice, and holds its samples once
    assert (summary["rounds_committed"], summary["steps_lost_to_crashes"], summary["digests_agree"]) == (3, 2, True)
    assert summary["checkpoints"] == dict(written=4, failed=2, skipped=0, resumes=4, stall_seconds=1.0)
    told = "4 written, for which training stood still 1.00 s,  2 FAILED , resumed 4 times, 2 steps lost to crashes"
    assert told in printed(run)


def test_what_a_crash_threw_away_is_in_no_curve(tmp_path: Path) -> None:
    first = Process(0).train(1).checkpoint().train(3).write("eval", step=4, loss=9.0).train(1)
    second = Process(0, began=1000.0, step=1, position=BATCH, continues=True).train(2)
    (record,) = read_run(write(tmp_path, [first.rows, second.rows]))
    assert [row["step"] for row in record.steps] == [1, 2, 3] and record.num_lost_steps == 4
    assert [row["loss"] for row in record.evals] == [5.0]
    assert summarize(tmp_path)["final_loss"] == second.rows[-1]["loss"]


def test_processes_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    places = [dict(began=100.0 + number, step=number, position=number * BATCH, continues=number > 0) for number in range(12)]
    processes = [Process(0, **place).train().rows for place in places]
    (record,) = read_run(write(tmp_path, processes))
    assert [row["step"] for row in record.steps] == list(range(1, 13))


def test_files_of_an_earlier_run_are_not_of_this_one(tmp_path: Path) -> None:
    later = Process(0, began=9000.0).train(2).round(1, 0).end()
    run = write(tmp_path, [undisturbed(0), later, Process(0, 9500.0, 2, 16, continues=True).train().rows])
    assert summarize(run)["tokens"] == 3 * TOKENS
    assert samples(run) == (24, 8, 0)


def test_seconds_are_summed_for_each_island_and_averaged_over_islands(tmp_path: Path) -> None:
    other = Process(0).train(2).round(1, 0, transfer_seconds=3.0).train(1)
    other.round(1, 16, "skipped", stall_seconds=20.0, waiting_seconds=19.0)  # all of it was for nothing
    run = write(tmp_path, [other.train(1).round(2, 16).end()], restarted())
    lost = summarize(run)["seconds_lost"]
    assert lost["by_island"] == {
        "0": dict(waiting=0.0, transferring=3.0, recovering=0.0, skipped=20.0),
        "1": dict(waiting=1.5, transferring=0.0, recovering=2.0, skipped=0.0),
    }
    assert {cause: lost[cause] for cause in ("waiting", "transferring", "recovering", "skipped")} == dict(
        waiting=0.75, transferring=1.5, recovering=1.0, skipped=10.0
    )
    told = "0.8 s waiting for others, 1.5 s transferring, 1.0 s recovering, 10.0 s in skipped rounds (mean of the islands)"
    assert told in printed(run)


def test_a_round_beside_the_training_costs_only_what_was_felt(tmp_path: Path) -> None:
    times = dict(exchange_seconds=20.0, waiting_seconds=12.0, transfer_seconds=8.0, stall_seconds=2.0)
    island = Process(0).train().round(1, 0, **times).train().end()
    lost = summarize(write(tmp_path, [island]))["seconds_lost"]
    assert {cause: lost[cause] for cause in ("waiting", "transferring")} == pytest.approx(dict(waiting=1.2, transferring=0.8))


def test_carried_work_is_not_lost_and_dropped_work_is(tmp_path: Path) -> None:
    carried = Process(0).train(2).round(1, 0, "left_out").train(2).round(2, 0).end()
    dropped = Process(1).train(2).round(1, 0, "left_out").train(2).round(2, 16).end()
    assert samples(write(tmp_path / "carried", [carried])) == (32, 0, 0)
    assert samples(write(tmp_path / "dropped", [dropped])) == (32, 16, 0)


def test_work_of_a_round_that_was_heard_of_later_is_not_lost(tmp_path: Path) -> None:
    rows = Process(0).train(2).round(1, 0, "left_out", counted=16).train(2).round(2, 16).end()
    assert samples(write(tmp_path, [rows])) == (32, 0, 0)


def test_samples_that_count_twice_are_told_loudly(tmp_path: Path) -> None:
    first, second = restarted()
    second = [row | dict(start=8) if row["kind"] == "round" else row for row in second]
    run = write(tmp_path, [undisturbed(0)], [first, second])
    assert summarize(run)["samples_repeated"] == 8
    assert "8 REPEATED: the same samples counted twice" in printed(run)


def test_slots_and_fragments_are_counted_apart(tmp_path: Path) -> None:
    both = Process(0).train(2).round(1, 0, fragment=0).round(1, 0, fragment=1).train(2).round(2, 16, fragment=0)
    run = write(tmp_path, [both.end()], [undisturbed(1)])
    assert samples(run) == (64, 48, 0)  # fragment 1 counted two steps of one island


def test_rounds_committed_apart_and_given_up_do_not_count(tmp_path: Path) -> None:
    """A partition: island 1 commits rounds 2 and 3 alone, then takes over the state of the others."""
    main = undisturbed(0)
    apart = Process(1).train(2).round(1, 0).train(1).round(2, 16, digest="apart").train(1).round(3, 24, digest="apart, too")
    apart.train(1).round(5, 32, "left_out", counted=16).train(1).round(6, 32)
    run = write(tmp_path, [main], [apart.end()])
    summary = summarize(run)
    assert summary["digests_agree"] is True
    assert samples(run) == (32 + 48, 16, 0)
    assert summary["rounds_committed"] == 3  # 1 and 2 by both, and 6


def test_without_rounds_or_batch_size_it_is_unknown(tmp_path: Path) -> None:
    alone = write(tmp_path / "alone", [Process(0).train(3).end()])
    assert samples(alone) == (24, None, None)
    old = undisturbed(0)
    del old[0]["detail"]["global_batch_size"]
    assert samples(write(tmp_path / "old", [old])) == (None, None, 0)
    assert "samples trained" not in printed(alone) + printed(tmp_path / "old")


def test_unlike_islands_that_came_to_the_end_count_alike(tmp_path: Path) -> None:
    slow = Process(1).train(1).round(1, 0).train(1).round(2, 8).write("eval", step=2, loss=3.0)
    run = write(tmp_path, [undisturbed(0)], [slow.write("event", what="end", detail="").rows])
    assert summarize(run)["eval_loss"] == (4.0 + 3.0) / 2


def test_the_picture_has_each_row_at_its_time_of_the_run() -> None:
    late = Process(2, step=30, position=80, continues=True).train(2)
    jump = late.round(4, 80).train(1).write("eval", step=90, loss=1.0)
    jump.step = 90
    rows = jump.train(1).round(5, 104).rows
    places = _positions(rows)
    found = [(row["kind"], places[id(row)] // TOKENS) for row in rows]
    assert found == [
        ("event", 0), ("step", 31), ("step", 32), ("round", 33), ("step", 33), ("eval", 33), ("step", 91), ("round", 91)
    ]  # fmt: skip
