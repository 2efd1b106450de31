"""Wakes threads that sleep until a descriptor is readable."""

from __future__ import annotations

import socket
import threading


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
