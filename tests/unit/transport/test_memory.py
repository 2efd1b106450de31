"""Links inside one process: what fits, ends, and waits."""

from __future__ import annotations

import threading

import pytest

from ringcomm.transport.base import LinkClosed
from ringcomm.transport.memory import memory_channels, memory_fabrics

LIMIT_S = 20.0


def test_as_much_as_fits_in_order():
    one, other = memory_fabrics(2, capacity_bytes=5)
    assert one.link(1).carrier == "the memory of this process"
    assert one.link(1).send([memoryview(b"abc"), memoryview(b"defg")]) == 5
    assert not one.link(1).writable() and other.link(0).readable()
    assert one.link(1).send([memoryview(b"fg")]) == 0
    into = [memoryview(bytearray(1)), memoryview(bytearray(9))]
    assert other.link(0).recv(into) == 5
    assert bytes(into[0]) + bytes(into[1]) == b"abcde\0\0\0\0\0"
    assert one.link(1).writable() and not other.link(0).readable()
    assert other.link(0).recv(into) == 0


def test_the_end_comes_behind_what_was_sent():
    one, other = memory_fabrics(2)
    one.link(1).send([memoryview(b"last")])
    one.close()
    into = [memoryview(bytearray(4))]
    assert other.link(0).recv(into) == 4
    assert other.link(0).recv([memoryview(bytearray())]) == 0  # nothing was asked for
    with pytest.raises(LinkClosed, match="it closed the connection"):
        other.link(0).recv(into)
    with pytest.raises(LinkClosed, match="it closed the connection"):
        other.link(0).send(into)
    with pytest.raises(LinkClosed, match="this end closed the connection"):
        one.link(1).recv(into)
    assert all(link.readable() and link.writable() for link in (one.link(1), other.link(0)))


def test_a_wait_ends_with_any_change_and_when_it_is_woken():
    one, other = memory_fabrics(2)
    other.make_wakeable()
    woken = []

    def wait():
        other.wait([other.link(0)], [], 3 * LIMIT_S)
        woken.append(True)

    for change in (lambda: one.link(1).send([memoryview(b"x")]), other.wake, one.close):
        thread = threading.Thread(target=wait)
        thread.start()
        change()
        thread.join(LIMIT_S)
    assert woken == [True] * 3
    other.wait([other.link(0)], [], 0.0)


def test_the_channels_of_a_job_are_apart():
    one, other = memory_channels(2)
    one.direct.link(1).send([memoryview(b"x")])
    assert [fabric.link(0).readable() for fabric in other] == [True, False, False]
    assert {fabric.size for fabric in (*one, *other)} == {2}
