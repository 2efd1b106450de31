"""The control connection while a view of an elastic job is in force; the test is the rendezvous."""

from __future__ import annotations

import select
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringcomm.errors import PeerLostError
from ringcomm.rendezvous import control
from ringcomm.rendezvous.control import ControlChannel, Resume
from ringcomm.wire.messages import MAX_MESSAGE_BYTES, MessageReader, encode
from ringcomm.wire.signing import session_of
from tests.support.service import eventually

ABORT = {"type": "abort", "kind": "lost", "text": "rank 1 died young", "rank": 1, "host": "there"}


class Played:
    """A rendezvous, and the channel of rank 0 in epoch 3 at the other end of its connection."""

    def __init__(self):
        self.sock, there = socket.socketpair()
        self.sock.settimeout(30.0)
        there.setblocking(False)
        self.session = session_of(bytes(32), False)
        self._reader = MessageReader(MAX_MESSAGE_BYTES, self.session)
        other = session_of(bytes(32), True)
        reader = MessageReader(MAX_MESSAGE_BYTES, other)
        self.channel = ControlChannel(there, reader, 0, ["here", "there"], other, 7, 3, changes=1)

    def send(self, *messages):
        self.sock.sendall(b"".join(encode(message, self.session) for message in messages))

    def read(self):
        """The next messages."""
        found = []
        while not found:
            data = self.sock.recv(4096)
            assert data, "the connection is closed"
            found += self._reader.feed(data)
        return found


@pytest.fixture
def played(no_leaks, monkeypatch):
    monkeypatch.setattr(control, "_LEAVE_S", 0.01)
    played = Played()
    yield played
    played.channel.leave("the test is over", True)
    played.sock.close()


def woken(channel):
    return select.select([channel], [], [], 0.0)[0] == [channel]


def test_pings_are_answered_while_the_program_computes(played):
    played.send({"type": "ping"})
    assert played.read() == [{"type": "pong", "heard": [], "silent": []}]


def test_changes_are_reported_once(played):
    assert played.channel.take_changes() == 1, "it was reported while the view was set up"
    played.send({"type": "updated", "change": 2}, {"type": "updated", "change": 1}, {"type": "ping"})
    assert played.read()[0]["type"] == "pong"
    assert played.channel.take_changes() == 3 and played.channel.take_changes() == 0
    played.channel.check()
    assert not woken(played.channel)


def test_a_listener_gets_changes_at_once(played):
    heard, told = [], threading.Event()

    def listener(change, ready):
        heard.append((change, ready))
        told.set()

    played.channel.on_changes(listener)
    assert heard == [(1, True)], "it was reported while the view was set up"
    told.clear()
    played.send({"type": "announced"}, {"type": "updated", "change": 2})
    assert eventually(lambda: len(heard) == 3)
    assert heard[1:] == [(2, False), (2, True)]
    assert played.channel.take_changes() == 3, "what is only announced is no reason to stop"
    played.channel.on_changes(None)
    played.send({"type": "updated", "change": 1}, {"type": "ping"})
    assert played.read()[0]["type"] == "pong" and len(heard) == 3


def test_a_listener_that_fails_does_not_end_the_thread(played, caplog):
    def listener(change, ready):
        raise ValueError("a bug of the program")

    played.channel.on_changes(listener)
    played.send({"type": "updated", "change": 2}, {"type": "ping"})
    assert played.read()[0]["type"] == "pong"
    played.send({"type": "ping"})
    assert played.read()[0]["type"] == "pong"
    assert eventually(lambda: caplog.text.count("training goes on") == 2)


def test_the_end_of_its_epoch_wakes_all_that_wait_and_the_end_of_another_does_not(played):
    played.send({**ABORT, "epoch": 2}, {"type": "ping"})
    assert played.read()[0]["type"] == "pong"
    played.channel.check()
    assert not woken(played.channel)
    played.send({**ABORT, "epoch": 3})
    assert eventually(lambda: woken(played.channel))
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 1 died young"):
            played.channel.check()


def test_the_answer_to_a_report_is_what_the_rank_raises(played):
    with ThreadPoolExecutor(1) as pool:
        report = pool.submit(played.channel.report_lost, 1, "allreduce", "connection reset")
        (lost,) = played.read()
        assert (lost["type"], lost["peer"], lost["doing"]) == ("lost", 1, "allreduce")
        played.send({**ABORT, "epoch": 3})
        assert str(report.result(30.0)) == "rank 1 died young"
    again = played.channel.report_lost(1, "allreduce", "connection reset")
    assert str(again) == "rank 1 died young", "at once, and without another report"
    played.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        played.sock.recv(1)


def test_without_an_answer_the_own_view_counts(played, monkeypatch):
    monkeypatch.setattr(control, "ROOT_CAUSE_S", 0.05)
    own = PeerLostError("rank 0 was interrupted", rank=0)
    assert str(played.channel.root_cause(own)) == "rank 0 was interrupted"
    assert woken(played.channel)
    with pytest.raises(PeerLostError, match="rank 0 was interrupted"):
        played.channel.check()
    played.send({**ABORT, "epoch": 3}, {"type": "ping"})
    assert played.read()[0]["type"] == "pong"
    with pytest.raises(PeerLostError, match="rank 0 was interrupted"):
        played.channel.check()


def test_the_connection_is_kept_for_the_next_view(played):
    resume = played.channel.detach(5)
    member, epoch, position, (sock, reader, session) = resume
    assert (member, epoch, position) == (7, 3, 5)
    assert not played.channel.open and played.channel.detach(6) == Resume(7, 3, 6, None)
    played.send({"type": "ping"})
    assert select.select([sock], [], [], 30.0)[0]
    assert list(reader.feed(sock.recv(100))) == [{"type": "ping"}]
    sock.sendall(encode({"type": "pong", "heard": [], "silent": []}, session))
    assert played.read()[0]["type"] == "pong"
    sock.close()


def test_a_connection_that_has_ended_is_not_kept(played):
    played.sock.close()
    assert eventually(lambda: woken(played.channel))
    with pytest.raises(PeerLostError, match="The rendezvous of this job is gone"):
        played.channel.check()
    assert played.channel.detach(5) == Resume(7, 3, 5, None)


def test_a_member_says_why_it_leaves(played):
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(played.channel.leave, "it has finished", True)
        assert played.read() == [{"type": "leaving", "reason": "it has finished", "ok": True}]
        played.sock.shutdown(socket.SHUT_RDWR)
        leaving.result(30.0)
    assert not played.channel.open
