"""The answering side of a probe, with the probing process at the other end of a connection."""

from __future__ import annotations

import socket

import pytest

from ringcomm.clock import Deadline
from ringcomm.rendezvous.measuring import LIMIT_BYTES, REQUEST, Echo
from ringcomm.transport.reactor import Reactor
from ringcomm.wire.messages import MessageReader

LIMIT_S = 20.0


class Probed:
    """An echo of rank 3, and the other end of its connection; `ended` has echoes without a connection."""

    def __init__(self) -> None:
        self.reactor = Reactor()
        listener = socket.create_server(("127.0.0.1", 0))
        self.sock = socket.create_connection(listener.getsockname())
        self.other, _ = listener.accept()
        listener.close()
        self.other.setblocking(False)
        self.sock.settimeout(LIMIT_S)
        self.ended: list = []
        self.reader = MessageReader(1000)
        self.echo = Echo(self.reactor, self.other, None, 3, self._over)  # type: ignore[arg-type]

    def _over(self, echo: Echo) -> None:
        self.reactor.forget(echo.sock)
        self.ended.append(echo)

    def turn_until(self, condition) -> None:
        deadline = Deadline(LIMIT_S)
        while not condition():
            assert not deadline.expired()
            self.reactor.run_once(0.05)

    def close(self) -> None:
        self.reactor.close()
        self.sock.close()
        self.other.close()

    def greet(self) -> None:
        """Read which rank it is."""
        (message,) = self.reader.feed(self.sock.recv(1000))
        assert message == {"type": "echo", "rank": 3}


@pytest.fixture
def probed():
    made = Probed()
    yield made
    made.close()


@pytest.mark.parametrize("size", [0, LIMIT_BYTES + 1])
def test_a_measurement_of_impossible_size_ends_it(probed, size):
    probed.greet()
    probed.sock.sendall(REQUEST.pack(size))
    probed.turn_until(lambda: probed.ended)


def test_more_than_was_announced_ends_it(probed):
    probed.greet()
    probed.sock.sendall(REQUEST.pack(1000) + bytes(1001))
    probed.turn_until(lambda: probed.ended)
