"""Builds the links of one rank while the job starts: listening, probing, measuring, linking.

Each rank listens on every address it may use, one socket each. The first rank of every host dials
all addresses of the first ranks of the other hosts at the same time and records which of them lead
to those ranks. The rendezvous selects one route per pair of hosts, and links are built only over these
routes. When the last link is established, all listeners close: from then on no port is open.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from ..clock import Deadline
from ..errors import ProtocolError, StartupError
from ..transport.accept import Acceptor
from ..transport.connect import Dial, is_local, listen
from ..transport.kinds import LOCAL, LOOPBACK, VIRTUAL
from ..transport.nics import Interface, interface_of, machine, own_addresses
from ..transport.pace import Expected
from ..transport.rate_limit import TokenBucket
from ..transport.reactor import READ, Reactor
from ..transport.refusals import Refusals
from ..transport.routes import Attempt, not_dialled
from ..transport.secure import Encryption
from ..wire.auth import Claim, Purpose
from ..wire.messages import Message, MessageReader, encode
from ..wire.signing import Session
from .echo import Echo, check_echo
from .probe import PROBE_S, Probe
from .race import ECHO_LIMIT_BYTES, Race

logger = logging.getLogger("ringcomm.rendezvous")

_PATIENCE_S = 0.3
"""How much longer to wait for the rest once every host has answered on a real interface: at least so long,"""
_PATIENCE = 3.0
"""and at least so many times as long as that has taken: on busy hosts the right address may answer late."""
_LINK_S = 10.0
_UNAUTHENTICATED_PER_S = 4000
"""Ten times as many as at the rendezvous: all listeners close before the computation that unauthenticated
peers could slow down begins, and a rank that is not accepted has only 5 s to try again."""
_CHANNELS = (Purpose.DIRECT, Purpose.BACKGROUND, Purpose.ENGINE_CONTROL)

Channel = Tuple[int, int]
"""The purpose of a link, and the peer at the other end."""
Proven = Tuple[socket.socket, Session]
"""A connection after the handshake, and what authenticates the messages on it."""

SendMessage = Callable[[Message], None]


def patience_s(answered_s: float) -> float:
    """How long to wait for other addresses once every host has answered on a real interface, in seconds.

    Args:
        answered_s: how long that has taken, in seconds.
    """
    return max(_PATIENCE_S, _PATIENCE * answered_s)


class LinkSetup:
    """The listeners, probes and links that one rank opens while the job starts.

    Args:
        reactor: drives them.
        interfaces: the addresses that may be used.
        key: the job's secret.
        job: the digest of the job's name.
        send: sends a message to the rendezvous.
        encryption, forwarded: see :class:`~ringcomm.transport.accept.Acceptor`.
    """

    def __init__(
        self,
        reactor: Reactor,
        interfaces: Sequence[Interface],
        key: bytes,
        job: bytes,
        send: SendMessage,
        encryption: Optional[Encryption] = None,
        forwarded: bool = False,
    ) -> None:
        self.reactor = reactor
        self.interfaces = list(interfaces)
        self.key = key
        self.job = job
        self.encryption = encryption
        self.rank = -1
        self.chosen: List[Expected] = []
        self.generation = 0
        self.refusals = Refusals()
        self._send = send
        self._listeners: List[Tuple[Interface, socket.socket]] = []
        for interface in self.interfaces:
            try:
                self._listeners.append((interface, listen(interface.address, interface.scope)))
            except OSError as problem:
                # An address may vanish between being listed and being bound; the others remain.
                logger.info("cannot listen on %s (%s): %s", interface.address, interface.name, problem)
        if not self._listeners:
            raise StartupError("None of this machine's addresses can be listened on.")
        self._acceptor = Acceptor(
            reactor,
            [sock for _, sock in self._listeners],
            key,
            job,
            self._arrived,
            self.refusals.add,
            encryption,
            TokenBucket(_UNAUTHENTICATED_PER_S, _UNAUTHENTICATED_PER_S),
            forwarded,
        )
        self._early: List[Tuple[socket.socket, Claim, Session]] = []
        self._echoes: Set[Echo] = set()
        self._probes: List[Probe] = []
        self._own: List[Attempt] = []
        self._probing = False
        self._hurrying = False
        self._probing_since = Deadline(None)
        self._race: Optional[Race] = None
        self._links: Dict[Channel, Proven] = {}
        self._expected: Optional[Set[Channel]] = None
        self._linked = False

    def offers(self) -> List[Dict[str, Any]]:
        """This rank's addresses, as they are sent to the other ranks."""
        return [
            {
                "iface": item.name,
                "address": item.address,
                "port": 0 if item.kind == LOCAL else int(sock.getsockname()[1]),
                "kind": item.kind,
            }
            for item, sock in self._listeners
        ]

    def assign_rank(self, rank: int, generation: int) -> None:
        """Take the rank that the rendezvous has assigned, and answer the peers that connected before."""
        self.rank = rank
        self.generation = generation
        early, self._early = self._early, []
        for item in early:
            self._arrived(*item)

    def _arrived(self, sock: socket.socket, claim: Claim, session: Session) -> None:
        if self.rank < 0:
            self._early.append((sock, claim, session))
            return
        if claim.target != self.rank or claim.generation != self.generation:
            # The right job, but another rank: an address that exists on several hosts. Sending this
            # process's rank, before closing, lets the other side report it.
            try:
                sock.send(encode({"type": "echo", "rank": self.rank}, session))
            except OSError as problem:
                logger.debug("a connection for rank %d ended early: %s", claim.target, problem)
            sock.close()
        elif claim.purpose == Purpose.PROBE:
            self._echoes.add(Echo(self.reactor, sock, session, self.rank, self._drop_echo))
        elif claim.purpose in _CHANNELS and claim.source != self.rank:
            self._accept_link((claim.purpose, claim.source), (sock, session))
        else:
            sock.close()

    def _drop_echo(self, echo: Echo) -> None:
        self._echoes.discard(echo)
        self.reactor.forget(echo.sock)
        echo.sock.close()

    # ---- probing -----------------------------------------------------------------------------

    def probe(self, targets: Sequence[Dict[str, Any]], limit_s: float = PROBE_S) -> None:
        """Dial every address of every target at once; :meth:`_settled` continues when all have ended.

        Args:
            targets: the ranks to reach: each a ``rank``, its ``addresses`` and its ``machine``.
            limit_s: how long the slowest address may take to answer, in seconds.
        """
        self._probing = True
        self._hurrying = False
        self._probing_since = Deadline(limit_s)
        self._own = []
        probes: List[Probe] = []
        own = {item.address for item in own_addresses()}
        for target in targets:
            elsewhere = target.get("machine") != machine()
            for offer in target["addresses"]:
                if offer.get("kind") in (LOOPBACK, LOCAL):
                    continue
                if elsewhere and offer["address"] in own:
                    # It leads to this host (docker0's does, on many hosts), not to the target.
                    self._own.append(not_dialled(self.rank, int(target["rank"]), offer))
                    continue
                for scope in self._scopes(str(offer["address"])):
                    claim = Claim(Purpose.PROBE, self.job, self.generation, self.rank, int(target["rank"]))
                    probes.append(
                        Probe(
                            self.reactor,
                            self.key,
                            claim,
                            offer,
                            scope,
                            self.interfaces,
                            self._settled,
                            limit_s,
                            self.encryption,
                        )  # fmt: skip
                    )
        self._probes = probes
        if not probes:
            self._finish_probing()
        else:
            self._settled()

    def _scopes(self, address: str) -> List[int]:
        """The scopes with which to dial this address: every interface's if it is link-local, else 0."""
        if ":" in address and ipaddress.ip_address(address).is_link_local:
            return sorted({item.scope for item in self.interfaces if item.scope})
        return [0]

    def _settled(self) -> None:
        """A probe has ended: report if all have; wait only a moment longer if every host has answered."""
        if not self._probing or not self._probes:
            return
        if all(probe.why is not None for probe in self._probes):
            self._finish_probing()
        elif not self._hurrying and self._all_hosts_answered():
            self._hurrying = True
            self.reactor.after(patience_s(self._probing_since.elapsed_s()), self._stop_waiting)

    def _all_hosts_answered(self) -> bool:
        answered = [probe.attempt() for probe in self._probes if probe.why == ""]
        reached = {attempt.target for attempt in answered if attempt.kind != VIRTUAL}
        return reached == {probe.target for probe in self._probes}

    def _stop_waiting(self) -> None:
        for probe in list(self._probes):
            if probe.why is None:
                waited_s = self._probing_since.elapsed_s()
                probe.give_up(f"no answer within {waited_s:.1f} s, while another address had answered")

    def _finish_probing(self) -> None:
        self._probing = False
        attempts = [item.to_json() for item in (*(probe.attempt() for probe in self._probes), *self._own)]
        for probe in self._probes:
            probe.close()
        self._probes = []
        self._send({"type": "probed", "attempts": attempts})

    def measure(self, pairs: Sequence[Dict[str, Any]], speeds: Sequence[Dict[str, Any]] = ()) -> None:
        """Measure all wires to one host at the same time, then those to the next.

        Args:
            pairs: the hosts that are still to be measured: each a ``rank`` and its ``wires``.
            speeds: the results so far.
        """
        if not pairs:
            self._send({"type": "measured", "speeds": list(speeds)})
            return
        target, wires = int(pairs[0]["rank"]), list(pairs[0]["wires"])

        def finished(found: List[Optional[float]]) -> None:
            self._race = None
            results = [
                {"rank": target, "address": wire["address"], "iface": wire["iface"], "mb_per_s": speed}
                for wire, speed in zip(wires, found)
                if speed is not None
            ]
            self.measure(pairs[1:], [*speeds, *results])

        claim = Claim(Purpose.PROBE, self.job, self.generation, self.rank, target)
        ways = [{**wire, "scope": self._scope(str(wire["address"]), str(wire["iface"]))} for wire in wires]
        self._race = Race(self.reactor, self.key, claim, ways, finished, self.encryption)

    def _scope(self, address: str, iface: str) -> int:
        """The scope of an interface, if the address needs one because it is link-local; else 0."""
        if is_local(address) or not ipaddress.ip_address(address).is_link_local:
            return 0
        return next((item.scope for item in self.interfaces if item.name == iface and item.scope), 0)

    # ---- linking -----------------------------------------------------------------------------

    def link(self, routes: Sequence[Dict[str, Any]], deadline: Deadline) -> None:
        """Build the links: dial those that this rank is to dial, wait for the others."""
        self._expected = set()
        found = (Expected.of(int(route["peer"]), route) for route in routes)
        self.chosen = [item for item in found if item is not None]
        for route in routes:
            channels = [(int(purpose), int(route["peer"])) for purpose in _CHANNELS]
            self._expected.update(channels)
            if route["dial"]:
                for channel in channels:
                    self._dial_link(channel, route, [])
        self.reactor.after(min(_LINK_S, deadline.remaining_s()), self._links_overdue)
        self._check_complete()

    def _dial_link(self, channel: Channel, route: Dict[str, Any], failures: List[str]) -> None:
        """Dial the addresses of a route one after another until one leads to the peer."""
        purpose, peer = channel
        if len(failures) == len(route["addresses"]):
            tried = "; ".join(failures) or "it offered no address on the chosen route"
            self._send({"type": "unlinked", "peer": peer, "reason": f"rank {peer} did not answer ({tried})"})
            return
        offer = route["addresses"][len(failures)]
        address = str(offer["address"])

        def failed(reason: str) -> None:
            failures.append(f"{address}: {reason}")
            self._dial_link(channel, route, failures)

        def finished(dial: Dial) -> None:
            if dial.sock is not None:
                self._confirm_link(channel, (dial.sock, dial.session), failed)
            else:
                failed(dial.reason)

        claim = Claim(purpose, self.job, self.generation, self.rank, peer)
        scope = self._scope(address, str(route["iface"]))
        where = (address, int(offer["port"]))
        Dial(self.reactor, where, self.key, claim, finished, _LINK_S / 2, scope, self.encryption)

    def _confirm_link(self, channel: Channel, link: Proven, failed: Callable[[str], None]) -> None:
        """After dialling, wait until the other end confirms that it is the expected rank."""
        sock, session = link
        reader = MessageReader(ECHO_LIMIT_BYTES, session)

        def readable() -> None:
            try:
                # Nothing can follow the echo yet: traffic starts when all ranks are linked.
                data = sock.recv(ECHO_LIMIT_BYTES)
                if not data:
                    raise ConnectionError("it closed the connection")
                for message in reader.feed(data):
                    check_echo(message, channel[1])
                    self.reactor.forget(sock)
                    self._add_link(channel, link)
            except (BlockingIOError, InterruptedError):
                return
            except (OSError, ProtocolError) as problem:
                self.reactor.forget(sock)
                sock.close()
                failed(str(problem))

        self.reactor.watch(sock, READ, readable)

    def _accept_link(self, channel: Channel, link: Proven) -> None:
        sock, session = link
        try:
            sock.send(encode({"type": "echo", "rank": self.rank}, session))
        except OSError as problem:
            logger.debug("a link from rank %d ended early: %s", channel[1], problem)
            sock.close()
            return
        self._add_link(channel, link)

    def _add_link(self, channel: Channel, link: Proven) -> None:
        older = self._links.get(channel)
        if older is not None:
            # The other end dialled again, so it has given up the older connection.
            older[0].close()
        self._links[channel] = link
        self._check_complete()

    def _check_complete(self) -> None:
        if self._expected is None or self._linked or not self._expected <= set(self._links):
            return
        self._linked = True
        links = []
        for purpose, peer in sorted(self._links):
            sock, _ = self._links[purpose, peer]
            if purpose != Purpose.DIRECT:
                continue  # The links of the other channels use the same route.
            local, remote, iface = "", "", "unix"
            if sock.family != socket.AF_UNIX:
                local = str(sock.getsockname()[0]).split("%")[0]
                remote = str(sock.getpeername()[0]).split("%")[0]
                iface = interface_of(local, self.interfaces)
            links.append({"peer": peer, "iface": iface, "local": local, "remote": remote})
        self._send({"type": "linked", "links": links})

    def _links_overdue(self) -> None:
        if not self._linked and self._expected is not None:
            missing = sorted({peer for _, peer in self._expected - set(self._links)})
            names = ", ".join(f"rank {peer}" for peer in missing)
            reason = f"no link to {names} within {_LINK_S:g} s"
            self._send({"type": "unlinked", "peer": missing[0], "reason": reason})

    @property
    def linked(self) -> bool:
        """Whether all links are established."""
        return self._linked

    def take_links(self) -> Dict[int, Dict[int, Proven]]:
        """The finished links, by purpose and by peer; everything else is closed."""
        channels: Dict[int, Dict[int, Proven]] = {int(purpose): {} for purpose in _CHANNELS}
        for (purpose, peer), link in self._links.items():
            channels[purpose][peer] = link
        self._links = {}
        self.close()
        return channels

    def close(self) -> None:
        """Close everything that is still open."""
        self._probing = False
        if self._race is not None:
            self._race.close()
            self._race = None
        self._acceptor.close()
        for probe in self._probes:
            probe.close()
        self._probes = []
        for echo in list(self._echoes):
            self._drop_echo(echo)
        for sock, *_ in self._early:
            sock.close()
        self._early = []
        for sock, _ in self._links.values():
            self.reactor.forget(sock)
            sock.close()
        self._links = {}
