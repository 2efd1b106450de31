"""Which kind of link two ranks of one host get, and that shared memory is gone when they are."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.errors import StartupError
from ringcomm.testing.cluster import run_ranks
from ringcomm.transport import local
from ringcomm.transport.local import make_links
from ringcomm.transport.process_memory import Lease, PeerMemory, ReadingLink
from ringcomm.transport.ring import (
    RING_BYTES,
    SMALL_RING_BYTES,
)
from ringcomm.transport.shm import SharedLink
from ringcomm.transport.tcp import SocketLink


@pytest.fixture
def pair():
    """`pair(wish, wish)`: the links at both ends of a Unix socket, or what was raised instead."""
    sockets = []

    def make(*wishes):
        ends = socket.socketpair()
        sockets.extend(ends)
        with ThreadPoolExecutor(2) as pool:
            tasks = [pool.submit(make_links, {1 - rank: ends[rank]}, wishes[rank]) for rank in range(2)]
        return [task.exception() or task.result()[1 - rank] for rank, task in enumerate(tasks)]

    yield make
    for sock in sockets:
        sock.close()


def refuse(*arguments, **options):
    raise PermissionError(1, "Operation not permitted")


def kinds(links):
    for link in links:
        link.close()
    return [type(link) for link in links]


@pytest.mark.parametrize(
    ("wishes", "kind"),
    [
        (("auto", "auto"), ReadingLink),
        (("memory", "auto"), ReadingLink),
        (("shm", "auto"), SharedLink),
        (("auto", "unix"), SocketLink),
        (("unix", "unix"), SocketLink),
    ],
)
def test_both_ends_get_the_best_that_both_wish_for(pair, wishes, kind):
    assert kinds(pair(*wishes)) == [kind, kind]


def test_memory_that_may_not_be_read_is_shared(pair, monkeypatch):
    monkeypatch.setattr(PeerMemory, "read", refuse)
    assert kinds(pair("auto", "auto")) == [SharedLink, SharedLink]


def test_without_any_memory_a_plain_stream_remains(pair, monkeypatch):
    monkeypatch.setattr(PeerMemory, "read", refuse)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert kinds(pair("auto", "auto")) == [SocketLink, SocketLink]


@pytest.mark.parametrize(
    ("wish", "remedy"), [("memory", "use 'auto' or 'shm'"), ("shm", "use 'auto' or 'unix'")]
)
def test_a_wish_that_cannot_be_granted_is_an_error_with_a_remedy(pair, wish, remedy):
    one, other = pair(wish, "unix")
    assert isinstance(one, StartupError)
    assert remedy in str(one)
    assert "rank 1" in str(one)
    assert type(other) is SocketLink


def test_where_many_ranks_share_a_host_the_rings_are_small(monkeypatch, no_leaks):
    def at_work(context):
        link = context.group.channels.direct.link(1 - context.rank)
        x = np.full(2_000_000, context.rank + 1.0, np.float32)  # lent
        y = np.full(30_000, context.rank + 1.0, np.float32)  # more than a small ring holds
        sums = (context.allreduce(x, rc.Sum)[-1], context.allreduce(y, rc.Sum)[-1])
        return type(link), {made.size for made in link._rings}, link.ring_most_bytes, sums

    monkeypatch.setattr(local, "measured", lambda: 123_456)
    large = (ReadingLink, {RING_BYTES}, 123_456, (3.0, 3.0))
    assert run_ranks(2, at_work, transport="auto") == [large] * 2
    monkeypatch.setattr(local, "_MANY_PEERS", 1)
    small = (ReadingLink, {SMALL_RING_BYTES}, SMALL_RING_BYTES, (3.0, 3.0))
    assert run_ranks(2, at_work, transport="auto") == [small] * 2


def test_a_broken_connection_leaves_nothing_behind(no_leaks):
    one, other = socket.socketpair()
    other.sendall(bytes(40) + b"\0" + b"\1")  # and then no ring
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match="closed the connection"):
        make_links({1: one}, "shm")
    one.close()
    other.close()


def test_memory_that_ends_half_way_is_an_error_unless_the_lease_was_revoked(no_leaks):
    """The system copies the first page and then stops: fewer bytes, and no error number."""
    page, lease = mmap.PAGESIZE, Lease()
    with mmap.mmap(-1, 2 * page) as area:
        place = ctypes.addressof(ctypes.c_char.from_buffer(area))
        protect = ctypes.CDLL(None).mprotect
        assert protect(ctypes.c_void_p(place + page), ctypes.c_size_t(page), 0) == 0
        memory, into = PeerMemory(os.getpid(), lease.address, lease.token), memoryview(bytearray(2 * page))
        with pytest.raises(OSError) as caught:
            memory.read(place, into)
        assert caught.value.errno == errno.EFAULT
        lease.revoke()
        assert memory.read(place, into) == 0
