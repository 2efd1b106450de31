"""The encrypted connection between a launcher and a machine that has joined, and what it carries.

After the proof of the code (:mod:`.proof`) both ends send their certificates, which must have the proven
fingerprints; then TLS 1.3 in which each end shows its certificate and insists on the other's
(:class:`ringcomm.transport.tls.Tls`). Inside are frames: kind, number of the agent, length, content.

:class:`Carrier` connects the standard streams of one agent at a time with the frames, as ssh does. At the
launcher the streams are the pipes of a :class:`ringrun.reach.agent_process.AgentLink`, at the other end
those of the agent. What one side does not take is not read from the other, so nothing grows without a limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import socket
import ssl
import struct
from collections import deque
from functools import partial
from typing import IO, Any, Callable, Deque, Dict, List, NamedTuple

from ringcomm.clock import monotonic
from ringcomm.errors import AuthenticationError, ProtocolError
from ringcomm.transport.connect import trust
from ringcomm.transport.reactor import READ, WRITE, Reactor, SecureSocket, WakeUp
from ringcomm.transport.tls import Tls

from .proof import HELLO, MAGIC, PROOF_BYTES, Proof, Role

HANDSHAKE_S = 2.0
"""What proves nothing within this time is closed."""
ANSWER_S = 10.0
"""A launcher to which many dial has this long to answer."""
STDIN, STDOUT, STDERR = 1, 2, 3
"""Kinds of frames with bytes of a stream; without bytes: its end."""
START, EXIT, TELL = 4, 5, 6
"""Start an agent, how it has ended, and facts about the machine or the job as JSON."""
STREAMS = (STDIN, STDOUT, STDERR)
MAX_CERTIFICATE_BYTES = 2048
PIECE_BYTES = 1 << 16
QUEUE_BYTES = 1 << 20
"""Above this, queued bytes stop what they come from."""
_FRAME = struct.Struct("!BII")
_LENGTH = struct.Struct("!H")
LOST_MS = 75_000
"""A machine that has lost its network is noticed after so long, as over SSH."""


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


def prove_to(sock: socket.socket, make_proof: Callable[[], Proof]) -> Proof:
    """As the launcher: read the other end's hello and proof; the latter is not answered yet."""
    until_s = monotonic() + HANDSHAKE_S
    hello = read_exactly(sock, HELLO.size, until_s)
    if not hello.startswith(MAGIC):  # for others nothing is computed
        raise ProtocolError("it is not a ringrun that joins")
    proof = make_proof()
    sock.sendall(proof.hello)  # also to another version, which can say so
    proof.meet(hello)
    proof.check(read_exactly(sock, PROOF_BYTES, until_s))
    return proof


class Frame(NamedTuple):
    """One frame that is not of a stream."""

    kind: int
    number: int
    data: bytes


class _Sink:
    """A pipe that is written to: what waits for it, and whether that is all."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.waiting: Deque[bytes] = deque()
        self.bytes = 0
        self.at_end = False


class Carrier:
    """One end of a connection; used by one thread, except for :meth:`wake`."""

    def __init__(self, sock: SecureSocket) -> None:
        self.ended = False
        self.number = 0
        self._sock, self._reactor, self._wake_up = sock, Reactor(), WakeUp()
        self._reactor.watch(self._wake_up, READ, self._wake_up.clear)
        self.wake = self._wake_up.wake
        self._outgoing: Deque[bytes] = deque()
        self._out_bytes = 0
        self._incoming = bytearray()
        self._sources: Dict[int, IO[bytes]] = {}
        self._sinks: Dict[int, _Sink] = {}

    def attach(self, number: int, sources: Dict[int, IO[bytes]], sinks: Dict[int, IO[bytes]]) -> None:
        """Carry the streams of an agent, in place of those before. The files are closed at their ends."""
        self.detach()
        self.number = number
        for kind, file in sources.items():
            os.set_blocking(file.fileno(), False)
            self._sources[kind] = file
        for kind, file in sinks.items():
            os.set_blocking(file.fileno(), False)
            self._sinks[kind] = _Sink(file)

    def detach(self) -> None:
        """Close all streams."""
        for kind in list(self._sources):
            self._close_source(kind)
        for kind in list(self._sinks):
            self._close_sink(kind)

    @property
    def has_output(self) -> bool:
        """Whether stdout or stderr is open."""
        return any(kind in (STDOUT, STDERR) for kind in (*self._sources, *self._sinks))

    def send(self, kind: int, data: bytes = b"") -> None:
        """Queue a frame."""
        frame = _FRAME.pack(kind, self.number, len(data)) + data
        self._outgoing.append(frame)
        self._out_bytes += len(frame)

    def tell(self, facts: Any) -> None:
        """Queue facts."""
        self.send(TELL, json.dumps(facts).encode())

    @property
    def has_outgoing(self) -> bool:
        """Whether frames wait for the network."""
        return bool(self._outgoing)

    def turn(self, limit_s: float) -> List[Frame]:
        """Wait for something to move, and move it; return the frame that has come and is not of a stream."""
        frames = self._parse()
        if frames:
            return frames
        reading = not self.ended and all(sink.bytes < QUEUE_BYTES for sink in self._sinks.values())
        writing = self._outgoing and not self.ended
        self._watch(self._sock, (READ if reading else 0) | (WRITE if writing else 0), lambda: None)
        for kind, file in self._sources.items():
            self._watch(file, READ if self._out_bytes < QUEUE_BYTES else 0, partial(self._pump, kind))
        for kind, sink in self._sinks.items():
            self._watch(sink.file, WRITE if sink.waiting else 0, partial(self._drain, kind))
        self._reactor.run_once(limit_s)
        if reading:
            self._receive()
        self._flush()
        return self._parse()

    def _watch(self, file: Any, events: int, callback: Callable[[], None]) -> None:
        if events:
            self._reactor.watch(file, events, callback)
        else:
            self._reactor.forget(file)

    def _flush(self) -> None:
        while self._outgoing and not self.ended:
            first = self._outgoing[0]
            try:
                sent = self._sock.send(first)
            except BlockingIOError:
                return
            self._out_bytes -= sent
            if sent == len(first):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = first[sent:]

    def _receive(self) -> None:
        try:
            data = self._sock.recv(PIECE_BYTES)
        except BlockingIOError:
            return
        self.ended = not data
        self._incoming += data

    def _parse(self) -> List[Frame]:
        """Take what has come up to a frame that is not of a stream: it may be the start of the next agent."""
        while len(self._incoming) >= _FRAME.size:
            kind, number, length = _FRAME.unpack_from(self._incoming)
            if not STDIN <= kind <= TELL or length > PIECE_BYTES:
                raise ProtocolError(f"a frame of kind {kind} and {length} bytes")
            end = _FRAME.size + length
            if len(self._incoming) < end:
                break
            content = bytes(self._incoming[_FRAME.size : end])
            del self._incoming[:end]
            if kind not in STREAMS:
                return [Frame(kind, number, content)]
            if number == self.number and kind in self._sinks:
                self._put(kind, content)
        return []

    def _pump(self, kind: int) -> None:
        file = self._sources[kind]
        try:
            data = os.read(file.fileno(), PIECE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data or kind != STDERR:  # the launcher adds to stderr how the agent has ended
            self.send(kind, data)
        if not data:
            self._close_source(kind)

    def _put(self, kind: int, data: bytes) -> None:
        sink = self._sinks[kind]
        sink.waiting.append(data)
        sink.bytes += len(data)
        sink.at_end |= not data
        self._drain(kind)

    def finish(self, kind: int, data: bytes = b"") -> None:
        """Write this to a stream, after what waits for it, and close it; no effect if it is closed."""
        for piece in (data, b""):
            if kind in self._sinks:
                self._put(kind, piece)

    def _drain(self, kind: int) -> None:
        sink = self._sinks[kind]
        while sink.waiting:
            first = sink.waiting[0]
            try:
                written = os.write(sink.file.fileno(), first) if first else 0
            except BlockingIOError:
                return
            except OSError:
                self._close_sink(kind)  # nothing reads it any more
                return
            sink.bytes -= written
            if written == len(first):
                sink.waiting.popleft()
            else:
                sink.waiting[0] = first[written:]
        if sink.at_end:
            self._close_sink(kind)

    def _close_source(self, kind: int) -> None:
        file = self._sources.pop(kind)
        self._reactor.forget(file)
        file.close()

    def _close_sink(self, kind: int) -> None:
        file = self._sinks.pop(kind).file
        self._reactor.forget(file)
        file.close()

    def close(self) -> None:
        """Close the connection and all streams."""
        self.detach()
        self.ended = True
        self._reactor.close()
        self._sock.close()
        self._wake_up.close()
