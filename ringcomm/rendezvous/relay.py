"""A rank's part in passing the list of all ranks on, from rank to rank; see :mod:`.member_list`."""

from __future__ import annotations

import logging
import socket
from typing import Any, Callable, Collection, Dict, List, Optional, Sequence

from ..errors import ProtocolError, StartupError
from ..transport.connect import Dial, is_local
from ..transport.kinds import LOOPBACK
from ..transport.nics import Interface, machine, own_addresses
from ..transport.reactor import READ, WRITE, Reactor
from ..transport.secure import Encryption
from ..wire.auth import Claim
from ..wire.messages import MAX_MESSAGE_BYTES, Message, MessageReader, body_of, framed
from ..wire.signing import Session
from .echo import check_echo, send_rank
from .probing import scopes_of

logger = logging.getLogger("ringcomm.rendezvous")


class Source:
    """The connection to the rank from which this one gets the list.

    All its addresses are dialled at once; the first that leads to that rank is used.

    Args:
        reactor: drives it.
        interfaces: this machine's addresses that may be used.
        key: the job's secret.
        claim: this rank, and the one to dial.
        target: its ``addresses`` and its ``machine``.
        encryption: see :class:`~ringcomm.transport.connect.Dial`.
        limit_s: how long the slowest address may take to answer, in seconds.
        received: called with every message.
        ended: called once with the reason if there is no connection, or no longer.
    """

    def __init__(
        self,
        reactor: Reactor,
        interfaces: Sequence[Interface],
        key: bytes,
        claim: Claim,
        target: Dict[str, Any],
        encryption: Optional[Encryption],
        limit_s: float,
        received: Callable[[Message], None],
        ended: Callable[[str], None],
    ) -> None:
        self._reactor = reactor
        self._claim = claim
        self._received = received
        self._ended = ended
        self._over = False
        self._sock: Optional[socket.socket] = None
        self._proven: List[socket.socket] = []
        self._reasons: List[str] = []
        offers = _to_dial(target)
        self._dials = [
            Dial(
                reactor, (str(offer["address"]), int(offer["port"])), key, claim, self._dialled, limit_s,
                scope, encryption,
            )
            for offer in offers
            for scope in scopes_of(str(offer["address"]), interfaces)
        ]  # fmt: skip
        if not self._dials:
            reactor.after(0.0, lambda: self._fail("it offers no address that can be dialled from here"))

    def _dialled(self, dial: Dial) -> None:
        if dial.sock is None:
            self._lost_one(f"{dial.address[0]}: {dial.reason}")
        else:
            sock, reader = dial.sock, MessageReader(MAX_MESSAGE_BYTES, dial.session)
            self._proven.append(sock)
            self._reactor.watch(sock, READ, lambda: self._readable(sock, reader, dial.address[0]))

    def _lost_one(self, reason: str) -> None:
        """An address does not lead to that rank: wait for the others, if there are any."""
        self._reasons.append(reason)
        if len(self._reasons) == len(self._dials) and self._sock is None:
            self._fail("; ".join(self._reasons))

    def _readable(self, sock: socket.socket, reader: MessageReader, address: str) -> None:
        try:
            data = sock.recv(1 << 18)
            if not data:
                raise ConnectionError("it closed the connection")
            for message in reader.feed(data):
                if self._sock is None:
                    check_echo(message, self._claim.target)
                    self._choose(sock)
                elif not self._over:
                    self._received(message)
        except (BlockingIOError, InterruptedError):
            return
        except (OSError, ProtocolError) as problem:
            if self._over:
                # All has come that was to come; what this rank does with it has failed.
                raise StartupError(f"This rank cannot connect to the others: {problem}.") from problem
            if sock is self._sock:
                self._fail(str(problem))
            else:
                self._proven.remove(sock)
                self._reactor.forget(sock)
                sock.close()
                self._lost_one(f"{address}: {problem}")

    def _choose(self, sock: socket.socket) -> None:
        """This connection leads to that rank: the others are not needed."""
        self._sock = sock
        for dial in self._dials:
            dial.give_up("another address has answered first")
        for other in self._proven:
            if other is not sock:
                self._reactor.forget(other)
                other.close()
        self._proven = [sock]

    def _fail(self, reason: str) -> None:
        if not self._over:
            self.close()
            self._ended(reason)

    def close(self) -> None:
        """Close it; nothing is called any more."""
        self._over = True
        for dial in self._dials:
            dial.give_up("it is not needed any more")
        for sock in self._proven:
            self._reactor.forget(sock)
            sock.close()
        self._proven = []


def _to_dial(target: Dict[str, Any]) -> List[Dict[str, Any]]:
    """The addresses of a rank that may lead to it from here."""
    if target["machine"] == machine():
        return list(target["addresses"])
    # An address that this machine has itself leads to this machine.
    own = {item.address for item in own_addresses()}
    return [
        item
        for item in target["addresses"]
        if item["address"] not in own and item["kind"] != LOOPBACK and not is_local(str(item["address"]))
    ]


class _Branch:
    """A connection to a rank that gets the list from this one."""

    def __init__(
        self,
        reactor: Reactor,
        sock: socket.socket,
        session: Session,
        rank: int,
        ended: Callable[[_Branch], None],
    ) -> None:
        self.sock = sock
        self.rank = rank
        self._reactor = reactor
        self._session = session
        self._ended = ended
        self._unsent = bytearray()
        reactor.watch(sock, READ, self._ready)

    def send(self, body: bytes) -> None:
        """Send a message, as far as that is possible now; the rest follows."""
        self._unsent += framed(body, self._session)
        self._ready()

    def _ready(self) -> None:
        try:
            while self._unsent:
                sent = self.sock.send(self._unsent)
                del self._unsent[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as problem:
            logger.debug("rank %d needs the list of ranks no longer: %s", self.rank, problem)
            self._ended(self)
            return
        self._reactor.watch(self.sock, READ | (WRITE if self._unsent else 0), self._ready)
        self._look_for_end()

    def _look_for_end(self) -> None:
        """Nothing comes from the other end but the end of the connection."""
        try:
            self.sock.recv(1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as problem:
            logger.debug("rank %d needs the list of ranks no longer: %s", self.rank, problem)
        self._ended(self)


class Relay:
    """The connections to the ranks that get the list of all ranks from this one, and where it comes from.

    Args:
        reactor: drives them.
        rank: this rank.

    Attributes:
        source: the connection over which this rank itself gets the list; None: there is none (any more).
    """

    def __init__(self, reactor: Reactor, rank: int) -> None:
        self._reactor = reactor
        self._rank = rank
        self.source: Optional[Source] = None
        self._branches: List[_Branch] = []
        self._list = self._ways = b""
        self._mates: Collection[int] = ()

    def accept(self, sock: socket.socket, session: Session, rank: int) -> None:
        """A rank has dialled this one."""
        if not send_rank(sock, session, self._rank):
            sock.close()
            return
        branch = _Branch(self._reactor, sock, session, rank, self._drop)
        self._branches.append(branch)
        if self._list:
            branch.send(self._list)
        if self._ways and rank in self._mates:
            branch.send(self._ways)

    def pass_on_list(self, listing: Message, mates: Collection[int]) -> None:
        """Send the list to the ranks that have dialled, and to those that will.

        Args:
            listing: the list.
            mates: the ranks of this host.
        """
        self._list, self._mates = body_of(listing), mates
        for branch in list(self._branches):
            branch.send(self._list)

    def pass_on_ways(self, ways: Message) -> None:
        """Send the ways to other hosts to those of them that are on this host."""
        self._ways = body_of(ways)
        for branch in list(self._branches):
            if branch.rank in self._mates:
                branch.send(self._ways)

    def _drop(self, branch: _Branch) -> None:
        if branch in self._branches:
            self._branches.remove(branch)
            self._reactor.forget(branch.sock)
            branch.sock.close()

    def close_source(self) -> None:
        """Close the connection over which the list has come."""
        if self.source is not None:
            self.source.close()
            self.source = None

    def close(self) -> None:
        """Close all connections: the links are made, or the start has failed."""
        self.close_source()
        for branch in list(self._branches):
            self._drop(branch)
