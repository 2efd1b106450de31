"""A server thread that exchanges control messages: what it takes, what it sends, and how it ends."""

from __future__ import annotations

import logging
import socket
import struct
import threading

import pytest

from ringcomm.errors import ProtocolError, StartupError
from ringcomm.rendezvous import server as server_module
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.wire.auth import Purpose
from tests.integration.rendezvous.peer import Peer
from tests.support.service import KEY, eventually

NOTE = {"type": "note", "text": "hello"}
LONG = {"type": "note", "text": "x" * 3_000_000}
MANY = 8
"""So many of them are more than the buffers of a connection hold."""


class Server(RendezvousServer):
    """Records what happens, and answers as the test says."""

    def __init__(self, addresses=("127.0.0.1",), **options):
        super().__init__(
            key=KEY, job="job", size=2, addresses=addresses, start_timeout_s=20.0, notify=print, **options
        )
        self.events, self.refused = [], []
        self.answer = lambda number, message: None

    def arrived(self, number):
        self.events.append(("arrived", number))

    def received(self, number, message):
        self.events.append((message["type"], number))
        self.answer(number, message)

    def lost(self, number):
        self.events.append(("lost", number))

    def refused_connections(self, text):
        self.refused.append(text)


@pytest.fixture
def server(no_leaks):
    server = Server()
    server.endpoints = server.start()
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


# ---- messages --------------------------------------------------------------------------------


def test_connections_have_numbers_by_which_they_are_answered(server, client):
    server.answer = lambda number, message: server.send_message(number, {"type": "unblocked"})
    one, other = client(), client()
    one.send(NOTE, NOTE)
    other.send(NOTE)
    assert eventually(lambda: len(server.events) == 5)
    assert sorted(server.events) == [("arrived", 1), ("arrived", 2), ("note", 1), ("note", 1), ("note", 2)]
    assert here(server, lambda: server.numbers) == [1, 2]
    server.stop()
    assert one.read() == [{"type": "unblocked"}] * 2 and other.read() == [{"type": "unblocked"}]


def test_a_connection_that_is_dropped_first_gets_all_that_was_sent(server, client):
    """What it sends itself is not read any more, and it is not lost."""

    def answer(number, message):
        for _ in range(MANY):
            server.send_message(number, LONG)
        server.drop(number)

    server.answer = answer
    item = client()
    item.send(NOTE)
    assert eventually(lambda: ("note", 1) in server.events)
    here(server, lambda: None)  # all is in the queue
    assert item.read() == [LONG] * MANY
    assert server.events == [("arrived", 1), ("note", 1)]
    assert eventually(lambda: here(server, lambda: server.numbers) == [])


def test_a_connection_that_is_dropped_for_what_it_has_sent_is_not_lost(server, client):
    """The server has ended it by itself, and the rest of what has arrived is of no interest."""

    def answer(number, message):
        server.drop(number)
        raise ProtocolError("this server takes no such message")

    server.answer = answer
    item = client()
    item.send(NOTE, NOTE)
    assert eventually(lambda: here(server, lambda: server.numbers) == [])
    assert server.events == [("arrived", 1), ("note", 1)]


# ---- connections that end --------------------------------------------------------------------


def refuse(number, message):
    raise ProtocolError("this server takes no such message")


def test_a_connection_that_breaks_the_rules_ends_and_the_others_stay(server, client, caplog):
    caplog.set_level(logging.INFO, "ringcomm.rendezvous")
    server.answer = refuse
    stays = client()
    unwanted, malformed, reset = client(), client(), client()
    unwanted.send(NOTE)
    malformed.sock.sendall(b"\xff" * 4)
    reset.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.sock.close()
    lost = [("lost", number) for number in (2, 3, 4)]
    assert eventually(lambda: sorted(server.events)[-4:] == [*lost, ("note", 2)])
    for number, why in (
        (2, "this server takes no such message"),
        (3, "a control message of 4294967295 bytes"),
        (4, "connection reset by peer"),
    ):
        assert f"control connection {number}: {why}" in caplog.text
    assert here(server, lambda: server.numbers) == [1]
    server.stop()
    assert stays.read() == []


def test_a_message_to_a_peer_that_is_gone_is_no_error_of_the_server(server, client):
    """The server notices when it reads, not while it does something for another one."""
    gone, other = client(), client()
    gone.send(NOTE)
    assert eventually(lambda: ("note", 1) in server.events)

    def answer(number, message):
        gone.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.sock.close()
        for _ in range(100):
            server.send_message(1, NOTE)

    server.answer = answer
    other.send(NOTE)
    assert eventually(lambda: ("lost", 1) in server.events)
    assert server.events.count(("lost", 1)) == 1
    assert here(server, lambda: server.numbers) == [2]


def test_a_peer_with_another_purpose_is_turned_away_and_reported(server, client, monkeypatch):
    monkeypatch.setattr(server_module, "_REFUSALS_EVERY_S", 0.3)
    for _ in range(2):
        assert client(Purpose.DIRECT).read() == []
    assert eventually(lambda: sum(int(text.split()[1]) for text in server.refused) == 2)
    assert server.events == [] and server.refusals.total == 2
    assert all("(mostly a rank: it dialled the rendezvous for another purpose)" in x for x in server.refused)
    assert "their rate is limited" not in server.refused[0]
    server._acceptor.kept_waiting = True
    assert client(Purpose.DIRECT).read() == []
    assert eventually(lambda: server.refused[-1].endswith("so a new rank may have to wait for some seconds"))
    assert not server._acceptor.kept_waiting


# ---- start and end ---------------------------------------------------------------------------


def test_an_address_that_is_not_this_machines_is_left_out(no_leaks, caplog):
    caplog.set_level(logging.INFO, "ringcomm.rendezvous")
    server = Server(["192.0.2.1", "127.0.0.1"])
    ((address, port),) = server.start()
    server.stop()
    assert address == "127.0.0.1" and port > 0
    assert "the rendezvous does not listen on 192.0.2.1: " in caplog.text


def test_a_server_that_can_listen_nowhere_does_not_start(no_leaks):
    server = Server(["192.0.2.1"])
    with pytest.raises(StartupError, match=r"The rendezvous cannot listen anywhere: 192\.0\.2\.1: "):
        server.start()
    server.stop()


def test_a_peer_that_does_not_read_cannot_keep_a_server_from_its_end(server, client):
    item = client()
    here(server, lambda: [server.send_message(1, LONG) for _ in range(MANY)])
    server.stop()
    assert server.numbers == [] and item.sock.recv(4) != b"", "what was sent before is there"


def test_after_its_end_nothing_is_called_any_more(server):
    called = []
    server.stop()
    server.stop()
    server.order(lambda: called.append(1))
    assert called == [] and server.numbers == []


# ---- with ranks -------------------------------------------------------------------------------
