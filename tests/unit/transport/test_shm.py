"""Links through shared memory: both ends in this process, driven by hand."""

from __future__ import annotations

import os
import select
import socket

import pytest

from ringcomm.transport.base import LinkClosed
from ringcomm.transport.ring import (
    CLOSED,
    EXPENSIVE,
    LENT,
    NEAR_BYTES,
    READ,
    READER_STATE,
    RING_BYTES,
    SKIPPED_BYTES,
    SMALL_RING_BYTES,
    SPAN,
    STINT_BYTES,
    WINDOW,
    WRITER_STATE,
    WRITTEN,
    Ring,
    SpanChoice,
)
from ringcomm.transport.shm import SharedLink

SIZE = SMALL_RING_BYTES


@pytest.fixture
def links():
    """The two ends of a link."""
    yield from ends(SIZE)


@pytest.fixture
def large():
    """The two ends of a link that may use more or less of its rings."""
    yield from ends(RING_BYTES)


def ends(size: int):
    sockets = socket.socketpair()
    made = [Ring.make(size) for _ in sockets]
    rings = [(made[0], made[1].duplicate()), (made[1], made[0].duplicate())]
    links = [SharedLink(1 - rank, sockets[rank], *rings[rank]) for rank in range(2)]
    yield links
    for link in links:
        link.close()
        link.close()


def views(*lengths: int) -> list:
    return [memoryview(bytearray(os.urandom(length))) for length in lengths]


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


class TestEnd:
    def test_before_it_sleeps_it_says_what_it_has_read(self, links):
        one, other = links
        one.send(views(SIZE))
        other.recv(views(100))  # too little to be worth a message
        assert one.poll_events(False, True) == select.POLLIN
        other.poll_events(True, False)
        assert awake(one) and one.send(views(200)) == 100

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


@pytest.mark.parametrize(
    ("word", "value", "reason"),
    [
        (WRITTEN, SIZE + 1, "sent more than there is room for"),
        (READ, SIZE, "read more than it was sent"),
        (LENT, 1, "it lent nothing"),
    ],
)
def test_what_a_peer_cannot_have_done_breaks_the_link(links, word, value, reason):
    one = links[0]
    outward, inward = one._rings
    if word == READ:
        assert one.send(views(10)) == 10
        outward.words[word] = value
        with pytest.raises(LinkClosed, match=reason):
            one.send(views(SIZE))
    else:
        inward.words[word] = value
        with pytest.raises(LinkClosed, match=reason):
            one.recv(views(100))


COUNT = 512 * 1024
OWN = 1e-10
CHEAP, DEAR = COUNT * OWN * EXPENSIVE / 2, COUNT * OWN * EXPENSIVE * 2
FIRST = SKIPPED_BYTES // COUNT - 1
"""Copies before the first that counts."""


def noted(choice: SpanChoice, *times: float) -> bool:
    for elapsed_s in times:
        choice.note(COUNT, elapsed_s)
    return choice.whole


class TestSpanChoice:
    def test_the_whole_ring_is_used_where_writing_is_expensive(self):
        choice = SpanChoice(OWN)
        assert not noted(choice, *[DEAR] * (FIRST + WINDOW - 1))
        assert noted(choice, DEAR)

    def test_the_part_is_tried_again_after_some_time(self):
        choice = SpanChoice(OWN)
        noted(choice, *[DEAR] * (FIRST + WINDOW))
        stint = STINT_BYTES // COUNT
        assert noted(choice, *[CHEAP] * (stint - 1))  # cheap, because the whole ring is used
        assert not noted(choice, CHEAP)
        assert not noted(choice, *[DEAR] * (FIRST + WINDOW - 1))
        assert noted(choice, DEAR)
