"""Records of an encrypted connection are played into another one of the job, or into their own again."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from typing import Any, List, Tuple

import pytest

from ringcomm.storage.keys import make_certificate
from ringcomm.transport.secure import SecureSocket, encryption_of

TEXT = b"gradient" * 100


def received(source: socket.socket) -> bytes:
    try:
        return source.recv(1 << 16)
    except BlockingIOError:
        return b""


class Pair:
    """Two ends of an encrypted connection, and the wire between them in the hands of the test."""

    def __init__(self, certificate: str, stack: ExitStack) -> None:
        encryption = encryption_of(certificate)
        assert encryption is not None
        ends: List[SecureSocket] = []
        self.wires: List[socket.socket] = []
        for accepted in (False, True):
            inner, outer = socket.socketpair()
            for sock in (inner, outer):
                sock.setblocking(False)
            ends.append(stack.enter_context(closing(encryption.wrap(inner, accepted))))
            self.wires.append(stack.enter_context(outer))
        self.dialled, self.accepted = ends
        while not (self.dialled.handshake() & self.accepted.handshake()):
            for source, target in (self.wires, self.wires[::-1]):
                target.sendall(received(source))
        for source, target in (self.wires, self.wires[::-1]):
            target.sendall(received(source))
        for end in ends:
            end.trust()

    def sent(self, text: bytes = TEXT) -> bytes:
        """Return what the end that dialled puts on the wire for this text; it arrives nowhere."""
        self.dialled.send(text)
        return received(self.wires[0])


@pytest.fixture
def pairs() -> Any:
    with ExitStack() as stack:
        certificate = make_certificate()
        yield Pair(certificate, stack), Pair(certificate, stack)


@pytest.mark.parametrize("before", [0, 3], ids=["first", "fourth"])
def test_a_record_of_another_connection_ends_the_link(pairs: Tuple[Pair, Pair], before: int) -> None:
    """Same certificate, same direction, same number of the record, same text."""
    one, other = pairs
    for _ in range(before):
        for pair in pairs:
            pair.wires[1].sendall(pair.sent())
            assert pair.accepted.recv(1 << 16) == TEXT
    foreign = one.sent()
    other.sent()
    other.wires[1].sendall(foreign)
    with pytest.raises(ConnectionAbortedError, match="damaged or forged"):
        other.accepted.recv(1 << 16)


@pytest.mark.parametrize("how", ["again", "back", "left out", "in another order"])
def test_records_of_the_own_connection_end_it_too(pairs: Tuple[Pair, Pair], how: str) -> None:
    pair, _ = pairs
    first, second = pair.sent(), pair.sent()
    wire, victim = pair.wires[1], pair.accepted
    if how == "again":
        wire.sendall(first + first)
        assert victim.recv(len(TEXT)) == TEXT
    elif how == "back":
        wire, victim = pair.wires[0], pair.dialled
        wire.sendall(first)
    elif how == "left out":
        wire.sendall(second)
    else:
        wire.sendall(second + first)
    with pytest.raises(ConnectionAbortedError, match="damaged or forged"):
        victim.recv(1 << 16)
