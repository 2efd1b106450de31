"""A server thread that exchanges control messages: what it takes, what it sends, and how it ends."""

from __future__ import annotations

import logging
import socket
import struct
import threading

import pytest

from ringcomm.errors import StartupError
from ringcomm.rendezvous import server as server_module
from ringcomm.rendezvous.membership import Drop, Send
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.wire.auth import Purpose
from tests.integration.rendezvous.fake_rendezvous import Peer
from tests.support.service import KEY, eventually

NOTE = {"type": "note", "text": "hello"}
LONG = {"type": "note", "text": "x" * 3_000_000}
MANY = 8
"""So many of them are more than the buffers of a connection hold."""


def server_of(*addresses, notify=print):
    return RendezvousServer(
        key=KEY, job="job", size=2, addresses=addresses, start_timeout_s=20.0, notify=notify
    )


@pytest.fixture
def server(no_leaks):
    notices = []
    server = server_of("127.0.0.1", notify=notices.append)
    server.endpoints, server.notices = server.start(), notices
    yield server
    server.stop()


@pytest.fixture
def client(server):
    """`client()`: connects to the server."""
    made = []

    def connect(*arguments):
        made.append(Peer(server.endpoints, KEY, "job", *arguments))
        return made[-1]

    yield connect
    for item in made:
        item.sock.close()


def here(server, action):
    """Call this in the server's thread; what it returns."""
    results, done = [], threading.Event()

    def call():
        results.append(action())
        done.set()

    server.order(call)
    assert done.wait(30.0)
    return results[0]


def numbers(server):
    return here(server, lambda: sorted(server._connections))


def test_a_connection_that_is_dropped_first_gets_all_that_was_sent(server, client):
    item = client()
    assert eventually(lambda: numbers(server) == [1])
    here(server, lambda: server._act([*[Send(1, LONG)] * MANY, Drop(1), Send(2, NOTE)]))
    assert item.read() == [LONG] * MANY
    assert eventually(lambda: numbers(server) == [])


def test_a_connection_that_breaks_the_rules_ends_and_the_others_stay(server, client, caplog):
    caplog.set_level(logging.INFO, "ringcomm.rendezvous")
    stays = client()
    unwanted, malformed, reset = client(), client(), client()
    unwanted.send({"type": "unblocked"})
    malformed.sock.sendall(b"\xff" * 4)
    reset.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.sock.close()
    assert eventually(lambda: numbers(server) == [1])
    for number, why in (
        (2, "a rank may not send 'unblocked'"), (3, "a control message of 4294967295 bytes"),
        (4, "Connection reset by peer"),
    ):
        assert f"control connection {number}: {why}" in caplog.text
    server.stop()
    assert stays.read() == []


def test_a_peer_with_another_purpose_is_turned_away_and_reported(server, client, monkeypatch):
    monkeypatch.setattr(server_module, "_REFUSALS_EVERY_S", 0.3)
    for _ in range(2):
        assert client(Purpose.DIRECT).read() == []
    assert eventually(lambda: sum(int(item.text.split()[1]) for item in server.notices) == 2)
    why = "(mostly a rank: it dialled the rendezvous for another purpose)"
    assert all(why in item.text and item.kind == "log" for item in server.notices)


def test_an_address_that_is_not_this_machines_is_left_out(no_leaks):
    server = server_of("192.0.2.1", "127.0.0.1")
    ((address, port),) = server.start()
    server.stop()
    assert address == "127.0.0.1" and port > 0


def test_a_server_that_can_listen_nowhere_does_not_start(no_leaks):
    server = server_of("192.0.2.1")
    with pytest.raises(StartupError, match=r"The rendezvous cannot listen anywhere: 192\.0\.2\.1: "):
        server.start()
    server.stop()


def test_a_peer_that_does_not_read_cannot_keep_a_server_from_its_end(server, client):
    item = client()
    assert eventually(lambda: numbers(server) == [1])
    here(server, lambda: server._act([Send(1, LONG)] * MANY))
    server.stop()
    assert item.sock.recv(4) != b"", "what was sent before is there"
    called = []
    server.stop()
    server.order(lambda: called.append(1))
    assert called == [], "after its end nothing is called any more"
