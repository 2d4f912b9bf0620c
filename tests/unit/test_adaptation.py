"""Which codec and period hold a target utilization, as all members reckon it."""

import pytest
from small import small_config

from diloco.adaptation import Adaptation, Pace
from diloco.from_config import make_adaptation, make_wire
from diloco.ledger import Counted, Ledger
from islands.config_file import ConfigError

#: none, int8, int4 at 20 steps; then int4 at 30, 45, 67, 100.
LADDER = Adaptation(target=0.9, shortest=20, longest=100, bits=(32.0, 8.0, 4.0))


def paces(*round_seconds: float, step: float = 1.0, free: float = 0.0) -> list[Pace]:
    return [Pace(step, seconds, free) for seconds in round_seconds]


def test_the_ladder_goes_from_rich_codecs_to_long_periods() -> None:
    rungs = [(LADDER.period(rung), LADDER.codec(rung)) for rung in range(LADDER.rungs)]
    assert rungs == [(20, 0), (20, 1), (20, 2), (30, 2), (45, 2), (67, 2), (100, 2)]


@pytest.mark.parametrize(
    ("round_seconds", "rung"),
    # of 20 s, waiting may take 2.22 s; int8 takes a quarter of the time, int4 an eighth
    [(2.2, 0), (2.3, 1), (8.8, 1), (9.0, 2), (17.7, 2), (18.0, 3), (26.6, 3), (27.0, 4), (1e6, 6)],
)
def test_it_takes_the_first_rung_that_holds_the_target(round_seconds: float, rung: int) -> None:
    assert LADDER.after(0, paces(round_seconds, round_seconds)) == rung


def test_what_is_hidden_beside_the_training_costs_nothing() -> None:
    assert LADDER.after(0, paces(10.0, free=10.0)) == 0
    assert LADDER.after(0, paces(12.0, free=10.0)) == 0
    assert LADDER.after(0, paces(13.0, free=10.0)) == 1


def test_it_counts_the_mean_of_the_members() -> None:
    assert LADDER.after(0, paces(4.0, 0.1)) == 0  # 0.83 and 0.995
    assert LADDER.after(0, paces(6.0, 0.1)) == 1


def test_it_goes_back_one_rung_at_a_time_and_with_room_to_spare() -> None:
    assert LADDER.after(6, paces(0.1)) == 5
    assert LADDER.after(2, paces(0.5)) == 1
    assert LADDER.after(1, paces(0.53)) == 1  # as none 2.12 s of 22.12 s: 0.904, where 0.925 is asked for
    assert LADDER.after(1, paces(0.40)) == 0


def test_it_does_not_swing_where_nothing_changes() -> None:
    for seconds_as_none in (0.5, 2.0, 2.3, 5.0, 9.5, 30.0, 100.0):
        rung, seen = 0, []
        for _ in range(20):
            rung = LADDER.after(rung, paces(seconds_as_none * LADDER.bits[LADDER.codec(rung)] / 32))
            seen.append(rung)
        assert len(set(seen[8:])) == 1


@pytest.mark.parametrize("step", [5e-324, 1e-300, 1.0, 1e308])
@pytest.mark.parametrize("seconds", [5e-324, 1.0, 1e308])
@pytest.mark.parametrize("free", [0.0, 1e308])
def test_a_member_may_say_any_number(step: float, seconds: float, free: float) -> None:
    """It comes from the network, and all members reckon with it: one that raises an error ends their exchange processes."""
    several = Adaptation(target=0.9, shortest=1, longest=500, bits=(32.0, 0.3), fragments=4)
    for rung in range(several.rungs):
        assert 0 <= several.after(rung, [Pace(step, seconds, free), Pace(1.0, 1e-6)]) < several.rungs


def test_from_beyond_the_end_of_the_ladder_it_goes_on_at_its_end() -> None:
    """A run may go on from a checkpoint with fewer codecs, or a longest period that is shorter."""
    beyond = LADDER.rungs + 3
    assert (LADDER.period(beyond), LADDER.codec(beyond)) == (100, 2)
    assert LADDER.after(beyond, paces(1e6)) == LADDER.rungs - 1
    assert LADDER.after(beyond, paces(0.001)) == LADDER.rungs - 2


@pytest.mark.parametrize("unknown", [Pace(), Pace(1.0, 0.0), Pace(0.0, 1.0)])
def test_it_waits_until_all_have_measured(unknown: Pace) -> None:
    assert LADDER.after(3, [*paces(1e6), unknown]) == 3
    assert LADDER.after(3, []) == 3


def test_fragments_share_the_period() -> None:
    halves = Adaptation(0.9, 20, 100, (32.0, 8.0), fragments=2)
    assert halves.after(0, paces(1.0)) == 0 and halves.after(0, paces(1.2)) == 1


def test_the_ledger_carries_the_rung_to_all_members_and_newcomers() -> None:
    counted = [Counted(slot, 10, 10, 1, 1.0, Pace(1.0, 9.0, 0.0)) for slot in (0, 1)]
    ledger = Ledger((0, 0)).after(counted, LADDER)
    assert ledger.rung == 2 and Ledger.from_bytes(ledger.to_bytes()) == ledger
    assert Ledger((0, 0)).after(counted).rung == 0
    assert ledger.after(counted).rung == 2


def test_it_is_off_by_default_and_made_from_the_configuration() -> None:
    assert make_adaptation(small_config()) is None
    outer = dict(sync_every=10, fragments=2, codec=dict(type="int8"))
    config = small_config(outer=outer | dict(adaptive=dict(target=0.95, codecs=["int4", "topk"], max_sync_every=40)))
    adaptation, wire = make_adaptation(config), make_wire(config)
    assert (adaptation.target, adaptation.shortest, adaptation.longest, adaptation.fragments) == (0.95, 10, 40, 2)
    assert [wire.choose(index).contribution.bits for index in range(3)] == list(adaptation.bits)
    assert list(adaptation.bits) == sorted(adaptation.bits, reverse=True)


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        (dict(adaptive=dict(target=0.9, codecs=["int5"])), "'int5' is not one of .* .did you mean 'int8'"),
        (dict(codec=dict(type="int4"), adaptive=dict(target=0.9, codecs=["int8"])), "int8 takes .* cheaper than outer.codec"),
        (dict(sync_every="90s", adaptive=dict(target=0.9)), "outer.sync_every=90s counts seconds"),
        (dict(sync_every=50, adaptive=dict(target=0.9, max_sync_every=40)), "max_sync_every=40 is less than"),
        (dict(adaptive=dict(target=1.0)), "less than 1"),
    ],
)
def test_what_can_not_adapt_is_refused(outer: dict, told: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){told}"):
        small_config(outer=outer)
