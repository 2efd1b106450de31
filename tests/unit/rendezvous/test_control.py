"""The control connection of a running job, with the rendezvous at the other end of a pair of sockets."""

from __future__ import annotations

import select
import socket
import threading
from typing import Optional

import pytest

from ringcomm.errors import (
    LinkLostError,
    MismatchError,
    NoRouteError,
    PeerLostError,
    PeerStalledError,
    RingcommError,
    StartTimeoutError,
)
from ringcomm.rendezvous import control
from ringcomm.rendezvous.control import ControlChannel, error_from
from ringcomm.wire.auth import Session, session_of
from ringcomm.wire.messages import MAX_MESSAGE_BYTES, MessageReader, encode
from tests.support.service import eventually

HOSTS = ["desk", "jetson1", "jetson2"]
LIMIT_S = 20.0
ABORT = {"type": "abort", "kind": "lost", "text": "rank 2 (jetson2) was lost", "rank": 2, "host": "jetson2"}


class Rendezvous:
    """The other end."""

    def __init__(self, sock: socket.socket, session: Optional[Session] = None) -> None:
        self.sock, self.session = sock, session
        self.reader = MessageReader(1 << 20, session)
        self.sock.settimeout(LIMIT_S)

    def send(self, *messages: dict) -> None:
        self.sock.sendall(b"".join(encode(message, self.session) for message in messages))

    def read(self, count: int = 1) -> list:
        """The next messages; fewer if the connection ends."""
        found: list = []
        while len(found) < count:
            data = self.sock.recv(1 << 16)
            if not data:
                break
            found += self.reader.feed(data)
        return found


@pytest.fixture
def ends():
    """The channel of rank 1 of three, and the rendezvous."""
    one, other = socket.socketpair()
    one.setblocking(False)
    channel = ControlChannel(one, MessageReader(1 << 20), 1, HOSTS)
    rendezvous = Rendezvous(other)
    yield channel, rendezvous
    other.close()
    channel.leave("the test is over", True)


def await_end(channel: ControlChannel) -> None:
    """Wait as threads do that wait for peers, until the job is over."""
    assert select.select([channel], [], [], LIMIT_S)[0] == [channel]


class TestAbort:
    @pytest.mark.parametrize(
        ("end", "reason"),
        [
            (lambda rendezvous: rendezvous.sock.close(), "it closed the connection"),
            (lambda rendezvous: rendezvous.sock.sendall(b"\xff" * 8), "control message of"),
        ],
    )
    def test_a_rendezvous_that_is_gone_is_the_root_cause(self, ends, end, reason):
        channel, rendezvous = ends
        end(rendezvous)
        await_end(channel)
        for _ in range(2):
            with pytest.raises(PeerLostError, match=f"The rendezvous of this job is gone .*{reason}"):
                channel.check()
        assert not channel.open
        for call in (channel.note, lambda text: channel.warn("topic", text)):
            call("nothing to send it to")
        channel.leave("its program ended", ok=True)


def answered(rendezvous: Rendezvous, answer: dict, found: list) -> threading.Thread:
    """A thread in which the rendezvous answers the next message."""

    def answer_it() -> None:
        found.extend(rendezvous.read())
        rendezvous.send(answer)

    thread = threading.Thread(target=answer_it)
    thread.start()
    return thread


class TestReports:
    def test_the_rendezvous_determines_the_root_cause(self, ends):
        channel, rendezvous = ends
        found: list = []
        thread = answered(rendezvous, ABORT, found)
        error = channel.report_lost(0, "barrier()", "connection reset by peer")
        thread.join()
        assert isinstance(error, PeerLostError) and str(error) == ABORT["text"]
        said = {"peer": 0, "doing": "barrier()", "why": "connection reset by peer", "kind": "lost"}
        assert found == [{"type": "lost", **said}]
        # What is reported later gets the same answer, at once.
        assert str(channel.report_mismatch(2, "another call")) == ABORT["text"]

    @pytest.mark.parametrize(
        ("kind", "peer", "error", "text"),
        [
            ("lost", 2, PeerLostError, "rank 2 (jetson2) was lost while rank 1 (jetson1) was in barrier(): "),
            ("late", 2, PeerStalledError, "rank 2 (jetson2) is late while"),
            ("silent", 2, PeerStalledError, "rank 2 (jetson2) is silent while"),
            ("cut off", 2, PeerStalledError, "rank 1 (jetson1) was lost while"),
            ("lost", 7, PeerLostError, "rank 7 was lost while"),
        ],
    )
    def test_a_rendezvous_that_does_not_answer(self, ends, monkeypatch, kind, peer, error, text):
        channel, rendezvous = ends
        monkeypatch.setattr(control, "ROOT_CAUSE_S", 0.02)
        monkeypatch.setattr(control, "_SILENCE_S", 0.02)
        found = channel.report_lost(peer, "barrier()", "why", kind)
        assert type(found) is error and str(found).startswith(text)
        assert "The rendezvous has not answered; it may be where rank" in str(found)
        with pytest.raises(error):
            channel.check()

    def test_an_interruption_is_reported_once_and_its_answer_read_later(self, ends):
        channel, rendezvous = ends
        noted = channel.note_interrupted("barrier(), call number 3", "KeyboardInterrupt")
        assert channel.note_interrupted("", "again") is noted
        text = "rank 1 (jetson1) was interrupted (KeyboardInterrupt) in barrier(), call number 3"
        assert text in str(noted)
        assert rendezvous.read() == [
            {"type": "interrupted", "doing": "barrier(), call number 3", "why": "KeyboardInterrupt"}
        ]
        rendezvous.send(ABORT)
        assert str(channel.root_cause(noted)) == ABORT["text"]


class TestLeaving:
    def test_the_goodbye_is_read_before_the_connection_ends(self, ends):
        channel, rendezvous = ends
        rendezvous.send({"type": "ping"})  # unread bytes would reset the connection
        found: list = []

        def read_all() -> None:
            found.extend(item for item in rendezvous.read(9) if item["type"] == "leaving")
            rendezvous.sock.close()

        thread = threading.Thread(target=read_all)
        thread.start()
        channel.leave("its program ended", ok=True)
        channel.leave("again", ok=True)
        thread.join()
        assert [(message["reason"], message["ok"]) for message in found] == [("its program ended", True)]
        assert not channel.open


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, PeerLostError),
        ({"kind": "stalled"}, PeerStalledError),
        ({"kind": "cut", "ranks": [0, 2], "hosts": ["desk", "jetson2"]}, LinkLostError),
        ({"kind": "mismatch"}, MismatchError),
        ({"kind": "timeout"}, StartTimeoutError),
        ({"kind": "no_route"}, NoRouteError),
        ({"kind": "of a later version"}, RingcommError),
    ],
)
def test_errors_of_abort_messages(change, kind):
    error = error_from({**ABORT, **change})
    assert type(error) is kind and str(error) == ABORT["text"]
    if kind is LinkLostError:
        assert error.ranks == (0, 2) and error.hosts == ("desk", "jetson2")
    elif issubclass(kind, PeerLostError):
        assert (error.rank, error.host) == (2, "jetson2")

# ---- while a view of an elastic job is in force ------------------------------------------------


@pytest.fixture
def played(monkeypatch):
    """The rendezvous, and the channel of rank 0 in epoch 3 at the other end of its connection."""
    monkeypatch.setattr(control, "_LEAVE_S", 0.01)
    here, there = socket.socketpair()
    there.setblocking(False)
    played, session = Rendezvous(here, session_of(bytes(32), False)), session_of(bytes(32), True)
    reader = MessageReader(MAX_MESSAGE_BYTES, session)
    played.channel = ControlChannel(there, reader, 0, ["here", "there"], session, 7, 3, changes=1)
    yield played
    played.channel.leave("the test is over", True)
    here.close()


def woken(channel):
    return select.select([channel], [], [], 0.0)[0] == [channel]


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


def test_the_end_of_its_epoch_wakes_all_that_wait_and_the_end_of_another_does_not(played):
    played.send({**ABORT, "epoch": 2}, {"type": "ping"})
    assert played.read()[0]["type"] == "pong"
    played.channel.check()
    assert not woken(played.channel)
    played.send({**ABORT, "epoch": 3})
    assert eventually(lambda: woken(played.channel))
    for _ in range(2):
        with pytest.raises(PeerLostError, match="rank 2 .* was lost"):
            played.channel.check()
