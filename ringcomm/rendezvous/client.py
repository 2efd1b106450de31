"""A rank's side of the rendezvous: join the job, link to every peer, keep the control connection."""

from __future__ import annotations

import ipaddress
import logging
import os
import platform
import socket
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from ..clock import Deadline
from ..config import Membership, Settings
from ..errors import (
    AuthenticationError,
    ProtocolError,
    RefusedError,
    RingcommError,
    StartTimeoutError,
    StartupError,
)
from ..group.view import Peer
from ..transport.encryption import encryption_of
from ..transport.kinds import LOOPBACK
from ..transport.nics import Interface, local_socket, machine, own_addresses
from ..transport.reactor import READ, Reactor
from ..version import __version__
from ..wire.auth import Claim, Purpose, job_digest
from ..wire.messages import MAX_MESSAGE_BYTES, Message, MessageReader, encode
from ..wire.signing import Session, Signer
from .channels import make_channels, paces_of
from .connect_server import DIAL_S, Reached, reach
from .control import ControlChannel, error_from
from .joined import Joined
from .links import LinkSetup
from .probe import PROBE_AGAIN_S
from .relayed_start import RelayedStart

logger = logging.getLogger("ringcomm.rendezvous")

_RETRY_S = 0.25
_PATIENCE_S = 3.0


class Moved(StartupError):
    """The rendezvous has another address now than the one that was given."""


class Watched(NamedTuple):
    """An address of the rendezvous that may change, because it comes from a store or a file.

    Attributes:
        moved: whether the store holds another address by now.
        patience_s: for how many seconds the rendezvous at this address may refuse this process or not answer
            before that is an error, in case that the address is about to change; 0: it does not change, and
            a rendezvous that does not answer has the whole start timeout.
        hint: what to try if it does not answer, for the error.
    """

    moved: Callable[[], bool]
    patience_s: float
    hint: str = ""


def join(
    membership: Membership, settings: Settings, listens: bool = False, watched: Optional[Watched] = None
) -> Joined:
    """Become a rank of the job.

    Args:
        membership: how this process takes part in the job.
        settings: the tunables.
        listens: whether an engine will answer the rendezvous' pings for as long as the job runs.
        watched: where the address of the rendezvous comes from, if it may change.

    Raises:
        Moved: the address has changed.
        StartupError: (or one of its subclasses) the job could not start; the message says why.
        ConfigError: ``settings.iface`` selects nothing on this machine, or encryption is required and
            there is no certificate.
    """
    return Joiner(membership, settings, listens, watched).join()


class Joiner:
    """The steps of joining, driven by one reactor and one deadline."""

    def __init__(
        self, membership: Membership, settings: Settings, listens: bool, watched: Optional[Watched]
    ) -> None:
        self.listens = listens
        self._watched = watched
        self._patience = Deadline(watched.patience_s if watched is not None else 0.0)
        self.membership = membership
        self.settings = settings
        self.encryption = encryption_of(membership.certificate, settings.encrypt)
        self.reactor = Reactor()
        # The server's own limit passes first, and its error names the missing ranks; this one is for a
        # server that does not answer.
        self._deadline = Deadline(settings.start_timeout_s + DIAL_S)
        self._reader = MessageReader(MAX_MESSAGE_BYTES)
        self._session: Optional[Session] = None
        self._control: Optional[socket.socket] = None
        self._unsent = b""
        self._failure: Optional[RingcommError] = None
        self._assignment: Optional[Message] = None
        self._go: Optional[Message] = None
        self._setup: Optional[LinkSetup] = None
        self._relayed: Optional[RelayedStart] = None
        self._rejoin = False

    def join(self) -> Joined:
        """Become a rank of the job; see :func:`join`."""
        try:
            return self._run()
        except BaseException:
            self.abandon()
            raise
        finally:
            self.reactor.close()

    def _run(self) -> Joined:
        interfaces = self._interfaces()
        sock = self._control = self._dial_rendezvous()
        self.reactor.watch(sock, READ, self._readable)
        self._introduce(interfaces)
        return self._complete()

    def _complete(self) -> Joined:
        """Go on until all links are established, or joining has failed."""
        while self._go is None and self._failure is None:
            self._wait()
        if self._failure is not None:
            if self._setup is not None and self._setup.refusals:
                text = f"{self._failure} This process turned away {self._setup.refusals} meanwhile."
                self._failure.args = (text,)
            raise self._failure
        return self._finish()

    def _interfaces(self) -> List[Interface]:
        """The addresses that links may use."""
        interfaces = own_addresses(self.settings.iface)
        places = self.membership.rendezvous + self.membership.rendezvous_last
        if all(_is_loopback(host) for host, _ in places):
            # Only processes of this machine can reach such a rendezvous.
            interfaces = [item for item in interfaces if item.kind == LOOPBACK]
        unix = local_socket() if self.settings.transport != "tcp" else None
        if unix is not None:
            interfaces.append(unix)
        return interfaces

    def _introduce(self, interfaces: Sequence[Interface]) -> None:
        """Listen for the other ranks, and ask the rendezvous for a rank."""
        self._relayed = None
        setup = self._setup = LinkSetup(
            self.reactor,
            interfaces,
            self.membership.key,
            job_digest(self.membership.job),
            self._send,
            self.encryption,
            self.settings.allow_forwarding,
        )
        self._send(self._introduction(setup.offers()))

    def _wait(self) -> None:
        """Go on with what has arrived, or wait for more."""
        if self._deadline.expired():
            raise StartTimeoutError(
                f"The job's {self.membership.size} ranks did not start within "
                f"{self._deadline.timeout_s:g} s, and the rendezvous has sent no reason."
            )
        if self._rejoin:
            self._join_again()
        else:
            self.reactor.run_once(self._deadline.remaining_s())

    def _finish(self) -> Joined:
        """All links are established: give them to their users."""
        assert self._assignment is not None and self._go is not None and self._setup is not None
        assert self._control is not None
        rank = int(self._assignment["rank"])
        self.reactor.forget(self._control)
        hosts = {int(item["rank"]): str(item["host"]) for item in self._assignment["members"]}
        control = self._make_control(self._control, rank, [hosts[item] for item in sorted(hosts)])
        peers = tuple(
            Peer(
                int(m["rank"]), str(m["host"]), int(m["host_index"]), int(m["local_rank"]), int(m["pid"]),
                int(m.get("member", -1)),
            )
            for m in self._assignment["members"]
        )  # fmt: skip
        generation = int(self._assignment["generation"])
        channels = make_channels(rank, len(peers), self._setup.take_links(), control, self.settings)
        paces = paces_of(rank, peers, self._setup.chosen, channels)
        channels.control.slow_links = paces.look
        signer = Signer(self.membership.key, self.membership.job, generation)
        return Joined(
            rank, generation, peers, channels, control, str(self._go["table"]), paces, signer
        )

    def _make_control(self, sock: socket.socket, rank: int, hosts: Sequence[str]) -> ControlChannel:
        return ControlChannel(sock, self._reader, rank, hosts, self._session)

    def _join_again(self) -> None:
        """Join again, after the rendezvous closed the connection before it had assigned a rank.

        That happens without a launcher if the rank that serves the rendezvous has ended the last generation
        but not started the next one when this rank joins.
        """
        assert self._control is not None and self._setup is not None
        self._rejoin = False
        self._control.close()
        self._pause()
        self._control = self._dial_rendezvous()
        self.reactor.watch(self._control, READ, self._readable)
        self._send(self._introduction(self._setup.offers()))

    def _pause(self) -> None:
        pause = Deadline(_RETRY_S)
        while not pause.expired():
            self.reactor.run_once(pause.remaining_s())

    def abandon(self) -> None:
        """Close everything that joining had opened."""
        if self._setup is not None:
            self._setup.close()
        if self._control is not None:
            self._control.close()

    # ---- the rendezvous ----------------------------------------------------------------------

    def _dial_rendezvous(self) -> socket.socket:
        """Dial every endpoint at once, again and again until one answers; keep the first."""
        membership = self.membership
        claim = Claim(Purpose.CONTROL, job_digest(membership.job))
        while True:
            found = reach(
                self.reactor, membership.rendezvous, membership.key, claim, self.encryption, DIAL_S,
                membership.rendezvous_last, membership.rendezvous_machine not in ("", machine()),
            )  # fmt: skip
            if found.sock is not None:
                self._session = found.session
                self._reader = MessageReader(MAX_MESSAGE_BYTES, found.session)
                return found.sock
            if self._watched is not None and self._watched.moved():
                raise Moved("the rendezvous has another address now")
            if found.refused_by is not None and self._patience.expired():
                where, reason = found.refused_by
                raise AuthenticationError(
                    f"The rendezvous at {where} was not accepted: {reason}. Every process of a job needs the "
                    "same key and job name."
                )
            if self._deadline.remaining_s() <= DIAL_S or self._refused_for_long(found):
                iface = self.settings.iface
                raise StartTimeoutError(
                    f"No answer from the rendezvous within {self._deadline.elapsed_s():.0f} s. Tried:\n"
                    + "\n".join(found.tried)
                    + "\nIs ringrun (or the process that serves the rendezvous) still running, and does a "
                    "firewall allow this host to reach it?"
                    + (f" --iface {iface} (RINGCOMM_IFACE) is set: is it the right network?" if iface else "")
                    + (self._watched.hint if self._watched is not None else "")
                )
            self._pause()

    def _refused_for_long(self, found: Reached) -> bool:
        """Return whether no answer is to be expected: the server serves before its address is published."""
        if self._watched is not None and self._watched.patience_s:
            return self._patience.expired()
        refused = self.membership.slot is not None and not found.silent
        return refused and self._deadline.elapsed_s() >= _PATIENCE_S

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
            "listens": self.listens,
        }
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
            self._connection_failed(
                "The connection to the rendezvous broke while the job was starting: "
                f"{problem.strerror or problem}."
            )

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
            self._connection_failed(
                f"The rendezvous ended while the job was starting: {problem}. Its own output says why."
            )

    def _connection_failed(self, text: str) -> None:
        assert self._control is not None
        self.reactor.forget(self._control)
        if self._failure is None and self._assignment is None and self.membership.slot is None:
            self._rejoin = True
        else:
            self._failure = self._failure or StartupError(text)

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        setup = self._setup
        assert setup is not None
        too_early = self._assignment is None or (kind == "go" and not setup.linked)
        too_early = too_early or (kind in ("members", "ways") and self._relayed is None)
        if kind in ("probe_again", "measure", "link", "go", "members", "ways") and too_early:
            raise ProtocolError(f"the rendezvous sent {kind!r} too early")
        if kind == "refused":
            self._failure = RefusedError(f"The rendezvous refused this process: {message['reason']}")
        elif kind == "abort":
            self._failure = error_from(message)
        elif kind == "ping":
            self._send({"type": "pong", "heard": [], "silent": []})
        elif kind == "probe":
            self._assignment = message
            setup.assign_rank(int(message["rank"]), int(message["generation"]))
            if message["targets"]:
                setup.probe(message["targets"])
        elif kind == "assign":
            self._take_assignment(message, setup)
        elif kind == "members" and self._relayed is not None:
            self._relayed.take_list(message)
        elif kind == "ways" and self._relayed is not None:
            self._relayed.take_ways(message)
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


    def _take_assignment(self, message: Message, setup: LinkSetup) -> None:
        """The rendezvous has assigned a rank; the list of all ranks comes from another rank."""
        self._assignment = assignment = {**message, "members": []}

        def named(members: List[Dict[str, Any]]) -> None:
            assignment["members"] = members

        def link(routes: List[Dict[str, Any]]) -> None:
            setup.link(routes, self._deadline)

        self._relayed = RelayedStart(setup, message, self._send, named, link)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
