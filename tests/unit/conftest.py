"""`clock`: a clock that a test moves. `ends`: of a TCP connection."""

from __future__ import annotations

import socket

import pytest


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def ends():
    """The two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with dialled, accepted:
        yield dialled, accepted
