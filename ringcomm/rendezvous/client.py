"""A rank's side of the rendezvous: join, find the way to every peer, stay in touch."""

from __future__ import annotations

import ipaddress
import logging
import os
import platform
import socket
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

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
from ..transport.base import Lanes
from ..transport.encryption import encryption_of
from ..transport.kinds import LOOPBACK
from ..transport.local import make_links
from ..transport.nics import local_socket, machine, own_addresses
from ..transport.pace import Counted, Expected, Paces, counted
from ..transport.reactor import READ, Reactor
from ..transport.tcp import SocketFabric, SocketLink
from ..version import __version__
from ..wire.auth import Claim, Purpose, job_digest
from ..wire.messages import MAX_MESSAGE_BYTES, Message, MessageReader, encode
from ..wire.signing import Session, Signer
from .connect_server import DIAL_S, Reached, reach
from .control import ControlChannel, error_from
from .links import Mesh, Proven

logger = logging.getLogger("ringcomm.rendezvous")

_RETRY_S = 0.25
_PATIENCE_S = 3.0


class Peer(NamedTuple):
    """A rank of the job, as every rank knows it."""

    rank: int
    host: str
    host_index: int
    local_rank: int
    pid: int


class Joined(NamedTuple):
    """What :func:`join` gives: a place in a job and the links to everybody else.

    Attributes:
        paces: tells links that are far slower than what they were chosen for.
    """

    rank: int
    generation: int
    peers: Tuple[Peer, ...]
    lanes: Lanes
    control: ControlChannel
    table: str
    paces: Paces
    signer: Signer


class Moved(StartupError):
    """The rendezvous is no longer where it was said to be: it is somewhere else now."""


class Watched(NamedTuple):
    """What is known of the place that says where the rendezvous is.

    Attributes:
        moved: whether it says something else by now.
        patience_s: how long the rendezvous may be one that does not accept this process, in case that what
            was said is about to change.
    """

    moved: Callable[[], bool]
    patience_s: float


def join(
    membership: Membership, settings: Settings, listens: bool = False, watched: Optional[Watched] = None
) -> Joined:
    """Become a rank of the job.

    Args:
        listens: whether an engine will answer the rendezvous for as long as the job runs.
        watched: where it was said where the rendezvous is, if that may change.

    Raises:
        Moved: it has.
        StartupError: (or one of its kinds) the job could not be put together; the message says why.
        ConfigError: ``settings.iface`` makes no sense on this machine, or encryption is wished for and
            nothing is there to encrypt with.
    """
    joiner = _Joiner(membership, settings, listens, watched)
    try:
        return joiner.run()
    except BaseException:
        joiner.abandon()
        raise
    finally:
        joiner.reactor.close()


class _Joiner:
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
        # The server's own limit comes first and knows who is missing; ours is for when it is silent.
        self._deadline = Deadline(settings.start_timeout_s + DIAL_S)
        self._reader = MessageReader(MAX_MESSAGE_BYTES)
        self._session: Optional[Session] = None
        self._control: Optional[socket.socket] = None
        self._unsent = b""
        self._failure: Optional[RingcommError] = None
        self._assignment: Optional[Message] = None
        self._go: Optional[Message] = None
        self._mesh: Optional[Mesh] = None
        self._again = False

    def run(self) -> Joined:
        interfaces = own_addresses(self.settings.iface)
        places = self.membership.rendezvous + self.membership.rendezvous_last
        if all(_is_loopback(host) for host, _ in places):
            # Everybody who can reach such a rendezvous is on this machine.
            interfaces = [item for item in interfaces if item.kind == LOOPBACK]
        unix = local_socket() if self.settings.transport != "tcp" else None
        if unix is not None:
            interfaces.append(unix)
        sock = self._control = self._dial_rendezvous()
        mesh = self._mesh = Mesh(
            self.reactor,
            interfaces,
            self.membership.key,
            job_digest(self.membership.job),
            self._tell,
            self.encryption,
            self.settings.allow_forwarding,
        )
        self.reactor.watch(sock, READ, self._readable)
        self._tell(self._introduction(mesh.offers()))
        while self._go is None and self._failure is None:
            if self._deadline.expired():
                raise StartTimeoutError(
                    f"The rendezvous did not bring the job's {self.membership.size} ranks together within "
                    f"{self._deadline.timeout_s:g} s, and did not say why."
                )
            if self._again:
                self._come_again(mesh)
            else:
                self.reactor.turn(self._deadline.remaining_s())
        if self._failure is not None:
            if mesh.refusals:
                text = f"{self._failure} This process turned away {mesh.refusals} meanwhile."
                self._failure.args = (text,)
            raise self._failure
        assert self._assignment is not None and self._go is not None
        rank = int(self._assignment["rank"])
        self.reactor.forget(self._control)
        hosts = {int(item["rank"]): str(item["host"]) for item in self._assignment["members"]}
        names = [hosts[item] for item in sorted(hosts)]
        control = ControlChannel(self._control, self._reader, rank, names, self._session)
        peers = tuple(
            Peer(int(m["rank"]), str(m["host"]), int(m["host_index"]), int(m["local_rank"]), int(m["pid"]))
            for m in self._assignment["members"]
        )
        generation = int(self._assignment["generation"])
        lanes = self._make_lanes(rank, mesh.take_links(), control)
        paces = _paces(rank, peers, mesh.chosen, lanes)
        lanes.orders.slow_links = paces.look
        signer = Signer(self.membership.key, self.membership.job, generation)
        return Joined(
            rank, generation, peers, lanes, control, str(self._go["table"]), paces, signer
        )

    def _come_again(self, mesh: Mesh) -> None:
        """Join anew, after the rendezvous hung up before it had a place for this rank.

        Without a launcher, that is how it looks if the rank that serves it has ended the last generation
        and is about to serve the next one, and this rank was quicker.
        """
        assert self._control is not None
        self._again = False
        self._control.close()
        self._pause()
        self._control = self._dial_rendezvous()
        self.reactor.watch(self._control, READ, self._readable)
        self._tell(self._introduction(mesh.offers()))

    def _pause(self) -> None:
        pause = Deadline(_RETRY_S)
        while not pause.expired():
            self.reactor.turn(pause.remaining_s())

    def _make_lanes(self, rank: int, lanes: Dict[int, Dict[int, Proven]], control: ControlChannel) -> Lanes:
        """Decide, link by link and by trying, how data will move."""
        size = self.membership.size
        settings = self.settings
        try:
            data = [
                {peer: sock for peer, (sock, _) in lanes[purpose].items()}
                for purpose in (Purpose.CALLS, Purpose.ENGINE)
            ]
            calls, engine = (
                SocketFabric(
                    rank,
                    make_links(socks, settings.transport, settings.congestion, settings.measure),
                    control,
                    size,
                )
                for socks in data
            )
            orders = {peer: SocketLink(peer, *link) for peer, link in lanes[Purpose.ORDERS].items()}
            return Lanes(calls, engine, SocketFabric(rank, orders, control, size))
        except (OSError, StartupError) as problem:
            for links in lanes.values():
                for sock, _ in links.values():
                    sock.close()
            raise StartupError(
                f"The links to the ranks of this host could not be set up: {problem}"
            ) from None

    def abandon(self) -> None:
        """Close everything that joining had opened."""
        if self._mesh is not None:
            self._mesh.close()
        if self._control is not None:
            self._control.close()

    # ---- the rendezvous ----------------------------------------------------------------------

    def _dial_rendezvous(self) -> socket.socket:
        """Dial every endpoint at once, again and again until one answers; keep the first."""
        who = self.membership
        claim = Claim(Purpose.CONTROL, job_digest(who.job))
        while True:
            found = reach(
                self.reactor, who.rendezvous, who.key, claim, self.encryption, DIAL_S,
                who.rendezvous_last, who.rendezvous_machine not in ("", machine()),
            )  # fmt: skip
            if found.sock is not None:
                self._session = found.session
                self._reader = MessageReader(MAX_MESSAGE_BYTES, found.session)
                return found.sock
            if self._watched is not None and self._watched.moved():
                raise Moved("the rendezvous is at another place now")
            if found.refused_by is not None and self._patience.expired():
                where, reason = found.refused_by
                raise AuthenticationError(
                    f"The rendezvous at {where} was not accepted: {reason}. Every process of a job needs the "
                    "same key and job name."
                )
            if self._deadline.remaining_s() <= DIAL_S or self._hopeless(found):
                iface = self.settings.iface
                raise StartTimeoutError(
                    f"No answer from the rendezvous within {self._deadline.elapsed_s():.0f} s. Tried:\n"
                    + "\n".join(found.tried)
                    + "\nIs ringrun (or the process that serves the rendezvous) still running, and does a "
                    "firewall allow this host to reach it?"
                    + (f" --iface {iface} (RINGCOMM_IFACE) is set: is it the right network?" if iface else "")
                )
            self._pause()

    def _hopeless(self, found: Reached) -> bool:
        """Whether every address has said no for a while, although the launcher serves before we start."""
        said_no = self.membership.slot is not None and not found.silent
        return said_no and self._deadline.elapsed_s() >= _PATIENCE_S

    def _introduction(self, addresses: List[Dict[str, Any]]) -> Message:
        who = self.membership
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
        if who.slot is not None:
            message["slot"] = list(who.slot)
        if who.rank is not None:
            message["rank"] = who.rank
        if who.host is not None:
            message["host"] = who.host
        return message

    def _tell(self, message: Message) -> None:
        assert self._control is not None
        try:
            self._control.settimeout(DIAL_S)
            self._control.sendall(encode(message, self._session))
            self._control.setblocking(False)
        except OSError as problem:
            self._broke(
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
            self._broke(
                f"The rendezvous left while the job was starting: {problem}. Its own output says why."
            )

    def _broke(self, text: str) -> None:
        assert self._control is not None
        self.reactor.forget(self._control)
        if self._failure is None and self._assignment is None and self.membership.slot is None:
            self._again = True
        else:
            self._failure = self._failure or StartupError(text)

    def _handle(self, message: Message) -> None:
        kind = message["type"]
        mesh = self._mesh
        assert mesh is not None
        too_early = self._assignment is None or (kind == "go" and not mesh.linked)
        if kind in ("measure", "link", "go") and too_early:
            raise ProtocolError(f"the rendezvous sent {kind!r} before its time")
        if kind == "refused":
            self._failure = RefusedError(f"The rendezvous refused this process: {message['reason']}")
        elif kind == "abort":
            self._failure = error_from(message)
        elif kind == "ping":
            self._tell({"type": "pong", "heard": [], "silent": []})
        elif kind == "probe":
            self._assignment = message
            mesh.become(int(message["rank"]), int(message["generation"]))
            if message["targets"]:
                mesh.probe(message["targets"])
        elif kind == "measure":
            mesh.measure(message["pairs"])
        elif kind == "link":
            mesh.link(message["routes"], self._deadline)
        elif kind == "go":
            self._go = message
        else:
            raise ProtocolError(f"the rendezvous may not send {kind!r}")


def _paces(rank: int, peers: Sequence[Peer], chosen: Sequence[Expected], lanes: Lanes) -> Paces:
    """Looks after the links to other hosts that another network could have carried."""
    by_rank = {peer.rank: peer for peer in peers}
    own = by_rank[rank]
    mates = sum(peer.host_index == own.host_index for peer in peers)
    hosts = len({peer.host_index for peer in peers})

    def read(peer: int) -> List[Optional[Counted]]:
        links = (lane.link(peer) for lane in (lanes.calls, lanes.engine))
        return [counted(link.sock) if isinstance(link, SocketLink) else None for link in links]

    def describe(item: Expected, mb_per_s: float, better: str) -> str:
        other = by_rank[item.peer]
        return (
            f"rank {rank} ({own.host}) reaches rank {item.peer} ({other.host}) over {item.iface} at "
            f"{mb_per_s:.1f} MB/s; that network was chosen because it carried {item.mb_per_s:.0f} MB/s when "
            f"the job started. {better} connects them, too: start with --iface '{own.host}=!{item.iface}' "
            f"(on {own.host}: RINGCOMM_IFACE='!{item.iface}') to use it."
        )

    return Paces(chosen, read, describe, shared=max(1, hosts - 1) * mates)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
