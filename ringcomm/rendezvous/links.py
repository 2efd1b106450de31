"""Builds the links of one rank while the job starts: listening, probing, measuring, linking.

Each rank listens on every address it may use, one socket each. The first rank of every host dials
all addresses of the first ranks of the other hosts at the same time and records which of them lead
to those ranks. The rendezvous selects one route per pair of hosts, and links are built only over these
routes. When the last link is established, all listeners close: from then on no port is open. Where neither
end can dial the other, both dial the rendezvous, which relays (:mod:`.server`).

An address leads to a rank if the process that answers there authenticates itself as a member of the same job
and sends that rank. If several wires do (a wire is a pair of interfaces, one of each host), they are measured
over separate connections (:mod:`.measuring`), so that the fastest can be chosen.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import socket
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Set, Tuple

from ..clock import Deadline
from ..errors import StartupError
from ..transport.connect import Acceptor, Dial, Refusals, is_local, is_short_of_descriptors, listen
from ..transport.nics import (
    LOCAL,
    LOOPBACK,
    VIRTUAL,
    WIRED,
    Attempt,
    Interface,
    interface_of,
    machine,
    not_dialled,
    own_addresses,
    worse_kind,
)
from ..transport.reactor import READ, Encryption, Reactor
from ..wire.auth import Admission, Claim, Purpose, Session
from ..wire.messages import Message
from .measuring import Echo, Race, WireSpeed, await_echo, send_rank
from .routing import ranges_of

logger = logging.getLogger("ringcomm.rendezvous")

_LINK_S = 10.0
_PLACE_S = 0.03
"""A tenth of that at the rendezvous: all listeners close before the computation begins that unauthenticated
peers could slow down, and a rank that is not accepted has only 5 s to try again."""
_CHANNELS = (Purpose.DIRECT, Purpose.BACKGROUND, Purpose.ENGINE_CONTROL)

PROBE_S = 10.0  # time limit for the slowest address to answer, on hosts that are busy with other work
_RELAYED_PROBE_S = 5.0
"""The same where a relay connects hosts without a route: addresses behind a firewall never answer."""
_GRACE_S = 0.3  # minimum time to wait for other addresses once every host has answered on a real interface,
_GRACE_FACTOR = 3.0  # and in multiples of the time that this has taken
_LINK_LOCAL_GRACE_S = 0.03
"""The minimum where only link-local addresses are left: they are dialled by every interface of this machine,
and all but one of these lead nowhere."""

Channel = Tuple[int, int]  # the purpose of a link, and the peer at the other end
Proven = Tuple[socket.socket, Session]  # A connection after the handshake, and its session

SendMessage = Callable[[Message], None]
Report = Callable[[List[Dict[str, Any]]], None]


class LinkSetup:
    """The listeners, probes and links that one rank opens while the job starts."""

    def __init__(
        self, reactor: Reactor, interfaces: Sequence[Interface], key: bytes, job: bytes, send: SendMessage,
        encryption: Optional[Encryption] = None,
    ) -> None:  # fmt: skip
        self.reactor, self.interfaces = reactor, list(interfaces)
        self.key, self.job, self.encryption = key, job, encryption
        self.rank, self.generation = -1, 0
        self.refusals = Refusals()
        self._send = send
        self._listeners: List[Tuple[Interface, socket.socket]] = []
        for interface in self.interfaces:
            try:
                self._listeners.append((interface, listen(interface.address, interface.scope)))
            except OSError as problem:
                if is_short_of_descriptors(problem):
                    for _, sock in self._listeners:
                        sock.close()
                    raise
                # An address may vanish between being listed and being bound; the others remain.
                logger.info("cannot listen on %s (%s): %s", interface.address, interface.name, problem)
        if not self._listeners:
            raise StartupError("None of this machine's addresses can be listened on.")
        self._acceptor = Acceptor(
            reactor, [sock for _, sock in self._listeners], key, job, self._arrived, self.refusals.add,
            encryption, _PLACE_S, may_wait=False,
        )  # fmt: skip
        self._early: List[Tuple[socket.socket, Claim, Session]] = []
        self._echoes: Set[Echo] = set()
        self._at_relay: Set[socket.socket] = set()  # where another rank has not begun the handshake yet
        self._probing: Optional[Probing] = None
        self._probed_by: Set[int] = set()  # ranks whose probes have reached this one
        self._race: Optional[Race] = None
        self._links: Dict[Channel, Proven] = {}
        self._missing: Optional[Set[Channel]] = None  # None before :meth:`link` and after :meth:`close`
        self.linked = False  # all links are established

    def offers(self) -> List[Dict[str, Any]]:
        """Return this rank's addresses, as they are sent to the other ranks."""
        return [
            {
                "iface": item.name, "address": item.address,
                "port": 0 if item.kind == LOCAL else int(sock.getsockname()[1]), "kind": item.kind,
            }  # fmt: skip
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
            send_rank(sock, session, self.rank)
            sock.close()
            return
        if claim.purpose == Purpose.PROBE:
            self._note_reached(sock, claim.source)
            self._echoes.add(Echo(self.reactor, sock, session, self.rank, self._drop_echo))
            return
        is_link = claim.purpose in _CHANNELS and claim.source != self.rank
        if is_link and send_rank(sock, session, self.rank):
            self._add_link((claim.purpose, claim.source), (sock, session))
        else:
            sock.close()

    def _note_reached(self, sock: socket.socket, source: int) -> None:
        """Note a rank that has reached this one on a real interface: there is a route between the two."""
        local = str(sock.getsockname()[0]).split("%")[0]
        if any(item.address == local and item.kind != VIRTUAL for item in self.interfaces):
            self._probed_by.add(source)
            if self._probing is not None:
                self._probing.end_if_enough()

    def _drop_echo(self, echo: Echo) -> None:
        self._echoes.discard(echo)
        self.reactor.forget(echo.sock)
        echo.sock.close()

    # ---- probing -----------------------------------------------------------------------------

    def probe(self, targets: Sequence[Dict[str, Any]], limit_s: Optional[float] = None) -> None:
        """Dial every address of every target at once, and report which of them lead there."""
        if limit_s is None:
            limit_s = PROBE_S if self.encryption is None else _RELAYED_PROBE_S
        claim = Claim(Purpose.PROBE, self.job, self.generation, self.rank, self.rank)
        self._probing = Probing(
            self.reactor, self.interfaces, self.key, claim, self.encryption, targets, limit_s,
            lambda attempts: self._send({"type": "probed", "attempts": attempts}), self._probed_by,
        )  # fmt: skip

    def measure(self, pairs: Sequence[Dict[str, Any]]) -> None:
        """Measure all wires to one host at the same time, then those to the next, and report the speeds."""
        self._measure_next(iter(pairs), [])

    def _measure_next(self, pairs: Iterator[Dict[str, Any]], speeds: List[Dict[str, Any]]) -> None:
        pair = next(pairs, None)
        if pair is None:
            self._send({"type": "measured", "speeds": speeds})
            return
        target, wires = int(pair["rank"]), list(pair["wires"])

        def finished(found: List[Optional[WireSpeed]]) -> None:
            speeds.extend(
                {
                    "rank": target, "address": wire["address"], "iface": wire["iface"],
                    "mb_per_s": speed.mb_per_s, **speed._asdict(),
                }
                for wire, speed in zip(wires, found)
                if speed is not None
            )  # fmt: skip
            self._measure_next(pairs, speeds)

        claim = Claim(Purpose.PROBE, self.job, self.generation, self.rank, target)
        ways = [{**wire, "scope": self._scope(str(wire["address"]), str(wire["iface"]))} for wire in wires]
        self._race = Race(self.reactor, self.key, claim, ways, finished, self.encryption)

    def _scope(self, address: str, iface: str) -> int:
        """Return the scope of an interface, if the address needs one because it is link-local; else 0."""
        if is_local(address) or not ipaddress.ip_address(address).is_link_local:
            return 0
        return next((item.scope for item in self.interfaces if item.name == iface and item.scope), 0)

    # ---- linking -----------------------------------------------------------------------------

    def link(
        self, routes: Sequence[Dict[str, Any]], deadline: Deadline, relay: Tuple[str, int] = ("", 0)
    ) -> None:
        """Build the links: dial those that this rank must dial, or the ``relay``, and wait for the others."""
        every = {(int(purpose), int(route["peer"])) for route in routes for purpose in _CHANNELS}
        self._missing = every - self._links.keys()
        for route in routes:
            if route.get("relayed"):
                route = {**route, "addresses": [{"address": relay[0], "port": relay[1]}]}
            for purpose in _CHANNELS if route["dial"] or route.get("relayed") else ():
                self._dial_link((int(purpose), int(route["peer"])), route, [])
        self.reactor.after(min(_LINK_S, deadline.remaining_s()), self._links_overdue)
        self._check_complete()

    def _dial_link(self, channel: Channel, route: Dict[str, Any], failures: List[str]) -> None:
        """Dial the addresses of a route one after another until one leads to the peer."""
        purpose, peer = channel
        if self._missing is None:
            return  # closed meanwhile: what this rank reports now would be taken for the next view's
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
            if dial.sock is not None and self._missing is None:
                dial.sock.close()
            elif dial.sock is not None and not route["dial"]:
                self._await_at_relay(dial.sock)
            elif dial.sock is not None:
                self._confirm_link(channel, (dial.sock, dial.session), failed)
            else:
                failed(dial.reason)

        claim = Claim(purpose, self.job, self.generation, self.rank, peer)
        scope = self._scope(address, str(route["iface"]))
        where = (address, int(offer["port"]))
        # The other end of a relayed link may come to the relay later.
        limit_s, passage = _LINK_S / 2, b""
        if route.get("relayed"):
            limit_s, passage = _LINK_S, Admission.of(self.key, passage=claim)
        listens = not route["dial"]
        Dial(
            self.reactor, where, self.key, claim, finished, limit_s, scope, self.encryption, passage, listens
        )

    def _await_at_relay(self, sock: socket.socket) -> None:
        """Wait until the other rank begins the handshake, then treat it as one that has dialled this rank."""

        def begun() -> None:
            self._at_relay.discard(sock)
            self.reactor.forget(sock)
            self._acceptor.take(sock, "the relay")

        self._at_relay.add(sock)
        self.reactor.watch(sock, READ, begun)

    def _confirm_link(self, channel: Channel, link: Proven, failed: Callable[[str], None]) -> None:
        """Wait, after dialling, until the other end confirms that it is the expected rank."""

        def refused(reason: str) -> None:
            link[0].close()
            failed(reason)

        await_echo(self.reactor, *link, channel[1], lambda: self._add_link(channel, link), refused)

    def _add_link(self, channel: Channel, link: Proven) -> None:
        older = self._links.get(channel)
        if older is not None:
            # The other end dialled again, so it has given up the older connection.
            older[0].close()
        self._links[channel] = link
        if self._missing is not None:
            self._missing.discard(channel)
        self._check_complete()

    def _check_complete(self) -> None:
        if self._missing is None or self._missing or self.linked:
            return
        self.linked = True
        peers: Dict[Tuple[str, str], List[int]] = {}
        for (purpose, peer), (sock, _) in self._links.items():
            if purpose != Purpose.DIRECT:
                continue  # The links of the other channels use the same route.
            local, iface = "", "unix"
            if sock.family != socket.AF_UNIX:
                local = str(sock.getsockname()[0]).split("%")[0]
                iface = interface_of(local, self.interfaces)
            peers.setdefault((iface, local), []).append(peer)
        links = [
            {"iface": iface, "local": local, "peers": ranges_of(found)}
            for (iface, local), found in sorted(peers.items())
        ]
        self._send({"type": "linked", "links": links})

    def _links_overdue(self) -> None:
        if not self.linked and self._missing is not None:
            missing = sorted({peer for _, peer in self._missing})
            names = ", ".join(f"rank {peer}" for peer in missing)
            reason = f"no link to {names} within {_LINK_S:g} s"
            self._send({"type": "unlinked", "peer": missing[0], "reason": reason})

    def take_links(self) -> Dict[int, Dict[int, Proven]]:
        """Return the finished links, by purpose and by peer; close everything else."""
        channels: Dict[int, Dict[int, Proven]] = {int(purpose): {} for purpose in _CHANNELS}
        for (purpose, peer), link in self._links.items():
            channels[purpose][peer] = link
        self._links = {}
        self.close()
        return channels

    def close(self) -> None:
        self._missing = None
        if self._probing is not None:
            self._probing.close()
        if self._race is not None:
            self._race.close()
        self._acceptor.close()
        for echo in list(self._echoes):
            self._drop_echo(echo)
        links = (sock for sock, _ in self._links.values())
        for sock in [*self._at_relay, *(item[0] for item in self._early), *links]:
            self.reactor.forget(sock)
            sock.close()
        self._at_relay, self._early, self._links = set(), [], {}


def scopes_of(address: str, interfaces: Sequence[Interface]) -> List[int]:
    """Return the scopes with which to dial an address: every interface's if it is link-local, else 0."""
    if ":" in address and ipaddress.ip_address(address).is_link_local:
        return sorted({item.scope for item in interfaces if item.scope})
    return [0]


class Probing:
    """One round of probes: dials all addresses of all targets at once, and checks which rank answers.
    ``report`` gets all attempts when they have ended; ``claim`` names this rank.
    """

    def __init__(
        self, reactor: Reactor, interfaces: Sequence[Interface], key: bytes, claim: Claim,
        encryption: Optional[Encryption], targets: Sequence[Dict[str, Any]], limit_s: float, report: Report,
        reached_by: Iterable[int] = (),
    ) -> None:  # fmt: skip
        self._reactor, self._interfaces, self._claim, self._report = reactor, interfaces, claim, report
        self._active = True
        self._grace_s = math.inf
        self._since = Deadline(limit_s)
        self._not_dialled: List[Attempt] = []
        self._probes: List[_Probe] = []
        wanted = list(self._addresses(targets))
        self._unreached = {target for target, *_ in wanted}  # ranks without an answer on a real interface
        self._reached_by = reached_by  # ranks whose own probes have come here; it may grow
        self._unsettled = len(wanted)
        for target, offer, scope in wanted:
            probe = _Probe(target, offer, scope)
            self._probes.append(probe)
            where = (str(offer["address"]), int(offer["port"]))
            told = claim._replace(purpose=Purpose.PROBE, target=target)
            proven = partial(self._proven, probe)
            probe.dial = Dial(reactor, where, key, told, proven, limit_s, scope, encryption)
        reactor.after(0.0, self.end_if_enough)

    def _addresses(self, targets: Sequence[Dict[str, Any]]) -> Iterator[Tuple[int, Dict[str, Any], int]]:
        """Yield what to dial: rank, address, and scope."""
        own = {item.address for item in own_addresses()}
        for target in targets:
            elsewhere = target.get("machine") != machine()
            for offer in target["addresses"]:
                if offer.get("kind") in (LOOPBACK, LOCAL):
                    continue
                if elsewhere and offer["address"] in own:
                    # It leads to this host (docker0's does, on many hosts), not to the target.
                    self._not_dialled.append(not_dialled(self._claim.source, int(target["rank"]), offer))
                    continue
                for scope in scopes_of(str(offer["address"]), self._interfaces):
                    yield int(target["rank"]), offer, scope

    def _proven(self, probe: _Probe, dial: Dial) -> None:
        probe.dial = dial
        if dial.sock is None:
            self._settle(probe, dial.reason)
            return
        iface = interface_of(dial.local, self._interfaces)
        why = "" if iface != "?" else f"it goes out by {dial.local}, which --iface excludes"
        confirmed, failed = partial(self._settle, probe, why), partial(self._settle, probe)
        await_echo(self._reactor, dial.sock, dial.session, probe.target, confirmed, failed)

    def _settle(self, probe: _Probe, why: str) -> None:
        if probe.why is not None or not self._active:
            return
        probe.why = why
        self._unsettled -= 1
        if probe.dial is not None and probe.dial.sock is not None:
            self._reactor.forget(probe.dial.sock)
        if not why and self._attempt(probe).kind != VIRTUAL:
            self._unreached.discard(probe.target)
        self.end_if_enough()

    def end_if_enough(self) -> None:
        """Report if all attempts have ended. If there is a route to every host (also one that its own probe
        has found), wait only some multiple of the time so far: on busy hosts the right address answers late.
        """
        if not self._active:
            return
        if not self._unsettled:
            self._finish()
        elif self._unreached.issubset(self._reached_by):
            local = all(item.scope for item in self._probes if item.why is None)
            grace_s = _LINK_LOCAL_GRACE_S if local else _GRACE_S
            if grace_s < self._grace_s:
                self._grace_s = grace_s
                wait_s = max(grace_s, _GRACE_FACTOR * self._since.elapsed_s())
                self._reactor.after(wait_s, self._stop_waiting)

    def _stop_waiting(self) -> None:
        why = f"no answer within {self._since.elapsed_s():.1f} s, while another address had answered"
        for probe in list(self._probes):
            if probe.why is None and probe.dial is not None:
                probe.dial.give_up(why)
                self._settle(probe, why)

    def _attempt(self, probe: _Probe) -> Attempt:
        """Return a result, as it is reported to the rendezvous."""
        assert probe.dial is not None
        local = next((item for item in self._interfaces if item.address == probe.dial.local), None)
        return Attempt(
            source=self._claim.source,
            target=probe.target,
            address=str(probe.offer["address"]),
            port=int(probe.offer["port"]),
            local=probe.dial.local,
            local_iface=local.name if local else "?",
            remote_iface=str(probe.offer.get("iface", "?")),
            kind=worse_kind(local.kind if local else WIRED, str(probe.offer.get("kind", WIRED))),
            why=probe.why or "",
            too_slow=bool(probe.why) and probe.dial.too_slow,
        )

    def _finish(self) -> None:
        attempts = [*map(self._attempt, self._probes), *self._not_dialled]
        self.close()
        self._report([item.to_json() for item in attempts])

    def close(self) -> None:
        """Close everything that is still open; nothing is reported any more."""
        self._active = False
        for probe in self._probes:
            if probe.dial is not None:
                probe.dial.give_up("the probe is over")
                if probe.dial.sock is not None:
                    self._reactor.forget(probe.dial.sock)
                    probe.dial.sock.close()
        self._probes = []


@dataclass
class _Probe:
    """One address that is dialled. Its connection is for this question alone."""

    target: int
    offer: Dict[str, Any]
    scope: int
    dial: Optional[Dial] = None
    why: Optional[str] = None  # the failure; "" on success, None until it has ended
