"""The control connection of an elastic job: it stays open from one view to the next."""

from __future__ import annotations

import logging
import select
import socket
import threading
from typing import List, NamedTuple, Optional, Sequence, Tuple

from ..errors import RingcommError, fresh_copy
from ..transport.secure import SecureSocket
from ..transport.wake_up import WakeUp
from ..wire.messages import Message, MessageReader
from ..wire.signing import Session
from .control import ROOT_CAUSE_S, ControlChannel, Listener
from .joining import ADDED

logger = logging.getLogger("ringcomm.rendezvous")


class Resume(NamedTuple):
    """What a member takes from one view to the next.

    Attributes:
        member: its member number; None: a new process without a number.
        epoch: the last epoch that it was in; -1: none.
        position: how many commits or steps its state contains.
        connection: its control connection, what has arrived on it, and what authenticates the messages; None:
            it has been closed, and the rendezvous is to be dialled.
    """

    member: Optional[int] = None
    epoch: int = -1
    position: int = 0
    connection: Optional[Tuple[socket.socket, MessageReader, Session]] = None


class ElasticChannel(ControlChannel):
    """The control connection while a view is in force.

    A thread reads it all the time, so the rendezvous gets answers also between two views, and reports of
    processes that are to join arrive while the program computes. Threads that wait for peers are woken up by
    a descriptor that becomes readable when the epoch has ended.

    Args:
        sock, reader: the connection, and what has arrived on it.
        rank: this rank.
        hosts: of every rank, for texts.
        session: authenticates the messages.
        member: this process's member number.
        epoch: number of the view.
        changes: changes of the membership that were reported while the view was set up.
    """

    def __init__(
        self,
        sock: socket.socket,
        reader: MessageReader,
        rank: int,
        hosts: Sequence[str],
        session: Session,
        member: int,
        epoch: int,
        changes: int = 0,
    ) -> None:
        super().__init__(sock, reader, rank, hosts, session)
        self.member = member
        self.epoch = epoch
        self._own_session = session
        self._changes = changes
        self._heard: List[Tuple[int, bool]] = []
        self._listener: Optional[Listener] = None
        self._delivering = threading.RLock()
        self._over = threading.Event()
        self._epoch_over, self._stop = WakeUp(), WakeUp()
        self._thread: Optional[threading.Thread] = threading.Thread(
            target=self._main, name="ringcomm-control", daemon=True
        )
        self._thread.start()

    def fileno(self) -> int:
        """A descriptor that becomes readable when the epoch has ended."""
        return self._epoch_over.fileno()

    def check(self) -> None:
        """Raise the root cause, if the epoch has been aborted."""
        if self.abort_error is not None:
            raise fresh_copy(self.abort_error)

    def take_changes(self) -> int:
        """See :meth:`.ControlChannel.take_changes`."""
        with self._lock:
            changes, self._changes = self._changes, 0
        return changes

    def on_changes(self, listener: Optional[Listener]) -> bool:
        """See :meth:`.ControlChannel.on_changes`."""
        with self._delivering:
            self._listener = listener
            with self._lock:
                changes, self._heard = self._changes, []
            if changes:
                self._call_listener(changes, True)
        return True

    def _deliver(self) -> None:
        """Call the listener for what has been received. Not under the lock: it runs code of the program."""
        with self._delivering:
            with self._lock:
                heard, self._heard = self._heard, []
            for change, ready in heard:
                self._call_listener(change, ready)

    def _call_listener(self, change: int, ready: bool) -> None:
        if self._listener is None:
            return
        try:
            self._listener(change, ready)
        except Exception:  # noqa: BLE001  code of the program; without this thread the rank would be lost
            logger.exception("on_hosts_updated() failed on rank %d; training goes on.", self._rank)

    def detach(self, position: int) -> Resume:
        """End this object's part in the view, and keep the connection for the next one.

        Args:
            position: how many commits or steps this process's state contains.
        """
        self._end_thread()
        with self._lock:
            kept = (self._sock, self._reader, self._own_session) if self.open else None
            self.open = False
        return Resume(self.member, self.epoch, position, kept)

    def leave(self, reason: str, ok: bool) -> None:
        """Send a goodbye message and close the connection."""
        self._end_thread()
        super().leave(reason, ok)

    def _end_thread(self) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._stop.wake()
        if thread is not threading.current_thread():
            thread.join()
        self._epoch_over.close()
        self._stop.close()

    # ---- waiting for the root cause -----------------------------------------------------------

    def root_cause(self, otherwise: RingcommError) -> RingcommError:
        """Wait for the root cause from the rendezvous, after a failure was reported."""
        return self._await(otherwise, ROOT_CAUSE_S)

    def _report(self, message: Message, otherwise: RingcommError, limit_s: float) -> RingcommError:
        with self._lock:
            sent = self.open and self.abort_error is None and self._send(message)
        return self._await(otherwise, limit_s if sent else 0.0)

    def _await(self, otherwise: RingcommError, limit_s: float) -> RingcommError:
        self._over.wait(limit_s)
        with self._lock:
            if self.abort_error is None:
                self.abort_error = otherwise
                self._end_reads()
            return fresh_copy(self.abort_error)

    # ---- the thread ---------------------------------------------------------------------------

    def _main(self) -> None:
        poller = select.poll()
        for watched in (self._sock, self._stop):
            poller.register(watched, select.POLLIN)
        while self._receive_all():
            if any(descriptor == self._stop.fileno() for descriptor, _ in poller.poll()):
                return

    def _receive_all(self) -> bool:
        """Take what has arrived; whether more may come."""
        with self._lock:
            self._receive()
            while self.open and isinstance(self._sock, SecureSocket) and self._sock.buffered():
                self._receive()
            if self.abort_error is not None:
                self._end_reads()
            is_open = self.open
        self._deliver()
        return is_open

    def _take(self, message: Message) -> None:
        if message["type"] == "updated":
            self._changes |= int(message["change"])
            self._heard.append((int(message["change"]), True))
        elif message["type"] == "announced":
            self._heard.append((ADDED, False))
        elif int(message.get("epoch", self.epoch)) == self.epoch:
            super()._take(message)

    def _end_reads(self) -> None:
        self._over.set()
        self._epoch_over.wake()
