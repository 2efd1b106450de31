"""The event loop with real sockets."""

from __future__ import annotations

import os
import socket

from ringcomm.transport.reactor import READ, Reactor


def test_a_socket_with_the_number_of_one_that_was_closed_while_watched() -> None:
    """The system has dropped the closed one: the number is watched again only if it is registered again."""
    reactor, got = Reactor(), []
    (before, other), (spare, there) = socket.socketpair(), socket.socketpair()
    reactor.watch(before, READ, lambda: None)
    os.dup2(spare.fileno(), before.fileno())  # closes it, and gives its number to another one at once
    here = socket.socket(fileno=before.detach())
    reactor.watch(here, READ, lambda: got.append(here.recv(1)))
    there.send(b"x")
    reactor.run_once(5.0)
    assert got == [b"x"]
    for sock in (other, spare, there):
        sock.close()
    reactor.close()
