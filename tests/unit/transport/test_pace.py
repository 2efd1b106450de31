"""Links that stay far below what they were chosen for: what the system counts, and when a line is due."""

from __future__ import annotations

import socket
import struct

import pytest

from ringcomm.transport import pace
from ringcomm.transport.memory import memory_fabrics
from ringcomm.transport.pace import Counted, Expected, Paces, counted
from ringcomm.transport.tcp import SocketFabric, SocketLink

CHOSEN = Expected(1, 100.0, "eth0", (("wlan0", 30.0),))


@pytest.mark.parametrize(
    "chosen, others, now, shared, better",
    [
        (100.0, {"wlan0": 30.0}, 100.0, 1, ""),
        (100.0, {"wlan0": 30.0}, 25.0, 1, ""),
        (100.0, {"wlan0": 30.0}, 7.4, 1, "wlan0"),
        (100.0, {"wlan0": 30.0}, 7.6, 1, ""),  # a choice between them would still be for this one
        (100.0, {"wlan0": 60.0}, 14.9, 1, "wlan0"),
        (100.0, {"wlan0": 60.0}, 14.9, 2, ""),  # two streams may share the interface
        (100.0, {"wlan0": 60.0}, 12.4, 2, "wlan0"),
        (100.0, {"wlan0": 30.0, "eth1": 60.0}, 7.4, 1, "eth1"),
        (3000.0, {"eth1": 3000.0}, 51.0, 1, ""),  # processors decide, not the network
        (3000.0, {"eth1": 3000.0}, 49.0, 1, "eth1"),
        (172.0, {"eth0": 900.0}, 2.4, 1, "eth0"),
    ],
)
def test_what_is_slow(chosen, others, now, shared, better):
    assert Expected(1, chosen, "x", tuple(others.items())).complaint(now, shared) == better


@pytest.mark.parametrize(
    "route, expected",
    [
        ({}, None),
        ({"own_iface": "eth0", "measured": {}}, None),
        ({"own_iface": "eth0", "measured": {"eth0": 100.0}}, None),
        ({"own_iface": "eth0", "measured": {"wlan0": 30.0}}, None),
        ({"own_iface": "eth0", "measured": {"wlan0": 30, "eth0": 100}}, CHOSEN),
    ],
)
def test_where_there_was_a_choice(route, expected):
    assert Expected.of(1, route) == expected


class Link:
    """A link at a speed, as the system counts it."""

    def __init__(self, chosen=CHOSEN, shared=1):
        self.now = Counted(0, 0, 0, 0, True)
        self.paces = Paces([chosen], lambda peer: [None, self.now], lambda *what: repr(what), shared)

    def go_on(self, mb_per_s, seconds=1.0, held_s=0.0, idle=False, rate=None, unsent=50_000, filled=1448):
        moved = int(mb_per_s * 1e6 * seconds)
        self.now = Counted(
            self.now.acked_bytes + moved,
            self.now.busy_us + int((seconds + held_s) * 1e6),
            self.now.held_us + int(held_s * 1e6),
            int((mb_per_s if rate is None else rate) * 1e6),
            idle,
            unsent,
            self.now.segments + moved // filled,
            1448,
        )
        return self.paces.look()


def test_a_line_once_it_has_stayed_slow():
    link = Link()
    said = [link.go_on(2.5) for _ in range(8)]  # the first look only notes the counters
    assert [len(lines) for lines in said] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert said[3] == [repr((CHOSEN, 2.5, "wlan0"))]


def test_a_moment_is_not_enough():
    link = Link()
    for _ in range(5):
        assert not any([link.go_on(2.5), link.go_on(2.5), link.go_on(90.0)])


@pytest.mark.parametrize(
    "what",
    [
        {"mb_per_s": 2.5, "idle": True},  # small messages, one after another
        {"mb_per_s": 2.5, "held_s": 0.5},  # the other end computes, and takes nothing
        {"mb_per_s": 2.5, "rate": 80.0},  # small messages between large ones, and those are quick
        {"mb_per_s": 80.0, "rate": 2.5},
        {"mb_per_s": 1.1, "unsent": 0},  # all that there is to send is on its way
        {"mb_per_s": 1.1, "filled": 160},  # small messages: what waits is the next one
    ],
)
def test_what_says_nothing_about_the_network(what):
    link = Link()
    assert not any(link.go_on(**what) for _ in range(10))


def test_what_is_sent_in_small_parts_adds_up():
    link = Link()
    said = [link.go_on(0.1) for _ in range(12)]
    assert [number for number, lines in enumerate(said) if lines] == [9]  # three times 300 kB after the first


def test_pauses_do_not_make_a_slow_link_quick():
    link = Link()
    said = [link.go_on(2.5) or link.go_on(0.0, idle=True) for _ in range(4)]
    assert [len(lines) for lines in said] == [0, 0, 0, 1]


class TestWhatTheSystemCounts:
    def test_of_a_connection(self, ends):
        before = counted(ends[0])
        ends[0].sendall(bytes(5000))
        got = 0
        while got < 5000:
            got += len(ends[1].recv(5000))
        ends[1].sendall(b"!")  # acknowledges all
        assert ends[0].recv(1) == b"!"
        after = counted(ends[0])
        assert before is not None and after is not None
        assert after.acked_bytes - before.acked_bytes == 5000
        assert after.unsent_bytes == 0 and 0 < after.segments - before.segments <= 5000
        assert after.segment_bytes > 500 and after.round_trip_us < 30e6

    def test_of_what_waits_because_the_other_end_does_not_read(self, ends):
        ends[0].setblocking(False)
        for _ in range(1000):  # until the buffers of both ends are full
            try:
                ends[0].send(bytes(1 << 16))
            except BlockingIOError:
                break
        seen = counted(ends[0])
        assert seen is not None and seen.unsent_bytes > 0

    def test_of_what_has_no_counters(self, ends, monkeypatch):
        unix = socket.socketpair()
        assert counted(unix[0]) is None
        ends[0].close()
        assert counted(ends[0]) is None
        for sock in unix:
            sock.close()
        monkeypatch.setattr(pace, "_TCP_INFO", struct.Struct("4096x"))  # an old kernel gives less
        assert counted(ends[1]) is None
        monkeypatch.delattr(socket, "TCP_INFO")
        assert counted(ends[1]) is None

    def test_of_a_fabric(self, ends):
        unix = socket.socketpair()
        links = {1: SocketLink(1, ends[0]), 2: SocketLink(2, unix[0])}
        fabric = SocketFabric(0, links)
        found = pace.delivered(fabric)
        assert list(found) == [1] and found[1][1] >= 0.0
        assert pace.delivered(memory_fabrics(2)[0]) == {}
        fabric.close()
        unix[1].close()
