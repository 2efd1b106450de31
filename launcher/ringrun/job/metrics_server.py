"""The endpoint for Prometheus: HTTP on the loopback interface of the machine that runs ringrun.

Every process of this machine reaches it, those of other users, too, and web pages that a browser shows. So
one thread serves few connections at a time, each for a short time, and a request must name this machine as
its ``Host``: a page from elsewhere whose name was made to lead to 127.0.0.1 names itself.
"""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import closing, suppress
from typing import Callable, List, Mapping, Optional

from ringcomm.clock import monotonic
from ringcomm.errors import ConfigError
from ringcomm.transport.connect import NO_DESCRIPTORS_S, is_short_of_descriptors

from ..watch.history import History
from ..watch.prometheus import exposition

ADDRESS = "127.0.0.1"
NAMES = ("localhost", ADDRESS, "[::1]")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_CONNECTIONS = 8
TOTAL_S = 5.0
"""Time limit of a connection, in seconds."""
GRACE_S = 0.5
"""Where all places are taken, a connection that is older gives up its own, in seconds."""
ACCEPT_EVERY_S = 0.02
"""Time between two connections, in seconds."""
MAX_REQUEST_BYTES = 8192
_LOOK_S, _LOOK_WHILE_BUSY_S = 0.5, 0.05
_HTTP_PORT = 80


class MetricsServer:
    """Serves ``/metrics``, in a thread.

    Args:
        port: the port; 0 for a free one.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener: Optional[socket.socket] = None
        self._thread: Optional[threading.Thread] = None
        self._text = b""
        self._stopped = threading.Event()

    def start(self) -> str:
        """Listen; returns the address of the page.

        Raises:
            ConfigError: the port is in use, or not allowed.
        """
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ADDRESS, self._port))
            listener.listen(MAX_CONNECTIONS)
            listener.setblocking(False)
        except OSError as problem:
            listener.close()
            raise ConfigError(
                f"--metrics-port {self._port}: {ADDRESS}:{self._port} cannot be opened: {problem.strerror}. "
                "Name a port that is not in use, or 0."
            ) from None
        self._listener = listener
        self._stopped.clear()
        self._thread = threading.Thread(
            target=self._serve, args=(listener,), name="ringrun-metrics", daemon=True
        )
        self._thread.start()
        return f"http://{ADDRESS}:{listener.getsockname()[1]}/metrics"

    def update(self, history: History, hosts: Mapping[int, str]) -> None:
        """Serve these numbers from now on.

        Args:
            history: the samples.
            hosts: by process, the name of its host.
        """
        self._text = exposition(history, hosts).encode("utf-8", "replace")

    def stop(self) -> None:
        """Close the port, and end the thread."""
        if self._listener is not None and self._thread is not None:
            self._stopped.set()
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # the thread wakes up
            self._thread.join()
            self._listener = None

    def _serve(self, listener: socket.socket) -> None:
        with listener, closing(_Places(listener, self._answer)) as places:
            while not self._stopped.is_set():
                places.turn()

    def _answer(self, request: bytes, port: int) -> bytes:
        status, text = _status(request, port), b""
        if status == "200 OK":
            text = self._text
        head = (
            f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(text)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode("ascii") + text


def _status(request: bytes, port: int) -> str:
    """The status line of the answer to a request, from its head."""
    first, *lines = request.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return "400 Bad Request"
    hosts = [line.partition(":")[2].strip().lower() for line in lines if line.lower().startswith("host:")]
    allowed = {f"{name}:{port}" for name in NAMES} | (set(NAMES) if port == _HTTP_PORT else set())
    if len(hosts) != 1 or hosts[0] not in allowed:
        return "403 Forbidden"
    if words[0] != "GET":
        return "405 Method Not Allowed"
    return "200 OK" if words[1].partition("?")[0] == "/metrics" else "404 Not Found"


class _Connection:
    """A connection, from the first byte of its request to the last one of the answer.

    Args:
        sock: not blocking.
        answer: makes the answer to the head of a request.
    """

    def __init__(self, sock: socket.socket, answer: Callable[[bytes], bytes]) -> None:
        self.sock, self._answer = sock, answer
        self.since_s = monotonic()
        self._received = b""
        self._left = memoryview(b"")

    def advance(self) -> int:
        """Receive or send what can be now; what to wait for, 0 if it has ended."""
        try:
            if not self._left:
                piece = self.sock.recv(MAX_REQUEST_BYTES)
                self._received += piece
                head, end, _ = self._received.partition(b"\r\n\r\n")
                if not end and piece and len(self._received) < MAX_REQUEST_BYTES:
                    return selectors.EVENT_READ
                if not end:
                    return 0
                self._left = memoryview(self._answer(head))
            self._left = self._left[self.sock.send(self._left) :]
        except (BlockingIOError, InterruptedError):
            return selectors.EVENT_WRITE if self._left else selectors.EVENT_READ
        except OSError:
            return 0  # the other end has gone
        return selectors.EVENT_WRITE if self._left else 0


class _Places:
    """The connections that are served at a time.

    Args:
        listener: not blocking.
        answer: makes an answer from the head of a request and the port that it came to.
    """

    def __init__(self, listener: socket.socket, answer: Callable[[bytes, int], bytes]) -> None:
        port = listener.getsockname()[1]
        self._listener = listener
        self._answer = lambda head: answer(head, port)
        self._selector = selectors.DefaultSelector()
        self._open: List[_Connection] = []
        self._not_before_s = 0.0
        self._accepting = False

    def turn(self) -> None:
        """Wait for a moment, and go on with what is ready."""
        now_s = monotonic()
        for connection in [item for item in self._open if item.since_s + TOTAL_S <= now_s]:
            self._close(connection)
        room = len(self._open) < MAX_CONNECTIONS or self._open[0].since_s + GRACE_S <= now_s
        accepting = room and self._not_before_s <= now_s
        if accepting is not self._accepting:
            self._accepting = accepting
            if accepting:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)
        for key, _ in self._selector.select(_LOOK_S if accepting and not self._open else _LOOK_WHILE_BUSY_S):
            if key.data is None:
                self._accept()
            elif key.data in self._open:
                self._advance(key.data)

    def _accept(self) -> None:
        self._not_before_s = monotonic() + ACCEPT_EVERY_S
        try:
            sock, _ = self._listener.accept()
        except OSError as problem:
            if is_short_of_descriptors(problem):
                self._not_before_s = monotonic() + NO_DESCRIPTORS_S
            return
        sock.setblocking(False)
        if len(self._open) >= MAX_CONNECTIONS:
            self._close(self._open[0])
        connection = _Connection(sock, self._answer)
        self._open.append(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        self._advance(connection)

    def _advance(self, connection: _Connection) -> None:
        events = connection.advance()
        if events:
            self._selector.modify(connection.sock, events, connection)
        else:
            self._close(connection)

    def _close(self, connection: _Connection) -> None:
        self._open.remove(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._open):
            self._close(connection)
        self._selector.close()
