"""A rank's side of the rendezvous: join the job, link to every peer, keep the control connection."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from ..clock import Deadline
from ..config import Membership, Settings
from ..configuration.membership import is_loopback
from ..errors import (
    ExcludedError,
    ProtocolError,
    RefusedError,
    RingcommError,
    StartTimeoutError,
    StartupError,
)
from ..group.view import Peer
from ..transport.base import Channels
from ..transport.connect import check_descriptors, release_spare, shortage_error
from ..transport.local import make_links
from ..transport.nics import LOOPBACK, Interface, local_socket, machine, own_addresses
from ..transport.reactor import READ, Reactor
from ..transport.secure import encryption_of
from ..transport.tcp import SocketFabric, SocketLink
from ..version import __version__
from ..wire.auth import Purpose, job_digest
from ..wire.messages import MAX_MESSAGE_BYTES, Message, MessageReader, encode
from ..wire.signing import Signer
from .connect_server import DIAL_S, RendezvousSearch, Watched, ask, pause
from .control import (
    Connection,
    ControlChannel,
    Resume,
    await_close,
    error_from,
    left_behind,
    shortage_message,
)
from .links import LinkSetup, Proven

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
    return Joiner(membership, settings, resume, watched).join()


def running_size(membership: Membership, settings: Settings) -> int:
    """Return the number of ranks of the present view; 0 before the first one, so that this process must join.
    Raises StartupError if the rendezvous does not answer.
    """
    reactor, encryption = Reactor(), encryption_of(membership.certificate, settings.encrypt)
    deadline = Deadline(settings.start_timeout_s + DIAL_S)
    try:
        connection = RendezvousSearch(reactor, membership, settings, encryption, None).find(deadline)
    finally:
        reactor.close()
    try:
        answer = ask(*connection, {"type": "count"}, "counted", deadline)
    except (OSError, ProtocolError) as problem:
        raise StartupError(_ended_text(problem)) from None
    if answer is None:
        raise StartTimeoutError(_timeout_text(membership, deadline))
    return int(answer["size"])


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
        self._connection: Optional[Connection] = None
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

    def join(self) -> Joined:
        """Become a rank of the job; see :func:`join`."""
        try:
            check_descriptors(self.membership.size - 1)
            interfaces = self._interfaces()
            self._connect()
            self._introduce(interfaces)
            return self._complete()
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
            sock = self._connect() if self._connection is None else self._connection[0]
            self._send(shortage_message(error, self.membership.elastic))
            await_close(sock, DIAL_S)
        except (RingcommError, OSError) as second:
            logger.warning("the other ranks cannot be told of it (%s): %s", second, error)

    def _connect(self) -> socket.socket:
        """Take the connection of the last view, or else dial the rendezvous."""
        self._connection = self._resume.connection
        if self._connection is None:
            sock, session = self._search.find(self._deadline)
            self._connection = sock, MessageReader(MAX_MESSAGE_BYTES, session), session
        self.reactor.watch(self._connection[0], READ, self._readable)
        return self._connection[0]

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
            self.encryption,
        )  # fmt: skip
        self._send(self._introduction(setup.offers()))

    def _wait(self) -> None:
        """Handle received messages, or wait for more."""
        if self._failed_view:
            self._start_over()
        elif self._deadline.expired():
            raise StartTimeoutError(_timeout_text(self.membership, self._deadline))
        elif self._rejoin:
            self._join_again()
        else:
            self.reactor.run_once(self._deadline.remaining_s())

    def _start_over(self) -> None:
        """Ask for the next view: one has failed while its members were connecting."""
        self._failed_view = False
        self._assignment = self._go = None
        if self._setup is not None:
            self._setup.close()
        self._introduce(self._interfaces())

    def _finish(self) -> Joined:
        """Hand the established links to their users."""
        assert self._assignment is not None and self._connection is not None
        self.reactor.forget(self._connection[0])
        members = sorted(self._assignment["members"], key=lambda item: int(item["rank"]))
        peers = tuple(
            Peer(
                int(item["rank"]), str(item["host"]), int(item["host_index"]), int(item["local_rank"]),
                int(item["pid"]), int(item.get("member", -1)),
            )
            for item in members
        )  # fmt: skip
        rank, generation = int(self._assignment["rank"]), int(self._assignment["generation"])
        sock, reader, session = self._connection
        control = ControlChannel(
            sock, reader, rank, [peer.host for peer in peers], session,
            peers[rank].member if self.membership.elastic else None, generation, self._changes,
        )  # fmt: skip
        try:
            return self._joined(control, rank, generation, peers)
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

    def _joined(self, control: ControlChannel, rank: int, generation: int, peers: Tuple[Peer, ...]) -> Joined:
        """Return the place in the job; raises StartupError if a link is unusable."""
        assert self._go is not None and self._setup is not None
        channels = make_channels(rank, len(peers), self._setup.take_links(), control, self.settings)
        signer = Signer(self.membership.key, self.membership.job, generation)
        relayed = frozenset((int(low), int(high)) for low, high in self._go.get("relayed", ()))
        return Joined(rank, generation, peers, channels, control, str(self._go["table"]), signer, relayed)

    def _join_again(self) -> None:
        """Join again after the rendezvous closed the connection before it had assigned a rank. That happens
        without a launcher if the rank that serves the rendezvous has ended the last generation but not
        started the next one when this rank joins.
        """
        assert self._connection is not None and self._setup is not None
        self._rejoin = False
        self._connection[0].close()
        pause(self.reactor)
        self._connect()
        self._send(self._introduction(self._setup.offers()))

    def abandon(self) -> None:
        """Close everything that joining has opened."""
        if self._setup is not None:
            self._setup.close()
        if self._connection is not None:
            self._connection[0].close()

    # ---- the rendezvous ----------------------------------------------------------------------

    def _introduction(self, addresses: List[Dict[str, Any]]) -> Message:
        membership = self.membership
        message: Message = {
            "type": "join",
            "version": __version__,
            "hostname": socket.gethostname(),
            "machine": machine(),
            "pid": os.getpid(),
            "addresses": addresses,
            "dead_after": self.settings.dead_after_s,
            "epoch": self._resume.epoch,
            "position": self._resume.position,
        }
        slot = None if membership.slot is None else list(membership.slot)
        group = [membership.job, membership.size, float(self.settings.start_timeout_s)]
        optional = {
            "member": self._member, "slot": slot, "rank": membership.rank, "host": membership.host,
            "group": group if membership.within else None,
        }  # fmt: skip
        return {**message, **{name: value for name, value in optional.items() if value is not None}}

    def _send(self, message: Message) -> None:
        assert self._connection is not None
        sock, _, session = self._connection
        try:
            sock.settimeout(DIAL_S)
            sock.sendall(encode(message, session))
            sock.setblocking(False)
        except OSError as problem:
            self._connection_failed(problem)

    def _readable(self) -> None:
        assert self._connection is not None
        sock, reader, _ = self._connection
        try:
            data = sock.recv(65536)
            if not data:
                raise ConnectionError("it closed the connection")
            for message in reader.feed(data):
                self._handle(message)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as problem:
            self._connection_failed(problem)

    def _connection_failed(self, problem: Exception) -> None:
        assert self._connection is not None
        self.reactor.forget(self._connection[0])
        # Without its control connection a process of an elastic job is lost for the others.
        may_rejoin = self.membership.slot is None and not self.membership.elastic
        if self._failure is None and self._assignment is None and may_rejoin:
            self._rejoin = True
        elif self._failure is None and self._resume.epoch >= 0:
            self._failure = StartupError(f"the connection to the rendezvous broke ({_reason(problem)}).")
        elif self._failure is None:
            self._failure = StartupError(_ended_text(problem))

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        if self.membership.elastic:
            # The rendezvous pings processes that wait, so silence means that it cannot be reached.
            limit_s = self.settings.dead_after_s or self.settings.start_timeout_s
            self._deadline = Deadline(limit_s + DIAL_S)
        if kind not in _HANDLERS:
            raise ProtocolError(f"the rendezvous may not send {kind!r}")
        assert self._setup is not None
        too_early = self._assignment is None or (kind == "go" and not self._setup.linked)
        if kind in _WITH_RANK and too_early:
            raise ProtocolError(f"the rendezvous sent {kind!r} too early")
        _HANDLERS[kind](self, self._setup, message)

    def _excluded(self, setup: LinkSetup, message: Message) -> None:
        raise ExcludedError(str(message["reason"]))

    def _refused(self, setup: LinkSetup, message: Message) -> None:
        self._failure = RefusedError(f"The rendezvous refused this process: {message['reason']}")

    def _waiting(self, setup: LinkSetup, message: Message) -> None:
        self._member = int(message["member"])

    def _pinged(self, setup: LinkSetup, message: Message) -> None:
        self._send({"type": "pong", "heard": [], "silent": []})

    def _updated(self, setup: LinkSetup, message: Message) -> None:
        self._changes |= int(message["change"])

    def _announced(self, setup: LinkSetup, message: Message) -> None:
        """Do nothing: the program does not run between two views."""

    def _aborted(self, setup: LinkSetup, message: Message) -> None:
        if "epoch" not in message:
            self._failure = self._abort = error_from(message)
            return
        # An older epoch's abort was on its way while this process asked for the next view.
        generation = -1 if self._assignment is None else int(self._assignment["generation"])
        self._failed_view = self._failed_view or int(message["epoch"]) == generation
        self._go = None if self._failed_view else self._go

    def _assigned(self, setup: LinkSetup, message: Message) -> None:
        self._changes = 0  # Earlier reports are about processes that this view takes into account.
        self._assignment = message
        setup.assign_rank(int(message["rank"]), int(message["generation"]))
        if message["targets"]:
            setup.probe(message["targets"])

    def _measure(self, setup: LinkSetup, message: Message) -> None:
        setup.measure(message["pairs"])

    def _link(self, setup: LinkSetup, message: Message) -> None:
        assert self._connection is not None
        setup.link(message["routes"], self._deadline, self._connection[0].getpeername()[:2])

    def _started(self, setup: LinkSetup, message: Message) -> None:
        self._go = message


_HANDLERS: Dict[str, Callable[[Joiner, LinkSetup, Message], None]] = {
    "excluded": Joiner._excluded,
    "refused": Joiner._refused,
    "waiting": Joiner._waiting,
    "ping": Joiner._pinged,
    "updated": Joiner._updated,
    "announced": Joiner._announced,
    "abort": Joiner._aborted,
    "probe": Joiner._assigned,
    "measure": Joiner._measure,
    "link": Joiner._link,
    "go": Joiner._started,
}
"""The messages that a process may receive until all ranks are linked."""
_WITH_RANK = ("measure", "link", "go")


def _reason(problem: Exception) -> str:
    return str(getattr(problem, "strerror", None) or problem)


def _ended_text(problem: Exception) -> str:
    return f"The rendezvous ended while the job was starting: {_reason(problem)}. Its own output says why."


def _timeout_text(membership: Membership, deadline: Deadline) -> str:
    limit = f"{deadline.timeout_s:g} s"
    if not membership.elastic:
        return (
            f"The job's {membership.size} ranks did not start within {limit}, and the rendezvous "
            "has sent no reason."
        )
    return (
        f"The rendezvous has sent nothing for {limit}: its host is down, or this host is cut off from "
        "it. The job may be going on there without this process."
    )


class Joined(NamedTuple):
    """The result of joining: a place in a job and the links to every other rank."""

    rank: int
    generation: int  # generations of the job that have run before
    peers: Tuple[Peer, ...]  # all ranks, this one among them, in rank order
    channels: Channels
    control: ControlChannel
    table: str  # of links
    signer: Signer
    relayed: FrozenSet[Tuple[int, int]] = frozenset()  # pairs of hosts, by their numbers


def make_channels(
    rank: int, size: int, found: Dict[int, Dict[int, Proven]], control: ControlChannel, settings: Settings
) -> Channels:
    """Make the links of all three channels, each over the best transport that works for it. Raises
    StartupError, and closes the connections ``found`` (by purpose and peer), if a link cannot be set up.
    """
    try:
        data = [
            {peer: sock for peer, (sock, _) in found[purpose].items()}
            for purpose in (Purpose.DIRECT, Purpose.BACKGROUND)
        ]
        calls, engine = (
            SocketFabric(
                rank,
                make_links(socks, settings.transport, settings.measure),
                control,
                size,
            )
            for socks in data
        )
        between_engines = {
            peer: SocketLink(peer, *link) for peer, link in found[Purpose.ENGINE_CONTROL].items()
        }
        return Channels(calls, engine, SocketFabric(rank, between_engines, control, size))
    except (OSError, StartupError) as problem:
        for links in found.values():
            for sock, _ in links.values():
                sock.close()
        raise StartupError(f"The links to the ranks of this host could not be set up: {problem}") from None
