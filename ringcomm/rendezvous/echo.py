"""The answering side of a probe: sends its rank, and takes part in measuring the wire."""

from __future__ import annotations

import logging
import socket
import struct
from typing import Callable, Tuple

from ..clock import monotonic
from ..errors import ProtocolError
from ..transport.pace import counted
from ..transport.reactor import READ, WRITE, Reactor
from ..wire.messages import Message, MessageReader, encode
from ..wire.signing import Session
from .meter import LIMIT_BYTES

logger = logging.getLogger("ringcomm.rendezvous")

REQUEST = struct.Struct("!I")
"""The most bytes that each side may send."""
BLOCK = struct.Struct("!QQQQQI")
"""Bytes received here; microseconds until the last of them; the result of :func:`acknowledged`; and the
number of bytes that follow."""
BLOCK_BYTES = 32 * 1024
READ_BYTES = 1024 * 1024
"""The size of a system's receive buffer: one read takes all received bytes."""
_QUEUE_BYTES = 128 * 1024
ECHO_LIMIT_BYTES = 4096


class Echo:
    """Sends the rank of this process. On request it then sends blocks of data as fast as it can; each block
    reports how much has been received here, and when.
    """

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        session: Session,
        rank: int,
        ended: Callable[[Echo], None],
    ) -> None:
        self.sock = sock
        self._reactor = reactor
        self._ended = ended
        self._head = bytearray()
        self._limit = self._sent = self._received = self._reported = 0
        self._start_s = self._received_s = 0.0
        self._unsent = memoryview(b"")
        send_rank(sock, session, rank)
        reactor.watch(sock, READ, self._ready)

    def _ready(self) -> None:
        try:
            self._read()
            if self._limit:
                self._write()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            logger.debug("probe connection closed: %s", problem)
            self._ended(self)

    def _read(self) -> None:
        try:
            data = self.sock.recv(READ_BYTES if self._limit else REQUEST.size - len(self._head))
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            raise ConnectionError("the probe is over")
        if self._limit:
            self._received += len(data)
            self._received_s = monotonic()
            if self._received > self._limit:
                raise ConnectionError("more than was announced")
            return
        self._head += data
        if len(self._head) == REQUEST.size:
            (limit,) = REQUEST.unpack(self._head)
            if not 0 < limit <= LIMIT_BYTES:
                raise ConnectionError("a measurement of impossible size")
            self._limit = limit
            self._start_s = self._received_s = monotonic()
            keep_queue_short(self.sock)

    def _write(self) -> None:
        if not self._unsent:
            size = min(BLOCK_BYTES, self._limit - self._sent)
            if not size and self._reported == self._received:
                self._reactor.watch(self.sock, READ, self._ready)
                return
            self._reported, self._sent = self._received, self._sent + size
            passed_us = int((self._received_s - self._start_s) * 1e6)
            head = BLOCK.pack(self._received, passed_us, *acknowledged(self.sock), size)
            self._unsent = memoryview(head + bytes(size))
        self._reactor.watch(self.sock, READ | WRITE, self._ready)
        self._unsent = self._unsent[self.sock.send(self._unsent) :]


def acknowledged(sock: socket.socket) -> Tuple[int, int, int]:
    """Return the system's counters of bytes sent on a connection: acknowledged bytes, microseconds in which
    bytes were in flight that the other end had room for, and the last rate in bytes per second; zeros without
    counters.
    """
    now = counted(sock)
    return (0, 0, 0) if now is None else (now.acked_bytes, max(0, now.busy_us - now.held_us), now.rate)


def keep_queue_short(sock: socket.socket) -> None:
    """Limit the send buffer, so that counters arrive soon, and few bytes are sent in vain."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)


def send_rank(sock: socket.socket, session: Session, rank: int) -> bool:
    """Send the rank of this process to the dialling one; return whether the connection still stands."""
    try:
        sock.send(encode({"type": "echo", "rank": rank}, session))
    except OSError as problem:
        logger.debug("a connection to rank %d ended early: %s", rank, problem)
        return False
    return True


def await_echo(
    reactor: Reactor,
    sock: socket.socket,
    session: Session,
    rank: int,
    confirmed: Callable[[], None],
    failed: Callable[[str], None],
) -> None:
    """Wait, after dialling, until the other end confirms that it is this rank; the socket stays open. Nothing
    can follow the confirmation before this end has sent something.
    """
    reader = MessageReader(ECHO_LIMIT_BYTES, session)

    def readable() -> None:
        try:
            data = sock.recv(ECHO_LIMIT_BYTES)
            if not data:
                raise ConnectionError("it closed the connection")
            for message in reader.feed(data):
                check_echo(message, rank)
                reactor.forget(sock)
                confirmed()
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as problem:
            reactor.forget(sock)
            failed(str(problem))

    reactor.watch(sock, READ, readable)


def check_echo(message: Message, rank: int) -> None:
    """Raise ConnectionError unless the message comes from this rank."""
    if message["type"] != "echo" or message["rank"] != rank:
        raise ConnectionError(f"rank {message.get('rank')} answered there, not rank {rank}")
