"""The doctor's program of a host, in this process: what its peers do wrong."""

from __future__ import annotations

import io
import json
import os
import socket
import struct
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest

from ringrun.doctor import probe as module
from ringrun.doctor.probe import MARKER, PING, SINK, Dialer, Server

TOKEN = b"0123456789abcdef"
LIMIT_S = 60.0
_Serve = Callable[[socket.socket], None]


@pytest.fixture
def peer() -> Iterator[Callable[[_Serve], Dict[str, Any]]]:
    """`peer(serve)`: the target of a peer that has checked the token, and then does this."""
    threads: List[threading.Thread] = []
    listeners: List[socket.socket] = []

    def start(serve: _Serve) -> Dict[str, Any]:
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def run() -> None:
            link, _ = listener.accept()
            with link:
                assert module.read_exactly(link, 16) == TOKEN
                serve(link)

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
        return {"host": 1, "address": "127.0.0.1", "port": listener.getsockname()[1], "mtu": None}

    yield start
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    for item in listeners:
        item.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to answer."""
    monkeypatch.setattr(module, "DIAL_S", LIMIT_S)


def reset(link: socket.socket) -> None:
    """End a connection without a goodbye."""
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_peer_that_ends_before_it_has_answered(peer: Any) -> None:
    assert Dialer(TOKEN).try_all([peer(lambda link: None)]) == [{"error": "ECONNRESET"}]


def test_a_peer_that_ends_while_it_is_measured(peer: Any) -> None:
    def answer_once(link: socket.socket) -> None:
        link.sendall(b"\x01")
        assert module.read_exactly(link, 1) == PING
        reset(link)

    assert Dialer(TOKEN).try_all([peer(answer_once)]) == [{"error": "ECONNRESET"}]


def test_a_peer_that_ends_during_a_stream(peer: Any) -> None:
    def receive_some(link: socket.socket) -> None:
        link.sendall(b"\x01")
        assert module.read_exactly(link, 1) == SINK
        module.read_exactly(link, 100_000)
        reset(link)

    found = Dialer(TOKEN).stream(peer(receive_some), LIMIT_S)
    assert found in ({"error": "ECONNRESET"}, {"error": "EPIPE"})


def test_peers_that_do_not_answer_in_time(peer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DIAL_S", 0.05)
    ended = threading.Event()
    try:
        results = Dialer(TOKEN).try_all([peer(lambda link: ended.wait(LIMIT_S) and None)])
    finally:
        ended.set()
    assert results == [{"error": "timeout"}]


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (socket.timeout(), "timeout"),
        (OSError(111, "Connection refused"), "ECONNREFUSED"),
        (OSError("no number"), "no number"),
    ],
)
def test_the_names_of_errors(problem: OSError, name: str) -> None:
    assert module._error_name(problem) == name


class Datagrams:
    """In place of a socket whose first answer cannot be sent."""

    def __init__(self) -> None:
        self.received = [(TOKEN + b"1" * 30, "gone"), (b"0" * 40, "unknown"), (TOKEN + b"2" * 30, "here")]
        self.sent: List[Tuple[bytes, str]] = []

    def recvfrom(self, _: int) -> Tuple[bytes, str]:
        if not self.received:
            raise EOFError
        return self.received.pop(0)

    def sendto(self, data: bytes, to: str) -> None:
        if to == "gone":
            raise OSError(101, "Network is unreachable")
        self.sent.append((data, to))


def test_a_datagram_that_cannot_be_answered_does_not_end_the_server() -> None:
    server, echo = Server.__new__(Server), Datagrams()
    server._token = TOKEN
    with pytest.raises(EOFError):
        server._echo(echo)  # type: ignore[arg-type]
    assert echo.sent == [(TOKEN + b"2" * 16, "here")]


def test_commands_are_answered_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is run in this process, with a pipe as its stdin."""
    reader, writer = os.pipe()
    commands: List[Dict[str, Any]] = [
        {"do": "facts", "cwd": "~"},
        {"do": "dial", "targets": []},
        {"do": "stream", "target": {"address": "127.0.0.1", "port": 0}, "seconds": 0.01},
    ]
    os.write(writer, b"".join(json.dumps(command).encode() + b"\n" for command in commands))
    os.close(writer)
    stream, out = os.fdopen(reader, "rb"), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(module.os, "fdopen", lambda *_, **__: stream)
    with stream:
        module.main()
    first, marker, *answers = out.getvalue().splitlines()
    facts, dialled, sent = map(json.loads, answers)
    assert (first, marker) == ("", MARKER)
    assert facts["python"]
    assert dialled == [] and sent["error"] in ("ECONNREFUSED", "EADDRNOTAVAIL")
