"""The encrypted connection between a launcher and a machine that joins, what it carries, and its address.

After the proof of the code (:mod:`.proof`) both ends send their certificates, which must have the proven
fingerprints; then TLS 1.3 in which each end shows its certificate and insists on the other's
(:class:`ringcomm.transport.tls.Tls`). Inside are frames: kind, number of the agent, length, content.

:class:`Carrier` connects the standard streams of one agent at a time with the frames, as ssh does. What one
side does not take is not read from the other, so nothing grows without a limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import select
import socket
import ssl
import struct
import sys
from enum import IntEnum
from functools import partial
from typing import IO, Any, Callable, Dict, Iterator, List, Sequence, Set, Tuple

from ringcomm.clock import monotonic
from ringcomm.errors import AuthenticationError, ProtocolError
from ringcomm.transport.connect import trust
from ringcomm.transport.nics import Interface, own_addresses
from ringcomm.transport.reactor import READ, WRITE, Reactor, SecureSocket, WakeUp
from ringcomm.transport.tls import Tls
from ringcomm.wire.auth import JOIN_MAGIC

from ..reach.incoming import Form, decoded
from .proof import HELLO, KEPT, PROOF_BYTES, Proof, Role

HANDSHAKE_S = 2.0  # what proves nothing within this time is closed
ANSWER_S = 10.0  # so long has a launcher to which many dial
LOST_MS = 75_000  # after so long a machine that has lost its network is noticed, as over SSH
MAX_CERTIFICATE_BYTES = 2048
PIECE_BYTES = 1 << 16
QUEUE_BYTES = 1 << 20  # above this, queued bytes stop what they come from
_FRAME = struct.Struct("!BII")
_LENGTH = struct.Struct("!H")


# Bytes of a stream (none: its end); start an agent; how it has ended; facts about the machine or the job.
Kind = IntEnum("Kind", "STDIN STDOUT STDERR START EXIT TELL")


def fingerprint_of(pem: str) -> bytes:
    """SHA-256 of the certificate in a PEM text."""
    return hashlib.sha256(_der(pem)).digest()


def _der(pem: str) -> bytes:
    return ssl.PEM_cert_to_DER_cert(pem[pem.index("-----BEGIN CERTIFICATE-----") :].strip())


def read_exactly(sock: socket.socket, count: int, until_s: float) -> bytes:
    """Read so many bytes from a socket that has no timeout of its own."""
    data = b""
    while len(data) < count:
        sock.settimeout(max(0.001, until_s - monotonic()))
        try:
            piece = sock.recv(count - len(data))
        except socket.timeout:
            raise ProtocolError(f"it sent {len(data)} of {count} bytes in time") from None
        if not piece:
            raise ProtocolError("it closed the connection")
        data += piece
    return data


def join_with(sock: socket.socket, proof: Proof, pem: str) -> SecureSocket:
    """Prove the code to a launcher; return the encrypted connection."""
    until_s = monotonic() + ANSWER_S
    sock.settimeout(ANSWER_S)
    sock.sendall(proof.hello)
    proof.meet(read_exactly(sock, HELLO.size, until_s))
    sock.sendall(proof.own)
    proof.check(read_exactly(sock, PROOF_BYTES, until_s))
    return secured(sock, proof, Role.JOINING, pem)


def secured(sock: socket.socket, proof: Proof, role: Role, pem: str) -> SecureSocket:
    """Exchange the certificates, and begin with TLS. Both ends have proven to have the code."""
    until_s, own = monotonic() + 2 * HANDSHAKE_S, _der(pem)
    sock.sendall(_LENGTH.pack(len(own)) + own)
    (length,) = _LENGTH.unpack(read_exactly(sock, _LENGTH.size, until_s))
    if length > MAX_CERTIFICATE_BYTES:
        raise ProtocolError(f"its certificate has {length} bytes")
    other = read_exactly(sock, length, until_s)
    if hashlib.sha256(other).digest() != proof.peer_fingerprint:
        raise AuthenticationError("its certificate is not the one that it has proven")
    sock.setblocking(False)
    encrypted = Tls(pem, ssl.DER_cert_to_PEM_cert(other)).wrap(sock, accepted=role == Role.LAUNCHER)
    try:
        while not encrypted.handshake():
            if not select.select([encrypted], [], [], max(0.0, until_s - monotonic()))[0]:
                raise ProtocolError("it was too slow to encrypt")
    except (AuthenticationError, ProtocolError, OSError):
        encrypted.close()
        raise
    trust(encrypted)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        encrypted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_MS)
    return encrypted


def prove_to(sock: socket.socket, make_proof: Callable[[bool, str], Proof]) -> Proof:
    """As the launcher: read the other end's hello and proof; the latter is not answered yet."""
    until_s = monotonic() + HANDSHAKE_S
    hello = read_exactly(sock, HELLO.size, until_s)
    if not hello.startswith(JOIN_MAGIC):  # for others nothing is computed
        raise ProtocolError("it is not a ringrun that joins")
    _, _, kind, name, _, _ = HELLO.unpack(hello)
    proof = make_proof(kind == KEPT, name.rstrip(b"\0").decode("ascii", "replace"))
    sock.sendall(proof.hello)  # also to another version, which can say so
    proof.meet(hello)
    proof.check(read_exactly(sock, PROOF_BYTES, until_s))
    return proof


class _Pipe:
    """A stream of an agent: a source that is read, or a sink, what waits for it, and whether that is all."""

    def __init__(self, file: IO[bytes], is_sink: bool) -> None:
        os.set_blocking(file.fileno(), False)
        self.file, self.is_sink = file, is_sink
        self.waiting = bytearray()
        self.at_end = False


class Carrier:
    """One end of a connection; used by one thread, except for :meth:`wake`."""

    def __init__(self, sock: SecureSocket) -> None:
        self.ended = False
        self.number = 0
        self.outgoing = bytearray()  # frames that wait for the network
        self._sock, self._reactor, self._wake_up = sock, Reactor(), WakeUp()
        self._reactor.watch(self._wake_up, READ, self._wake_up.clear)
        self.wake = self._wake_up.wake
        self._incoming = bytearray()
        self._pipes: Dict[int, _Pipe] = {}

    def attach(self, number: int, sources: Dict[Kind, IO[bytes]], sinks: Dict[Kind, IO[bytes]]) -> None:
        """Carry the streams of an agent, in place of those before. The files are closed at their ends."""
        self.detach()
        self.number = number
        self._pipes.update({kind: _Pipe(file, False) for kind, file in sources.items()})
        self._pipes.update({kind: _Pipe(file, True) for kind, file in sinks.items()})

    def detach(self) -> None:
        """Close all streams."""
        for kind in list(self._pipes):
            self._close_pipe(kind)

    @property
    def has_output(self) -> bool:
        return Kind.STDOUT in self._pipes or Kind.STDERR in self._pipes

    def send(self, kind: int, data: bytes = b"") -> None:
        """Queue a frame."""
        self.outgoing += _FRAME.pack(kind, self.number, len(data)) + data

    def tell(self, facts: Any) -> None:
        """Queue facts."""
        self.send(Kind.TELL, json.dumps(facts).encode())

    def told(self, form: Form, until_s: float) -> Any:
        """Return the next facts from the other end, in a form."""
        while not self.ended and monotonic() < until_s:
            for kind, _, data in self.turn(0.5):
                if kind == Kind.TELL:
                    return decoded(data, form)
        raise ProtocolError("it closed the connection" if self.ended else "it has not answered in time")

    def turn(self, limit_s: float) -> List[Tuple[int, int, bytes]]:
        """Wait for something to move, and move it; return a frame of no stream: kind, number and content."""
        frames = self._parse()
        if frames:
            return frames
        full = any(len(pipe.waiting) >= QUEUE_BYTES for pipe in self._pipes.values())
        reading = READ if not (self.ended or full) else 0
        writing = WRITE if self.outgoing and not self.ended else 0
        self._reactor.watch(self._sock, reading | writing, lambda: None)
        room = READ if len(self.outgoing) < QUEUE_BYTES else 0
        for kind, pipe in self._pipes.items():
            events, move = (WRITE if pipe.waiting else 0, self._drain) if pipe.is_sink else (room, self._pump)
            self._reactor.watch(pipe.file, events, partial(move, kind))
        self._reactor.run_once(limit_s)
        with contextlib.suppress(BlockingIOError):
            if reading:
                data = self._sock.recv(PIECE_BYTES)
                self.ended = not data
                self._incoming += data
        with contextlib.suppress(BlockingIOError):
            while self.outgoing and not self.ended:
                del self.outgoing[: self._sock.send(self.outgoing)]
        return self._parse()

    def flush(self, limit_s: float = 2.0) -> None:
        """Send what waits for the network, for so long."""
        until_s = monotonic() + limit_s
        while self.outgoing and not self.ended and monotonic() < until_s:
            self.turn(0.1)

    def _parse(self) -> List[Tuple[int, int, bytes]]:
        """Take what has come up to a frame that is not of a stream: it may be the start of the next agent."""
        while len(self._incoming) >= _FRAME.size:
            kind, number, length = _FRAME.unpack_from(self._incoming)
            if not Kind.STDIN <= kind <= Kind.TELL or length > PIECE_BYTES:
                raise ProtocolError(f"a frame of kind {kind} and {length} bytes")
            end = _FRAME.size + length
            if len(self._incoming) < end:
                break
            content = bytes(self._incoming[_FRAME.size : end])
            del self._incoming[:end]
            if kind > Kind.STDERR:
                return [(kind, number, content)]
            if number == self.number and kind in self._pipes and self._pipes[kind].is_sink:
                self._put(kind, content)
        return []

    def _pump(self, kind: int) -> None:
        try:
            data = os.read(self._pipes[kind].file.fileno(), PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data or kind != Kind.STDERR:  # the launcher adds to stderr how the agent has ended
            self.send(kind, data)
        if not data:
            self._close_pipe(kind)

    def _put(self, kind: int, data: bytes) -> None:
        self._pipes[kind].waiting += data
        self._pipes[kind].at_end |= not data
        self._drain(kind)

    def finish(self, kind: Kind, data: bytes = b"") -> None:
        """Write this to a stream, after what waits for it, and close it; no effect if it is closed."""
        for piece in (data, b""):
            if kind in self._pipes:
                self._put(kind, piece)

    def _drain(self, kind: int) -> None:
        pipe = self._pipes[kind]
        try:
            while pipe.waiting:
                del pipe.waiting[: os.write(pipe.file.fileno(), pipe.waiting)]
        except BlockingIOError:
            return
        except OSError:
            pipe.at_end = True  # nothing reads it any more
        if pipe.at_end:
            self._close_pipe(kind)

    def _close_pipe(self, kind: int) -> None:
        file = self._pipes.pop(kind).file
        self._reactor.forget(file)
        file.close()

    def close(self) -> None:
        """Close the connection and all streams."""
        self.detach()
        self.ended = True
        self._reactor.close()
        self._sock.close()
        self._wake_up.close()


# -- the launcher's address ----------------------------------------------------------------------

GROUP, PORT = "239.255.43.117", 43117
ANSWER_EVERY_S = 1.0
MAX_ADDRESSES = 8  # so many different answers are tried
_QUESTION = struct.Struct("!9s16sH37x")
_ANSWER = struct.Struct("!9s16sHH")
_ASKED, _ANSWERED = b"ringjoin?", b"ringjoin!"
_ALL_GROUPS = 49  # Linux's IP_MULTICAST_ALL: whether groups of other sockets count, too


class Answerer:
    """Answers questions about these numbers on these interfaces."""

    def __init__(self, interfaces: Sequence[Interface], labels: Sequence[int], port: int) -> None:
        usable = [item for item in interfaces if ":" not in item.address]
        self._networks = [ipaddress.ip_network(f"{i.address}/{i.prefix_bits}", strict=False) for i in usable]
        self._labels, self._port, self._next_s = labels, port, 0.0
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "darwin":
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if sys.platform.startswith("linux"):
                self.sock.setsockopt(socket.IPPROTO_IP, _ALL_GROUPS, 0)
            self.sock.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, 1)
            self.sock.bind((GROUP, PORT))
            self.sock.setblocking(False)
            for item in usable:
                member = socket.inet_aton(GROUP) + socket.inet_aton(item.address)
                with contextlib.suppress(OSError):  # it has no multicast
                    self.sock.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        except OSError:
            self.sock.close()
            raise

    def answer(self) -> None:
        """Take one datagram; answer it if it is a question of a machine in a network of this one."""
        try:
            data, origin = self.sock.recvfrom(_QUESTION.size + 1)
        except OSError:
            return
        reply = answer_to(data, self._labels, self._port)
        near = any(ipaddress.ip_address(origin[0]) in network for network in self._networks)
        if reply and near and monotonic() >= self._next_s:
            self._next_s = monotonic() + ANSWER_EVERY_S
            with contextlib.suppress(OSError):
                self.sock.sendto(reply, origin)


def answer_to(data: bytes, labels: Sequence[int], port: int) -> bytes:
    """The answer to a datagram; b"" if it is no question about one of these numbers."""
    if len(data) != _QUESTION.size:
        return b""
    magic, nonce, label = _QUESTION.unpack(data)
    return _ANSWER.pack(_ANSWERED, nonce, label, port) if magic == _ASKED and label in labels else b""


def said_in(data: bytes, nonce: bytes, label: int) -> int:
    """The port in an answer to the question with this nonce, if it is about this label, else 0."""
    if len(data) != _ANSWER.size:
        return 0
    *said, port = _ANSWER.unpack(data)
    return int(port) if said == [_ANSWERED, nonce, label] else 0


def find(label: int, limit_s: float) -> Iterator[Tuple[str, int]]:
    """The addresses of invitations with this number, in the order in which they answer."""
    nonce = os.urandom(16)
    seen: Set[Tuple[str, int]] = set()
    own = [socket.inet_aton(item.address) for item in own_addresses() if ":" not in item.address]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
        sock.setblocking(False)
        until_s, next_s = monotonic() + limit_s, 0.0
        while monotonic() < until_s and len(seen) < MAX_ADDRESSES:
            if monotonic() >= next_s:
                next_s = monotonic() + 0.7 * ANSWER_EVERY_S
                for address in own:
                    with contextlib.suppress(OSError):
                        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, address)
                        sock.sendto(_QUESTION.pack(_ASKED, nonce, label), (GROUP, PORT))
            with contextlib.suppress(OSError):
                if select.select([sock], [], [], 0.1)[0]:
                    data, origin = sock.recvfrom(_ANSWER.size + 1)
                    found = str(origin[0]), said_in(data, nonce, label)
                    if found[1] and found not in seen:
                        seen.add(found)
                        yield found
