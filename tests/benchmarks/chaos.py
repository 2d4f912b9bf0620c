"""A swarm through ten minutes in which something breaks every 25 seconds, and what that cost it.

Islands are whole processes as a user starts them, over a 50 Mbit/s, 40 ms link where network namespaces are to be had and
over loopback, without cut links, where they are not. Dice with a seed decide who is killed and started again (the founder
too), frozen, cut off, slowed, poisoned, or loses its exchange process or its daemon; a stranger throws garbage. One
victim at a time: a fault waits until the one before it is overcome.

Inner steps have a fixed length, most of it asleep: so ``throughput_ratio`` (steps done / steps that the islands had
time for while they were able to) tells how long they waited, not how many cores they share. Target: 0.95.

    python tests/benchmarks/chaos.py [--quick] [--seconds 600] [--islands 4] [--seed 0] [--sync-every 12s] [--loopback]
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "swarm"))

import chaos_measures as measures  # noqa: E402
import wan  # noqa: E402
from chaos_plan import KINDS, random_plan  # noqa: E402
from cluster import Cluster  # noqa: E402
from fault_player import FaultPlayer  # noqa: E402
from faults import Fault, parse_plan  # noqa: E402

STEP_SECONDS = 0.5
EVERY_SECONDS = 25.0
RECOVERY_SECONDS = 40.0  # after the last fault
AGAIN_SECONDS = 3.0  # until an island that has ended is started again, as a supervisor would
QUICK = ["freeze 1 for 6s @ 4s", "kill 0 @ 16s", "restart 0 @ 17s"]


class Chaos:
    """One run of it.

    Args:
        seconds: how long; in the last ``recovery`` of them no fault begins.

    Attributes:
        ended_by_themselves: islands that nobody killed, and how they ended.
    """

    def __init__(self, cluster: Cluster, plan: list[str], seconds: float, recovery: float) -> None:
        self._end = time.monotonic() + seconds
        self._last_moment = self._end - recovery
        self.cluster = cluster
        self.player = FaultPlayer(cluster, parse_plan(plan), may_strike=self._may_strike)
        self.ended_by_themselves: list[str] = []
        self._again: dict[int, float] = {}

    def run(self) -> None:
        """Let it happen until the time is over."""
        while time.monotonic() < self._end:
            self.player.tick()
            self._supervise()
            time.sleep(0.02)

    def lives(self) -> list[measures.Lives]:
        """Of all islands."""
        return [island.lives for island in self.cluster.islands]

    def _may_strike(self, fault: Fault) -> bool:
        """In the order of the plan, when nobody suffers from an earlier fault and there is time to get over this one."""
        if fault.kind == "restart":
            return time.time() > self.cluster.islands[fault.islands[0]].lives[-1].ended + AGAIN_SECONDS
        for island in self.cluster.islands:
            island.read()
        begun = [strike for strike in self.player.strikes if strike.began]
        over = all(strike.ended and (measures.recovery_seconds(self.lives(), strike) or 0) < math.inf for strike in begun)
        healthy = over and all(island.alive() and island.height() for island in self.cluster.islands)
        waiting = (strike.fault for strike in self.player.strikes if not strike.began and strike.fault.kind != "restart")
        return healthy and fault is next(waiting) and time.monotonic() < self._last_moment

    def _supervise(self) -> None:
        for island in self.cluster.islands:
            if island.alive() or island.lives[-1].ended_by_us:
                continue
            if island.slot not in self._again:
                island.lives[-1].ends(by_us=False)
                self._again[island.slot] = time.monotonic() + AGAIN_SECONDS
                code = island.lives[-1].process.returncode
                self.ended_by_themselves.append(f"island {island.slot}: exit code {code}\n{island.last_lines()}")
            elif time.monotonic() > self._again[island.slot]:
                del self._again[island.slot]
                self.cluster.start(island.slot)


def result_of(chaos: Chaos, seconds: float) -> dict[str, Any]:
    """All figures."""
    islands, strikes = chaos.lives(), chaos.player.strikes
    fired = [strike for strike in strikes if strike.proof]
    faults = [strike for strike in fired if strike.fault.kind != "restart"]
    recoveries = [value for strike in fired if (value := measures.recovery_seconds(islands, strike)) is not None]
    began = sorted(strike.began for strike in faults)
    digests = measures.digests(islands)
    step = measures.step_seconds(islands)
    return {
        "faults": len(faults),
        "faults_by_kind": dict(Counter(strike.fault.kind for strike in faults)),
        "faults_planned": sum(strike.fault.kind != "restart" for strike in strikes),
        "longest_seconds_between_faults": round(max(map(lambda a, b: b - a, began, began[1:]), default=0.0), 1),
        "inner_steps_lost_on_survivors": measures.steps_lost(islands, strikes),
        "throughput_ratio": round(measures.throughput_ratio(islands, strikes, step), 4),
        "worst_stall_seconds": round(measures.stalls(islands, strikes)[0][0], 2),
        "worst_recovery_seconds": round(max(recoveries, default=0.0), 2) if max(recoveries, default=0) < math.inf else None,
        "digests_agree": all(len(values) == 1 for values in digests.values()),
        "rounds_committed": measures.rounds_committed(islands),
        "ended_by_themselves": len(chaos.ended_by_themselves),
        "step_seconds": round(step, 4),
        "islands": len(islands),
        "seconds": seconds,
        "link": bool(chaos.cluster.link),
    }


def show(chaos: Chaos, result: dict[str, Any]) -> None:
    """The table of what happened, and what is not as it should be."""
    islands, start = chaos.lives(), min(life.started for island in chaos.cluster.islands for life in island.lives)
    print(f"{'second':>7}  {'fault':36} {'recovered':>10}  seen")
    for strike in sorted(chaos.player.strikes, key=lambda strike: strike.began or math.inf):
        recovery = measures.recovery_seconds(islands, strike) if strike.proof else None
        back = "" if recovery is None else f"{recovery:.1f} s" if recovery < math.inf else "never"
        moment = f"{strike.began - start:.1f}" if strike.began else "-"
        print(f"{moment:>7}  {str(strike.fault):36} {back:>10}  {strike.proof or 'DID NOT HAPPEN'}")
    for ending in chaos.ended_by_themselves:
        print(f"ended by itself: {ending}")
    for (fragment, height), digests in measures.digests(islands).items():
        if len(digests) > 1:
            held = " and ".join(digest[:12] for digest in sorted(digests))
            print(f"fragment {fragment}, round {height}: the islands held {held}")
    for slot, lives in enumerate(islands):
        rounds = Counter(row["outcome"] for life in lives for row in life.of_kind("round"))
        steps = sum(len(life.of_kind("step")) for life in lives)
        print(f"island {slot}: {len(lives)} lives, {steps} steps, rounds {dict(rounds)}")
    waits = (
        f"{seconds:.1f} s (island {slot}, until second {until - start:.0f})"
        for seconds, until, slot in measures.stalls(islands, chaos.player.strikes)[:6]
    )
    print(f"longest waits of islands that were not the victim then: {', '.join(waits)}")
    print(f"throughput {result['throughput_ratio']:.1%} of what the islands had time for (target 95 %)")


def main() -> None:
    """Run it, show it, and print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three islands and two faults: about a minute")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--islands", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sync-every", default="12s", help="outer.sync_every (12s)")
    parser.add_argument("--loopback", action="store_true", help="no link, even where there could be one")
    arguments = parser.parse_args()
    islands, seconds, recovery = arguments.islands, arguments.seconds, RECOVERY_SECONDS
    if arguments.quick:
        islands, seconds, recovery = 3, 36.0, 15.0
    reason = "--loopback" if arguments.loopback else wan.missing()
    if reason:
        print(f"over loopback, no link is cut: {reason}")
    kinds = [kind for kind in KINDS if not (reason and kind == "cut")]
    plan = QUICK
    if not arguments.quick:
        plan = random_plan(arguments.seed, seconds, islands, EVERY_SECONDS, recovery, kinds)
    sync_every = "2s" if arguments.quick else arguments.sync_every
    settings = [
        f"outer.sync_every={sync_every}",
        f"swarm.max_slots={islands}",
        "exchange.peer_timeout=5",
        "exchange.round_deadline=30",
        "exchange.min_islands=2",  # an island that is cut off shall wait, not found a swarm of its own
    ]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        link = None if reason else stack.enter_context(wan.WanLink(islands + 1, "50mbit", rtt_ms=40))
        cluster = stack.enter_context(Cluster(folder, islands, settings, link, step_seconds=STEP_SECONDS))
        cluster.wait_until_training()
        chaos = Chaos(cluster, plan, seconds, recovery)
        chaos.run()
        cluster.end()
        result = result_of(chaos, seconds)
        show(chaos, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
