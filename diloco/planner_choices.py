"""Which settings reach a target utilization, with the least to fear for the loss first."""

import itertools
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Iterator, Sequence

from diloco.link_model import Link, Prediction
from diloco.planner import Planner, Setting, Traffic
from islands.config_file import ConfigError

PERIODS = (1, 2, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000)
OVERLAPS = (0, 1, 2, 5, 10, 20)
FRAGMENTS = (1, 2, 4, 8)
#: From the richest. The loss suffers as from so many times longer periods: a rule of thumb, by which the last two, that cost about one
#: per cent in docs/codecs.md, are for links on which nothing else will do.
CODECS = {"none": 1.0, "bf16": 1.0, "int8": 1.0, "int4": 1.25, "statistical2": 8.0, "topk": 16.0}
#: Inner steps of period that one of overlap is like, as the anchor is that much staler. A rule of thumb, too.
_STALENESS = 2.0
_MOST_SHOWN = 6


@dataclass(frozen=True)
class Choice:
    """A setting that reaches the target."""

    setting: Setting
    prediction: Prediction
    traffic: Traffic

    @property
    def harm(self) -> float:
        """What it may do to the loss, as a period in inner steps; only to order by."""
        setting = self.setting
        return setting.sync_every * CODECS[setting.codec] + _STALENESS * setting.overlap


def choices(planner: Planner, link: Link, step_seconds: float, target: float) -> list[Choice]:
    """Settings that reach ``target`` and that no other one betters in everything, the least harmful first."""
    shortest = partial(_shortest_period, planner, link, step_seconds, target)
    others = [Setting(0, *each) for each in itertools.product(CODECS, _fragments(planner), OVERLAPS)]
    found = [choice for setting in others if (choice := shortest(setting))]
    best, is_valid = _best(found), cache(planner.is_valid)
    while wrong := [choice for choice in best if not is_valid(choice.setting)]:  # only those: to ask takes milliseconds
        longer = [choice for each in wrong if (choice := shortest(each.setting))]
        found = [*(choice for choice in found if choice not in wrong), *longer]
        best = _best(found)
    return best


def _best(found: Sequence[Choice]) -> list[Choice]:
    best = [one for one in found if not any(_betters(other.setting, one.setting) for other in found)]
    return sorted(best, key=lambda choice: (choice.harm, choice.setting.fragments))[:_MOST_SHOWN]


def _fragments(planner: Planner) -> Iterator[int]:
    for count in FRAGMENTS:
        try:
            planner.sizes(count)
        except ConfigError:
            return
        yield count


def _shortest_period(planner: Planner, link: Link, step_seconds: float, target: float, beyond: Setting) -> Choice | None:
    """Like ``beyond`` but for a longer period, the shortest that reaches the target."""
    for period in PERIODS:
        setting = replace(beyond, sync_every=period)
        if period <= beyond.sync_every or period < max(setting.fragments, setting.overlap):
            continue
        prediction = planner.predict(setting, link, step_seconds)
        if prediction.utilization >= target:
            return Choice(setting, prediction, planner.traffic(setting))
    return None


def _betters(one: Setting, other: Setting) -> bool:
    """Whether a setting is no worse in anything that the loss may suffer from, and is another one."""
    ranks = list(CODECS)
    pairs = [
        (one.sync_every, other.sync_every),
        (ranks.index(one.codec), ranks.index(other.codec)),
        (one.overlap, other.overlap),
        (one.fragments, other.fragments),
    ]
    return one != other and all(mine <= theirs for mine, theirs in pairs)
