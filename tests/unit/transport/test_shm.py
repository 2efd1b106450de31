"""Links within a host: both ends in this process, driven by hand."""

from __future__ import annotations

import os
import select

import pytest

from ringcomm.transport import local
from ringcomm.transport.base import LinkClosed
from ringcomm.transport.local import ReadingLink, read_memory
from ringcomm.transport.shm import (
    CLOSED,
    LENT,
    LOANS,
    MASK,
    MAX_LOANS,
    NEAR_BYTES,
    READ,
    READER_STATE,
    RETURNED,
    RING_BYTES,
    SMALL_RING_BYTES,
    SPAN,
    WRITER_STATE,
    WRITTEN,
    SharedLink,
)
from tests.support.links import linked

SIZE = SMALL_RING_BYTES


def closed(links):
    for link in links:
        link.close()
        link.close()


@pytest.fixture
def links():
    """The two ends of a link."""
    made = linked(SharedLink, SIZE)
    yield made
    closed(made)


@pytest.fixture
def large():
    """The two ends of a link that may use more or less of its rings."""
    made = linked(SharedLink, RING_BYTES)
    yield made
    closed(made)


@pytest.fixture
def lending():
    """The two ends of a link of this process with itself; what is larger than 1000 bytes is lent."""
    if local._readv is None:
        pytest.skip("this system cannot read another process's memory")
    made = linked(ReadingLink, SIZE)
    for link in made:
        link.lend_above(1000)
    yield made
    closed(made)


def views(*lengths: int) -> list:
    return [memoryview(bytearray(os.urandom(length))) for length in lengths]


def received(link: SharedLink, count: int) -> bytes:
    into, got = bytearray(count), 0
    while got < count:
        step = link.recv([memoryview(into)[got:]])
        assert step
        got += step
    return bytes(into)


def awake(link: SharedLink) -> bool:
    """Return whether the other end has woken this one, which sleeps."""
    return bool(select.select([link.sock], [], [], 0.0)[0])


class TestSpan:
    """How much of the ring is used; see TestSpanChoice for when that changes."""

    def passes(self, one, other, length: int) -> None:
        (data,) = views(length)
        into, sent, got = memoryview(bytearray(length)), 0, 0
        while got < length:
            sent += one.send([data[sent:]]) if sent < length else 0
            got += other.recv([into[got:]])
        assert into == data

    def test_it_changes_both_ways_and_bytes_stay_in_their_order(self, large):
        one, other = large
        for whole, span in ((False, NEAR_BYTES), (True, RING_BYTES), (False, NEAR_BYTES), (True, RING_BYTES)):
            one._choice.whole = whole
            assert not other.recv(views(1))  # It says that it has read all.
            self.passes(one, other, 3_000_001)
            assert one._out_span == other._in_span == span == one._rings[0].words[SPAN]
            assert other._out_span == NEAR_BYTES

    @pytest.mark.parametrize("span", [0, NEAR_BYTES // 2, RING_BYTES * 2, NEAR_BYTES + 1])
    def test_a_span_that_a_ring_cannot_have_breaks_the_link(self, large, span):
        one, other = large
        one.send(views(10))
        one._rings[0].words[SPAN] = span
        with pytest.raises(LinkClosed, match="to use more of the memory than there is"):
            other.recv(views(10))


class TestSleeping:
    def test_a_reader_is_woken_once(self, links):
        one, other = links
        assert other.poll_events(reading=True, writing=False) == select.POLLIN
        assert one.send(views(10)) == 10 and one.send(views(10)) == 10
        assert awake(other)
        other.woken(select.POLLIN)
        assert not awake(other)
        one.send(views(10))  # it is awake: no byte through the socket
        assert not awake(other)
        assert other.poll_events(True, False) == select.POLLIN | select.POLLOUT  # it need not sleep

    def test_before_it_sleeps_it_says_what_it_has_read(self, links):
        one, other = links
        one.send(views(SIZE))
        other.recv(views(100))  # too little to be worth a message
        assert one.poll_events(False, True) == select.POLLIN
        other.poll_events(True, False)
        assert awake(one) and one.send(views(200)) == 100

    @pytest.mark.parametrize("way", ["reading", "writing"])
    def test_a_peer_that_dies_wakes_a_sleeper(self, links, way):
        one, other = links
        if way == "writing":
            one.send(views(SIZE))
        one.poll_events(way == "reading", way == "writing")
        other.sock.close()  # as the system does it, without a word in the ring
        assert awake(one)
        one.woken(select.POLLIN | select.POLLHUP)
        assert one.poll_events(True, False) & select.POLLOUT  # there is something to find
        with pytest.raises(LinkClosed, match="it closed the connection"):
            one.recv(views(10))
        with pytest.raises(LinkClosed, match="it closed the connection"):
            one.send(views(10))


class TestEnd:
    def test_bytes_that_are_seen_only_after_the_end_come_before_it(self, links):
        """The other end stores bytes and then closes, between this end's looks at the one and the other."""
        one, other = links

        def last_message():
            del other._order
            one.send(views(10))

        other._order = last_message  # the memory barrier between the two looks
        other._rings[1].words[WRITER_STATE] = CLOSED
        assert other.recv(views(100)) == 10
        with pytest.raises(LinkClosed, match="it closed the connection"):
            other.recv(views(100))

    def test_a_reader_that_has_closed_may_have_read_the_last_message(self, links):
        one, other = links
        other._rings[1].words[READER_STATE] = CLOSED
        assert one.send(views(10)) == 10
        with pytest.raises(LinkClosed, match="it closed the connection"):
            one.send(views(10))

    def test_a_peer_that_closes_without_reading_what_was_lent(self, lending):
        one, other = lending
        assert one.send(views(5000)) == 0
        assert not one._may_send()
        other.close()
        assert one._may_send()
        with pytest.raises(LinkClosed, match="it closed the connection"):
            one.send(views(5000))


class TestLending:
    def test_small_pieces_before_a_large_one_go_through_the_ring(self, lending):
        one, other = lending
        small, large = os.urandom(900), os.urandom(5000)
        assert one.send([memoryview(small), memoryview(large)]) == 900
        assert one.send([memoryview(large)]) == 0  # lent: it counts when it has been read
        assert received(other, 5900) == small + large
        assert one.send([memoryview(large)]) == 5000

    def test_more_pieces_than_there_are_places_for(self, lending):
        one, other = lending
        pieces = views(*[2000] * (MAX_LOANS + 3))
        assert one.send(pieces) == 0
        got = received(other, 2000 * MAX_LOANS)
        assert one.send(pieces) == 2000 * MAX_LOANS
        assert one.send(pieces[MAX_LOANS:]) == 0
        assert got + received(other, 6000) == b"".join(pieces)

    @pytest.mark.parametrize("given_back", [False, True])
    def test_what_is_revoked_is_not_taken_and_nothing_follows(self, lending, monkeypatch, given_back):
        one, other = lending
        data = bytearray(b"a" * 5000)
        assert one.send([memoryview(data)]) == 0

        def read_too_late(pid, address, into):
            one.revoke()
            one.revoke()
            data[:] = b"b" * 5000
            read_memory(pid, 16 if given_back else address, into)

        monkeypatch.setattr(local, "read_memory", read_too_late)
        assert other.recv(views(5000)) == 0 and other.recv(views(5000)) == 0
        with pytest.raises(LinkClosed, match="given up a call in which it was used"):
            one.send(views(10))
        one.close()
        with pytest.raises(LinkClosed, match="it closed the connection"):
            other.recv(views(5000))

    def test_memory_that_cannot_be_read_is_the_end_of_the_link(self, lending):
        inward = lending[0]._rings[1]
        inward.words[LOANS], inward.words[LOANS + 1] = 16, 100  # no process has memory there
        inward.words[LENT] = 1
        with pytest.raises(LinkClosed, match="its memory cannot be read: bad address"):
            lending[0].recv(views(100))

    def test_a_system_that_cannot_read(self, monkeypatch):
        monkeypatch.setattr(local, "_readv", None)
        with pytest.raises(OSError, match="this system cannot"):
            read_memory(os.getpid(), 16, memoryview(bytearray(7)))

    def test_positions_count_on_from_0(self, lending):
        """The words of a ring hold 64 bits; a job that runs for long enough comes to their end."""
        one, other = lending
        outward, inward = one._rings[0], other._rings[1]
        outward.words[RETURNED] = one._returned = near = MASK - 999
        (data,) = views(5000)
        assert one.send([data]) == 0
        assert received(other, 5000) == data
        assert one.send([data]) == 5000 and inward.words[RETURNED] == (near + 5000) & MASK


@pytest.mark.parametrize(
    ("word", "value", "reason"),
    [
        (WRITTEN, RING_BYTES + 1, "sent more than there is room for"),
        (READ, RING_BYTES, "read more than it was sent"),
        (RETURNED, 2**31, "read more than it was lent"),
        (LENT, 1, "lent nothing"),
        (WRITER_STATE, CLOSED, "closed the connection"),
    ],
)
def test_what_a_peer_cannot_have_done_breaks_the_link(lending, word, value, reason):
    one = lending[0]
    outward, inward = one._rings
    if word in (WRITTEN, LENT, WRITER_STATE):
        inward.words[word] = value
        with pytest.raises(LinkClosed, match=reason):
            one.recv(views(100))
    else:
        data = views(5000 if word == RETURNED else 1000)
        one.send(data)
        outward.words[word] = value
        with pytest.raises(LinkClosed, match=reason):
            for _ in range(SMALL_RING_BYTES // 1000 + 1):
                one.send(data)
