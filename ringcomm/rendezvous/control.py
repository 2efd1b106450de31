"""The control connection to the rendezvous while the job runs: it carries failure reports and aborts."""

from __future__ import annotations

import logging
import select
import socket
import threading
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple, Type

from ..clock import Deadline
from ..errors import (
    ExcludedError,
    LinkLostError,
    MismatchError,
    NoRouteError,
    PeerLostError,
    PeerStalledError,
    ProtocolError,
    RingcommError,
    StartTimeoutError,
    StartupError,
    fresh_copy,
    interruption_text,
)
from ..group.failures import Reporter
from ..transport.connect import drop_spare, keep_spare, shortage_error
from ..transport.reactor import SecureSocket
from ..wire.auth import Session
from ..wire.messages import Message, MessageReader, encode
from .membership import ADDED
from .routing import ranges_of

logger = logging.getLogger("ringcomm.rendezvous")

ROOT_CAUSE_S = 5.0  # how long a rank that lost a peer waits for the root cause
_MISMATCH_S = 30.0  # the same for a rank whose peer makes another call: only a busy machine can delay it
_LEAVE_S = 1.0  # how long a rank that leaves waits for the rendezvous to close the connection
_SILENCE_S = 1.5  # the same after a long silence: then the rendezvous may be cut off as well
_SILENT_KINDS = ("silent", "still", "cut off")  # kinds of reports about peers that have sent nothing for long


Listener = Callable[[int, bool], None]
"""Takes changes of the membership as bits (1: processes leave, 2: join), and whether they are ready now."""
Connection = Tuple[socket.socket, MessageReader, Optional[Session]]
"""An authenticated connection to the rendezvous; without a session there is no other process."""


class Resume(NamedTuple):
    """What a member takes from one view to the next."""

    member: Optional[int] = None  # a new process has none
    epoch: int = -1  # the last epoch that it was in; -1: none
    position: int = 0  # commits or steps that its state contains
    connection: Optional[Connection] = None


class ControlChannel(Reporter):
    """The control connection to the rendezvous while a job, or a view of an elastic one, is in force. A
    thread reads it all the time, also while the program computes and between two views. Threads that wait for
    peers are woken up by a socket pair, which stays readable once the job or the view has been aborted.
    """

    def __init__(
        self,
        sock: socket.socket,
        reader: MessageReader,
        rank: int = -1,
        hosts: Sequence[str] = (),
        session: Optional[Session] = None,  # None: there is no other process
        member: Optional[int] = None,  # None: the size of the job is fixed
        epoch: int = 0,
        changes: int = 0,  # reported while the view was set up
    ) -> None:
        self._rank, self._hosts = rank, tuple(hosts)
        self._member, self._epoch = member, epoch
        self._changes = changes
        self._heard: List[Tuple[int, bool]] = []  # changes of which the listener has not been told
        self._listener: Optional[Listener] = None
        self._noting, self._delivering = threading.Lock(), threading.RLock()
        self._sock, self._reader, self._session = sock, reader, session
        self.server: Optional[int] = None  # rank that serves the rendezvous; None: the launcher, or unknown
        self._lock = threading.RLock()
        self.open = True
        self._over = threading.Event()
        # Waiting threads poll the first, which the thread makes readable; it polls the second, to be ended.
        self._waker, self._stopper = socket.socketpair()
        self._thread: Optional[threading.Thread] = threading.Thread(
            target=self._main, name="ringcomm-control", daemon=True
        )
        self._thread.start()
        keep_spare(self)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the job, or the view, has been aborted."""
        return self._waker.fileno()

    # ---- the thread --------------------------------------------------------------------------

    def _main(self) -> None:
        poller = select.poll()
        for sock in (self._sock, self._stopper):
            poller.register(sock, select.POLLIN)
        ended = False
        while not ended:
            with self._lock:
                self._read()
            self._deliver()
            ended = not self.open or any(item == self._stopper.fileno() for item, _ in poller.poll())

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._waker.send(b"!")
        if thread is not threading.current_thread():
            thread.join()
        self._waker.close()
        self._stopper.close()

    def _read(self) -> None:
        more = self.open
        while more:
            self._receive()
            more = self.open and isinstance(self._sock, SecureSocket) and self._sock.buffered()
        if self.abort_error is not None:
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Make the descriptor of waiting threads readable from now on."""
        if not self._over.is_set():
            self._over.set()
            self._stopper.send(b"!")

    def _receive(self) -> None:
        """Handle received messages; the end of the connection is a root cause."""
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
        self.abort_error = self.abort_error or self._without_rendezvous(reason)

    def _without_rendezvous(self, reason: str) -> PeerLostError:
        """Return the error when the connection to the rendezvous has ended."""
        if self.server is None:
            return PeerLostError(
                f"The rendezvous of this job is gone ({reason}): ringrun, or the process that served it, has "
                "ended. Without it failures cannot be reported to other ranks, so this rank stops."
            )
        name, host = self._named(self.server)
        served = "Its process served the rendezvous, over which failures are reported."
        return PeerLostError(f"{name} was lost: {reason}. {served}", rank=self.server, host=host)

    def _take(self, message: Message) -> None:
        if int(message.get("epoch", self._epoch)) != self._epoch:
            return
        if message["type"] == "ping":
            heard, silent = ([], []) if self.heard_and_silent is None else self.heard_and_silent()
            self._send({"type": "pong", "heard": ranges_of(heard), "silent": ranges_of(silent)})
        elif message["type"] == "abort":
            self.abort_error = self.abort_error or error_from(message)
        elif message["type"] in ("updated", "announced"):
            # Members must ask for the next view, or a process is being started.
            is_ready = message["type"] == "updated"
            change = int(message["change"]) if is_ready else ADDED
            with self._noting:
                self._changes |= change if is_ready else 0
                self._heard.append((change, is_ready))

    def await_abort(self, limit_s: float) -> Optional[RingcommError]:
        """Return the root cause; while the connection is open, wait up to ``limit_s`` for it."""
        if self.open:
            self._over.wait(limit_s)
        return self.abort_error

    def report_lost(self, peer: int, doing: str, why: str, kind: str = "lost") -> RingcommError:
        """Report that a peer is lost; return the error that all ranks will raise: the root cause, or an error
        about the peer if the rendezvous does not answer. ``doing``: this rank's collective, or empty.
        ``kind``: ``lost``: the link to the peer broke; ``stalled``: it moved nothing; ``silent``: it sent no
        heartbeat; ``cut off``: nor did any other peer; ``still``: it sends heartbeats, but a transfer makes
        no progress; ``late``: it sends heartbeats, but has not entered the collective.
        """
        if kind == "cut off":
            # This rank itself is cut off: neither the rendezvous nor any other rank can be reached.
            peer = self._rank
        name, host = self._named(peer)
        fate = {"lost": "was lost", "cut off": "was lost", "late": "is late"}.get(kind, "is silent")
        during = f" while {self._named(self._rank)[0]} was in {doing}" if doing else ""
        text = f"{name} {fate}{during}: {why}. (The rendezvous has not answered; it may be where {name} is.)"
        error = PeerLostError if kind == "lost" else PeerStalledError
        return self._report(
            {"type": "lost", "peer": peer, "doing": doing, "why": why, "kind": kind},
            error(text, rank=peer, host=host),
            _SILENCE_S if kind in _SILENT_KINDS else ROOT_CAUSE_S,
        )

    def _named(self, rank: int) -> Tuple[str, Optional[str]]:
        """Return a rank as text, and its host if it is known."""
        if 0 <= rank < len(self._hosts):
            return f"rank {rank} ({self._hosts[rank]})", self._hosts[rank]
        return "this rank" if rank == self._rank else f"rank {rank}", None

    def take_changes(self) -> int:
        """Return the changes of the membership since the last call, as bits; 0 in a job of fixed size."""
        with self._noting:
            changes, self._changes = self._changes, 0
        return changes

    def on_changes(self, listener: Optional[Listener]) -> bool:
        """Set the function that the thread calls for each change; return whether the job is elastic."""
        with self._delivering:
            self._listener = listener
            with self._noting:
                changes, self._heard = self._changes, []
            if changes:
                self._call(changes, True)
        return self._member is not None

    def _deliver(self) -> None:
        """Call the listener for the reported changes. It runs code of the program: hold no other lock."""
        with self._delivering:
            with self._noting:
                heard, self._heard = self._heard, []
            for change, is_ready in heard:
                self._call(change, is_ready)

    def _call(self, change: int, is_ready: bool) -> None:
        try:
            if self._listener is not None:
                self._listener(change, is_ready)
        except Exception:  # noqa: BLE001  code of the program; without this thread the rank would be lost
            logger.exception("on_hosts_updated() failed on rank %d; training goes on.", self._rank)

    def note_closed(self, peer: int, why: str) -> None:
        """Report to the rendezvous, without waiting for it, that a link ended while it was not in use."""
        if self.abort_error is None:
            self._send_if_open({"type": "closed", "peer": peer, "why": why})

    def report_mismatch(self, peer: int, text: str) -> RingcommError:
        error = MismatchError(text, peer=peer)
        return self._report({"type": "mismatch", "peer": peer, "text": text}, error, _MISMATCH_S)

    def note_interrupted(self, doing: str, why: str) -> RingcommError:
        """Report, without waiting, that this rank has left a collective half-way; return the error to raise
        if the rendezvous does not answer, see :meth:`root_cause`. Only the first report counts: other threads
        stop because of it. ``why``: the interruption, such as ``KeyboardInterrupt``.
        """
        with self._lock:
            if self._interruption is None:
                if self.open and self.abort_error is None:
                    self._send({"type": "interrupted", "doing": doing, "why": why})
                name, host = self._named(self._rank)
                text = interruption_text(name, why, doing)
                self._interruption = PeerLostError(text, rank=self._rank, host=host)
            return self._interruption

    def _report(self, message: Message, otherwise: RingcommError, limit_s: float) -> RingcommError:
        with self._lock:
            self._read()  # The root cause may have arrived, on a connection that ended after it.
            sent = self.open and self.abort_error is None and self._send(message)
            if not sent:
                self._read()  # or since then
        return self.root_cause(otherwise, limit_s if sent else 0.0)

    def root_cause(self, otherwise: RingcommError, limit_s: float = ROOT_CAUSE_S) -> RingcommError:
        """Wait for the root cause after a reported failure; return ``otherwise`` if it does not arrive."""
        self._over.wait(limit_s)
        with self._lock:
            if self.abort_error is None:
                self._read()  # The thread that reads may have had no time, or has ended.
            if self.abort_error is None:
                self.abort_error = otherwise
                self._wake_waiting()
            return fresh_copy(self.abort_error)

    def _send(self, message: Message) -> bool:
        try:
            self._sock.settimeout(ROOT_CAUSE_S)
            self._sock.sendall(encode(message, self._session))
        except OSError as problem:
            logger.debug("the rendezvous cannot be reached: %s", problem)
            return False
        finally:
            if self.open:
                self._sock.setblocking(False)
        return True

    def note(self, text: str) -> None:
        """Send a note that the launcher shows if its user asked for details."""
        self._send_if_open({"type": "note", "text": text})

    def warn(self, topic: str, text: str) -> None:
        """Warn the user; the rendezvous passes on the first warning of each topic."""
        self._send_if_open({"type": "warning", "topic": topic, "text": text})

    def _send_if_open(self, message: Message) -> None:
        with self._lock:
            if self.open:
                self._send(message)

    def detach(self, position: int) -> Resume:
        """End this object's part in the view, and keep the connection for the next one."""
        self._end_thread()
        with self._lock:
            kept = (self._sock, self._reader, self._session) if self.open else None
            self.open = False
        drop_spare(self)
        return Resume(self._member, self._epoch, position, kept)

    def leave(self, reason: str, ok: bool) -> None:
        """Send a goodbye message and close the connection. ``ok``: this is a normal end."""
        self._end_thread()
        with self._lock:
            if self.open:
                sent = self._send({"type": "leaving", "reason": reason, "ok": ok})
                # A job of fixed size that has been aborted needs no goodbye, and may not be reached any more.
                if sent and (self.abort_error is None or self._member is not None):
                    await_close(self._sock, _LEAVE_S)
                self._close_socket()

    def report_shortage(self, problem: BaseException) -> Optional[StartupError]:
        """Leave because this process lacks something, and have all ranks told; None for any other problem."""
        host = self._hosts[self._rank] if self._hosts else "this host"
        error = shortage_error(problem, self._rank, host)
        if error is not None:
            self._send_if_open(shortage_message(error, self._member is not None))
            self.leave(str(error), ok=False)
        return error

    def _close_socket(self) -> None:
        self.open = False
        drop_spare(self)
        self._sock.close()


def shortage_message(error: StartupError, elastic: bool) -> Message:
    """Return the message of a rank that lacks something; an elastic job continues without it."""
    if elastic:
        return {"type": "leaving", "reason": str(error), "ok": False}
    return {"type": "short", "text": str(error)}


def await_close(sock: socket.socket, limit_s: float) -> None:
    """Wait until the other end has read the last message and closed the connection: closing one with unread
    received bytes resets it, and the goodbye message in flight would be lost.
    """
    deadline = Deadline(limit_s)
    try:
        sock.shutdown(socket.SHUT_WR)
        while not deadline.expired():
            sock.settimeout(max(0.01, deadline.remaining_s()))
            if not sock.recv(65536):
                return
    except OSError as problem:
        logger.debug("the rendezvous closed the connection first: %s", problem)


_ERRORS: Dict[str, Type[RingcommError]] = {
    "lost": PeerLostError, "stalled": PeerStalledError, "cut": LinkLostError, "mismatch": MismatchError,
    "timeout": StartTimeoutError, "no_route": NoRouteError, "startup": StartupError,
}  # fmt: skip


def error_from(message: Message) -> RingcommError:
    """Return the error of an ``abort`` message."""
    kind = _ERRORS.get(str(message["kind"]), RingcommError)
    rank, host = message.get("rank"), message.get("host")
    if issubclass(kind, LinkLostError):
        ranks, hosts = message.get("ranks", ()), message.get("hosts", ())
        return kind(str(message["text"]), ranks=tuple(map(int, ranks)), hosts=tuple(map(str, hosts)))
    if issubclass(kind, PeerLostError):
        return kind(str(message["text"]), rank=rank, host=host)
    if issubclass(kind, MismatchError):
        return kind(str(message["text"]), rank=rank)
    return kind(str(message["text"]))


def left_behind(host: Optional[str], silent_s: float, problem: RingcommError) -> ExcludedError:
    """Return the error of a member of an elastic job that cannot reach its rendezvous any more."""
    return ExcludedError(
        f"this rank on {host or 'this host'} was cut off from its job: no message for {silent_s:.0f} s, "
        f"then: {problem} The job has gone on without this rank, or has ended, so this process ends. A host "
        "that can be reached again gets new ranks by itself while ringrun runs; if it does not, write "
        f"`ringrun add {host or 'HOST'}` on the machine where ringrun runs. If the job has ended, start it "
        "again.",
        lost=True,
    )
