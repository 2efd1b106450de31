"""Connects to a server that has several addresses, only some of which may lead to it from this machine.

An address that this machine has itself, like docker0's, leads to this machine. Unless the server is known to
be on this machine, such an address is not dialled.
"""

from __future__ import annotations

import socket
from typing import List, NamedTuple, Optional, Sequence, Tuple

from ..clock import Deadline
from ..configuration.endpoints import format_endpoint
from ..transport.connect import Dial
from ..transport.nics import own_addresses
from ..transport.reactor import Reactor
from ..transport.secure import Encryption
from ..wire.auth import Claim
from ..wire.signing import Session

DIAL_S = 5.0
"""How long an address may take to answer."""
_LATER_S = 1.0
"""How long the preferred addresses have to answer before the others are dialled too."""


class Reached(NamedTuple):
    """The result of dialling a server.

    Attributes:
        sock: an authenticated, non-blocking connection, or None.
        tried: if there is none, a line for every address: why it failed.
        refused_by: an address at which a server with another key or of another job answered, and the reason.
        silent: whether some address did not answer at all.
        session: authenticates the messages on the connection.
    """

    sock: Optional[socket.socket]
    tried: List[str]
    refused_by: Optional[Tuple[str, str]] = None
    silent: bool = False
    session: Optional[Session] = None


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
    """Dial every address of every endpoint at once, once; keep the first that answers.

    Args:
        reactor: drives the connections.
        endpoints: hosts and ports.
        key: the job's secret.
        claim: what this process claims to be.
        encryption: how connections are encrypted; None: not at all.
        timeout_s: how long an address may take to answer, in seconds.
        later: endpoints to dial if none of the others answers soon.
        elsewhere: whether the server is known to be on another machine than this one.
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
    _end_all_but(winner, dials)
    if winner is not None:
        return Reached(winner.sock, [], session=winner.session)
    wrong_key = next((dial for dial in dials if dial.refused_by_key), None)
    return Reached(
        None,
        [f"  {format_endpoint(*dial.address)}: {dial.reason}" for dial in dials] + problems,
        None if wrong_key is None else (format_endpoint(*wrong_key.address), wrong_key.reason),
        any(dial.no_answer for dial in dials),
    )


def _end_all_but(winner: Optional[Dial], dials: Sequence[Dial]) -> None:
    for dial in dials:
        if dial is not winner:
            dial.give_up("another endpoint answered first")
            if dial.sock is not None:
                dial.sock.close()


def _resolve(host: str, problems: List[str]) -> Sequence[str]:
    """The numeric addresses of a host that the user named; errors are added to ``problems``, not raised."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as problem:  # UnicodeError: it can be no name ("desk..local")
        problems.append(f"  {host}: {getattr(problem, 'strerror', None) or problem}")
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))
