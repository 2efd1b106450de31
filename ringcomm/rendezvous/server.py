"""The rendezvous server: sockets and a thread around a job's state machine, which has no I/O.

It also keeps entries that ranks post for each other: process groups of other libraries use them, where one
rank serves a rendezvous for the group and posts its address, or PyTorch's store. And it connects the ranks of
groups that have no rendezvous of their own: each as a job beside this one.
"""

from __future__ import annotations

import logging
import queue
import re
import resource
import socket
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from ..clock import Deadline, monotonic
from ..config import Slot
from ..configuration.membership import Limits
from ..errors import ProtocolError, RingcommError, StartupError
from ..transport.connect import Acceptor, Refusals, is_short_of_descriptors, keep_open, listen
from ..transport.reactor import READ, WRITE, Encryption, Reactor, WakeUp
from ..version import __version__
from ..wire.auth import Claim, Purpose, Session, job_digest
from ..wire.messages import MAX_REPORT_BYTES, Message, MessageReader, encode
from .control import error_from
from .membership import NO_RELAY, START_LIMIT, Action, Drop, Notice, RelayHost, Seat, Send, Terms, Timer
from .state import Rendezvous

logger = logging.getLogger("ringcomm.rendezvous")

_REFUSALS_EVERY_S = 1.0
_CLOSE_S = 0.5
MAX_GROUPS = 1_000
MAX_ENTRIES = 10_000
MAX_ENTRY_BYTES = 64 * 1024


class _Connection:
    """An authenticated control connection."""

    def __init__(self, number: int, sock: socket.socket, session: Session, state: Rendezvous) -> None:
        self.number, self.sock, self.session = number, sock, session
        self.state = state  # of the job, or of one of its groups
        self.reader = MessageReader(MAX_REPORT_BYTES, session)
        self.outgoing = bytearray()
        self.closing = False  # once all bytes have been sent


class RendezvousServer:
    """Connects the ranks of one job, in a thread; a job of fixed size it aborts when a rank is lost. Either
    ``seats`` (one per rank, in rank order: a launcher planned the job) or ``size`` (ranks come on their own)
    is given for a job of fixed size, or ``limits`` for an elastic one. If an elastic job is ``launched``,
    only processes that :meth:`expect` has announced may join. Each of the ``addresses`` is bound by itself;
    with port 0 the system chooses ports. ``notify`` is called in the server's thread, and ``joining`` with
    the connections of machines that join. Links of an encrypted job between hosts without a route are
    relayed.
    """

    def __init__(
        self, *, key: bytes, job: str, seats: Sequence[Seat] = (), size: Optional[int] = None,
        limits: Optional[Limits] = None, launched: bool = False, addresses: Sequence[str],
        start_timeout_s: float, notify: Callable[[Notice], None], port: int = 0,
        encryption: Optional[Encryption] = None, limit: str = START_LIMIT,
        joining: Optional[Callable[[socket.socket], None]] = None,
    ) -> None:  # fmt: skip
        size = 0 if limits is not None else size or len(seats)
        relay = NO_RELAY if encryption is None else relay_here()
        terms = Terms(__version__, start_timeout_s, size, tuple(seats), limits, launched, limit, relay)
        self._state, self._terms = Rendezvous(terms), terms
        self._groups: Dict[bytes, Rendezvous] = {}  # by the digests of their names
        self._board = Board()
        self._notify = notify
        self._awaited = False
        self._idle = threading.Event()
        self._idle.set()
        self._key, self._job = key, job_digest(job)
        self._addresses, self._port, self._joining = list(addresses), port, joining
        self._encryption = encryption
        self._connections: Dict[int, _Connection] = {}
        self._numbers = 0
        self._refused = Refusals()  # since the last line in the log
        self._refusals = Refusals()  # since the start
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reactor = Reactor()
        self._relay: Optional[Relay] = None
        if relay != NO_RELAY:
            self._relay = Relay(self._reactor, self._relays, lambda text: notify(Notice("log", text)))
        self._wake_up = WakeUp()
        self._thread: Optional[threading.Thread] = None
        self._stopping = False
        self._acceptor: Optional[Acceptor] = None

    # ---- any thread --------------------------------------------------------------------------

    def start(self) -> List[Tuple[str, int]]:
        """Serve in a thread; return the (address, port) pairs. Raises StartupError or OSError."""
        listeners = self._listen()
        self._acceptor = Acceptor(
            self._reactor, listeners, self._key, self._job, self._accept, self._count_refusal,
            self._encryption,
        )  # fmt: skip
        self._acceptor.relay = None if self._relay is None else self._relay.take
        self._acceptor.joining = self._joining
        self._reactor.watch(self._wake_up, READ, self._run_calls)
        endpoints = [listener.getsockname()[:2] for listener in listeners]
        self._thread = threading.Thread(target=self._serve, name="ringcomm-rendezvous", daemon=True)
        self._thread.start()
        return [(str(address), int(port)) for address, port in endpoints]

    def _listen(self) -> List[socket.socket]:
        listeners: List[socket.socket] = []
        problems: List[str] = []
        shortage: Optional[OSError] = None
        for address in self._addresses:
            try:
                listeners.append(listen(address, port=self._port))
            except OSError as problem:
                problems.append(f"{address}: {problem.strerror or problem}")
                shortage = problem if is_short_of_descriptors(problem) else shortage
        if not listeners:
            self._reactor.close()
            self._wake_up.close()
            text = "The rendezvous cannot listen anywhere: " + "; ".join(problems)
            raise StartupError(text) if shortage is None else shortage
        for line in problems:
            logger.info("the rendezvous does not listen on %s", line)
        return listeners

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

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until only processes for the next generation are connected; return whether in time."""
        self._awaited = True
        self.order(self._changed)
        return self._idle.wait(timeout_s)

    def process_exited(self, number: int, how: str, ok: bool) -> None:
        """Report that a process, by rank or else member number, has ended (any thread)."""
        self.order(lambda: self._act(self._state.process_exited(number, how, ok, monotonic())))

    def expect(self, member: int, slot: Slot, host: str) -> None:
        """Announce a process of an elastic job, with a new number, that is to be started (any thread)."""
        self.order(lambda: self._act(self._state.expect(member, slot, host)))

    def exclude(self, member: int, why: str) -> None:
        """Make a member of an elastic job leave at the next step, without an error (any thread)."""
        self.order(lambda: self._act(self._state.exclude(member, why, monotonic())))

    @property
    def failure(self) -> Optional[RingcommError]:
        message = self._state.abort_message
        return None if message is None else error_from(message)

    @property
    def culprit(self) -> int:
        """Return the rank that this error names, or -1."""
        rank = (self._state.abort_message or {}).get("rank")
        return -1 if rank is None else int(rank)

    # ---- the server's thread -----------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while not self._stopping:
                self._reactor.run_once(3600.0)
        finally:
            self._close()

    def _run_calls(self) -> None:
        self._wake_up.clear()
        while not self._calls.empty():
            self._calls.get()()

    def _stop(self) -> None:
        self._stopping = True

    def _close(self) -> None:
        # Send queued messages, such as an abort.
        deadline = Deadline(_CLOSE_S)
        while any(item.outgoing for item in self._connections.values()) and not deadline.expired():
            self._reactor.run_once(deadline.remaining_s())
        if self._acceptor is not None:
            self._acceptor.close()
        if self._relay is not None:
            self._relay.close()
        for connection in self._connections.values():
            connection.sock.close()
        self._connections.clear()
        self._changed()
        self._reactor.close()

    def _received(self, number: int, message: Message) -> None:
        """Give one message to the state machine and perform the actions that it returns."""
        if message["type"] == "post":
            self._act(self._board.posted(number, message))
        elif message["type"] == "await":
            self._act(self._board.awaited(number, message))
        elif message["type"] == "change":
            self._act(self._board.changed(number, message))
        else:
            connection = self._connections[number]
            if message["type"] == "join" and "group" in message:
                connection.state = self._group(message["group"])
            self._act(connection.state.handle(number, message, monotonic()), connection.state)
            self._changed()

    def _group(self, terms: Any) -> Rendezvous:
        """Return the state of a group, for a rank that joins it with these terms: name, size and timeout."""
        name, size, limit_s = terms if isinstance(terms, list) and len(terms) == 3 else ("", 0, 0.0)
        if type(name) is not str or type(size) is not int or not 1 < size <= max(self._terms.most, 2):
            raise ProtocolError("a group of an impossible size, or without a name")
        if type(limit_s) is not float or len(self._groups) >= MAX_GROUPS:
            raise ProtocolError("a group without a timeout, or one too many")
        limits = Terms(__version__, limit_s, size, limit="the timeout of the group", relay=self._terms.relay)
        return self._groups.setdefault(job_digest(name), Rendezvous(limits))

    def _relays(self, link: Claim) -> bool:
        state = self._state if link.job == self._job else self._groups.get(link.job)
        return state is not None and state.epoch.relays(link)

    def _act(self, actions: Sequence[Action], state: Optional[Rendezvous] = None) -> None:
        """Perform actions of a state: that of the job, or of a group, whose notices go to the log only."""
        is_group = state is not None and state is not self._state
        for action in actions:
            if isinstance(action, Timer):
                self._reactor.after(action.delay_s, partial(self._tick, state))
            elif isinstance(action, Notice):
                logger.info("%s", action.text) if is_group else self._notify(action)
            elif action.connection in self._connections:
                connection = self._connections[action.connection]
                if isinstance(action, Send):
                    self._send(connection, action.message)
                elif isinstance(action, Drop):
                    connection.closing = True
                    self._rewatch(connection)

    def _tick(self, state: Optional[Rendezvous]) -> None:
        state = state or self._state
        state.note_refused(str(self._refusals))
        self._act(state.tick(monotonic()), state)

    def _changed(self) -> None:
        """Update whether any rank of the current generation is connected."""
        # This is called for every message. So connections are looked at only if a thread waits for it.
        if not self._awaited and self._connections:
            return
        if any(not item.state.is_waiting(number) for number, item in self._connections.items()):
            self._idle.clear()
        else:
            self._idle.set()

    # ---- connections, in the server's thread -------------------------------------------------

    def _accept(self, sock: socket.socket, claim: Claim, session: Session) -> None:
        if claim.purpose != Purpose.CONTROL:
            self._count_refusal("a rank", "it dialled the rendezvous for another purpose")
            sock.close()
            return
        self._numbers += 1
        connection = _Connection(self._numbers, sock, session, self._state)
        self._connections[self._numbers] = connection
        self._idle.clear()
        self._rewatch(connection)

    def _rewatch(self, connection: _Connection) -> None:
        """Watch for writability only while bytes wait to be sent; close a dropped connection after them."""
        if connection.closing and not connection.outgoing:
            self._forget(connection)
        elif connection.number in self._connections:
            events = (0 if connection.closing else READ) | (WRITE if connection.outgoing else 0)
            self._reactor.watch(connection.sock, events, lambda: self._ready(connection))

    def _ready(self, connection: _Connection) -> None:
        """Send and receive; called when the socket is readable or writable."""
        try:
            self._flush(connection)
            if connection.closing:
                return
            data = connection.sock.recv(65536)
            if not data:
                self._lose(connection, "")
            for message in connection.reader.feed(data):
                self._received(connection.number, message)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as problem:
            self._lose(connection, str(getattr(problem, "strerror", None) or problem))

    def _send(self, connection: _Connection, message: Message) -> None:
        connection.outgoing += encode(message, connection.session)
        try:
            self._flush(connection)
        except OSError as problem:
            # The read that follows fails too, and reports that the connection has ended.
            logger.debug("control connection %d: %s", connection.number, problem)

    def _flush(self, connection: _Connection) -> None:
        while connection.outgoing:
            try:
                sent = connection.sock.send(connection.outgoing)
            except (BlockingIOError, InterruptedError):
                break
            del connection.outgoing[:sent]
        self._rewatch(connection)

    def _forget(self, connection: _Connection) -> None:
        if self._connections.pop(connection.number, None) is not None:
            self._reactor.forget(connection.sock)
            connection.sock.close()
            used = [item.state for item in self._connections.values()]
            self._groups = {name: state for name, state in self._groups.items() if state in used}
            self._changed()

    def _lose(self, connection: _Connection, reason: str) -> None:
        """End a control connection that ended or sent an invalid message."""
        if connection.number not in self._connections:
            return
        if reason:
            logger.info("control connection %d: %s", connection.number, reason)
        connection.outgoing.clear()
        self._forget(connection)
        self._board.left(connection.number)
        self._act(connection.state.disconnected(connection.number, monotonic()), connection.state)

    def _count_refusal(self, origin: str, reason: str) -> None:
        """Count a refusal for the log, which gets at most one line a second."""
        self._refusals.add(origin, reason)
        if not self._refused:
            self._reactor.after(_REFUSALS_EVERY_S, self._log_refusals)
        self._refused.add(origin, reason)

    def _log_refusals(self) -> None:
        text = f"refused {self._refused} at the rendezvous"
        self._refused.clear()
        if self._acceptor is not None and self._acceptor.kept_waiting:
            self._acceptor.kept_waiting = False
            text += "; their rate is limited, so a new rank may have to wait for some seconds"
        logger.info(text)
        self._notify(Notice("log", text))


class Board:
    """The posted entries, and which connections wait for which entries."""

    def __init__(self) -> None:
        self._entries: Dict[str, str] = {}
        self._waiting: Dict[str, Set[int]] = {}

    def posted(self, connection: int, message: Message) -> List[Send]:
        """Post an entry, and send it to those that wait for it; raises ProtocolError at the limits."""
        entry, text = message["entry"], message["text"]
        if len(entry) + len(text) > MAX_ENTRY_BYTES or len(self._entries) >= MAX_ENTRIES:
            raise ProtocolError("an entry that is too long, or one too many")
        self._entries[entry] = text
        waiting = sorted(self._waiting.pop(entry, ()))
        return [_entry_message(number, entry, text) for number in (connection, *waiting)]

    def awaited(self, connection: int, message: Message) -> List[Send]:
        """Send an entry now, or when it is posted. Raises ProtocolError if ranks wait for too many."""
        entry = message["entry"]
        if entry in self._entries:
            return [_entry_message(connection, entry, self._entries[entry])]
        if len(self._waiting) >= MAX_ENTRIES:
            raise ProtocolError("ranks wait for too many entries")
        self._waiting.setdefault(entry, set()).add(connection)
        return []

    def changed(self, connection: int, message: Message) -> List[Send]:
        """Change an entry as PyTorch's store does; answer with its text, or "1" if it exists."""
        entry, how, text = message["entry"], message["how"], message["text"]
        before = self._entries.get(entry)
        if how == "add" and all(re.fullmatch(r"-?\d{1,18}", item) for item in (text, before or "0")):
            text = str(int(before or 0) + int(text))
        elif how == "compare":
            if before != message["before"] and not (before is None and not message["before"]):
                return [_entry_message(connection, entry, message["before"] if before is None else before)]
        elif how in ("check", "delete"):
            if how == "delete":
                self._entries.pop(entry, None)
            return [_entry_message(connection, entry, "" if before is None else "1")]
        elif how == "count":
            found = sum(name.startswith(entry) for name in self._entries)
            return [_entry_message(connection, entry, str(found))]
        else:
            raise ProtocolError(f"an entry cannot be changed by {how[:20]!r}")
        return self.posted(connection, {"entry": entry, "text": text})

    def left(self, connection: int) -> None:
        for entry in [entry for entry, waiting in self._waiting.items() if connection in waiting]:
            self._waiting[entry].discard(connection)
            if not self._waiting[entry]:
                del self._waiting[entry]


def _entry_message(connection: int, entry: str, text: str) -> Send:
    return Send(connection, {"type": "entry", "entry": entry, "text": text})


# ---- links between ranks of which neither can dial the other -------------------------------------

# Each of the two dials the rendezvous and asks for their link, with a tag that takes the job's key
# (:class:`ringcomm.wire.auth.Admission`). Then what one sends goes to the other, unread: they authenticate
# each other and encrypt from end to end. The relay dials nothing. It connects only ranks for which the
# rendezvous has no other route, each link once, and holds at most :data:`PIECE_BYTES` for an end that does
# not read: meanwhile it does not read from the other one either.

PIECE_BYTES = 256 * 1024
WAIT_S = 10.0  # one end waits for the other as long as ranks try to build their links
SPARE_FILES = 128  # descriptors that the process needs for other things
_LINKS = (Purpose.DIRECT, Purpose.BACKGROUND, Purpose.ENGINE_CONTROL)


def relay_here() -> RelayHost:
    """Return this host as one that relays: two descriptors for each of a pair's links."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = sys.maxsize if descriptors == resource.RLIM_INFINITY else descriptors - SPARE_FILES
    return socket.gethostname(), max(0, most // (2 * len(_LINKS)))


class Relay:
    """The relayed links of one job, as far as ``allows`` permits; ``report`` gets a line at their end."""

    def __init__(
        self, reactor: Reactor, allows: Callable[[Claim], bool], report: Callable[[str], None]
    ) -> None:
        self._reactor, self._allows, self._report = reactor, allows, report
        self._waiting: Dict[Claim, socket.socket] = {}  # by the claim of the end that has come
        self._splices: Dict[Claim, Splice] = {}  # by the claim of the lower rank
        self._links = self._bytes = 0  # that have ended

    def take(self, sock: socket.socket, claim: Claim) -> None:
        """Connect one end of a link with the other, as soon as that has come."""
        if claim.purpose not in _LINKS or claim.source == claim.target or not self._allows(claim):
            logger.info("refused to relay between rank %d and rank %d", claim.source, claim.target)
            sock.close()
            return
        mirrored = claim._replace(source=claim.target, target=claim.source)
        link = min(claim, mirrored)
        self._drop(lambda old: old == claim or (old.job == claim.job and old.generation < claim.generation))
        if link in self._splices:
            self._splices[link].close()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_open(sock)
        other = self._waiting.pop(mirrored, None)
        if other is None:
            self._waiting[claim] = sock
            self._reactor.after(WAIT_S, partial(self._give_up, claim, sock))
            return
        self._splices[link] = Splice(self._reactor, sock, other, partial(self._ended, link))

    def _give_up(self, claim: Claim, sock: socket.socket) -> None:
        if self._waiting.get(claim) is sock:
            self._waiting.pop(claim).close()

    def _drop(self, outdated: Callable[[Claim], bool]) -> None:
        for claim in [claim for claim in self._waiting if outdated(claim)]:
            self._waiting.pop(claim).close()
        for claim in [claim for claim in self._splices if outdated(claim)]:
            self._splices[claim].close()

    def _ended(self, link: Claim) -> None:
        self._links += 1
        self._bytes += self._splices.pop(link).bytes
        if not self._splices:
            self._report(f"relayed {self._bytes / 1e6:.1f} MB over {self._links} connections between ranks")

    def close(self) -> None:
        self._drop(lambda _: True)


@dataclass
class _End:
    sock: socket.socket
    held: memoryview = memoryview(b"")  # from the other end, not sent to this one yet
    sends: bool = True  # more may come from it
    shut: bool = False  # it knows that nothing more will come to it


class Splice:
    """Two connections, of which each one's bytes go to the other. ``ended`` is called once."""

    def __init__(
        self, reactor: Reactor, one: socket.socket, other: socket.socket, ended: Callable[[], None]
    ) -> None:
        self.bytes = 0
        self._reactor, self._ended = reactor, ended
        self._ends = (_End(one), _End(other))
        self._watch()

    def _turn(self) -> None:
        one, other = self._ends
        self._move(one, other)
        self._move(other, one)
        if any(end.sends or end.held for end in self._ends):
            self._watch()
        else:
            self.close()

    def _move(self, source: _End, sink: _End) -> None:
        """Pass on what can be passed on now: at most one piece, so that other connections get their turn."""
        try:
            if source.sends and not sink.held:
                sink.held = memoryview(source.sock.recv(PIECE_BYTES))
                self.bytes += len(sink.held)
                source.sends = bool(sink.held)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            source.sends = False
        try:
            if sink.held:
                sink.held = sink.held[sink.sock.send(sink.held) :]
            if not source.sends and not sink.held and not sink.shut:
                sink.shut = True
                sink.sock.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # it is gone, so that nothing can be sent to it
            sink.held, source.sends = memoryview(b""), False

    def _watch(self) -> None:
        for end, other in (self._ends, self._ends[::-1]):
            events = (READ if end.sends and not other.held else 0) | (WRITE if end.held else 0)
            self._reactor.watch(end.sock, events, self._turn)

    def close(self) -> None:
        for end in self._ends:
            self._reactor.forget(end.sock)
            end.sock.close()
        self._ended()
