"""A server thread: accepts connections, authenticates them, and exchanges control messages on each."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from ..clock import Deadline
from ..errors import ProtocolError, StartupError
from ..transport.accept import Acceptor
from ..transport.connect import is_short_of_descriptors, listen
from ..transport.reactor import READ, WRITE, Reactor
from ..transport.refusals import Refusals
from ..transport.secure import Encryption
from ..transport.wake_up import WakeUp
from ..wire.auth import Claim, Purpose, job_digest
from ..wire.messages import MAX_REPORT_BYTES, Message, MessageReader, encode
from ..wire.signing import Session

logger = logging.getLogger("ringcomm.rendezvous")

_REFUSALS_EVERY_S = 1.0


class _Connection:
    """An authenticated control connection: messages in, messages out."""

    def __init__(self, server: MessageServer, number: int, sock: socket.socket, session: Session) -> None:
        self.server = server
        self.number = number
        self.sock = sock
        self.session = session
        self.reader = MessageReader(MAX_REPORT_BYTES, session)
        self.outgoing = bytearray()
        self.closing = False

    def serve(self) -> None:
        """Send and receive; called when the socket is readable or writable."""
        try:
            self._flush()
            if not self.closing:
                self._read()
        except OSError as problem:
            self.server.lose(self, str(problem.strerror or problem).lower())
        except ProtocolError as problem:
            self.server.lose(self, str(problem))

    def _read(self) -> None:
        try:
            data = self.sock.recv(65536)
        except (BlockingIOError, InterruptedError):
            return
        if not data:
            self.server.lose(self, "")
            return
        for message in self.reader.feed(data):
            self.server.received(self.number, message)

    def send_message(self, message: Message) -> None:
        self.outgoing += encode(message, self.session)
        try:
            self._flush()
        except OSError as problem:
            # The read that follows fails too, and reports that the connection has ended.
            logger.debug("control connection %d: %s", self.number, problem)

    def _flush(self) -> None:
        while self.outgoing:
            try:
                sent = self.sock.send(self.outgoing)
            except (BlockingIOError, InterruptedError):
                break
            del self.outgoing[:sent]
        self.server.rewatch(self)


class MessageServer:
    """Listens in its own thread. Subclasses handle the messages.

    :meth:`arrived`, :meth:`received`, :meth:`lost` and :meth:`refused_connections` are called in that thread,
    and :meth:`send_message`, :meth:`drop` and :meth:`after` may be called only there. ``title`` is the name
    of the service, for messages and for the thread. Each address is bound by itself; never all interfaces.
    """

    def __init__(
        self,
        *,
        title: str,
        key: bytes,
        job: str,
        purpose: Purpose,
        addresses: Sequence[str],
        port: int = 0,
        encryption: Optional[Encryption] = None,
        forwarded: bool = False,
    ) -> None:
        self._forwarded = forwarded
        self._title = title
        self._key = key
        self._job = job_digest(job)
        self._purpose = purpose
        self._addresses = list(addresses)
        self._port = port
        self._encryption = encryption
        self._connections: Dict[int, _Connection] = {}
        self._numbers = 0
        self._refused = Refusals()
        self.refusals = Refusals()  # for the thread that serves
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reactor = Reactor()
        self._wake_up = WakeUp()
        self._thread: Optional[threading.Thread] = None
        self._stopping = False
        self._acceptor: Optional[Acceptor] = None

    # ---- for subclasses to define ------------------------------------------------------------

    def arrived(self, number: int) -> None:
        """Take a peer that has authenticated itself; its connection has this number from now on."""

    def received(self, number: int, message: Message) -> None:
        """Handle a message. Raises ProtocolError, which ends the connection, for an unknown one."""

    def lost(self, number: int) -> None:
        """Handle the end of a connection that was not caused by :meth:`drop`."""

    def changed(self) -> None:
        """Handle the end of a connection, for any reason."""

    def refused_connections(self, text: str) -> None:
        """Report refused unauthenticated peers; called at most once a second."""

    # ---- any thread --------------------------------------------------------------------------

    def start(self) -> List[Tuple[str, int]]:
        """Bind, start serving in a thread, and return the (address, port) pairs. Raises StartupError if none
        of the addresses can be bound, OSError if this process has no descriptors or memory left.
        """
        listeners: List[socket.socket] = []
        problems: List[str] = []
        shortage: Optional[OSError] = None
        for address in self._addresses:
            try:
                listeners.append(listen(address, port=self._port))
            except OSError as problem:
                problems.append(f"{address}: {problem.strerror or problem}")
                shortage = shortage or (problem if is_short_of_descriptors(problem) else None)
        if not listeners:
            self._reactor.close()
            self._wake_up.close()
            if shortage is not None:
                raise shortage
            raise StartupError(f"The {self._title} cannot listen anywhere: " + "; ".join(problems))
        for line in problems:
            logger.info("the %s does not listen on %s", self._title, line)
        endpoints = [listener.getsockname()[:2] for listener in listeners]
        self._acceptor = Acceptor(
            self._reactor,
            listeners,
            self._key,
            self._job,
            self._accept,
            self._count_refusal,
            self._encryption,
            forwarded=self._forwarded,
        )
        self._reactor.watch(self._wake_up, READ, self._run_calls)
        name = "ringcomm-" + self._title.replace(" ", "-")
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        return [(str(address), int(port)) for address, port in endpoints]

    def stop(self) -> None:
        """Close everything and end the thread (any thread but the server's own)."""
        if self._thread is None:
            return
        self.order(self._stop)
        self._thread.join()
        self._thread = None
        self._wake_up.close()

    def order(self, action: Callable[[], None]) -> None:
        """Call a function in the server's thread, unless that has ended."""
        self._calls.put(action)
        self._wake_up.wake()

    # ---- the server's thread -----------------------------------------------------------------

    def send_message(self, number: int, message: Message) -> None:
        """Send a message, if that connection still exists."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.send_message(message)

    def drop(self, number: int) -> None:
        """Close a connection once all messages for it have been sent."""
        connection = self._connections.get(number)
        if connection is not None:
            connection.closing = True
            self.rewatch(connection)

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Call a function in the server's thread after some seconds."""
        self._reactor.after(delay_s, callback)

    @property
    def numbers(self) -> List[int]:
        """Return the numbers of all present connections."""
        return list(self._connections)

    def _run_calls(self) -> None:
        self._wake_up.clear()
        while not self._calls.empty():
            self._calls.get()()

    def _stop(self) -> None:
        self._stopping = True

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._reactor.run_once(3600.0)
        finally:
            self._close()

    def _close(self) -> None:
        # Send queued messages (such as an abort), for half a second at most.
        deadline = Deadline(0.5)
        while any(item.outgoing for item in self._connections.values()) and not deadline.expired():
            self._reactor.run_once(deadline.remaining_s())
        if self._acceptor is not None:
            self._acceptor.close()
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self.changed()
        self._reactor.close()

    def _accept(self, sock: socket.socket, claim: Claim, session: Session) -> None:
        if claim.purpose != self._purpose:
            self._count_refusal("a rank", f"it dialled the {self._title} for another purpose")
            sock.close()
            return
        self._numbers += 1
        connection = self._connections[self._numbers] = _Connection(self, self._numbers, sock, session)
        self.arrived(connection.number)
        self.rewatch(connection)

    def rewatch(self, connection: _Connection) -> None:
        """Watch for writability only while bytes wait to be sent; close a dropped connection after them."""
        if connection.closing and not connection.outgoing:
            self._forget(connection)
        elif connection.number in self._connections:
            events = (0 if connection.closing else READ) | (WRITE if connection.outgoing else 0)
            self._reactor.watch(connection.sock, events, connection.serve)

    def _forget(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is not None:
            self._reactor.forget(connection.sock)
            connection.sock.close()
            self.changed()

    def lose(self, connection: _Connection, reason: str) -> None:
        """End a control connection that ended or sent an invalid message."""
        if connection.number not in self._connections:
            return
        if reason:
            logger.info("control connection %d: %s", connection.number, reason)
        connection.outgoing.clear()
        self._forget(connection)
        self.lost(connection.number)

    def _count_refusal(self, origin: str, reason: str) -> None:
        """Count a refusal for the log, which gets at most one line a second."""
        self.refusals.add(origin, reason)
        if not self._refused:
            self._reactor.after(_REFUSALS_EVERY_S, self._log_refusals)
        self._refused.add(origin, reason)

    def _log_refusals(self) -> None:
        text = f"refused {self._refused} at the {self._title}"
        self._refused.clear()
        if self._acceptor is not None and self._acceptor.kept_waiting:
            self._acceptor.kept_waiting = False
            text += "; their rate is limited, so a new rank may have to wait for some seconds"
        logger.info(text)
        self.refused_connections(text)
