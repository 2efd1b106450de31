"""What another rank of this host may write into shared memory: links break, and nothing else does."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import strategies as st

from ringcomm.errors import StartupError
from ringcomm.transport.base import LinkClosed
from ringcomm.transport.local import make_links
from ringcomm.transport.process_memory import Lease, PeerMemory, ReadingLink
from ringcomm.transport.ring import (
    LENT,
    LOANS,
    LOANS_READ,
    MASK,
    NEAR_BYTES,
    READ,
    READER_STATE,
    RETURNED,
    RING_BYTES,
    SPAN,
    WRITER_STATE,
    WRITTEN,
    Ring,
)
from ringcomm.transport.shm import SharedLink
from tests.fuzz.cases import at_most, fuzz

pytestmark = pytest.mark.release

counters = st.sampled_from([0, 1, 5, 7000, NEAR_BYTES, RING_BYTES, RING_BYTES + 1, 1 << 40, MASK - 1, MASK])


stored = st.lists(
    st.tuples(
        st.sampled_from([WRITTEN, READ, WRITER_STATE, READER_STATE, LENT, LOANS_READ, RETURNED, SPAN]),
        counters,
    )
    | st.tuples(st.integers(LOANS, LOANS + 3), counters),
    max_size=8,
)  # fmt: skip


def use(link, there, others, changes):
    """Let a link meet these words of its peer while it sends and receives: it may break, and nothing else."""
    scratch, top = memoryview(bytearray(4096)), memoryview(bytearray(30))
    try:
        for index, value in changes:
            for other in others:
                other.words[index] = value
            link.send([memoryview(bytes(5000))])
            link.send([memoryview(bytes(50_000))])
            link.recv([scratch])
            link.recv([top, scratch])
            link.poll_events(True, True)
            link.woken(0)
            link.settled()
    except LinkClosed:
        pass
    finally:
        link.close()
        there.close()
        for other in others:
            other.close()


def both_ends_of_rings():
    """Two rings, and the same two for the other end."""
    rings = [Ring.make(), Ring.make()]
    return rings, [ring.duplicate() for ring in rings]


@fuzz(stored)
def test_links_through_shared_memory(changes):
    here, there = socket.socketpair()
    rings, others = both_ends_of_rings()
    use(SharedLink(1, here, *rings), there, others, changes)


@fuzz(stored)
def test_links_that_read_memory(changes):
    here, there = socket.socketpair()
    with at_most(1 << 20):
        rings, others = both_ends_of_rings()
        lease = Lease()
        link = ReadingLink(1, here, PeerMemory(os.getpid(), lease.address, lease.token), lease, *rings)
        link.lend_above(20_000)
        use(link, there, others, changes)


@fuzz(st.binary(max_size=60), st.booleans())
def test_what_two_ranks_of_a_host_agree_on(data, memory):
    here, there = socket.socketpair()
    try:
        there.sendall(data)
        if memory:
            with there.dup() as other:
                socket.send_fds(there, [b"\x01"], [other.fileno()]) if hasattr(socket, "send_fds") else None
        there.shutdown(socket.SHUT_WR)
        for link in make_links({1: here}, "auto").values():
            link.close()
    except (OSError, StartupError):
        pass
    finally:
        here.close()
        there.close()
