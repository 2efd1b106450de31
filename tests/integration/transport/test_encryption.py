"""Encrypted connections, with real sockets: which peers are accepted, and what a listener sees."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.config import Membership, Settings
from ringcomm.errors import ConfigError
from ringcomm.storage.keys import make_certificate
from ringcomm.testing.cluster import run_ranks
from ringcomm.transport import tls
from ringcomm.transport.connect import Dial
from ringcomm.transport.reactor import encryption_of
from ringcomm.wire.auth import Admission
from tests.support.service import CLAIM, KEY, Door


@pytest.fixture(scope="module")
def certificate():
    return make_certificate()


@pytest.fixture
def house(reactor):
    """An acceptor, and what dials it."""
    house = House(reactor)
    yield house
    for sock in [*(end.sock for end in house.ends if end.sock), house.made]:
        sock.close()


class House:
    def __init__(self, reactor):
        self.reactor, self.ends = reactor, []

    def door(self, certificate):
        self.made = Door(self.reactor, certificate=certificate)
        self.arrived, self.refused = self.made.arrived, self.made.refused
        return self.made.address

    def dial(self, address, certificate, key=KEY):
        Dial(self.reactor, address, key, CLAIM, self.ends.append, 5.0, encryption=encryption_of(certificate))

    def until(self, condition):
        self.made.turn_until(condition)


@pytest.mark.parametrize(
    ("ours", "theirs", "dialled", "accepted"),
    [
        ("job", "other", "does not have this job's certificate", "does not have this job's certificate"),
        ("job", "", "no certificate came with its key", "it does not encrypt, and this process does"),
        ("", "job", "it does not encrypt, and this process does", "no certificate came with this job's key"),
    ],
)
def test_a_peer_with_another_certificate_or_none_is_refused(
    house, certificate, ours, theirs, dialled, accepted
):
    made = {"job": certificate, "other": make_certificate(), "": ""}
    house.dial(house.door(made[ours]), made[theirs])
    house.until(lambda: house.ends and house.refused)
    end = house.ends[0]
    assert end.sock is None and end.refused_by_key
    assert dialled in end.reason
    assert accepted in house.refused[0]
    assert house.arrived == []


def test_the_certificate_alone_opens_nothing(house, certificate):
    house.dial(house.door(certificate), certificate, key=b"x" * 32)
    house.until(lambda: house.ends and house.refused)
    assert "does not hold this job's key" in house.ends[0].reason
    assert house.arrived == []


COPIED = Admission.of(KEY)
"""What a process on the wire has seen a rank send ahead of TLS, to another port."""


def tls_peer(address, certificate, **changes):
    """What becomes of a peer that uses Python's TLS, in a thread: the exception."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if "show" in changes:
        context.load_cert_chain(changes["show"])
    if "newest" in changes:
        context.maximum_version = changes["newest"]
    problems = []

    def visit():
        try:
            with socket.create_connection(address) as plain:
                plain.sendall(COPIED)
                with context.wrap_socket(plain) as secured:
                    secured.settimeout(5.0)
                    problems.append(secured.recv(1))
        except OSError as problem:
            problems.append(problem)

    thread = threading.Thread(target=visit)
    thread.start()
    return thread, problems


@pytest.mark.parametrize("kind", ["without a certificate", "with another one", "with TLS 1.2"])
def test_unauthenticated_peers_with_tls(house, certificate, tmp_path, kind):
    changes = {}
    if kind == "with another one":
        (tmp_path / "pem").write_text(make_certificate())
        changes["show"] = tmp_path / "pem"
    if kind == "with TLS 1.2":
        (tmp_path / "pem").write_text(certificate)
        changes = {"show": tmp_path / "pem", "newest": ssl.TLSVersion.TLSv1_2}
    thread, problems = tls_peer(house.door(certificate), certificate, **changes)
    house.until(lambda: house.refused)
    thread.join(10.0)
    assert house.arrived == []
    assert isinstance(problems[0], OSError) or problems == [b""]


class Listener:
    """Sits between a rank and a port, passes everything on, and keeps a copy."""

    def __init__(self, stack, target):
        self.seen = bytearray()
        self._target = target
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = self._door.getsockname()
        self._stack = stack
        stack.callback(self._door.close)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        try:
            while True:
                sock, _ = self._door.accept()
                there = socket.create_connection(self._target)
                for pair in ((sock, there), (there, sock)):
                    threading.Thread(target=self._carry, args=pair, daemon=True).start()
        except OSError:
            pass

    def _carry(self, source, target):
        try:
            while True:
                data = source.recv(65536)
                self.seen += data
                target.sendall(data)
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
        except OSError:
            source.close()
            target.close()


@pytest.mark.parametrize("encrypt", [True, False])
def test_what_a_listener_sees(monkeypatch, encrypt):
    """The same job twice: with encryption neither what is sent nor what is said can be found on the wire."""
    text = np.frombuffer(b"the gradient of a secret model! " * 4096, np.uint8)
    listeners = []
    with ExitStack() as stack:
        connect = socket.socket.connect

        def by_detour(sock, address):
            if sock.family == socket.AF_INET and threading.current_thread().name.startswith("rank-"):
                listeners.append(Listener(stack, address))
                address = listeners[-1].address
            return connect(sock, address)

        monkeypatch.setattr(socket.socket, "connect", by_detour)

        def work(context):
            mine = text.copy() if context.rank == 0 else np.zeros_like(text)
            context.allreduce_(mine, rc.Max)
            return bool((mine == text).all())

        settings = Settings(encrypt=encrypt, spin_us=0.0, measure=False)
        assert run_ranks(2, work, "tcp", settings) == [True, True]
    seen = b"".join(bytes(item.seen) for item in listeners)
    assert len(seen) > text.nbytes
    for word in (b"the gradient of a secret model!", b'"type":"join"', b"hostname", b"ringcomm"):
        assert (word in seen) != encrypt, word


# ---- keys and certificates -------------------------------------------------------------------


def test_to_insist_without_a_certificate_says_what_is_needed():
    with pytest.raises(ConfigError, match=r"newkey --encrypt FILE.*ringrun --encrypt"):
        encryption_of("", insist=True)
    with pytest.raises(ConfigError, match="newkey --encrypt FILE"):
        rc.init(Membership(2, (("127.0.0.1", 1),), KEY), Settings(encrypt=True))


@pytest.mark.parametrize("how", ["memory", "file"])
def test_loading_the_certificate_leaves_no_file(certificate, monkeypatch, tmp_path, how):
    monkeypatch.setattr(tls.tempfile, "tempdir", str(tmp_path))
    modes = []
    if how == "file":
        monkeypatch.delattr(tls.os, "memfd_create")
    load = ssl.SSLContext.load_cert_chain

    def look(context, path):
        modes.append((Path(path).stat().st_mode & 0o77, Path(path).parent.stat().st_mode & 0o77))
        load(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", look)
    assert encryption_of(certificate) is not None
    assert list(tmp_path.iterdir()) == []
    if how == "file":
        assert modes == [(0, 0)] * 2
