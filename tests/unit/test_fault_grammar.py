"""The language in which tests plan faults."""

import pytest
from swarm.faults import Fault, FaultError, parse_fault, parse_plan


@pytest.mark.parametrize(
    "text, expected",
    [
        ("kill 2 @ round 3 during transfer", dict(kind="kill", islands=(2,), at_round=3, during="transfer")),
        ("kill 2 @ 12s", dict(kind="kill", islands=(2,), at_seconds=12.0)),
        ("kill exchange 1 @ 1.5s", dict(kind="kill exchange", islands=(1,), at_seconds=1.5)),
        ("kill daemon 0", dict(kind="kill daemon", islands=(0,))),
        ("restart 2 @40s", dict(kind="restart", islands=(2,), at_seconds=40.0)),
        ("freeze 1 for 10s @ round 2", dict(kind="freeze", islands=(1,), seconds=10.0, at_round=2)),
        ("cut 0 for 20s @ 30s", dict(kind="cut", islands=(0,), seconds=20.0, at_seconds=30.0)),
        ("cut 0-1 for 20s", dict(kind="cut", islands=(0,), others=(1,), seconds=20.0)),
        ("cut 0,1-2,3 for 5s", dict(kind="cut", islands=(0, 1), others=(2, 3), seconds=5.0)),
        ("slow 10x 3 for 20s", dict(kind="slow", islands=(3,), factor=10.0, seconds=20.0)),
        ("nan 1 @ round 4", dict(kind="nan", islands=(1,), at_round=4)),
        ("corrupt 2 @ round 4", dict(kind="corrupt", islands=(2,), at_round=4)),
        ("stranger @ round 2", dict(kind="stranger", at_round=2)),
    ],
)
def test_each_kind_is_read(text: str, expected: dict) -> None:
    assert parse_fault(text) == Fault(text=text, **expected)


@pytest.mark.parametrize(
    "text, what_it_teaches",
    [
        ("explode 2", "no such fault; there are kill, kill exchange"),
        ("kill", "is no island; write its number, such as 2"),
        ("kill two @ 3s", "'two' is no island"),
        ("kill 1,2 @ 3s", "one island a line here"),
        ("kill 2 for 3s", "kill is over at once and takes no 'for', as in 'kill 2 @ 12s'"),
        ("freeze 2 @ 3s", "freeze lasts for a while; say how long, as in 'freeze 1 for 10s @ round 2'"),
        ("kill 2 @ 12", "'12' is no time; write seconds, such as 12s"),
        ("freeze 2 for ever @ 12s", "'ever' is no time"),
        ("kill 2 @ round 0", "'0' is no round; they are counted from 1"),
        ("kill 2 @ round x", "'x' is no round"),
        ("kill 2 @ round 3 during lunch", "no phase 'lunch'; there are transfer and vote"),
        ("kill 2 @ 3s during vote", "'during' needs a round, as in '@ round 3 during vote'"),
        ("nan 2 @ round 3 during vote", "only kill, kill exchange"),
        ("cut 0-0 for 3s", "island 0 can't be on both sides"),
        ("slow 3 for 20s", "how much slower? Write a factor above 1, as in 'slow 10x 3 for 20s'"),
        ("slow 1x 3 for 20s", "Write a factor above 1"),
        ("stranger 2", "leave '2' out"),
        ("kill 2 @", "no island"),
    ],
)
def test_an_error_shows_the_line_and_what_to_write(text: str, what_it_teaches: str) -> None:
    with pytest.raises(FaultError) as error:
        parse_fault(text)
    assert what_it_teaches in str(error.value) and repr(text) in str(error.value)


def test_a_plan_is_one_fault_a_line() -> None:
    plan = parse_plan(
        """
        # the founder goes first
        kill 0 @ 10s       # and comes back
        restart 0 @ 20s
        """
    )
    assert [str(fault) for fault in plan] == ["kill 0 @ 10s", "restart 0 @ 20s"]
