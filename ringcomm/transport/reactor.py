"""One thread, many sockets: whose turn it is."""

from __future__ import annotations

import selectors
import socket
from typing import Callable, List, Tuple

from ..clock import monotonic
from .secure import SecureSocket

Callback = Callable[[], None]
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
_LONGEST_WAIT_S = 3600.0


class Reactor:
    """Calls back when sockets are ready or moments have come. Used by one thread."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._alarms: List[Tuple[float, Callback]] = []

    def watch(self, sock: socket.socket, events: int, callback: Callback) -> None:
        """Call back whenever the socket is ready for one of the events (replaces what was set)."""
        try:
            self._selector.modify(sock, events, callback)
        except KeyError:
            self._selector.register(sock, events, callback)

    def forget(self, sock: socket.socket) -> None:
        """Stop watching; harmless if the socket was not watched."""
        try:
            self._selector.unregister(sock)
        except (KeyError, ValueError):
            pass

    def after(self, delay_s: float, callback: Callback) -> None:
        """Call back once, not before ``delay_s`` seconds have passed."""
        self._alarms.append((monotonic() + delay_s, callback))
        self._alarms.sort(key=lambda alarm: alarm[0])

    def turn(self, timeout_s: float) -> None:
        """Wait for at most ``timeout_s`` and run what is due."""
        if self._alarms:
            timeout_s = min(timeout_s, max(0.0, self._alarms[0][0] - monotonic()))
        timeout_s = min(timeout_s, _LONGEST_WAIT_S)  # the system's call knows no infinity
        held = self._with_bytes_held()
        ready = [key for key, _ in self._selector.select(0.0 if held else timeout_s)]
        for key in ready + [key for key in held if key not in ready]:
            # An earlier callback of this turn may have closed this socket.
            # (Looked up by number: a closed socket no longer has one, and asking it would raise.)
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = monotonic()
        while self._alarms and self._alarms[0][0] <= now:
            self._alarms.pop(0)[1]()

    def _with_bytes_held(self) -> List[selectors.SelectorKey]:
        """Those to be read whose bytes have left the system already: it would not report them."""
        return [
            key
            for key in self._selector.get_map().values()
            if isinstance(key.fileobj, SecureSocket) and key.events & READ and key.fileobj.buffered()
        ]

    def close(self) -> None:
        """Forget everything, and close the sockets still watched: nobody else will."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._alarms.clear()
