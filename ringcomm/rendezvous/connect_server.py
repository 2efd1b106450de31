"""Connects to a server that has several addresses, only some of which may lead to it from this machine.

An address that this machine has itself, like docker0's, leads to this machine. It is not dialled unless the
server is known to be on this machine. :class:`RendezvousSearch` dials a job's rendezvous until it answers;
:func:`post` and :func:`await_entry` use an own connection for one request.
"""

from __future__ import annotations

import socket
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

from ..clock import Deadline
from ..config import Membership, Settings
from ..configuration.membership import format_endpoint
from ..errors import AuthenticationError, ProtocolError, RefusedError, StartTimeoutError, StartupError
from ..transport.connect import Dial
from ..transport.nics import machine, own_addresses
from ..transport.reactor import Reactor
from ..transport.secure import Encryption, encryption_of
from ..wire.auth import Claim, Purpose, job_digest
from ..wire.messages import MAX_MESSAGE_BYTES, Message, MessageReader, encode
from ..wire.signing import Session

DIAL_S = 5.0
"""Time limit for an address to answer."""
_LATER_S = 1.0
"""How long the preferred addresses have to answer before the others are dialled as well."""
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
    reactor: Reactor,
    endpoints: Sequence[Tuple[str, int]],
    key: bytes,
    claim: Claim,
    encryption: Optional[Encryption],
    timeout_s: float,
    later: Sequence[Tuple[str, int]] = (),
    elsewhere: bool = False,
) -> Reached:
    """Dial every address of every endpoint at the same time, one attempt each; keep the first that answers.
    ``later``: endpoints to dial if none of the others answers soon; ``elsewhere``: the server is known to be
    on another machine than this one.
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


class RendezvousSearch:
    """Dials a job's rendezvous until it answers. ``watched``: the source of an address that may change."""

    def __init__(
        self,
        reactor: Reactor,
        membership: Membership,
        settings: Settings,
        encryption: Optional[Encryption],
        watched: Optional[Watched],
    ) -> None:
        self._reactor = reactor
        self._membership = membership
        self._settings = settings
        self._encryption = encryption
        self._watched = watched
        self._grace = Deadline(watched.grace_s if watched is not None else 0.0)

    def find(self, deadline: Deadline) -> Tuple[socket.socket, Optional[Session]]:
        """Dial every endpoint at once until one answers; return the connection and its session. Raises Moved
        if the address has changed, AuthenticationError for another key or job, RefusedError for another
        version of the protocol, StartTimeoutError if no endpoint answers.
        """
        watched = self._watched
        while True:
            found = _reach_rendezvous(self._reactor, self._membership, self._encryption, DIAL_S)
            if found.sock is not None:
                return found.sock, found.session
            if watched is not None and watched.moved():
                raise Moved("the rendezvous has another address now")
            if found.refused is not None and self._grace.expired():
                raise _refusal(found.refused)
            if deadline.remaining_s() <= DIAL_S or self._refused_for_long(found, deadline):
                iface = self._settings.iface
                raise StartTimeoutError(
                    f"No answer from the rendezvous within {deadline.elapsed_s():.0f} s. Tried:\n"
                    + "\n".join(found.tried)
                    + "\nIs ringrun (or the process that serves the rendezvous) still running, and does a "
                    "firewall allow this host to reach it?"
                    + (f" --iface {iface} (RINGCOMM_IFACE) is set: is it the right network?" if iface else "")
                    + (watched.hint if watched is not None else "")
                )
            pause(self._reactor)

    def _refused_for_long(self, found: Reached, deadline: Deadline) -> bool:
        """Return whether no answer can be expected any more."""
        if self._watched is not None and self._watched.grace_s:
            return self._grace.expired()
        refused = self._membership.slot is not None and not found.silent
        return refused and deadline.elapsed_s() >= REFUSED_S


def pause(reactor: Reactor) -> None:
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


def post(membership: Membership, entry: str, text: str, timeout_s: float) -> None:
    """Post an entry for all ranks of the job; raises StartupError if the rendezvous does not take it."""
    _ask_at(membership, {"type": "post", "entry": entry, "text": text}, timeout_s)


def await_entry(membership: Membership, entry: str, timeout_s: float) -> str:
    """Return the text of an entry, as soon as a rank has posted it. Raises StartTimeoutError if none has in
    time, StartupError if the rendezvous cannot be reached or has ended.
    """
    return _ask_at(membership, {"type": "await", "entry": entry}, timeout_s)


def change_entry(
    membership: Membership, how: str, entry: str, timeout_s: float, text: str = "", before: str = ""
) -> str:
    """Change an entry, see :meth:`ringcomm.rendezvous.server.Board.changed`; return the answer."""
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
    try:
        answer = ask(found.sock, found.session, message, "entry", deadline)
    except (OSError, ProtocolError) as problem:
        raise StartupError(f"The job's rendezvous has ended during a request: {problem}.") from None
    if answer is None:
        raise StartTimeoutError(
            f"No rank has posted {message['entry']} at the job's rendezvous within {timeout_s:g} s."
        )
    return str(answer["text"])


def ask(
    sock: socket.socket, session: Optional[Session], message: Message, kind: str, deadline: Deadline
) -> Optional[Message]:
    """Send one message, and close the connection after the answer; return that, or None if it does not come
    in time. Raises OSError or ProtocolError for a broken connection, and an answer of another kind.
    """
    reader = MessageReader(MAX_MESSAGE_BYTES, session)
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
