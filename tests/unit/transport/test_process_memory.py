"""Links that lend memory: what a peer may do, what it cannot have done, and what the system refuses."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from ringcomm.transport import process_memory
from ringcomm.transport.base import LinkClosed
from ringcomm.transport.process_memory import Lease, PeerMemory, ReadingLink, available
from ringcomm.transport.ring import (
    CLOSED,
    LENT,
    LOANS,
    MASK,
    MAX_LOANS,
    READ,
    READER_STATE,
    RETURNED,
    RING_BYTES,
    SMALL_RING_BYTES,
    WRITER_STATE,
    WRITTEN,
    Ring,
)

pytestmark = pytest.mark.skipif(not available(), reason="this system cannot read another process's memory")


@pytest.fixture
def links():
    """The two ends of a link of this process with itself; what is larger than 1000 bytes is lent."""
    sockets = socket.socketpair()
    made = [Ring.make(SMALL_RING_BYTES) for _ in sockets]
    rings = [(made[0], made[1].duplicate()), (made[1], made[0].duplicate())]
    leases = [Lease(), Lease()]
    memory = [PeerMemory(os.getpid(), lease.address, lease.token) for lease in leases]
    links = [
        ReadingLink(1 - rank, sockets[rank], memory[1 - rank], leases[rank], *rings[rank])
        for rank in range(2)
    ]
    for link in links:
        link.lend_above(1000)
    yield links
    for link in links:
        link.close()


def received(link: ReadingLink, count: int) -> bytes:
    into = bytearray(count)
    got = 0
    while got < count:
        step = link.recv([memoryview(into)[got:]])
        assert step
        got += step
    return bytes(into)


class TestLending:
    def test_small_pieces_before_a_large_one_go_through_the_ring(self, links):
        one, other = links
        small, large = os.urandom(900), os.urandom(5000)
        assert one.ring_most_bytes == 1000
        assert one.send([memoryview(small), memoryview(large)]) == 900
        assert one.send([memoryview(large)]) == 0  # lent: it counts when it has been read
        assert received(other, 5900) == small + large
        assert one.send([memoryview(large)]) == 5000

    def test_more_pieces_than_there_are_places_for(self, links):
        one, other = links
        pieces = [os.urandom(2000) for _ in range(MAX_LOANS + 3)]
        views = [memoryview(piece) for piece in pieces]
        assert one.send(views) == 0
        got = received(other, 2000 * MAX_LOANS)
        assert one.send(views) == 2000 * MAX_LOANS
        assert one.send(views[MAX_LOANS:]) == 0
        assert got + received(other, 6000) == b"".join(pieces)

    def test_what_is_revoked_is_not_taken_and_nothing_follows(self, links):
        one, other = links
        data = bytearray(b"a" * 5000)
        assert one.send([memoryview(data)]) == 0
        one.revoke()
        one.revoke()
        data[:] = b"b" * 5000
        into = bytearray(5000)
        assert other.recv([memoryview(into)]) == 0 and other.recv([memoryview(into)]) == 0
        with pytest.raises(LinkClosed, match="given up a call in which it was used"):
            one.send([memoryview(bytes(10))])
        one.close()
        with pytest.raises(LinkClosed, match="it closed the connection"):
            other.recv([memoryview(into)])

    def test_a_peer_that_closes_without_reading(self, links):
        one, other = links
        assert one.send([memoryview(bytes(5000))]) == 0
        other.close()
        with pytest.raises(LinkClosed, match="it closed the connection"):
            one.send([memoryview(bytes(5000))])


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
def test_what_a_peer_cannot_have_done_breaks_the_link(links, word, value, reason):
    one = links[0]
    outward, inward = one._rings
    if word in (WRITTEN, LENT, WRITER_STATE):
        inward.words[word] = value
        with pytest.raises(LinkClosed, match=reason):
            one.recv([memoryview(bytearray(100))])
    else:
        data = memoryview(bytes(5000 if word == RETURNED else 1000))
        one.send([data])
        outward.words[word] = value
        with pytest.raises(LinkClosed, match=reason):
            for _ in range(SMALL_RING_BYTES // 1000 + 1):
                one.send([data])


def test_memory_that_cannot_be_read_is_the_end_of_the_link(links):
    one = links[0]
    inward = one._rings[1]
    inward.words[LOANS], inward.words[LOANS + 1] = 16, 100  # no process has memory there
    inward.words[LENT] = 1
    with pytest.raises(LinkClosed, match="its memory cannot be read: bad address"):
        one.recv([memoryview(bytearray(100))])


def test_the_end_of_the_peer_wakes_one_that_waits_to_send(links):
    one = links[0]
    one.send([memoryview(bytes(5000))])
    one._rings[0].words[READER_STATE] = CLOSED
    assert one._may_send()


class TestPeerMemory:
    def test_only_with_a_valid_lease(self):
        lease, data = Lease(), bytearray(b"content")
        address = process_memory.address_of(memoryview(data))
        memory = PeerMemory(os.getpid(), lease.address, lease.token)
        into = bytearray(7)
        assert memory.read(address, memoryview(into)) == 7 and into == data
        lease.revoke()
        assert memory.read(address, memoryview(into)) == 0

    def test_no_memory_there(self):
        lease = Lease()
        memory = PeerMemory(os.getpid(), lease.address, lease.token)
        with pytest.raises(OSError, match="Bad address") as caught:
            memory.read(16, memoryview(bytearray(7)))
        assert caught.value.errno == errno.EFAULT
        lease.revoke()
        assert memory.read(16, memoryview(bytearray(7))) == 0  # the lender has given it back

    def test_a_system_that_cannot(self, monkeypatch):
        lease = Lease()
        memory = PeerMemory(os.getpid(), lease.address, lease.token)
        monkeypatch.setattr(process_memory, "_readv", None)
        assert not available()
        with pytest.raises(OSError, match="this system cannot"):
            memory.read(lease.address, memoryview(bytearray(7)))


def test_positions_count_on_from_0(links):
    """The words of a ring hold 64 bits; a job that runs for long enough comes to their end."""
    one, other = links
    outward, inward = one._rings[0], other._rings[1]
    near = MASK - 999
    outward.words[RETURNED] = one._returned = near
    data = os.urandom(5000)
    assert one.send([memoryview(data)]) == 0
    assert received(other, 5000) == data
    assert one.send([memoryview(data)]) == 5000 and inward.words[RETURNED] == (near + 5000) & MASK
