"""That the test network is as slow, long and lossy as it says, and leaves nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import wan
from harness import eventually, is_gone
from wan import WanLink, bits_per_second

needs_namespaces = pytest.mark.skipif(bool(wan.missing()), reason=wan.missing())

_RECEIVE = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
connection, _ = server.accept()
received, started = 0, time.monotonic()
while data := connection.recv(1 << 16):
    received += len(data)
print(received, time.monotonic() - started)
"""

_SEND = """
import socket, sys, time
deadline = time.monotonic() + 10
while True:
    started = time.monotonic()
    try:
        connection = socket.create_connection((sys.argv[1], 5000), timeout=1)
        break
    except ConnectionRefusedError:  # it does not listen yet
        assert time.monotonic() < deadline
        time.sleep(0.05)
print(time.monotonic() - started)
connection.settimeout(20)
connection.sendall(bytes(int(sys.argv[2])))
"""

_HOLDER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from wan import WanLink
link = WanLink(2)
print(link._router.pid, flush=True)
time.sleep(60)
"""


def transfer(link: WanLink, num_bytes: int) -> tuple[float, float]:
    """Send from island 1 to island 0; returns seconds for the connection to come about, and for the bytes to arrive."""
    receive = [sys.executable, "-S", "-c", _RECEIVE, link.address(0)]
    send = [sys.executable, "-S", "-c", _SEND, link.address(0), str(num_bytes)]
    with subprocess.Popen(link.command(0, receive), stdout=subprocess.PIPE, text=True) as receiver:
        sender = subprocess.run(link.command(1, send), capture_output=True, text=True, timeout=20)
        if sender.returncode:
            receiver.kill()
            raise ConnectionError(sender.stderr.splitlines()[-1])
        received, seconds = receiver.communicate(timeout=20)[0].split()
    assert int(received) == num_bytes
    return float(sender.stdout), float(seconds)


def test_a_rate_has_a_unit() -> None:
    assert bits_per_second("20mbit") == 20e6 and bits_per_second("1.5gbit") == 1.5e9
    with pytest.raises(ValueError, match="write a number and one of gbit, mbit, kbit, such as 20mbit"):
        bits_per_second("20")


@needs_namespaces
def test_rate_and_round_trip_are_what_was_asked_for_and_two_networks_do_not_meet() -> None:
    with WanLink(2, "20mbit", rtt_ms=100) as link, WanLink(2, "20mbit", rtt_ms=0) as other:
        connecting, seconds = transfer(link, 5_000_000)
        counts = link.counts()
        assert 0.1 < connecting < 0.2
        assert 2.0 <= seconds < 4.0  # 5 MB at 20 Mbit/s; a connection needs a few round trips to get going
        assert 5_000_000 < counts[1, 0].bytes < 5_600_000
        assert counts[0, 1].bytes < 500_000 and counts[0, 1].packets > 1000  # acknowledgements
        assert all(not count.packets for count in other.counts().values())


@needs_namespaces
def test_a_link_can_be_changed_cut_and_healed_while_it_is_in_use() -> None:
    with WanLink(3, "100mbit", rtt_ms=0) as link:
        quick, _ = transfer(link, 100)
        link.change(rtt_ms=200)
        assert transfer(link, 100)[0] > 0.2 > quick
        link.change([1], rtt_ms=0)
        link.slow([1], 100)
        assert transfer(link, 250_000)[1] > 1.5  # at 1 Mbit/s
        link.slow([1], 1)
        link.change([0], loss=0.02)
        transfer(link, 2_000_000)
        assert link.counts()[1, 0].lost > 5
        link.cut([1], [2])
        transfer(link, 100)  # that was another pair
        assert not link.packets_cut(0)
        link.cut([1])
        with pytest.raises(ConnectionError):
            transfer(link, 100)
        assert link.packets_cut(0) and link.packets_cut(1)
        link.heal([1])
        transfer(link, 100)


@needs_namespaces
def test_a_killed_test_takes_its_network_with_it() -> None:
    arguments = [sys.executable, "-c", _HOLDER, str(Path(wan.__file__).parent)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as holder:
        router = int(holder.stdout.readline())
        assert not is_gone(router)
        os.kill(holder.pid, signal.SIGKILL)
        eventually(lambda: is_gone(router), timeout=10)
    assert not Path(f"/proc/{router}/fd").exists() or not os.listdir(f"/proc/{router}/fd")
