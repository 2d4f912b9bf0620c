"""What a plan predicts before anything runs: bytes against the real thing, settings against the target, the page against its width."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small import small_config

from diloco import cli
from diloco.config import RunConfig
from diloco.from_config import make_layout
from diloco.link_model import Link
from diloco.outer_state import OuterState
from diloco.planner import Planner, Setting
from diloco.planner_answer import Question, answer
from diloco.planner_choices import CODECS, choices
from diloco.planner_costs import measure_costs
from diloco.planner_page import print_page
from diloco.planner_probe import probe_rtt, probe_step_seconds
from diloco.reduction import CHUNK
from diloco.round_bytes import round_bytes
from islands.config_file import ConfigError

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
INTERNET = QUICKSTART.with_name("internet.yaml")
SLOW_LINK = Link(bits_per_second=2e6, rtt=0.05)


def planner(islands: int = 2, **sections: Any) -> Planner:
    swarm = {"islands": islands, "max_slots": 16}
    return Planner(small_config(**{"train": {"precision": "fp32"}, **sections, "swarm": swarm}), ranks=1)


def question(**changes: Any) -> Question:
    return Question(**{**dict(bits_per_second=2e6, rtt=0.05, rtt_from="x", step_seconds=0.1, step_from="y", target=0.9), **changes})


# Bytes.


@pytest.mark.parametrize(
    "outer", [{}, {"fragments": 2, "overlap": "eager"}, {"codec": {"type": "topk"}}, {"optimizer": {"type": "adam"}}]
)
def test_host_bytes_are_those_of_the_shared_memory_that_the_trainer_makes(outer: dict[str, Any]) -> None:
    found = planner(outer=outer)
    layout = make_layout(found.config, found.sizes(found.config.outer.fragments))
    really = sum(memory.num_bytes for memory in OuterState(layout)._memory)
    assert 0 <= really - found.outer().shared_memory < 0.05 * really  # positions, digests and padding of a tiny model


def test_bytes_of_a_round_by_hand() -> None:
    none, int4 = planner().wire("none"), planner().wire("int4")
    numel = 12 * CHUNK
    assert round_bytes(none, numel, 2).each_way == 4 * numel  # whole, to one other
    assert round_bytes(int4, numel, 2).sent == numel * 4.25 / 8
    shares = round_bytes(int4, numel, 4)  # a quarter stays, and as much of the mean goes to each of three
    assert shares.sent == shares.each_way == pytest.approx(3 / 4 * numel * (4.25 + 8.125) / 8)
    assert shares.chunks == 12
    assert round_bytes(none, numel, 1).sent == 0


def test_few_chunks_keep_some_members_busier_than_others() -> None:
    found = round_bytes(planner().wire("none"), CHUNK, 4)  # one member reduces all: three send it, then it sends to three
    assert found.each_way == 3 * 4 * CHUNK + 3 * 4 * CHUNK
    assert found.sent == pytest.approx((3 * 4 * CHUNK + 3 * 4 * CHUNK) / 4)


def test_traffic_counts_every_fragment_once_in_a_period() -> None:
    found = planner(outer={"sync_every": 10, "fragments": 2, "codec": {"type": "int4"}})
    traffic = found.traffic(found.setting(1.0))
    assert traffic.bytes_per_step * 10 == pytest.approx(2 * traffic.round_bytes) == pytest.approx(found.numel * 4.25 / 8)
    assert traffic.data_parallel_bytes == 4 * found.numel


def test_islands_of_one_job_hold_and_send_shards() -> None:
    config = small_config(
        exchange={"type": "process_group"}, swarm={"islands": 2}, train={"precision": "fp32"}, parallel={"data_parallel_size": 2}
    )
    sharded = Planner(config, ranks=2)
    outer, traffic = sharded.outer(), sharded.traffic(sharded.setting(1.0))
    assert outer.anchor == outer.optimizer == 4 * sharded.numel // 2
    assert traffic.round_bytes == 4 * sharded.numel  # a ring of two islands: what each has, once
    section = config.parallel.model_copy(update={"data_parallel_strategy": "ddp"})
    copied = Planner(config.model_copy(update={"parallel": section}), ranks=2)
    assert copied.traffic(copied.setting(1.0)).round_bytes == 2 * traffic.round_bytes
    assert all(choice.setting.codec in ("none", "bf16", "int8") for choice in choices(sharded, SLOW_LINK, 0.1, 0.5))


# Time.


def job(islands: int = 4, ranks: int = 1, **outer: Any) -> Planner:
    """Of islands that are one job."""
    sections = {"exchange": {"type": "process_group"}, "swarm": {"islands": islands}, "train": {"precision": "fp32"}}
    plain = {"optimizer": {"lr": 1.0, "momentum": 0.0}, **outer}
    return Planner(small_config(**sections, outer=plain, parallel={"data_parallel_strategy": "ddp"}), ranks)


def test_rounds_of_one_job_are_as_fast_as_the_link() -> None:
    found = job(sync_every=10)
    seconds = [found.predict(found.setting(1.0), Link(rate, 0.0), 1.0).round_seconds for rate in (1e9, 10e9, 100e9)]
    assert seconds[0] == pytest.approx(10 * seconds[1]) == pytest.approx(100 * seconds[2])


def test_one_job_that_syncs_at_every_step_is_planned_as_data_parallel_training(capsys: pytest.CaptureFixture[str]) -> None:
    found = job(ranks=2, sync_every=1)
    setting = found.setting(1.0)
    traffic = found.traffic(setting)
    assert found.outer().total == 0  # there is no anchor
    assert traffic.round_bytes == traffic.bytes_per_step == traffic.data_parallel_bytes
    told = answer(found, question(bits_per_second=None))
    assert all(each["utilization"] == each["data_parallel_utilization"] < 1 for each in told["predictions"])
    print_page(told, Console(width=120))
    assert "outer state, a rank  none" in capsys.readouterr().out


def test_costs_are_measured_and_means_cost_only_where_they_are_sent_on() -> None:
    found = planner()
    layout = make_layout(found.config, (CHUNK,))
    whole, shares = (measure_costs(found.wire("int4"), layout, islands) for islands in (2, 4))
    assert min(whole.encode, whole.reduce, whole.step, whole.copy) > 0
    assert whole.encode_mean == whole.decode_mean == 0 < shares.decode_mean
    assert shares.decode_seconds(8 * CHUNK, 4) == pytest.approx(2 * (shares.reduce + shares.encode_mean) + 8 * shares.decode_mean)


def test_periods_in_seconds_and_eager_overlap_become_steps() -> None:
    assert planner(outer={"sync_every": "90s", "fragments": 2}).setting(0.5) == Setting(180, "none", 2, 0)
    assert planner(outer={"sync_every": "1s", "fragments": 2}).setting(5.0).sync_every == 2
    assert planner(outer={"sync_every": 30, "overlap": "eager"}).setting(0.5).overlap == 30


def test_a_step_takes_its_operations_over_all_ranks_and_the_bubble() -> None:
    config = small_config(parallel={"pipeline_parallel_size": 2}, train={"micro_batch_size": 2, "precision": "fp32"})
    one, two = planner(), Planner(config, ranks=2)
    assert two.bubble() == pytest.approx(1 / 5)
    assert one.step_seconds_at(1e9) / two.step_seconds_at(1e9) == pytest.approx(2 * 4 / 5)


# Choices.


def test_every_choice_reaches_the_target_and_none_is_no_worse_in_everything() -> None:
    found = planner()
    best = choices(found, SLOW_LINK, 0.1, 0.9)
    assert best and all(choice.prediction.utilization >= 0.9 for choice in best)
    assert [choice.harm for choice in best] == sorted(choice.harm for choice in best)
    order = list(CODECS)
    ranks = [(c.setting.sync_every, order.index(c.setting.codec), c.setting.overlap, c.setting.fragments) for c in best]
    for one in ranks:
        assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in ranks)


def test_a_slower_link_asks_for_more() -> None:
    fast, slow = (choices(planner(), Link(rate, 0.05), 0.1, 0.9)[0].harm for rate in (1e9, 1e6))
    assert fast < slow


def test_a_link_that_nothing_helps_has_no_choice() -> None:
    assert choices(planner(), Link(1.0, 100.0), 1e-6, 0.99) == []


def test_what_is_chosen_the_configuration_takes() -> None:
    found = planner(outer={"overlap": 2, "merge_alpha": 0.5})
    assert found.is_valid(Setting(10, "int4", 2, 0))
    assert not found.is_valid(Setting(10, "int4", 1, 20))
    for choice in choices(found, SLOW_LINK, 0.1, 0.9):
        RunConfig.model_validate({**found.config.model_dump(), "outer": {**choice.setting.keys}})


def test_where_the_shortest_period_is_refused_the_next_one_is_offered() -> None:
    nesterov = job(optimizer={"lr": 0.7, "momentum": 0.9})
    best = choices(nesterov, Link(100e9, 0.0), 1.0, 0.9)
    assert not nesterov.is_valid(Setting(1, "none", 1, 0)) and best[0].setting == Setting(2, "none", 1, 0)


# The answer, the page and the command.


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("open_ends", [{}, {"bits_per_second": None}, {"step_seconds": None}])
def test_the_page_fits_the_terminal(width: int, open_ends: dict[str, None], capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(planner(outer={"fragments": 2, "overlap": 3}), question(**open_ends))
    print_page(found, Console(width=width))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= width and "…" not in printed
    assert ("to paste" in printed) == (not open_ends)


def test_an_answer_has_one_prediction_for_each_open_combination() -> None:
    found = answer(planner(), question(bits_per_second=None, step_seconds=None))
    pairs = {(each["bits_per_second"], each["inner_step_seconds"]) for each in found["predictions"]}
    assert len(pairs) == len(found["predictions"]) == 25 and found["choices"] is None
    assert found["traffic"]["bytes_per_hour"] is None


def test_one_island_has_nobody_to_exchange_with(capsys: pytest.CaptureFixture[str]) -> None:
    print_page(answer(planner(islands=1), question()), Console(width=80))
    assert "One island has nobody to exchange with" in capsys.readouterr().out


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--bandwidth", "20mbit", "--rtt", "80ms", "--islands", "3", "--ranks", "4", "--step-seconds", "0.5", "--json"]
    assert cli.main(["plan", str(QUICKSTART), *given, "data.paths=[nowhere/*.txt]", "data.type=text"]) == 0  # needs no data
    found = json.loads(capsys.readouterr().out)
    assert (found["islands"], found["ranks"], found["parameters"]) == (3, 4, 1049984)
    [told] = found["predictions"]
    assert told["bits_per_second"] == 20e6 and told["rtt"] == pytest.approx(0.08) and 0 < told["utilization"] <= 1
    assert all(choice["utilization"] >= 0.95 for choice in found["choices"])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--bandwidth", "200"], "'200' is no bandwidth"),
        (["--rtt", "80"], "'80' is no time"),
        (["--target", "2"], "--target=2.0 should be a share"),
        (["--step-seconds", "-1"], "--step-seconds=-1.0 should be seconds above 0"),
        (["--flops-per-second", "0"], "--flops-per-second=0.0 should be"),
        (["--ranks", "0"], "--ranks=0 should be a whole number from 1"),
        (["--islands", "9"], "swarm.islands=9 is more than swarm.max_slots=8"),
        (["--ranks", "5"], "64 sequences don't divide among 5"),
        (["outer.fragments=99"], "outer.fragments=99 asks for 99 fragments of blocks"),
    ],
)
def test_what_can_not_be_planned_is_refused(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(INTERNET), *arguments]) == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.out == ""


def test_the_way_to_a_member_is_measured_and_one_that_nobody_reaches_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert 0 < probe_rtt([f"/ip4/127.0.0.1/tcp/{port}/p2p/Qm"]) < 1
    with pytest.raises(ConfigError, match="no island of swarm.initial_peers can be reached; give --rtt"):
        probe_rtt([f"/ip4/127.0.0.1/tcp/{port}/p2p/Qm"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_step_is_measured_by_doing_some() -> None:
    assert 0 < probe_step_seconds(QUICKSTART, ["train.global_batch_size=2", "run.device=cpu"], ranks=2) < 30
    with pytest.raises(ConfigError, match="could not be done on this machine(.|\n)*train.stepz: unknown key"):
        probe_step_seconds(QUICKSTART, ["train.stepz=2"], ranks=1)
