"""An event loop: one thread serves many sockets and timers by callbacks. A wake-up for threads that sleep.
And the interface of encrypted sockets.

:mod:`.tls` implements those. It needs Python's ``ssl``, which some builds lack and which is slow to import.
So only :func:`encryption_of` imports it, and only for jobs that encrypt.
"""

from __future__ import annotations

import heapq
import itertools
import selectors
import socket
import threading
from abc import ABC, abstractmethod
from typing import Callable, Dict, List, Optional, Protocol, Tuple

from ..clock import monotonic
from ..errors import ConfigError, ProtocolError

Callback = Callable[[], None]
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_MAX_WAIT_S = 3600.0


def error_text(problem: Exception) -> str:
    """Return the system's error message, as part of a sentence."""
    return str(getattr(problem, "strerror", None) or problem).lower()


class Watchable(Protocol):
    """A socket, or a selector that stands for several."""

    def fileno(self) -> int: ...


class Reactor:
    """Calls back when sockets are ready or timers expire. Used by one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._secure: Dict[SecureSocket, None] = {}
        self._alarms: List[Tuple[float, int, Callback]] = []
        self._numbers = itertools.count()

    def watch(self, sock: Watchable, events: int, callback: Callback) -> None:
        """Call back whenever the socket is ready for one of the events (replaces what was set; 0: never)."""
        if not events:
            self.forget(sock)
            return
        # Looked up first, and by number: the selector's exceptions format the socket, which takes long.
        known = self._selector.get_map().get(sock.fileno())
        if known is not None and known.fileobj is not sock:
            # It was closed while it was watched. The system watches no socket that has its number since then.
            self._selector.unregister(known.fileobj)
            known = None
        if known is not None:
            self._selector.modify(sock, events, callback)
        else:
            self._selector.register(sock, events, callback)
        if isinstance(sock, SecureSocket):
            self._secure[sock] = None

    def forget(self, sock: Watchable) -> None:
        """Stop watching; harmless if the socket was not watched."""
        if isinstance(sock, SecureSocket):
            self._secure.pop(sock, None)
        try:
            self._selector.unregister(sock)
        except (KeyError, ValueError):
            pass

    def after(self, delay_s: float, callback: Callback) -> None:
        """Call back once, not before ``delay_s`` seconds have passed."""
        # A rank of a large job dials thousands of links at once. The number keeps the order of equals.
        heapq.heappush(self._alarms, (monotonic() + delay_s, next(self._numbers), callback))

    def run_once(self, timeout_s: float) -> None:
        """Wait for at most ``timeout_s`` seconds, and run the callbacks that are due."""
        if self._alarms:
            timeout_s = min(timeout_s, max(0.0, self._alarms[0][0] - monotonic()))
        timeout_s = min(timeout_s, _MAX_WAIT_S)  # select() takes no infinity
        held = self._with_bytes_held()
        ready = [key for key, _ in self._selector.select(0.0 if held else timeout_s)]
        for key in ready + [key for key in held if key not in ready]:
            # An earlier callback may have closed this socket.
            # (Looked up by number: a closed socket no longer has one, and fileno() would raise.)
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = monotonic()
        while self._alarms and self._alarms[0][0] <= now:
            heapq.heappop(self._alarms)[2]()

    def _with_bytes_held(self) -> List[selectors.SelectorKey]:
        """Return encrypted sockets that hold bytes outside the buffers that select() reports."""
        watched = self._selector.get_map()
        numbers = [sock.fileno() for sock in self._secure if sock.buffered()]
        keys = [watched.get(number) for number in numbers if number >= 0]
        return [key for key in keys if key is not None and key.events & READ]

    def close(self) -> None:
        """Forget everything, and close the sockets still watched: the reactor owns them."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._secure.clear()
        self._alarms.clear()


class WakeUp:
    """A descriptor that any thread, or a signal handler, can make readable. Many calls cost one byte."""

    __slots__ = ("_closed", "_lock", "_reading", "_sent", "_writing", "fileno")

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        for end in (self._reading, self._writing):
            end.setblocking(False)
        self.fileno = self._reading.fileno  # bound: a wait calls it twice
        self._lock = threading.RLock()  # reentrant: a signal may arrive in :meth:`wake`
        self._sent = self._closed = False

    def wake(self) -> None:
        """Make the descriptor readable until :meth:`clear`; no effect once it is closed."""
        with self._lock:
            if not (self._sent or self._closed):
                self._sent = True
                self._writing.send(b"!")

    def clear(self) -> None:
        """Reset the descriptor after a sleep, before acting on the reason of :meth:`wake`."""
        with self._lock:
            if self._sent and not self._closed:
                self._reading.recv(16)
                self._sent = False

    def close(self) -> None:
        """Close the descriptor, in which no thread may sleep any more."""
        with self._lock:
            self._closed = True
            self._reading.close()
            self._writing.close()


# -- encrypted sockets -----------------------------------------------------------------------------


class ClosedEarly(ProtocolError):
    """The other end closed the connection before the handshake was over."""


class SecureSocket(socket.socket):
    """A connected socket whose bytes are encrypted: its methods take and give plain bytes, and raise
    BlockingIOError (or wait, with a timeout) where the other end must continue.
    """

    secured: bool  # the handshake is over; before, nothing may be sent or received

    def handshake(self) -> bool:
        """Continue the handshake without waiting; return whether it is over. AuthenticationError without this
        job's certificate, ProtocolError if it is not ringcomm or (:class:`ClosedEarly`) has closed.
        """
        raise NotImplementedError

    def buffered(self) -> bool:
        """Return whether a receive may return bytes that are not in the buffers of the system any more."""
        raise NotImplementedError

    def trust(self) -> None:
        """Lift the limits on what an authenticated peer may send."""
        raise NotImplementedError


class Encryption(ABC):
    """How this process encrypts the connections of its job."""

    fingerprint: bytes  # SHA-256 of the job's certificate; both ends' proofs cover it

    @abstractmethod
    def wrap(self, sock: socket.socket, accepted: bool) -> SecureSocket:
        """Take over a non-blocking socket, connected or not yet. ``accepted``: the other end dialled."""


def encryption_of(certificate: str, insist: bool = False) -> Optional[Encryption]:
    """Return how to encrypt a job's connections, or None; ConfigError if the certificate (PEM, with its key)
    cannot be used, or is missing and ``insist`` is set.
    """
    if not certificate:
        if insist:
            raise ConfigError(
                "RINGCOMM_ENCRYPT=1, but no certificate came with the job's key. Make a key file that has "
                "one (`python -m ringcomm.newkey --encrypt FILE`), copy it to every host and set "
                "RINGCOMM_KEY_FILE; or start the program with `ringrun --encrypt`, which does that."
            )
        return None
    try:
        from .tls import Tls
    except ImportError as problem:
        raise ConfigError(f"This Python was built without ssl, so it cannot encrypt: {problem}.") from None
    return Tls(certificate)
