"""Encrypted sockets: both ends in one thread, over a pair of connected sockets."""

from __future__ import annotations

import socket
import ssl
import sys

import pytest

from ringcomm.errors import AuthenticationError, ConfigError, ProtocolError
from ringcomm.storage.keys import make_certificate
from ringcomm.transport.reactor import encryption_of
from ringcomm.transport.tls import UNAUTHENTICATED_BYTES, Tls
from tests.support.links import secured

CERTIFICATE = make_certificate()


@pytest.fixture(scope="module")
def encryption():
    return Tls(CERTIFICATE)


@pytest.fixture
def raw():
    """Two plain sockets, connected with each other, that do not block."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def ends(raw, encryption):
    """Both ends after the handshake."""
    made = secured(raw, encryption)
    yield made
    for sock in made:
        sock.close()


def received(sock, count: int) -> bytes:
    got = b""
    while len(got) < count:
        got += sock.recv(count - len(got))
    return got


class TestReceiving:
    @pytest.mark.parametrize("orderly", [True, False])
    def test_the_end_comes_behind_what_was_sent(self, ends, orderly):
        one, other = ends
        one.sendall(b"last")
        if orderly:
            with pytest.raises(ssl.SSLWantReadError):
                one._tls.unwrap()  # as programs other than ringcomm end a connection
            one._post()
        one.close()
        assert received(other, 4) == b"last"
        assert other.recv(4) == b"" and other.recv(4) == b""

    @pytest.mark.parametrize("trusted", [True, False])
    def test_what_was_forged_is_an_error(self, ends, trusted):
        one, other = ends
        if trusted:
            other.trust()
        socket.socket.send(one, b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that no key has made
        with pytest.raises(ConnectionAbortedError if trusted else AuthenticationError):
            other.recv(4)

    def test_no_more_than_a_little_before_it_is_trusted(self, ends):
        one, other = ends
        for _ in range(3):
            one.sendall(bytes(UNAUTHENTICATED_BYTES // 2))
        with pytest.raises(ProtocolError, match=f"{UNAUTHENTICATED_BYTES} bytes and proved nothing"):
            received(other, 2 * UNAUTHENTICATED_BYTES)


class TestHandshake:
    def test_a_peer_that_closes_in_the_middle(self, raw, encryption):
        one = encryption.wrap(raw[0], accepted=True)
        assert not one.handshake()
        raw[1].close()
        with pytest.raises(ProtocolError, match="closed the connection during the handshake"):
            one.handshake()
        one.close()

    def test_another_certificate_is_refused_by_both_ends(self, raw, encryption):
        other = Tls(make_certificate())
        ends = [encryption.wrap(raw[0], accepted=False), other.wrap(raw[1], accepted=True)]
        problems, left = [], list(ends)
        while left:
            for end in list(left):
                try:
                    end.handshake()
                except AuthenticationError as problem:
                    problems.append(str(problem))
                    left.remove(end)
        assert len(problems) == 2
        assert all("does not have this job's certificate" in problem for problem in problems)
        for end in ends:
            end.close()


class TestCertificates:
    def test_a_python_without_ssl(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "ringcomm.transport.tls")
        monkeypatch.setitem(sys.modules, "ssl", None)
        with pytest.raises(ConfigError, match="built without ssl"):
            encryption_of(CERTIFICATE)

    @pytest.mark.parametrize(
        "text",
        ["", "nonsense", CERTIFICATE[CERTIFICATE.index("-----BEGIN CERT") :]],
        ids=["empty", "nonsense", "without a key"],
    )
    def test_what_is_none(self, text):
        with pytest.raises(ConfigError, match="cannot be used"):
            Tls(text)
