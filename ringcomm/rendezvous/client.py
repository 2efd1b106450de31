"""A rank's side of the rendezvous: reach it, join the job, link to every peer, keep the control connection.

A server may have several addresses, only some of which may lead to it from this machine. An address that this
machine has itself, like docker0's, leads to this machine. It is not dialled unless the server is known to be
on this machine. :func:`post` and :func:`await_entry` use an own connection for one request.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from ..clock import Deadline
from ..config import Membership, Settings
from ..configuration.membership import format_endpoint, is_loopback
from ..errors import (
    AuthenticationError,
    ExcludedError,
    ProtocolError,
    RefusedError,
    RingcommError,
    StartTimeoutError,
    StartupError,
)
from ..group.group import Peer
from ..transport.base import Channels
from ..transport.connect import Dial, check_descriptors, release_spare, shortage_error
from ..transport.local import make_links
from ..transport.nics import LOOPBACK, Interface, local_socket, machine, own_addresses
from ..transport.reactor import READ, Encryption, Reactor, encryption_of
from ..transport.tcp import SocketFabric, SocketLink
from ..version import __version__
from ..wire.auth import Claim, Purpose, Session, Signer, job_digest
from ..wire.messages import MAX_MESSAGE_BYTES, Message, MessageReader, encode
from .control import (
    Connection,
    ControlChannel,
    Resume,
    await_close,
    error_from,
    left_behind,
    shortage_message,
)
from .links import LinkSetup

if TYPE_CHECKING:
    from .embedded import EmbeddedRendezvous

logger = logging.getLogger("ringcomm.rendezvous")

NEW = Resume()
_MAX_ATTEMPTS = 5  # after this many views with unusable links the cause is this process, not a lost member


DIAL_S = 5.0  # time limit for an address to answer
_LATER_S = 1.0  # how long the preferred addresses have to answer before the others are dialled as well
_RETRY_S = 0.25
REFUSED_S = 3.0
"""For how long a server is dialled although every address refuses: it serves before they are published."""


class Moved(StartupError):
    """The address of the rendezvous has changed."""


class Watched(NamedTuple):
    """An address of the rendezvous that may change, because it comes from a store or a file."""

    moved: Callable[[], bool]  # whether the store holds another address by now
    grace_s: float  # until no answer or a refusal there is an error; 0: the address does not change
    hint: str = ""  # what to try if there is no answer


class Reached(NamedTuple):
    """The result of dialling a server."""

    sock: Optional[socket.socket]  # authenticated and non-blocking
    session: Optional[Session] = None
    tried: Sequence[str] = ()  # without a connection: a line for every address
    refused: Optional[Dial] = None  # by another key, job or protocol version
    silent: bool = False  # an address did not answer at all


def reach(
    reactor: Reactor, endpoints: Sequence[Tuple[str, int]], key: bytes, claim: Claim,
    encryption: Optional[Encryption], timeout_s: float, later: Sequence[Tuple[str, int]] = (),
    elsewhere: bool = False,
) -> Reached:  # fmt: skip
    """Dial every address of every endpoint at once, and keep the first that answers. ``later``: endpoints to
    dial if no other answers soon; ``elsewhere``: the server is known to be on another machine.
    """
    problems: List[str] = []
    dials: List[Dial] = []
    own = {item.address for item in own_addresses()} if elsewhere else set()
    ended: List[Dial] = []

    def dial_all(some: Sequence[Tuple[str, int]]) -> None:
        for host, port in some:
            for address in _resolve(host, problems):
                if address in own:
                    where = format_endpoint(address, port)
                    problems.append(f"  {where}: not dialled, because this machine has that address itself")
                    continue
                at = (address, port)
                dials.append(Dial(reactor, at, key, claim, ended.append, timeout_s, encryption=encryption))

    dial_all(endpoints)
    grace = Deadline(_LATER_S)
    while len(ended) < len(dials) or later:
        if any(dial.sock for dial in dials):
            break
        if later and (len(ended) == len(dials) or grace.expired()):
            dial_all(later)
            later = ()
        else:
            reactor.run_once(grace.remaining_s() if later else timeout_s)
    winner = next((dial for dial in dials if dial.sock is not None), None)
    for dial in dials:
        if dial is not winner:
            dial.give_up("another endpoint answered first")
            if dial.sock is not None:
                dial.sock.close()
    if winner is not None:
        return Reached(winner.sock, winner.session)
    tried = [f"  {format_endpoint(*dial.address)}: {dial.reason}" for dial in dials] + problems
    refused = [dial for dial in dials if dial.refused_by_key or dial.other_version]
    refusal = min(refused, key=lambda dial: dial.other_version, default=None)
    return Reached(None, None, tried, refusal, any(dial.no_answer for dial in dials))


def _reach_rendezvous(
    reactor: Reactor, membership: Membership, encryption: Optional[Encryption], timeout_s: float
) -> Reached:
    claim = Claim(Purpose.CONTROL, job_digest(membership.within or membership.job))
    return reach(
        reactor, membership.rendezvous, membership.key, claim, encryption, timeout_s,
        membership.rendezvous_last, membership.rendezvous_machine not in ("", machine()),
    )  # fmt: skip


def _find(
    reactor: Reactor, membership: Membership, settings: Settings, watched: Optional[Watched],
    deadline: Deadline,
) -> Connection:  # fmt: skip
    """Dial every endpoint of the rendezvous at once, again until one answers; return the connection. Raises
    Moved if the address has changed, AuthenticationError for another key or job, RefusedError for another
    version of the protocol, StartTimeoutError if no endpoint answers.
    """
    grace = Deadline(watched.grace_s if watched is not None else 0.0)
    encryption = encryption_of(membership.certificate, settings.encrypt)
    while True:
        found = _reach_rendezvous(reactor, membership, encryption, DIAL_S)
        if found.sock is not None:
            return found.sock, MessageReader(MAX_MESSAGE_BYTES, found.session), found.session
        if watched is not None and watched.moved():
            raise Moved("the rendezvous has another address now")
        if found.refused is not None and grace.expired():
            raise _refusal(found.refused)
        if watched is not None and watched.grace_s:
            hopeless = grace.expired()
        else:
            refused = membership.slot is not None and not found.silent
            hopeless = refused and deadline.elapsed_s() >= REFUSED_S
        if hopeless or deadline.remaining_s() <= DIAL_S:
            iface = settings.iface
            raise StartTimeoutError(
                f"No answer from the rendezvous within {deadline.elapsed_s():.0f} s. Tried:\n"
                + "\n".join(found.tried)
                + "\nIs ringrun (or the process that serves the rendezvous) still running, and does a "
                "firewall allow this host to reach it?"
                + (f" --iface {iface} (RINGCOMM_IFACE) is set: is it the right network?" if iface else "")
                + (watched.hint if watched is not None else "")
            )
        _pause(reactor)


def _pause(reactor: Reactor) -> None:
    """Wait a moment before the rendezvous is dialled again."""
    moment = Deadline(_RETRY_S)
    while not moment.expired():
        reactor.run_once(moment.remaining_s())


def _refusal(dial: Dial) -> StartupError:
    where = format_endpoint(*dial.address)
    if dial.other_version:
        return RefusedError(f"The rendezvous at {where} refused this process: {dial.reason}.")
    return AuthenticationError(
        f"The rendezvous at {where} was not accepted: {dial.reason}. Every process of a job needs the same "
        "key and job name."
    )


def _resolve(host: str, problems: List[str]) -> Sequence[str]:
    """Return the numeric addresses of a host that the user named; add errors to ``problems``."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:  # UnicodeError: it can be no name ("desk..local")
        problems.append(f"  {host}: {getattr(problem, 'strerror', None) or problem}")
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class Joined(NamedTuple):
    """The result of joining: a place in a job and the links to every other rank."""

    rank: int
    generation: int  # generations of the job that have run before
    peers: Tuple[Peer, ...]  # all ranks, this one among them, in rank order
    channels: Channels
    control: ControlChannel
    table: str  # of links
    signer: Signer
    membership: Membership  # with address and key of the rendezvous
    relayed: FrozenSet[Tuple[int, int]] = frozenset()  # pairs of hosts, by their numbers
    embedded: Optional[EmbeddedRendezvous] = None  # the rendezvous that this rank serves, if it does


def join(
    membership: Membership, settings: Settings, resume: Resume = NEW, watched: Optional[Watched] = None
) -> Joined:
    """Become a rank of the job, or of an elastic job's next view. A process that was a member of the last
    view must have closed its links. Raises Moved if the address of the rendezvous has changed (``watched``),
    ExcludedError if this process is out of the job, StartupError if the job could not start or cannot
    continue with this process, ConfigError for unusable settings.
    """
    return Joiner(membership, settings, resume, watched).join()


class Joiner:
    """The steps of joining; in an elastic job it waits as long as the rendezvous answers."""

    def __init__(
        self, membership: Membership, settings: Settings, resume: Resume, watched: Optional[Watched]
    ) -> None:
        self.membership = membership
        self.settings = settings
        self.encryption = encryption_of(membership.certificate, settings.encrypt)
        self.reactor = Reactor()
        self._watched = watched
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
            self._connection = _find(
                self.reactor, self.membership, self.settings, self._watched, self._deadline
            )
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
        if self._failed_view:  # while its members were connecting: ask for the next one
            self._failed_view = False
            self._assignment = self._go = None
            if self._setup is not None:
                self._setup.close()
            self._introduce(self._interfaces())
        elif self._deadline.expired():
            raise StartTimeoutError(_timeout_text(self.membership, self._deadline))
        elif self._rejoin:
            self._join_again()
        else:
            self.reactor.run_once(self._deadline.remaining_s())

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
        """Return the place in the job with its links; StartupError closes them if one cannot be set up."""
        assert self._go is not None and self._setup is not None
        found = self._setup.take_links()
        try:
            sockets = [
                {peer: sock for peer, (sock, _) in found[purpose].items()}
                for purpose in (Purpose.DIRECT, Purpose.BACKGROUND)
            ]
            calls, engine = (make_links(each, self.settings.transport) for each in sockets)
            between = {peer: SocketLink(peer, *link) for peer, link in found[Purpose.ENGINE_CONTROL].items()}
            channels = Channels(*(SocketFabric(rank, links, control) for links in (calls, engine, between)))
        except (OSError, StartupError) as problem:
            for links in found.values():
                for sock, _ in links.values():
                    sock.close()
            raise StartupError(
                f"The links to the ranks of this host could not be set up: {problem}"
            ) from None
        signer = Signer(self.membership.key, self.membership.job, generation)
        table = str(self._go["table"])
        relayed = frozenset((int(low), int(high)) for low, high in self._go.get("relayed", ()))
        return Joined(rank, generation, peers, channels, control, table, signer, self.membership, relayed)

    def _join_again(self) -> None:
        """Join again after the rendezvous closed the connection before it had assigned a rank. Without a
        launcher, the rank that serves it may have ended the last generation but not started the next one.
        """
        assert self._connection is not None and self._setup is not None
        self._rejoin = False
        self._connection[0].close()
        _pause(self.reactor)
        self._connect()
        self._send(self._introduction(self._setup.offers()))

    def abandon(self) -> None:
        if self._setup is not None:
            self._setup.close()
        if self._connection is not None:
            self._connection[0].close()

    # ---- the rendezvous ----------------------------------------------------------------------

    def _introduction(self, addresses: List[Dict[str, Any]]) -> Message:
        membership = self.membership
        message: Message = {
            "type": "join", "version": __version__, "hostname": socket.gethostname(), "machine": machine(),
            "pid": os.getpid(), "addresses": addresses, "dead_after": self.settings.dead_after_s,
            "epoch": self._resume.epoch, "position": self._resume.position,
        }  # fmt: skip
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
        setup, connection = self._setup, self._connection
        assert setup is not None and connection is not None
        too_early = self._assignment is None or (kind == "go" and not setup.linked)
        if kind in ("measure", "link", "go") and too_early:
            raise ProtocolError(f"the rendezvous sent {kind!r} too early")
        if kind == "ping":
            self._send({"type": "pong", "heard": [], "silent": []})
        elif kind == "waiting":
            self._member = int(message["member"])
        elif kind == "updated":
            self._changes |= int(message["change"])
        elif kind == "probe":
            self._changes = 0  # Earlier reports are about processes that this view takes into account.
            self._assignment = message
            setup.assign_rank(int(message["rank"]), int(message["generation"]))
            if message["targets"]:
                setup.probe(message["targets"])
        elif kind == "measure":
            setup.measure(message["pairs"])
        elif kind == "link":
            setup.link(message["routes"], self._deadline, connection[0].getpeername()[:2])
        elif kind == "go":
            self._go = message
        elif kind == "abort":
            self._aborted(message)
        elif kind == "excluded":
            raise ExcludedError(str(message["reason"]))
        elif kind == "refused":
            self._failure = RefusedError(f"The rendezvous refused this process: {message['reason']}")
        elif kind != "announced":  # the program does not run between two views
            raise ProtocolError(f"the rendezvous may not send {kind!r}")

    def _aborted(self, message: Message) -> None:
        if "epoch" not in message:
            self._failure = self._abort = error_from(message)
            return
        # An older epoch's abort was on its way while this process asked for the next view.
        generation = -1 if self._assignment is None else int(self._assignment["generation"])
        self._failed_view = self._failed_view or int(message["epoch"]) == generation
        self._go = None if self._failed_view else self._go


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


# ---- requests on an own connection ---------------------------------------------------------------


def post(membership: Membership, entry: str, text: str, timeout_s: float) -> None:
    """Post an entry for all ranks of the job; raises StartupError if the rendezvous does not take it."""
    _ask_at(membership, {"type": "post", "entry": entry, "text": text}, timeout_s)


def await_entry(membership: Membership, entry: str, timeout_s: float) -> str:
    """Return an entry's text once a rank has posted it; raises StartTimeoutError or StartupError."""
    return _ask_at(membership, {"type": "await", "entry": entry}, timeout_s)


def change_entry(
    membership: Membership, how: str, entry: str, timeout_s: float, text: str = "", before: str = ""
) -> str:
    message = {"type": "change", "how": how, "entry": entry, "text": text, "before": before}
    return _ask_at(membership, message, timeout_s)


def _ask_at(membership: Membership, message: Message, timeout_s: float) -> str:
    deadline = Deadline(timeout_s)
    reactor, encryption = Reactor(), encryption_of(membership.certificate)
    try:
        found = _reach_rendezvous(reactor, membership, encryption, min(DIAL_S, timeout_s))
    finally:
        reactor.close()
    if found.sock is None:
        raise StartupError("No answer from the job's rendezvous. Tried:\n" + "\n".join(found.tried))
    connection = found.sock, MessageReader(MAX_MESSAGE_BYTES, found.session), found.session
    try:
        answer = _ask(connection, message, "entry", deadline)
    except (OSError, ProtocolError) as problem:
        raise StartupError(f"The job's rendezvous has ended during a request: {problem}.") from None
    if answer is None:
        raise StartTimeoutError(
            f"No rank has posted {message['entry']} at the job's rendezvous within {timeout_s:g} s."
        )
    return str(answer["text"])


def running_size(membership: Membership, settings: Settings) -> int:
    """Return the number of ranks of the present view, 0 before the first; StartupError without an answer."""
    reactor = Reactor()
    deadline = Deadline(settings.start_timeout_s + DIAL_S)
    try:
        connection = _find(reactor, membership, settings, None, deadline)
    finally:
        reactor.close()
    try:
        answer = _ask(connection, {"type": "count"}, "counted", deadline)
    except (OSError, ProtocolError) as problem:
        raise StartupError(_ended_text(problem)) from None
    if answer is None:
        raise StartTimeoutError(_timeout_text(membership, deadline))
    return int(answer["size"])


def _ask(connection: Connection, message: Message, kind: str, deadline: Deadline) -> Optional[Message]:
    """Send one message, and close after the answer of this kind; None: it does not come in time."""
    sock, reader, session = connection
    with sock:
        sock.settimeout(DIAL_S)
        sock.sendall(encode(message, session))
        while not deadline.expired():
            sock.settimeout(max(0.01, deadline.remaining_s()))
            try:
                data = sock.recv(65536)
            except socket.timeout:
                continue
            if not data:
                raise ConnectionError("it closed the connection")
            for answer in reader.feed(data):
                if answer["type"] != kind:
                    raise ProtocolError(f"it sent {answer['type']!r}")
                return answer
    return None
