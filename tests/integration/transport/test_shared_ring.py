"""Shared memory without a name: made by one end, handed to the other through their Unix socket."""

from __future__ import annotations

import array
import os
import socket
import struct
import sys

import pytest

from ringcomm.transport import arena
from ringcomm.transport.ring import (
    CONTROL_BYTES,
    RING_BYTES,
    SMALL_RING_BYTES,
    WRITTEN,
    Ring,
    nameless,
    receive_memory,
)

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory without a name")


@pytest.fixture
def ends(no_leaks):
    """The two ends of a Unix socket."""
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def send_descriptor(sock, descriptor):
    """As an end does that offers some memory."""
    passed = array.array("i", [descriptor])
    sock.sendmsg([b"y"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, passed)])
    os.close(descriptor)


def test_both_ends_see_the_same_memory(ends):
    made = Ring.make(SMALL_RING_BYTES)
    made.bytes[:5] = b"hello"
    made.pass_on(ends[0], b"y")
    message, taken = Ring.take(ends[1])
    assert message == b"y" and taken.size == SMALL_RING_BYTES == len(taken.bytes)
    assert bytes(taken.bytes[:5]) == b"hello" and taken.words[WRITTEN] == 0
    taken.words[WRITTEN] = 7
    assert made.words[WRITTEN] == 7
    for ring in (made, taken):
        ring.close()


def test_memory_of_another_size_is_refused(ends):
    """The words in front must not be looked for in less; a process of 32 bits has half the bytes for them."""
    other_words = 512 * (4 if struct.calcsize("P") == 8 else 8)
    for size in (100, other_words + RING_BYTES):
        descriptor = nameless()
        os.ftruncate(descriptor, size)
        send_descriptor(ends[0], descriptor)
        assert Ring.take(ends[1]) == (b"y", None)
    descriptor = os.memfd_create("large")
    os.ftruncate(descriptor, CONTROL_BYTES + RING_BYTES + 1)
    with pytest.raises(OSError, match=f"cannot map shared memory: it has {CONTROL_BYTES + RING_BYTES + 1} b"):
        Ring(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_memory_that_could_become_shorter_is_refused(ends):
    """A process that read what is no longer there would be ended by SIGBUS."""
    made, array = Ring.make(SMALL_RING_BYTES), arena.empty(1_000_000)
    assert array in arena.own()
    for sealed in (made._descriptor, arena.own().descriptor):
        with pytest.raises(PermissionError):
            os.ftruncate(sealed, 100)
        send_descriptor(ends[0], os.dup(sealed))
        _, descriptor = receive_memory(ends[1])
        os.close(descriptor)
    made.close()
    for flags in (0, os.MFD_ALLOW_SEALING):
        descriptor = os.memfd_create("not sealed", flags)
        os.ftruncate(descriptor, CONTROL_BYTES + RING_BYTES)
        send_descriptor(ends[0], descriptor)
        assert Ring.take(ends[1]) == (b"y", None)
