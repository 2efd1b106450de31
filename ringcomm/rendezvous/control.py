"""The connection to the rendezvous while the job runs: failures are reported and announced on it."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Dict, Optional, Type

from ..clock import Deadline
from ..errors import (
    MismatchError,
    NoRouteError,
    PeerLostError,
    PeerStalledError,
    ProtocolError,
    RingcommError,
    StartTimeoutError,
    StartupError,
)
from ..transport.base import Watch
from ..wire.messages import Message, MessageReader, encode

logger = logging.getLogger("ringcomm.rendezvous")

_VERDICT_S = 5.0
"""How long a rank that lost a peer waits to be told why."""


class ControlChannel(Watch):
    """The connection to the rendezvous while the job runs.

    It is read only when this rank waits for others anyway. Several threads may do so: once there is a
    verdict, the descriptor stays readable, so that none of them sleeps through it.
    """

    def __init__(self, sock: socket.socket, reader: MessageReader) -> None:
        self._sock = sock
        self._reader = reader
        self._verdict: Optional[RingcommError] = None
        self._lock = threading.RLock()
        self.open = True

    def fileno(self) -> int:
        return self._sock.fileno() if self.open else -1

    def check(self) -> None:
        with self._lock:
            self._read()
            if self._verdict is not None:
                raise _copy(self._verdict)

    def _read(self) -> None:
        if not self.open or self._verdict is not None:
            return
        try:
            data = self._sock.recv(65536)
            if data:
                for message in self._reader.feed(data):
                    self._take(message)
                return
            reason = "it closed the connection"
        except (BlockingIOError, InterruptedError, socket.timeout):
            return
        except OSError as problem:
            reason = str(problem.strerror or problem).lower()
        except ProtocolError as problem:
            reason = str(problem)
        self._close_socket()
        self._verdict = self._verdict or PeerLostError(
            f"The rendezvous of this job is gone ({reason}): ringrun, or the process that served it, has "
            "ended. Without it nobody would learn of failures, so this rank stops."
        )

    def _take(self, message: Message) -> None:
        if message["type"] == "abort" and self._verdict is None:
            self._verdict = error_from(message)
            try:
                # From now on it reads as ended, for whoever else may wait for it.
                self._sock.shutdown(socket.SHUT_RD)
            except OSError as problem:
                logger.debug("the rendezvous has hung up already: %s", problem)

    def report_lost(self, peer: int, doing: str, why: str, kind: str = "lost") -> RingcommError:
        """Report that a peer is lost (or ``stalled``); the error that every rank will raise."""
        return self._report(
            {"type": "lost", "peer": peer, "doing": doing, "why": why, "kind": kind},
            PeerLostError(f"rank {peer} was lost while this rank was in {doing}: {why}.", rank=peer),
        )

    def report_mismatch(self, peer: int, text: str) -> RingcommError:
        """Report that a peer is in a different call; the error that every rank will raise."""
        return self._report({"type": "mismatch", "peer": peer, "text": text}, MismatchError(text, peer=peer))

    def _report(self, message: Message, otherwise: RingcommError) -> RingcommError:
        with self._lock:
            return self._ask(message, otherwise)

    def _ask(self, message: Message, otherwise: RingcommError) -> RingcommError:
        self._read()
        if self._verdict is None and self._send(message):
            deadline = Deadline(_VERDICT_S)
            while self.open and self._verdict is None and not deadline.expired():
                self._sock.settimeout(max(0.01, deadline.remaining_s()))
                self._read()
            if self.open:
                self._sock.setblocking(False)
        if self._verdict is None:
            self._verdict = otherwise
        return _copy(self._verdict)

    def _send(self, message: Message) -> bool:
        try:
            self._sock.settimeout(_VERDICT_S)
            self._sock.sendall(encode(message))
        except OSError as problem:
            logger.debug("the rendezvous cannot be told: %s", problem)
            return False
        finally:
            if self.open:
                self._sock.setblocking(False)
        return True

    def note(self, text: str) -> None:
        """Have the launcher show this, if its user wants details."""
        with self._lock:
            if self.open:
                self._send({"type": "note", "text": text})

    def leave(self, reason: str, ok: bool) -> None:
        """Say goodbye and hang up."""
        with self._lock:
            if self.open:
                self._send({"type": "leaving", "reason": reason, "ok": ok})
                self._close_socket()

    def _close_socket(self) -> None:
        self.open = False
        self._sock.close()


_ERRORS: Dict[str, Type[RingcommError]] = {
    "lost": PeerLostError,
    "stalled": PeerStalledError,
    "mismatch": MismatchError,
    "timeout": StartTimeoutError,
    "no_route": NoRouteError,
    "startup": StartupError,
}


def error_from(message: Message) -> RingcommError:
    """The error that an ``abort`` message stands for."""
    kind = _ERRORS.get(str(message["kind"]), RingcommError)
    rank, host = message.get("rank"), message.get("host")
    if issubclass(kind, PeerLostError):
        return kind(str(message["text"]), rank=rank, host=host)
    return kind(str(message["text"]))


def _copy(error: RingcommError) -> RingcommError:
    """A fresh exception with the same facts: raising one object twice would chain tracebacks."""
    copy = type(error)(*error.args)
    copy.__dict__.update(error.__dict__)
    return copy
