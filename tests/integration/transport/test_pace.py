"""What the system counts of a connection, which says whether a link has become slow."""

from __future__ import annotations

import socket

import pytest

from ringcomm.transport.pace import counted


def test_the_systems_counters():
    """Over the loopback, on Linux; elsewhere nothing is known."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with one, other:
            before = counted(one)
            if before is None:
                pytest.skip("this system does not count")
            one.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(other.recv(100_000))
            other.sendall(b"x")
            one.recv(1)  # so the acknowledgement is here
            after = counted(one)
    assert after.acked_bytes - before.acked_bytes == 100_000
    assert 0 <= after.held_us <= after.busy_us
    assert counted(one) is None  # closed
