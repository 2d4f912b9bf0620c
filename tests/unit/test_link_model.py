"""The link model against cases that can be worked out by hand."""

import subprocess
import sys
from dataclasses import replace

import pytest

from diloco.link_model import (
    CPU_BYTES_PER_SECOND,
    FIRST_WINDOW_BYTES,
    GOODPUT,
    MESSAGES_SECONDS,
    ROUND_TRIPS,
    SETTLING_ROUND_TRIPS,
    SETTLING_SHARE,
    Link,
    Pace,
    RoundLoad,
    data_parallel,
    parse_bandwidth,
    parse_time,
    predict,
    round_seconds,
    settling_seconds,
    slow_start_seconds,
)
from islands.config_file import ConfigError

LOAD = RoundLoad(islands=2, bytes_each_way=10e6, encode_seconds=0.1 - MESSAGES_SECONDS, decode_seconds=0.0, step_seconds=0.0)
LINK = Link(bits_per_second=100e6 / GOODPUT, rtt=0.0)  # 10 MB take 0.8 s


def pace(step: float = 0.1, sync_every: int = 20, fragments: int = 1, overlap: int = 0) -> Pace:
    return Pace(step, sync_every, fragments, overlap)


def test_bytes_take_their_time_on_the_line_and_latency_counts_once_for_each_message() -> None:
    assert round_seconds(LINK, LOAD) == pytest.approx(0.9)
    nothing = replace(LOAD, bytes_each_way=0)
    assert round_seconds(replace(LINK, rtt=0.2), nothing) == pytest.approx(0.1 + 0.2 * 2)
    assert round_seconds(replace(LINK, rtt=0.2), replace(nothing, islands=3)) == pytest.approx(0.1 + 0.2 * 2.5), "and means come back"


def test_decoding_runs_beside_the_transfer_but_for_one_chunk() -> None:
    heavy = replace(LOAD, decode_seconds=0.3, step_seconds=0.1)
    assert round_seconds(LINK, replace(heavy, chunks=1)) == pytest.approx(0.1 + 0.8 + 0.4)
    assert round_seconds(LINK, replace(heavy, chunks=4)) == pytest.approx(0.1 + 0.8 + 0.1)
    assert round_seconds(LINK, replace(heavy, decode_seconds=3.9, chunks=4)) == pytest.approx(0.1 + 4.0 + 0.2)


def test_a_lone_island_uses_no_link() -> None:
    alone = replace(LOAD, islands=1, encode_seconds=0.1, decode_seconds=0.2, step_seconds=0.3)
    assert round_seconds(replace(LINK, rtt=9.0), alone) == pytest.approx(0.6)


def test_windows_double_until_the_line_is_full_and_connections_begin_together() -> None:
    long = Link(bits_per_second=1e12, rtt=1.0)  # bound by the windows alone
    for windows, idle in ((1, 0), (3, 1), (7, 2), (7.5, 3)):
        assert slow_start_seconds(long, windows * FIRST_WINDOW_BYTES) == pytest.approx(idle, abs=1e-2)
    eight = replace(long, connections=8)
    assert slow_start_seconds(eight, 8 * 3 * FIRST_WINDOW_BYTES) == pytest.approx(1, abs=1e-2)
    assert slow_start_seconds(replace(long, rtt=0.0), 1e9) == 0


def test_a_round_over_few_chunks_uses_few_connections() -> None:
    long = Link(bits_per_second=1e12, rtt=1.0, connections=8)
    six = replace(LOAD, bytes_each_way=6 * FIRST_WINDOW_BYTES)
    one_chunk, many = (round_seconds(long, replace(six, chunks=chunks)) for chunks in (1, 100))
    assert one_chunk == pytest.approx(0.1 + ROUND_TRIPS + 2, abs=0.01) and many == pytest.approx(0.1 + ROUND_TRIPS, abs=0.01)


def test_congestion_control_settles_within_so_many_round_trips() -> None:
    short, long = (settling_seconds(replace(LINK, rtt=rtt), 10e6) for rtt in (0.01, 10.0))
    assert short == pytest.approx(SETTLING_SHARE * SETTLING_ROUND_TRIPS * 0.01)
    assert long == pytest.approx(SETTLING_SHARE * 0.8)


def test_connections_that_were_silent_for_a_moment_keep_some_of_their_window() -> None:
    long, size = Link(bits_per_second=1e12, rtt=1.0), 8 * FIRST_WINDOW_BYTES
    waits = [slow_start_seconds(long, size, idle) for idle in (0.5, 1.5, 3.0, 1e9)]
    assert waits == pytest.approx([0, 1, 2, 3], abs=0.01)
    assert settling_seconds(long, size, idle=1.1) == 0 < settling_seconds(long, size, idle=1.3)


def test_between_rounds_that_nothing_overlaps_the_line_is_idle_while_steps_are_computed() -> None:
    long = replace(LINK, rtt=0.2)
    warm, cold = (round_seconds(long, LOAD, idle) for idle in (0.0, 1e9))
    assert predict(long, LOAD, pace(step=10.0)).round_seconds == pytest.approx(cold)
    crowded = predict(long, LOAD, pace(step=0.02, fragments=10, overlap=20))
    assert crowded.round_seconds == pytest.approx(warm) and warm < cold


def test_training_waits_for_a_whole_round_where_nothing_overlaps() -> None:
    found = predict(LINK, LOAD, pace())
    assert found.stall_seconds == pytest.approx(0.9)
    assert found.utilization == pytest.approx(2.0 / 2.9)
    assert found.seconds_per_step == pytest.approx(2.9 / 20)


def test_overlap_hides_a_round_and_no_more_than_it_has_steps() -> None:
    assert predict(LINK, LOAD, pace(overlap=10)).utilization == 1.0
    assert predict(LINK, LOAD, pace(overlap=4)).stall_seconds == pytest.approx(0.5)


def test_rounds_in_flight_at_once_give_each_other_time_and_share_the_line() -> None:
    slow = replace(LOAD, encode_seconds=1.0 - MESSAGES_SECONDS)  # 1.8 s, of which the line is busy 0.8
    several = predict(LINK, slow, pace(fragments=2, overlap=15))  # a round every 10 steps, two landings in 15
    assert several.stall_seconds == pytest.approx((1.8 - 1.5) / 2)
    crowded = predict(LINK, slow, pace(fragments=10, overlap=20))  # a round every 0.2 s on a line that is busy for 0.8
    assert crowded.stall_seconds == pytest.approx(0.6) and crowded.utilization == pytest.approx(0.25)


def test_copies_stop_training_whatever_overlaps() -> None:
    assert predict(LINK, replace(LOAD, copy_seconds=0.5), pace(overlap=20)).stall_seconds == pytest.approx(0.5)


def test_data_parallel_reduces_at_every_step_behind_the_backward_pass() -> None:
    found = data_parallel(LINK, islands=4, gradient_bytes=10e6, inner_step_seconds=0.3)
    assert found.round_seconds == pytest.approx(0.8 * 1.5)
    assert found.stall_seconds == pytest.approx(1.0) and found.utilization == pytest.approx(0.3 / 1.3)
    assert data_parallel(LINK, 1, 10e6, 0.3).utilization == 1.0


def test_only_daemons_encrypt_and_pass_messages() -> None:
    rates = (1e9, 10e9, 100e9)
    reduced = [data_parallel(Link(rate, rtt=0.0), 4, 400e6, 1.0).round_seconds for rate in rates]
    assert reduced == pytest.approx([600e6 * 8 / rate / GOODPUT for rate in rates])
    fast = Link(100e9, rtt=0.0)
    assert round_seconds(fast, LOAD) == pytest.approx(0.1 + 10e6 / CPU_BYTES_PER_SECOND)
    assert round_seconds(replace(fast, daemons=False), LOAD) == pytest.approx(0.1 - MESSAGES_SECONDS + 80e6 / 100e9 / GOODPUT)


def test_numbers_have_units() -> None:
    assert parse_bandwidth("200mbit") == 200e6 and parse_bandwidth("1.5 Gbit") == 1.5e9
    assert parse_time("80ms") == pytest.approx(0.08) and parse_time("2s") == 2.0 and parse_time("0ms") == 0
    for wrong in ("200", "mbit", "0mbit", "-3mbit", "80ms", ""):
        with pytest.raises(ConfigError, match="is no bandwidth; write a number above 0 and kbit, mbit or gbit"):
            parse_bandwidth(wrong)
    with pytest.raises(ConfigError, match="'80' is no time"):
        parse_time("80")


def test_it_needs_no_torch() -> None:
    check = "import diloco.link_model, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0
