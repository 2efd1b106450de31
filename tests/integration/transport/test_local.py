"""Which kind of link two ranks of one host get, and that shared memory is gone when they are."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.errors import StartupError
from ringcomm.testing.cluster import run_ranks
from ringcomm.transport import arena, local
from ringcomm.transport.local import (
    LEND_ABOVE_BYTES,
    ReadingLink,
    make_links,
    read_memory,
    receive_memory,
    send_memory,
)
from ringcomm.transport.shm import CONTROL_BYTES, RING_BYTES, SMALL_RING_BYTES, Ring, SharedLink
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
    monkeypatch.setattr(local, "read_memory", refuse)
    assert kinds(pair("auto", "auto")) == [SharedLink, SharedLink]


def test_without_any_memory_a_plain_stream_remains(pair, monkeypatch):
    monkeypatch.setattr(local, "read_memory", refuse)
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

    large = (ReadingLink, {RING_BYTES}, LEND_ABOVE_BYTES, (3.0, 3.0))
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


def test_memory_that_ends_half_way_is_an_error():
    """The system copies the first page and then stops: fewer bytes, and no error number."""
    page = mmap.PAGESIZE
    with mmap.mmap(-1, 2 * page) as area:
        place = ctypes.addressof(ctypes.c_char.from_buffer(area))
        protect = ctypes.CDLL(None).mprotect
        assert protect(ctypes.c_void_p(place + page), ctypes.c_size_t(page), 0) == 0
        with pytest.raises(OSError) as caught:
            read_memory(os.getpid(), place, memoryview(bytearray(2 * page)))
        assert caught.value.errno == errno.EFAULT


# -- memory that is passed on ------------------------------------------------------------------------


@pytest.fixture
def ends(no_leaks):
    """The two ends of a Unix socket."""
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def test_memory_of_another_size_is_refused(no_leaks):
    """The words in front must not be looked for in less; a process of 32 bits has half the bytes for them."""
    other_words = 512 * (4 if struct.calcsize("P") == 8 else 8)
    for size in (100, other_words + RING_BYTES, CONTROL_BYTES + RING_BYTES + 1):
        descriptor = arena.nameless()
        os.ftruncate(descriptor, size)
        with pytest.raises(OSError, match=f"cannot map shared memory: it has {size} bytes"):
            Ring(descriptor)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_memory_that_could_become_shorter_is_refused(ends):
    """A process that read what is no longer there would be ended by SIGBUS."""
    made, array = Ring.make(SMALL_RING_BYTES), arena.empty(1_000_000)
    assert array in arena.own()
    sealed = [made.descriptor, arena.own().descriptor]
    for descriptor in sealed:
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, 100)
    send_memory(ends[0], sealed)
    for descriptor in receive_memory(ends[1]):
        os.close(descriptor)
    for flags in (0, os.MFD_ALLOW_SEALING):
        descriptor = os.memfd_create("not sealed", flags)
        os.ftruncate(descriptor, CONTROL_BYTES + RING_BYTES)
        send_memory(ends[0], [made.descriptor, descriptor])
        os.close(descriptor)
        assert receive_memory(ends[1]) == []
    made.close()
