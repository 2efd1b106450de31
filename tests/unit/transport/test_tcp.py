"""Links over sockets, and fabrics of them, with real connections on the loopback."""

from __future__ import annotations

import select
import socket
import struct
import threading

import pytest

from ringcomm.storage.keys import make_certificate
from ringcomm.transport.base import LinkClosed
from ringcomm.transport.tcp import SocketFabric, SocketLink, choose_congestion
from ringcomm.transport.tls import Tls
from tests.support.links import secured

LIMIT_S = 600.0
"""Longer than a test may take: where a wait is not woken, that time limit is the assertion."""


class Options:
    """What a kernel would answer that has bbr as its default, on a line with this round-trip time."""

    def __init__(self, current: bytes, usable: bytes = b"") -> None:
        self.current, self.usable = current, usable

    def getsockopt(self, level: int, option: int, length: int = 4) -> bytes:
        if option == socket.TCP_INFO:
            return struct.pack("@148xI64x", 500)[:length]
        return self.current + bytes(16 - len(self.current))

    def setsockopt(self, level: int, option: int, value: bytes) -> None:
        if value not in self.usable.split():
            raise OSError("no such congestion control")
        self.current = value


class TestCongestion:
    @pytest.mark.parametrize(
        ("current", "usable", "chosen"),
        [
            (b"bbr", b"cubic reno", b"cubic"),
            (b"bbr2", b"reno", b"reno"),
            (b"bbr", b"", b"bbr"),  # nothing else is loaded, or allowed
            (b"cubic", b"reno", b"cubic"),
        ],
    )
    def test_near_hosts_get_one_that_does_not_pace(self, current, usable, chosen):
        options = Options(current, usable)
        choose_congestion(options)
        assert options.current == chosen


class TestLink:
    @pytest.mark.parametrize("views", [1, 2])
    def test_a_connection_that_was_reset(self, ends, views):
        one = SocketLink(1, ends[0])
        ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        ends[1].close()
        select.select([ends[0]], [], [], LIMIT_S)
        with pytest.raises(LinkClosed, match="connection reset by peer"):
            one.recv([memoryview(bytearray(5))] * views)
        with pytest.raises(LinkClosed, match="broken pipe"):
            one.send([memoryview(bytes(5))] * views)


class TestFabric:
    def fabrics(self, ends, watch=None):
        return [SocketFabric(rank, {1 - rank: SocketLink(1 - rank, ends[rank])}, watch) for rank in range(2)]

    def test_a_wait_can_be_woken_from_before_or_meanwhile_by_any_thread(self, ends):
        one, other = self.fabrics(ends)
        one.make_wakeable()
        for _ in range(3):
            one.wake()
            one.wake()  # once is enough
            one.wait([one.link(1)], [], LIMIT_S)
        threads = [threading.Thread(target=one.wait, args=([one.link(1)], [], LIMIT_S)) for _ in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            one.wake()
            threads[0].join(0.01)
        one.wait([one.link(1)], [], 0.0)
        for fabric in (one, other):
            fabric.close()
        one.wake()  # it is closed: nothing happens

    def test_bytes_that_have_left_the_systems_buffers_end_a_wait(self, ends):
        """A TLS record is decrypted as a whole; poll() does not report what is left of it."""
        encrypted = secured(ends, Tls(make_certificate()))
        for sock in encrypted:
            sock.trust()
        one, other = self.fabrics(encrypted)
        assert one.link(1).send([memoryview(b"ab")]) == 2
        got = bytearray(2)
        while not other.link(0).recv([memoryview(got)[:1]]):
            other.wait([other.link(0)], [], LIMIT_S)
        assert other.link(0).holds_bytes() and not one.link(1).holds_bytes()
        other.wait([other.link(0)], [], LIMIT_S)
        assert other.link(0).recv([memoryview(got)[1:]]) == 1 and got == b"ab"
        for fabric in (one, other):
            fabric.close()
