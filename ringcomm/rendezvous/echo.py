"""The answering side of a probe: it says which rank is here, and helps to measure the wire."""

from __future__ import annotations

import logging
import socket
import struct
from typing import Callable, Tuple

from ..clock import monotonic
from ..transport.pace import counted
from ..transport.reactor import READ, WRITE, Reactor
from ..wire.messages import Message, encode
from ..wire.signing import Session
from .meter import LIMIT_BYTES

logger = logging.getLogger("ringcomm.rendezvous")

REQUEST = struct.Struct("!I")
"""How much each side may send at most."""
BLOCK = struct.Struct("!QQQQQI")
"""Bytes that have arrived here, after how many microseconds the last of them did; what :func:`acknowledged`
gives; and how many bytes follow."""
BLOCK_BYTES = 32 * 1024
READ_BYTES = 1024 * 1024
"""As much as a system holds for one connection: one reading takes all that has arrived."""
_QUEUE_BYTES = 128 * 1024


class Echo:
    """Says which rank this is. If it is asked to, it sends as fast as it can, and what it receives when.

    Args:
        reactor: calls back when something arrives.
        sock: an authenticated connection.
        session: signs the message that says which rank this is.
        rank: of this process.
        ended: called once the connection is over.
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
        self._limit = self._sent = self._received = self._told = 0
        self._start_s = self._heard_s = 0.0
        self._unsent = memoryview(b"")
        try:
            sock.send(encode({"type": "echo", "rank": rank}, session))
        except OSError as problem:
            logger.debug("a probe ended early: %s", problem)
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
            self._heard_s = monotonic()
            if self._received > self._limit:
                raise ConnectionError("more than was announced")
            return
        self._head += data
        if len(self._head) == REQUEST.size:
            (limit,) = REQUEST.unpack(self._head)
            if not 0 < limit <= LIMIT_BYTES:
                raise ConnectionError("a measurement of impossible size")
            self._limit = limit
            self._start_s = self._heard_s = monotonic()
            keep_queue_short(self.sock)

    def _write(self) -> None:
        if not self._unsent:
            size = min(BLOCK_BYTES, self._limit - self._sent)
            if not size and self._told == self._received:
                self._reactor.watch(self.sock, READ, self._ready)
                return
            self._told, self._sent = self._received, self._sent + size
            passed_us = int((self._heard_s - self._start_s) * 1e6)
            head = BLOCK.pack(self._received, passed_us, *acknowledged(self.sock), size)
            self._unsent = memoryview(head + bytes(size))
        self._reactor.watch(self.sock, READ | WRITE, self._ready)
        self._unsent = self._unsent[self.sock.send(self._unsent) :]


def acknowledged(sock: socket.socket) -> Tuple[int, int, int]:
    """What the system says of bytes that were sent; zeros where it does not.

    Returns:
        how many have been acknowledged, for how many microseconds something was on its way that the other end
        had room for, and at how many bytes per second the last were acknowledged.
    """
    known = counted(sock)
    return (
        (0, 0, 0) if known is None else (known.acked_bytes, max(0, known.busy_us - known.held_us), known.rate)
    )


def keep_queue_short(sock: socket.socket) -> None:
    """Let little wait here, so that what arrives at the other end is not old, and little is wasted."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE_BYTES)


def check_echo(message: Message, rank: int) -> None:
    """Raise ConnectionError unless the message says that this very rank is there."""
    if message["type"] != "echo" or message["rank"] != rank:
        raise ConnectionError(f"rank {message.get('rank')} answered there, not rank {rank}")
