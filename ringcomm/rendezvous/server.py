"""The rendezvous server: sockets and a thread around a job's state machine, which has no I/O."""

from __future__ import annotations

import threading
from typing import Callable, Optional, Sequence

from ..clock import monotonic
from ..config import Slot
from ..configuration.limits import Limits
from ..errors import RingcommError
from ..transport.secure import Encryption
from ..version import __version__
from ..wire.auth import Purpose
from ..wire.messages import Message
from .aborts import error_from
from .actions import Action, Drop, Notice, Seat, Send, Timer
from .board import Board
from .elastic_terms import ElasticTerms
from .epoch import Phase
from .fixed_terms import FixedTerms
from .message_server import MessageServer
from .state import Rendezvous
from .terms import Terms


class RendezvousServer(MessageServer):
    """Connects the ranks of one job; in one of fixed size it aborts all of them when one is lost.

    Either ``seats`` (one per rank, in rank order: a launcher planned the job) or ``size`` (ranks come on
    their own) is given for a job of fixed size, or ``limits`` for an elastic one. If an elastic job is
    ``launched``, only processes that :meth:`expect` has announced may join. ``notify`` is called in the
    server's thread.
    """

    def __init__(
        self,
        *,
        key: bytes,
        job: str,
        seats: Sequence[Seat] = (),
        size: Optional[int] = None,
        limits: Optional[Limits] = None,
        launched: bool = False,
        addresses: Sequence[str],
        start_timeout_s: float,
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
        terms: Terms = (
            FixedTerms(size or len(seats), seats, __version__, start_timeout_s)
            if limits is None
            else ElasticTerms(limits, __version__, launched, start_timeout_s)
        )
        self._state = Rendezvous(terms)
        self._board = Board()
        self._notify = notify
        self._awaited = False
        self._busy = -1
        self._idle = threading.Event()
        self._idle.set()

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until only processes that wait for the next generation are connected; return whether that
        happened in time (any thread).
        """
        self._awaited = True
        self.order(self.changed)
        return self._idle.wait(timeout_s)

    def arrived(self, number: int) -> None:
        """Note that a process of the job has authenticated itself."""
        self._idle.clear()

    def received(self, number: int, message: Message) -> None:
        """Give one message to the state machine and perform the actions that it returns."""
        if message["type"] in ("post", "await"):
            take = self._board.posted if message["type"] == "post" else self._board.awaited
            self._act(take(number, message))
            return
        self._act(self._state.handle(number, message, monotonic()))
        self.changed()

    def lost(self, number: int) -> None:
        """Handle the end of a rank's connection."""
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

    # ---- for the launcher ----------------------------------------------------------------------

    def process_exited(self, number: int, how: str, ok: bool) -> None:
        """Report to the rendezvous that a process ended (any thread). ``number`` is its planned rank, or its
        member number in an elastic job; ``how`` is like ``exit code 3``; ``ok``: a normal end.
        """
        self.order(lambda: self._act(self._state.process_exited(number, how, ok, monotonic())))

    def expect(self, member: int, slot: Slot, host: str) -> None:
        """Announce a process of an elastic job that is about to be started (any thread). No other process of
        this job has had the member number.
        """
        self.order(lambda: self._act(self._state.expect(member, slot, host)))

    def exclude(self, member: int, why: str) -> None:
        """Make a member of an elastic job leave at the next step, without an error (any thread)."""
        self.order(lambda: self._act(self._state.exclude(member, why, monotonic())))

    @property
    def phase(self) -> Phase:
        """Return the progress of the present generation."""
        return self._state.phase

    @property
    def failure(self) -> Optional[RingcommError]:
        """Return the error that all ranks were aborted with; None while the job has not failed."""
        message = self._state.abort_message
        return None if message is None else error_from(message)

    @property
    def culprit(self) -> int:
        """Return the rank that this error names, or -1."""
        rank = (self._state.abort_message or {}).get("rank")
        return -1 if rank is None else int(rank)
