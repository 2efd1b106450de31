"""The rendezvous server: sockets and a thread around :class:`~ringcomm.rendezvous.state.Rendezvous`."""

from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional, Protocol, Sequence

from ..clock import monotonic
from ..config import Slot
from ..errors import ProtocolError, RingcommError
from ..transport.secure import Encryption
from ..version import __version__
from ..wire.auth import Purpose
from ..wire.messages import Message
from .actions import Action, Drop, Notice, Seat, Send, Timer
from .board import Board
from .control import error_from
from .message_server import MessageServer
from .state import Phase, Rendezvous

Handler = Callable[[Rendezvous, int, Message, float], List[Action]]

HANDLERS: Dict[str, Handler] = {
    "join": Rendezvous.joined,
    "probed": lambda state, connection, message, now_s: state.probed(connection, message),
    "decided": lambda state, connection, message, now_s: state.probed(connection, message),
    "fetch": lambda state, connection, message, now_s: state.fetched(connection, message),
    "measured": lambda state, connection, message, now_s: state.measured(connection, message),
    "linked": lambda state, connection, message, now_s: state.linked(connection, message),
    "unlinked": Rendezvous.unlinked,
    "lost": Rendezvous.lost,
    "mismatch": Rendezvous.mismatched,
    "note": lambda state, connection, message, now_s: state.told(connection, message),
    "warning": lambda state, connection, message, now_s: state.told(connection, message),
    "usage": lambda state, connection, message, now_s: state.told(connection, message),
    "closed": Rendezvous.closed,
    "interrupted": Rendezvous.interrupted,
    "pong": Rendezvous.answered,
    "leaving": Rendezvous.leaving,
}
"""The messages that ranks may send, and what handles them."""


class JobState(Protocol):
    """The state machine of a job: :class:`.Rendezvous`, or :class:`~.elastic.ElasticRendezvous`.

    Attributes:
        refused_connections: the connections that failed to authenticate, as text; empty if none did.
    """

    refused_connections: str

    def is_waiting(self, connection: int) -> bool:
        """Whether the process of this connection waits for the next generation."""

    def disconnected(self, connection: int, now_s: float) -> List[Action]:
        """A control connection ended."""

    def tick(self, now_s: float) -> List[Action]:
        """Time has passed: act on what is due."""


class JobServer(MessageServer):
    """The server of one job. Subclasses define which messages its state machine takes.

    Args:
        state: the state machine.
        key: the job's secret.
        job: the job's name; ranks of others are refused.
        addresses: where to listen. Each is bound by itself; never all interfaces.
        notify: called in the server's thread with every :class:`~ringcomm.rendezvous.actions.Notice`.
        port: fixed port for every address; 0 lets the system choose.
        encryption: how connections are encrypted; None: not at all.
        forwarded: see :class:`~ringcomm.transport.accept.Acceptor`.
    """

    def __init__(
        self,
        state: JobState,
        *,
        key: bytes,
        job: str,
        addresses: Sequence[str],
        notify: Callable[[Notice], None],
        port: int = 0,
        encryption: Optional[Encryption] = None,
        forwarded: bool = False,
    ) -> None:
        super().__init__(
            title="rendezvous",
            key=key,
            job=job,
            purpose=Purpose.CONTROL,
            addresses=addresses,
            port=port,
            encryption=encryption,
            forwarded=forwarded,
        )
        self._state = state
        self._board = Board()
        self._notify = notify
        self._awaited = False
        self._busy = -1
        self._idle = threading.Event()
        self._idle.set()

    def handle(self, number: int, message: Message) -> List[Action]:
        """Give one message to the state machine; the actions that it returns.

        Raises:
            ProtocolError: ranks may not send it.
        """
        raise NotImplementedError

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until only processes that wait for the next generation are connected (any thread).

        Returns:
            whether that happened in time.
        """
        self._awaited = True
        self.order(self.changed)
        return self._idle.wait(timeout_s)

    def arrived(self, number: int) -> None:
        """A process of the job has authenticated itself."""
        self._idle.clear()

    def received(self, number: int, message: Message) -> None:
        """Give one message to the state machine and perform the actions that it returns."""
        if message["type"] in ("post", "await"):
            take = self._board.posted if message["type"] == "post" else self._board.awaited
            self._act(take(number, message))
            return
        self._act(self.handle(number, message))
        self.changed()

    def lost(self, number: int) -> None:
        """A rank's connection broke."""
        self._board.left(number)
        self._act(self._state.disconnected(number, monotonic()))

    def changed(self) -> None:
        """Update whether any rank of the current generation is connected."""
        # This is called for every message. So all connections are looked at only if a thread waits for it,
        # and not again while the one that was found before is there.
        busy = self._busy in self._connections and not self._state.is_waiting(self._busy)
        if not busy and (self._awaited or not self._connections):
            others = (number for number in self._connections if not self._state.is_waiting(number))
            self._busy = next(others, -1)
            busy = self._busy >= 0
            if not busy:
                self._idle.set()
        if busy:
            self._idle.clear()

    def refused_connections(self, text: str) -> None:
        """Report refused connections to the launcher."""
        self._notify(Notice("log", text))

    def _act(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self.send_message(action.connection, action.message)
            elif isinstance(action, Drop):
                self.drop(action.connection)
            elif isinstance(action, Timer):
                self.after(action.delay_s, self._tick)
            elif isinstance(action, Notice):
                self._notify(action)

    def _tick(self) -> None:
        self._state.refused_connections = str(self.refusals)
        self._act(self._state.tick(monotonic()))


class RendezvousServer(JobServer):
    """Connects the ranks of one job, and aborts all of them when one is lost.

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
        forwarded: see :class:`~ringcomm.transport.accept.Acceptor`.
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
        forwarded: bool = False,
    ) -> None:
        self._rendezvous = Rendezvous(size or len(seats), seats, __version__, start_timeout_s)
        super().__init__(
            self._rendezvous,
            key=key,
            job=job,
            addresses=addresses,
            notify=notify,
            port=port,
            encryption=encryption,
            forwarded=forwarded,
        )

    def process_exited(self, slot: Slot, how: str, ok: bool) -> None:
        """Report to the rendezvous that a rank's process ended (any thread).

        Args:
            slot: the place of the process.
            how: how it ended, such as ``exit code 3`` or ``killed by SIGKILL``.
            ok: whether that is a normal end.
        """
        self.order(lambda: self._act(self._rendezvous.process_exited(slot, how, ok, monotonic())))

    @property
    def phase(self) -> Phase:
        """How far the job has come."""
        return self._rendezvous.phase

    @property
    def failure(self) -> Optional[RingcommError]:
        """The error that all ranks were aborted with; None as long as the job has not failed."""
        message = self._rendezvous.abort_message
        return None if message is None else error_from(message)

    @property
    def culprit(self) -> int:
        """The rank that this error names; -1 if there is none."""
        rank = (self._rendezvous.abort_message or {}).get("rank")
        return -1 if rank is None else int(rank)

    def handle(self, number: int, message: Message) -> List[Action]:
        """Give one message to the state machine; the actions that it returns."""
        handler = HANDLERS.get(message["type"])
        if handler is None:
            raise ProtocolError(f"a rank may not send {message['type']!r}")
        return handler(self._rendezvous, number, message, monotonic())
