"""A wide-area network inside one machine: islands in network namespaces, joined by links that are slow, long and lossy.

Needs root and TUN devices, but no kernel module for shaping: a router in a process of its own (:mod:`wan_router`; its pace
must not hang on what the test does) carries every packet, so TCP, UDP and all that is built on them see the same link.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Sequence

import wan_router

_UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}
_FAST = 200e6  # bit/s, from which on Python can't look at every segment by itself


@dataclass(frozen=True)
class Counts:
    """One direction between two islands: IP bytes and packets that passed, and packets that did not, by why."""

    bytes: int = 0
    packets: int = 0
    lost: int = 0
    overflowed: int = 0
    cut: int = 0


def missing() -> str:
    """Why there can be no such network here; empty if there can. For ``pytest.mark.skipif``."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid():
        return "network namespaces need root"
    if absent := [tool for tool in ("ip", "nsenter") if not shutil.which(tool)]:
        return f"{' and '.join(absent)} (iproute2, util-linux) must be installed"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun can't be opened: TUN devices are not allowed here"
    done = subprocess.run(["unshare", "--net", "true"], capture_output=True, text=True)
    return f"network namespaces are not allowed here: {done.stderr.strip()}" if done.returncode else ""


def bits_per_second(rate: str) -> float:
    """``"20mbit"`` is 20e6.

    Raises:
        ValueError: it has no unit, or another one.
    """
    for unit, factor in _UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"{rate!r} is no rate; write a number and one of {', '.join(_UNITS)}, such as 20mbit")


class WanLink:
    """Islands 0 to ``count`` - 1, each with the same link to all others. Several can be up at the same time.

    Use it in a ``with``. It also goes when the process that made it is killed: the router reads its commands from a pipe
    and ends with it, and its namespaces have no names under which they could outlive it.

    Args:
        rate: of each island, in each direction, such as ``"20mbit"``.
        queue_ms: what waits longer in front of a link is dropped.
        congestion: TCP's congestion control in the islands.
        tuned: TCP may buffer 64 MiB a connection there, which a fast long link needs; else what this machine allows.
    """

    def __init__(
        self,
        count: int,
        rate: str = "100mbit",
        rtt_ms: float = 50.0,
        loss: float = 0.0,
        queue_ms: float = 100.0,
        congestion: str = "cubic",
        tuned: bool = False,
    ) -> None:
        self.count, self._rate = count, rate
        super_packets = bits_per_second(rate) >= _FAST
        first = {"count": count, "congestion": congestion, "super_packets": super_packets, "tuned": tuned}
        self._router = subprocess.Popen(
            [sys.executable, "-S", wan_router.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the test, which then ends it
        )
        self._namespaces: list[int] = self._ask(first)
        self.change(rate=rate, rtt_ms=rtt_ms, loss=loss, queue_ms=queue_ms)

    def __enter__(self) -> "WanLink":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @staticmethod
    def address(island: int) -> str:
        """The IP address of an island."""
        return f"{wan_router.NETWORK}.{island + 1}"

    def command(self, island: int, arguments: Sequence[str]) -> list[str]:
        """The command line that runs ``arguments`` (the first one a full path) in an island, without a process between."""
        namespace = Path("/proc") / str(self._router.pid) / "fd" / str(self._namespaces[island])
        return [shutil.which("nsenter"), f"--net={namespace}", *arguments]

    def change(
        self,
        islands: Sequence[int] | None = None,
        rate: str | None = None,
        rtt_ms: float | None = None,
        loss: float | None = None,
        queue_ms: float | None = None,
    ) -> None:
        """Change these islands' links (default: all) while they are in use; what is None stays as it is.

        Between two islands holds the rtt that was set last, and the higher of the two losses.
        """
        values = {
            "rate": None if rate is None else bits_per_second(rate),
            "rtt": None if rtt_ms is None else rtt_ms / 1000,
            "loss": loss,
            "queue": None if queue_ms is None else queue_ms / 1000,
        }
        given = {name: value for name, value in values.items() if value is not None}
        self._ask({"what": "change", "islands": self._those(islands), **given})

    def slow(self, islands: Sequence[int], factor: float) -> None:
        """Give these islands a share of the rate that the link was made with: ``1 / factor``."""
        self.change(islands, rate=f"{bits_per_second(self._rate) / factor / 1e3}kbit")

    def cut(self, islands: Sequence[int], others: Sequence[int] | None = None) -> None:
        """Let nothing pass between ``islands`` and ``others`` (default: all that are not in ``islands``)."""
        self._connect(islands, others, up=False)

    def heal(self, islands: Sequence[int], others: Sequence[int] | None = None) -> None:
        """Undo a cut."""
        self._connect(islands, others, up=True)

    def counts(self) -> dict[tuple[int, int], Counts]:
        """What has passed so far, by (source, target)."""
        rows = self._ask({"what": "count"})
        return {(row.pop("source"), row.pop("target")): Counts(**row) for row in rows}

    def packets_cut(self, island: int) -> int:
        """Packets from and to an island that a cut has swallowed: the proof that there was one."""
        return sum(counts.cut for pair, counts in self.counts().items() if island in pair)

    def bytes_of(self, island: int) -> int:
        """IP bytes that have passed from and to an island."""
        return sum(counts.bytes for pair, counts in self.counts().items() if island in pair)

    def close(self) -> None:
        """End the router. Processes that still run in an island keep their namespace, cut off from everyone."""
        self._router.stdin.close()
        self._router.wait(10)
        self._router.stdout.close()

    def _connect(self, islands: Sequence[int], others: Sequence[int] | None, up: bool) -> None:
        rest = [island for island in range(self.count) if island not in islands] if others is None else list(others)
        self._ask({"what": "connect", "islands": list(islands), "others": rest, "up": up})

    def _those(self, islands: Sequence[int] | None) -> list[int]:
        return list(range(self.count)) if islands is None else list(islands)

    def _ask(self, request: dict[str, Any]) -> Any:
        try:
            self._router.stdin.write(json.dumps(request).encode() + b"\n")
            self._router.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended, which the missing answer says
        answer = self._router.stdout.readline()
        if not answer:
            raise RuntimeError(f"the router of the test network ended with exit code {self._router.wait(10)}")
        return json.loads(answer)
