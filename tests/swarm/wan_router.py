"""The process behind :class:`wan.WanLink`: moves IP packets between network namespaces, late and not all of them.

The namespaces have no names: they are held open by this process alone, and the kernel removes them with the last process
that uses them, so nothing can be left over, however this one ends. Each has a TUN device whose other end is read here.
Standard library only, because a router that waits for an import is a link that is down.

Talks JSON, a line each way: the first line of its input is the link to make, each further one a change; each answer holds
the counters. It ends when its input does, which is when the test that started it is gone.
"""

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from typing import Any

NETWORK = "10.77.0"
_NETWORK_BYTES = bytes(int(part) for part in NETWORK.split("."))

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 1, 2
_HEADER = 10  # bytes of virtio_net_hdr in front of each packet
_FRAMING = 38  # bytes that Ethernet adds to a packet: preamble, header, checksum, gap
_LONGEST_PACKET = 70_000
_MOST_READ_AT_ONCE = 16
_EARLY_SECONDS = 2e-5

_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, call: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{call}: {os.strerror(ctypes.get_errno())}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def make_namespace(index: int, congestion: str, super_packets: bool, tuned: bool) -> tuple[int, int]:
    """Leave the current network namespace for a new one; returns descriptors of it and of its TUN device.

    ``super_packets``: TCP hands over many segments at once, which lets Python keep up with fast links; loss then takes them
    all together. ``tuned``: TCP's buffers may grow to 64 MiB.
    """
    _checked(_libc.unshare(_CLONE_NEWNET), "unshare")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", b"wan0", _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tun, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, (_TUN_F_CSUM | _TUN_F_TSO4) if super_packets else 0)
    own = f"{NETWORK}.{index + 1}"
    _ip("link", "set", "lo", "up")
    _ip("addr", "add", f"{own}/24", "dev", "wan0")
    _ip("link", "set", "wan0", "mtu", "1500", "txqueuelen", "1000", "up")
    for name in ("tcp_rmem", "tcp_wmem") if tuned else ():
        with open(f"/proc/sys/net/ipv4/{name}", "w") as setting:
            setting.write(f"4096 262144 {64 << 20}")
    # By route: the sysctl for a namespace's default may be refused.
    _ip("route", "replace", f"{NETWORK}.0/24", "dev", "wan0", "scope", "link", "src", own, "congctl", congestion)
    return namespace, tun


class Router:
    """A queue out of each namespace, a queue into each, and a delay between each two."""

    def __init__(self, count: int, congestion: str, super_packets: bool, tuned: bool = False) -> None:
        self.count = count
        outside = os.open("/proc/self/ns/net", os.O_RDONLY)
        made = [make_namespace(index, congestion, super_packets, tuned) for index in range(count)]
        _checked(_libc.setns(outside, _CLONE_NEWNET), "setns")
        self.namespaces, self._tuns = [namespace for namespace, _ in made], [tun for _, tun in made]
        self._rate, self._loss, self._queue = [1e9] * count, [0.0] * count, [0.1] * count
        self._delay = [[0.0] * count for _ in range(count)]
        self._cut: set[tuple[int, int]] = set()
        self._sent_until, self._received_until = [0.0] * count, [0.0] * count  # when each queue is empty again
        self._counters = {
            (source, target): {"bytes": 0, "packets": 0, "lost": 0, "overflowed": 0, "cut": 0}
            for source in range(count)
            for target in range(count)
            if source != target
        }
        self._flying: list[tuple[float, int, int, bytes]] = []  # arrival, number, target, packet
        self._number = 0

    def change(self, islands: list[int], **values: Any) -> None:
        """Set ``rate`` (bit/s), ``rtt`` (s), ``loss`` (share) or ``queue`` (s) of these islands' links."""
        for island in islands:
            self._rate[island] = values.get("rate", self._rate[island])
            self._loss[island] = values.get("loss", self._loss[island])
            self._queue[island] = values.get("queue", self._queue[island])
            if "rtt" in values:
                for other in range(self.count):
                    self._delay[island][other] = self._delay[other][island] = values["rtt"] / 2

    def connect(self, islands: list[int], others: list[int], up: bool) -> None:
        """Let nothing pass between two groups of islands, or let it pass again."""
        pairs = {(a, b) for a in islands for b in others} | {(b, a) for a in islands for b in others}
        self._cut = self._cut - pairs if up else self._cut | pairs

    def counters(self) -> list[dict[str, int]]:
        """What passed and what did not, by direction."""
        return [{"source": source, "target": target, **counts} for (source, target), counts in self._counters.items()]

    def take(self, source: int, packet: bytes, now: float) -> None:
        """A packet leaves a namespace: decide whether and when it arrives."""
        if packet[_HEADER] >> 4 != 4 or packet[_HEADER + 16 : _HEADER + 19] != _NETWORK_BYTES:
            return
        target = packet[_HEADER + 19] - 1
        counts = self._counters.get((source, target))
        if counts is None:
            return
        segments, size = _segments_and_bytes(packet)
        if (source, target) in self._cut:
            counts["cut"] += segments
            return
        loss = max(self._loss[source], self._loss[target])
        if loss and random.random() > (1 - loss) ** segments:
            counts["lost"] += segments
            return
        arrival = self._arrival(source, target, 8 * (size + _FRAMING * segments), now)
        if arrival is None:
            counts["overflowed"] += segments
            return
        counts["bytes"] += size
        counts["packets"] += segments
        self._number += 1
        heapq.heappush(self._flying, (arrival, self._number, target, packet))

    def deliver(self, now: float) -> float:
        """Hand over what has arrived; returns seconds until the next packet does."""
        flying = self._flying
        while flying and flying[0][0] <= now + _EARLY_SECONDS:
            _, _, target, packet = heapq.heappop(flying)
            try:
                os.write(self._tuns[target], packet)
            except OSError:
                pass  # its device queue is full: lost, as on a real machine
        return max(0.0, flying[0][0] - now) if flying else 1.0

    def run(self, control: int) -> None:
        """Until ``control`` ends."""
        sources = {tun: index for index, tun in enumerate(self._tuns)}
        waiting = b""
        while True:
            ready, _, _ = select.select([*self._tuns, control], (), (), self.deliver(time.monotonic()))
            for descriptor in ready:
                if descriptor != control:
                    self._read(descriptor, sources[descriptor])
                    continue
                received = os.read(control, 65536)
                if not received:
                    return
                *lines, waiting = (waiting + received).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))

    def _read(self, tun: int, source: int) -> None:
        for _ in range(_MOST_READ_AT_ONCE):
            try:
                packet = os.read(tun, _LONGEST_PACKET)
            except BlockingIOError:
                return
            self.take(source, packet, time.monotonic())

    def _obey(self, request: dict[str, Any]) -> None:
        what = request.pop("what")
        if what == "change":
            self.change(**request)
        elif what == "connect":
            self.connect(**request)
        print(json.dumps(self.counters()), flush=True)

    def _arrival(self, source: int, target: int, bits: int, now: float) -> float | None:
        """Through the sender's queue, over the distance, through the receiver's queue; None where one is full."""
        sent = max(now, self._sent_until[source])
        if sent - now > self._queue[source]:
            return None
        sent += bits / self._rate[source]
        there = sent + self._delay[source][target]
        received = max(there, self._received_until[target] + bits / self._rate[target])
        if received - there > self._queue[target]:
            return None
        self._sent_until[source], self._received_until[target] = sent, received
        return received


def _segments_and_bytes(packet: bytes) -> tuple[int, int]:
    """TCP segments in a packet, which may be many at once, and the bytes of IP that they are on a real link."""
    size = len(packet) - _HEADER
    if not packet[1]:
        return 1, size
    segment = packet[4] | packet[5] << 8
    ip_header = (packet[_HEADER] & 15) * 4
    headers = ip_header + (packet[_HEADER + ip_header + 12] >> 4) * 4
    segments = max(1, -(-(size - headers) // segment))
    return segments, size + (segments - 1) * headers


def main() -> None:
    """Make the link that the first line of the input describes, say where its namespaces are, and carry packets."""
    router = Router(**json.loads(sys.stdin.buffer.raw.readline()))
    print(json.dumps(router.namespaces), flush=True)
    router.run(sys.stdin.fileno())


if __name__ == "__main__":
    main()
