"""A rank's side of the rendezvous: join the job, link to every peer, keep the control connection."""

from __future__ import annotations

import logging
import os
import platform
import socket
from typing import Any, Dict, List, Optional, Sequence

from ..clock import Deadline
from ..config import Membership, Settings
from ..configuration.endpoints import is_loopback
from ..errors import (
    ExcludedError,
    ProtocolError,
    RefusedError,
    RingcommError,
    StartTimeoutError,
    StartupError,
)
from ..transport.encryption import encryption_of
from ..transport.kinds import LOOPBACK
from ..transport.nics import Interface, local_socket, machine, own_addresses
from ..transport.reactor import READ, Reactor
from ..transport.shortage import check_descriptors, release_spare, shortage_error
from ..version import __version__
from ..wire.auth import job_digest
from ..wire.messages import MAX_MESSAGE_BYTES, Message, MessageReader, encode
from ..wire.signing import Session
from .aborts import error_from, left_behind
from .connect_server import DIAL_S, RendezvousSearch, Watched, pause
from .control import Resume, await_close, shortage_message
from .joined import Joined, established, make_control
from .links import LinkSetup
from .probe import PROBE_AGAIN_S

logger = logging.getLogger("ringcomm.rendezvous")

NEW = Resume()
_MAX_ATTEMPTS = 5
"""After this many views with unusable links the cause is this process, not a lost member."""


def join(
    membership: Membership, settings: Settings, resume: Resume = NEW, watched: Optional[Watched] = None
) -> Joined:
    """Become a rank of the job, or of an elastic job's next view. A process that was a member of the last
    view must have closed its links.

    Raises Moved if the address of the rendezvous has changed (``watched``), ExcludedError if this process is
    out of the job, StartupError if the job could not start or cannot continue with this process, ConfigError
    for unusable settings.
    """
    short: Optional[OSError] = None
    try:
        check_descriptors(membership.size - 1)
    except OSError as problem:
        short = problem
    return Joiner(membership, settings, resume, watched).join(short)


def running_size(membership: Membership, settings: Settings) -> int:
    """Return the number of ranks of the present view; 0 before the first one, so that this process must join.
    Raises StartupError if the rendezvous does not answer.
    """
    return Joiner(membership, settings, NEW, None).count()


class Joiner:
    """The steps of joining, driven by one reactor and one deadline. In an elastic job a process waits for the
    next view as long as the rendezvous answers.
    """

    def __init__(
        self, membership: Membership, settings: Settings, resume: Resume, watched: Optional[Watched]
    ) -> None:
        self.membership = membership
        self.settings = settings
        self.encryption = encryption_of(membership.certificate, settings.encrypt)
        self.reactor = Reactor()
        self._search = RendezvousSearch(self.reactor, membership, settings, self.encryption, watched)
        # The server's own limit passes first, and its error names the missing ranks; this one is for a
        # server that does not answer.
        self._deadline = Deadline(settings.start_timeout_s + DIAL_S)
        self._reader = MessageReader(MAX_MESSAGE_BYTES)
        self._session: Optional[Session] = None
        self._control: Optional[socket.socket] = None
        self._failure: Optional[RingcommError] = None
        self._abort: Optional[RingcommError] = None
        self._assignment: Optional[Message] = None
        self._go: Optional[Message] = None
        self._setup: Optional[LinkSetup] = None
        self._rejoin = False
        self._resume = resume
        self._member = membership.member if resume.member is None else resume.member
        self._changes = 0
        self._failed_view = False
        self._attempts = 0
        self._size: Optional[int] = None

    def join(self, short: Optional[OSError] = None) -> Joined:
        """Become a rank of the job; see :func:`join`. With ``short`` (of descriptors) report only that."""
        try:
            if short is not None:
                raise short
            return self._run()
        except StartupError as problem:
            self.abandon()
            unreachable = problem is self._failure or isinstance(problem, StartTimeoutError)
            if self._resume.epoch < 0 or problem is self._abort or not unreachable:
                raise
            raise left_behind(self.membership.host, self._deadline.elapsed_s(), problem) from problem
        except BaseException as problem:
            rank = self.membership.rank if self._assignment is None else int(self._assignment["rank"])
            error = shortage_error(problem, rank, self.membership.host or socket.gethostname())
            if error is not None:
                self._report_shortage(error)
            self.abandon()
            if error is not None:
                raise error from problem
            raise
        finally:
            self.reactor.close()

    def _report_shortage(self, error: StartupError) -> None:
        """Report to the rendezvous, and so to all ranks, that this process lacks something."""
        if self._setup is not None:
            self._setup.close()
        release_spare()
        try:
            if self._control is None:
                self._connect()
            assert self._control is not None
            self._send(shortage_message(error, self.membership.elastic))
            await_close(self._control, DIAL_S)
        except (RingcommError, OSError) as second:
            logger.warning("the other ranks cannot be told of it (%s): %s", second, error)

    def count(self) -> int:
        """Ask for the number of ranks; see :func:`running_size`."""
        try:
            self._connect()
            self._send({"type": "count"})
            while self._size is None and self._failure is None:
                self._wait()
        finally:
            self.abandon()
            self.reactor.close()
        if self._size is None:
            assert self._failure is not None
            raise self._failure
        return self._size

    def _connect(self) -> None:
        """Take the connection of the last view, or else dial the rendezvous."""
        if self._resume.connection is not None:
            self._control, self._reader, self._session = self._resume.connection
        else:
            self._control, self._session = self._search.find(self._deadline)
            self._reader = MessageReader(MAX_MESSAGE_BYTES, self._session)
        self.reactor.watch(self._control, READ, self._readable)

    def _run(self) -> Joined:
        interfaces = self._interfaces()
        self._connect()
        self._introduce(interfaces)
        return self._complete()

    def _complete(self) -> Joined:
        """Continue until all links are established, or joining has failed."""
        while self._go is None and self._failure is None:
            self._wait()
        if self._failure is not None:
            if self._setup is not None and self._setup.refusals:
                text = f"{self._failure} This process turned away {self._setup.refusals} meanwhile."
                self._failure.args = (text,)
            raise self._failure
        return self._finish()

    def _interfaces(self) -> List[Interface]:
        """Return the addresses that links may use."""
        interfaces = own_addresses(self.settings.iface)
        places = self.membership.rendezvous + self.membership.rendezvous_last
        if all(is_loopback(host) for host, _ in places):
            # Only processes of this machine can reach such a rendezvous.
            interfaces = [item for item in interfaces if item.kind == LOOPBACK]
        unix = local_socket() if self.settings.transport != "tcp" else None
        if unix is not None:
            interfaces.append(unix)
        return interfaces

    def _introduce(self, interfaces: Sequence[Interface]) -> None:
        """Listen for the other ranks, and ask the rendezvous for a rank."""
        setup = self._setup = LinkSetup(
            self.reactor, interfaces, self.membership.key, job_digest(self.membership.job), self._send,
            self.encryption, self.settings.allow_forwarding,
        )  # fmt: skip
        self._send(self._introduction(setup.offers()))

    def _wait(self) -> None:
        """Handle received messages, or wait for more."""
        if self._failed_view:
            self._start_over()
        elif self._deadline.expired():
            raise StartTimeoutError(self._timeout_text())
        elif self._rejoin:
            self._join_again()
        else:
            self.reactor.run_once(self._deadline.remaining_s())

    def _timeout_text(self) -> str:
        limit = f"{self._deadline.timeout_s:g} s"
        if not self.membership.elastic:
            return (
                f"The job's {self.membership.size} ranks did not start within {limit}, and the rendezvous "
                "has sent no reason."
            )
        return (
            f"The rendezvous has sent nothing for {limit}: its host is down, or this host is cut off from "
            "it. The job may be going on there without this process."
        )

    def _start_over(self) -> None:
        """Ask for the next view: one has failed while its members were connecting."""
        self._failed_view = False
        self._assignment = self._go = None
        if self._setup is not None:
            self._setup.close()
        self._introduce(self._interfaces())

    def _finish(self) -> Joined:
        """Hand the established links to their users."""
        assert self._assignment is not None and self._go is not None and self._setup is not None
        assert self._control is not None
        self.reactor.forget(self._control)
        kept = self._control, self._reader, self._session
        control = make_control(*kept, self._assignment, self._changes)
        try:
            return established(
                control, self._assignment, self._go, self._setup, self.membership, self.settings
            )
        except BaseException as problem:
            # In an elastic job a member may have been lost after the last link was established.
            resume = control.detach(self._resume.position)
            self._attempts += 1
            again = self.membership.elastic and isinstance(problem, StartupError)
            if not again or self._attempts == _MAX_ATTEMPTS or resume.connection is None:
                raise
        self._resume, self._failed_view, self._go = resume, True, None
        self.reactor.watch(resume.connection[0], READ, self._readable)
        return self._complete()

    def _join_again(self) -> None:
        """Join again after the rendezvous closed the connection before it had assigned a rank. That happens
        without a launcher if the rank that serves the rendezvous has ended the last generation but not
        started the next one when this rank joins.
        """
        assert self._control is not None and self._setup is not None
        self._rejoin = False
        self._control.close()
        pause(self.reactor)
        self._connect()
        self._send(self._introduction(self._setup.offers()))

    def abandon(self) -> None:
        """Close everything that joining has opened."""
        if self._setup is not None:
            self._setup.close()
        if self._control is not None:
            self._control.close()

    # ---- the rendezvous ----------------------------------------------------------------------

    def _introduction(self, addresses: List[Dict[str, Any]]) -> Message:
        membership = self.membership
        message: Message = {
            "type": "join",
            "version": __version__,
            "python": platform.python_version(),
            "hostname": socket.gethostname(),
            "machine": machine(),
            "pid": os.getpid(),
            "addresses": addresses,
            "dead_after": self.settings.dead_after_s,
            "epoch": self._resume.epoch,
            "position": self._resume.position,
        }
        if self._member is not None:
            message["member"] = self._member
        if membership.slot is not None:
            message["slot"] = list(membership.slot)
        if membership.rank is not None:
            message["rank"] = membership.rank
        if membership.host is not None:
            message["host"] = membership.host
        return message

    def _send(self, message: Message) -> None:
        assert self._control is not None
        try:
            self._control.settimeout(DIAL_S)
            self._control.sendall(encode(message, self._session))
            self._control.setblocking(False)
        except OSError as problem:
            self._connection_failed(self._ended_text(problem))

    def _readable(self) -> None:
        assert self._control is not None
        try:
            data = self._control.recv(65536)
            if not data:
                raise ConnectionError("it closed the connection")
            for message in self._reader.feed(data):
                self._handle(message)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as problem:
            self._connection_failed(self._ended_text(problem))

    def _ended_text(self, problem: Exception) -> str:
        why = getattr(problem, "strerror", None) or problem
        if self._resume.epoch >= 0:
            return f"the connection to the rendezvous broke ({why})."
        return f"The rendezvous ended while the job was starting: {why}. Its own output says why."

    def _connection_failed(self, text: str) -> None:
        assert self._control is not None
        self.reactor.forget(self._control)
        # Without its control connection a process of an elastic job is lost for the others.
        may_rejoin = self.membership.slot is None and not self.membership.elastic
        if self._failure is None and self._assignment is None and may_rejoin:
            self._rejoin = True
            return
        self._failure = self._failure or StartupError(text)

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        if self.membership.elastic:
            # The rendezvous pings processes that wait, so silence means that it cannot be reached.
            limit_s = self.settings.dead_after_s or self.settings.start_timeout_s
            self._deadline = Deadline(limit_s + DIAL_S)
        if kind == "excluded":
            raise ExcludedError(str(message["reason"]))
        if kind == "counted":
            self._size = int(message["size"])
        elif kind == "waiting":
            self._member = int(message["member"])
        elif kind == "updated":
            self._changes |= int(message["change"])
        elif kind == "announced":
            pass  # the program does not run between two views
        elif kind == "abort" and "epoch" in message:
            # An older epoch's abort was on its way while this process asked for the next view.
            generation = -1 if self._assignment is None else int(self._assignment["generation"])
            self._failed_view = self._failed_view or int(message["epoch"]) == generation
            self._go = None if self._failed_view else self._go
        else:
            if kind == "probe":
                self._changes = 0  # Earlier reports are about processes that this view takes into account.
            self._handle_start(message)

    def _handle_start(self, message: Message) -> None:
        kind = message["type"]
        setup = self._setup
        assert setup is not None
        too_early = self._assignment is None or (kind == "go" and not setup.linked)
        if kind in ("probe_again", "measure", "link", "go") and too_early:
            raise ProtocolError(f"the rendezvous sent {kind!r} too early")
        if kind == "refused":
            self._failure = RefusedError(f"The rendezvous refused this process: {message['reason']}")
        elif kind == "abort":
            self._failure = self._abort = error_from(message)
        elif kind == "ping":
            self._send({"type": "pong", "heard": [], "silent": []})
        elif kind == "probe":
            self._assignment = message
            setup.assign_rank(int(message["rank"]), int(message["generation"]))
            if message["targets"]:
                setup.probe(message["targets"])
        elif kind == "probe_again":
            setup.probe(message["targets"], PROBE_AGAIN_S)
        elif kind == "measure":
            setup.measure(message["pairs"])
        elif kind == "link":
            setup.link(message["routes"], self._deadline)
        elif kind == "go":
            self._go = message
        else:
            raise ProtocolError(f"the rendezvous may not send {kind!r}")
