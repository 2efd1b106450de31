"""The rendezvous server: sockets and a thread around :class:`~ringcomm.rendezvous.state.Rendezvous`."""

from __future__ import annotations

import logging
import queue
import socket
import threading
from collections import Counter
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from ..clock import Deadline, monotonic
from ..config import Slot
from ..errors import ProtocolError, StartupError
from ..transport.connect import Acceptor, listen
from ..transport.reactor import READ, WRITE, Reactor
from ..transport.secure import Encryption
from ..version import __version__
from ..wire.auth import Claim, Purpose, job_digest
from ..wire.messages import MAX_REPORT_BYTES, Message, MessageReader, encode
from .actions import Action, Drop, Notice, Seat, Tell, Timer
from .state import Phase, Rendezvous

logger = logging.getLogger("ringcomm.rendezvous")

_REFUSALS_EVERY_S = 1.0


Handler = Callable[[Rendezvous, int, Message, float], List[Action]]

HANDLERS: Dict[str, Handler] = {
    "join": Rendezvous.joined,
    "probed": lambda state, connection, message, now_s: state.probed(connection, message),
    "linked": lambda state, connection, message, now_s: state.linked(connection, message),
    "unlinked": Rendezvous.unlinked,
    "lost": Rendezvous.lost,
    "mismatch": Rendezvous.mismatched,
    "note": lambda state, connection, message, now_s: state.noted(connection, message),
    "closed": Rendezvous.closed,
    "pong": Rendezvous.answered,
    "leaving": Rendezvous.leaving,
}
"""What ranks may send, and what becomes of it."""


class _Connection:
    """A proven control connection: messages in, messages out."""

    def __init__(self, server: RendezvousServer, number: int, sock: socket.socket) -> None:
        self.server = server
        self.number = number
        self.sock = sock
        self.reader = MessageReader(MAX_REPORT_BYTES)
        self.outgoing = bytearray()
        self.closing = False

    def serve(self) -> None:
        """Called when the socket is readable or writable."""
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
            self.server.handle(self, message)

    def tell(self, message: Message) -> None:
        self.outgoing += encode(message)
        try:
            self._flush()
        except OSError as problem:
            # Its end is noticed, and its owner told, by the read that follows.
            logger.debug("control connection %d: %s", self.number, problem)

    def _flush(self) -> None:
        while self.outgoing:
            try:
                sent = self.sock.send(self.outgoing)
            except (BlockingIOError, InterruptedError):
                break
            del self.outgoing[:sent]
        self.server.rewatch(self)


class RendezvousServer:
    """Brings the ranks of one job together, and tells all of them when one is lost.

    Args:
        key: the job's secret.
        job: the job's name; ranks of others are refused.
        seats: one per rank, in rank order, if a launcher planned the job; or just the number of
            ranks, if they come on their own.
        addresses: where to listen. Each is bound by itself; never all interfaces.
        start_timeout_s: how long the first rank waits for the last.
        notify: called in the server's thread with every :class:`~ringcomm.rendezvous.state.Notice`.
        port: fixed port for every address; 0 lets the system choose.
        encryption: how connections are encrypted; None: not at all.
    """

    def __init__(
        self,
        *,
        key: bytes,
        job: str,
        seats: Sequence[Seat] = (),
        size: Optional[int] = None,
        addresses: Sequence[str],
        start_timeout_s: float,
        notify: Callable[[Notice], None],
        port: int = 0,
        encryption: Optional[Encryption] = None,
    ) -> None:
        self._encryption = encryption
        self._key = key
        self._job = job_digest(job)
        self._state = Rendezvous(size or len(seats), seats, __version__, start_timeout_s)
        self._addresses = list(addresses)
        self._port = port
        self._notify = notify
        self._connections: Dict[int, _Connection] = {}
        self._numbers = 0
        self._refused: Counter[str] = Counter()
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reactor = Reactor()
        self._wake_in, self._wake_out = socket.socketpair()
        self._thread: Optional[threading.Thread] = None
        self._stopping = False
        self._idle = threading.Event()
        self._idle.set()
        self._acceptor: Optional[Acceptor] = None

    def start(self) -> List[Tuple[str, int]]:
        """Bind, start serving in a thread of its own, and return where: (address, port) pairs.

        Raises:
            StartupError: none of the addresses can be bound; the message lists why.
        """
        listeners: List[socket.socket] = []
        problems: List[str] = []
        for address in self._addresses:
            try:
                listeners.append(listen(address, port=self._port))
            except OSError as problem:
                problems.append(f"{address}: {problem.strerror or problem}")
        if not listeners:
            self._reactor.close()
            self._wake_in.close()
            self._wake_out.close()
            raise StartupError("The rendezvous cannot listen anywhere: " + "; ".join(problems))
        for line in problems:
            logger.info("the rendezvous does not listen on %s", line)
        endpoints = [listener.getsockname()[:2] for listener in listeners]
        self._acceptor = Acceptor(
            self._reactor,
            listeners,
            self._key,
            self._job,
            self._arrived,
            self._count_refusal,
            self._encryption,
        )
        self._wake_in.setblocking(False)
        self._reactor.watch(self._wake_in, READ, self._run_orders)
        self._thread = threading.Thread(target=self._serve, name="ringcomm-rendezvous", daemon=True)
        self._thread.start()
        return [(str(address), int(port)) for address, port in endpoints]

    def process_exited(self, slot: Slot, how: str, ok: bool) -> None:
        """Tell the rendezvous that a rank's process ended (any thread).

        Args:
            how: like ``exit code 3`` or ``killed by SIGKILL``.
            ok: whether that is a normal end.
        """
        self._order(lambda: self._act(self._state.process_exited(slot, how, ok, monotonic())))

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nobody is connected who does not wait for the next generation (any thread).

        Returns:
            whether that happened in time.
        """
        return self._idle.wait(timeout_s)

    def stop(self) -> None:
        """Close everything and end the thread (any thread but the server's own)."""
        if self._thread is None:
            return
        self._order(self._stop)
        self._thread.join()
        self._thread = None
        self._wake_out.close()

    def _order(self, action: Callable[[], None]) -> None:
        self._orders.put(action)
        try:
            self._wake_out.send(b"!")
        except OSError:
            logger.debug("the rendezvous has stopped already")

    def _run_orders(self) -> None:
        try:
            self._wake_in.recv(4096)
        except (BlockingIOError, InterruptedError):
            pass
        while not self._orders.empty():
            self._orders.get()()

    def _stop(self) -> None:
        self._stopping = True

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._reactor.turn(3600.0)
        finally:
            self._close()

    def _close(self) -> None:
        # Whatever was told just now (an abort, say) still leaves, within reason.
        deadline = Deadline(0.5)
        while any(item.outgoing for item in self._connections.values()) and not deadline.expired():
            self._reactor.turn(deadline.remaining_s())
        if self._acceptor is not None:
            self._acceptor.close()
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._idle.set()
        self._reactor.close()
        self._wake_in.close()

    def _arrived(self, sock: socket.socket, claim: Claim) -> None:
        if claim.purpose != Purpose.CONTROL:
            self._count_refusal("a rank", "it took the rendezvous for another rank")
            sock.close()
            return
        self._numbers += 1
        connection = self._connections[self._numbers] = _Connection(self, self._numbers, sock)
        self._idle.clear()
        self.rewatch(connection)

    def rewatch(self, connection: _Connection) -> None:
        """Watch for writability only while something waits to be written; drop it when it may go."""
        if connection.closing and not connection.outgoing:
            self._forget(connection)
        elif connection.number in self._connections:
            events = (0 if connection.closing else READ) | (WRITE if connection.outgoing else 0)
            self._reactor.watch(connection.sock, events, connection.serve)

    def _forget(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is not None:
            self._reactor.forget(connection.sock)
            connection.sock.close()
            self._look_whether_idle()

    def _look_whether_idle(self) -> None:
        if all(self._state.is_waiting(number) for number in self._connections):
            self._idle.set()
        else:
            self._idle.clear()

    def lose(self, connection: _Connection, reason: str) -> None:
        """A control connection ended or sent nonsense."""
        if connection.number not in self._connections:
            return
        if reason:
            logger.info("control connection %d: %s", connection.number, reason)
        connection.outgoing.clear()
        self._forget(connection)
        self._act(self._state.disconnected(connection.number, monotonic()))

    def handle(self, connection: _Connection, message: Message) -> None:
        """Give one message to the state machine and do what it wants."""
        number, state, now = connection.number, self._state, monotonic()
        handler = HANDLERS.get(message["type"])
        if handler is None:
            raise ProtocolError(f"a rank may not send {message['type']!r}")
        self._act(handler(state, number, message, now))
        self._look_whether_idle()

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Tell):
                connection = self._connections.get(action.connection)
                if connection is not None:
                    connection.tell(action.message)
            elif isinstance(action, Drop):
                connection = self._connections.get(action.connection)
                if connection is not None:
                    connection.closing = True
                    self.rewatch(connection)
            elif isinstance(action, Timer):
                self._reactor.after(action.delay_s, self._tick)
            elif isinstance(action, Notice):
                self._notify(action)

    def _tick(self) -> None:
        self._act(self._state.tick(monotonic()))

    @property
    def phase(self) -> Phase:
        """How far the job has come."""
        return self._state.phase

    def _count_refusal(self, origin: str, reason: str) -> None:
        """One log line a second at most, however many strangers there are."""
        if not self._refused:
            self._reactor.after(_REFUSALS_EVERY_S, self._log_refusals)
        self._refused[f"{origin}: {reason}"] += 1

    def _log_refusals(self) -> None:
        total = sum(self._refused.values())
        (what, _), *others = self._refused.most_common(1)
        self._refused.clear()
        text = f"turned away {total} connection{'s' if total > 1 else ''} at the rendezvous (mostly {what})"
        logger.info(text)
        self._notify(Notice("log", text))
