"""Links through shared memory: both ends in this process, driven by hand."""

from __future__ import annotations

import os
import select
import socket

import pytest

from ringcomm.transport.base import LinkClosed
from ringcomm.transport.ring import (
    CLOSED,
    LENT,
    READ,
    READER_STATE,
    SMALL_RING_BYTES,
    WRITER_STATE,
    WRITTEN,
    Ring,
)
from ringcomm.transport.shm import PIECE_BYTES, SharedLink

SIZE = SMALL_RING_BYTES


@pytest.fixture
def links():
    """The two ends of a link."""
    sockets = socket.socketpair()
    made = [Ring.make(SIZE) for _ in sockets]
    rings = [(made[0], made[1].duplicate()), (made[1], made[0].duplicate())]
    links = [SharedLink(1 - rank, sockets[rank], *rings[rank]) for rank in range(2)]
    yield links
    for link in links:
        link.close()
        link.close()


def views(*lengths: int) -> list:
    return [memoryview(bytearray(os.urandom(length))) for length in lengths]


def awake(link: SharedLink) -> bool:
    """Whether the other end has woken this one, which sleeps."""
    return bool(select.select([link.sock], [], [], 0.0)[0])


class TestPackets:
    def test_through_the_ring_and_around_its_end(self, links):
        one, other = links
        for _ in range(2 * SIZE // 700):
            (packet,) = views(700)
            sent = one.send_packet(packet)
            into = memoryview(bytearray(700))
            got = other.recv_packet(into[:sent])
            while got < 700:
                sent += one.send_packet(packet[sent:]) if sent < 700 else 0
                got += other.recv_packet(into[got:sent])
            assert into == packet

    def test_a_part_of_one(self, links):
        one, other = links
        (packet,) = views(100)
        assert one.send([packet[:60]]) == 60
        into = memoryview(bytearray(100))
        assert other.recv_packet(into) == 60
        assert other.recv_packet(into[60:]) == 0
        assert one.send_packet(packet[60:]) == 40
        assert other.recv_packet(into[60:]) == 40 and into == packet

    def test_that_does_not_fit(self, links):
        one, other = links
        (packet,) = views(SIZE)
        assert one.send_packet(packet) == SIZE
        assert one.send_packet(packet[:10]) == 0
        into = memoryview(bytearray(SIZE))
        assert other.recv_packet(into) == SIZE and into == packet
        assert one.send_packet(packet[:10]) == 10


def test_a_ring_that_is_full_takes_what_was_read(links):
    one, other = links
    (data,) = views(SIZE + 5000)
    assert one.send([data]) == SIZE < PIECE_BYTES
    assert one.send([data[SIZE:]]) == 0
    into = memoryview(bytearray(SIZE + 5000))
    assert other.recv([into[:10], into[10:SIZE]]) == SIZE
    assert one.send([data[SIZE:]]) == 5000
    assert other.recv([into[SIZE:]]) == 5000 and into == data


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

    def test_a_writer_is_woken_when_there_is_room(self, links):
        one, other = links
        assert one.send(views(SIZE)) == SIZE
        assert one.poll_events(reading=False, writing=True) == select.POLLIN
        assert other.recv(views(SIZE)) == SIZE
        assert awake(one)
        one.woken(select.POLLIN)
        assert one.poll_events(False, True) == select.POLLIN | select.POLLOUT

    def test_before_it_sleeps_it_says_what_it_has_read(self, links):
        one, other = links
        one.send(views(SIZE))
        other.recv(views(100))  # too little to be worth a message
        assert one.poll_events(False, True) == select.POLLIN
        other.poll_events(True, False)
        assert awake(one) and one.send(views(200)) == 100

    def test_woken_by_nothing(self, links):
        one = links[0]
        one.woken(0)
        one.woken(select.POLLOUT)
        one.woken(select.POLLIN)  # another thread has read the byte already
        assert one.send(views(10)) == 10

    def test_a_socket_that_is_full_wakes_in_any_case(self, links):
        one, other = links
        other.poll_events(True, False)
        try:
            while True:
                one.sock.send(bytes(1 << 16))
        except BlockingIOError:
            pass
        one.send(views(10))
        assert awake(other) and other.recv(views(10)) == 10


class TestEnd:
    def test_what_was_sent_before_comes_first(self, links):
        one, other = links
        one.send(views(10))
        one.close()
        assert other.recv(views(100)) == 10
        with pytest.raises(LinkClosed, match="it closed the connection"):
            other.recv(views(100))
        with pytest.raises(LinkClosed, match="it closed the connection"):
            other.send(views(SIZE + 1))

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

    def test_a_peer_that_dies_asleep_is_found_by_waking_it(self, links):
        one, other = links
        other.poll_events(True, False)
        other.sock.close()
        assert one.send(views(10)) == 10
        with pytest.raises(LinkClosed, match="it closed the connection"):
            one.send(views(10))

    def test_a_socket_that_fails(self, links):
        one = links[0]
        one.sock.close()
        one.woken(select.POLLNVAL)
        with pytest.raises(LinkClosed, match="it closed the connection"):
            one.send(views(10))

    def test_its_own_end(self, links):
        one, other = links
        one.close()
        for move in (one.send, one.recv):
            with pytest.raises(LinkClosed):
                move(views(10))


@pytest.mark.parametrize(
    ("word", "value", "reason"),
    [
        (WRITTEN, SIZE + 1, "sent more than there is room for"),
        (READ, SIZE, "read more than it was sent"),
        (LENT, 1, "lent memory that this end cannot read"),
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
