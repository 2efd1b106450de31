"""Dials, on the first rank of a host, all addresses of the first ranks of the others."""

from __future__ import annotations

import ipaddress
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from ..clock import Deadline
from ..transport.kinds import LOCAL, LOOPBACK, VIRTUAL
from ..transport.nics import Interface, machine, own_addresses
from ..transport.reactor import Reactor
from ..transport.routes import Attempt, not_dialled
from ..transport.secure import Encryption
from ..wire.auth import Claim
from .probe import Probe

_GRACE_S = 0.3
"""Minimum time to wait for the rest once every host has answered on a real interface,"""
_GRACE_FACTOR = 3.0
"""and in multiples of the time that this has taken: on busy hosts the right address may answer late."""
_LINK_LOCAL_GRACE_S = 0.03
"""The minimum where only link-local addresses are left, of interfaces that have answered at another address:
they are dialled by every interface of this machine, and all but one of these lead nowhere."""

Finished = Callable[[List[Dict[str, Any]]], None]


def grace_s(answered_s: float, least_s: float = _GRACE_S) -> float:
    """Return the seconds to wait for other addresses after all hosts have answered on a real one."""
    return max(least_s, _GRACE_FACTOR * answered_s)


def scopes_of(address: str, interfaces: Sequence[Interface]) -> List[int]:
    """Return the scopes with which to dial an address: every interface's if it is link-local, else 0."""
    if ":" in address and ipaddress.ip_address(address).is_link_local:
        return sorted({item.scope for item in interfaces if item.scope})
    return [0]


class Probing:
    """One round of probes: all addresses of all targets at once. ``finished`` gets all attempts."""

    def __init__(
        self,
        reactor: Reactor,
        interfaces: Sequence[Interface],
        key: bytes,
        claim: Claim,
        encryption: Optional[Encryption],
        finished: Finished,
    ) -> None:
        self._reactor = reactor
        self._interfaces = interfaces
        self._key = key
        self._claim = claim
        self._encryption = encryption
        self._report = finished
        self._probes: List[Probe] = []
        self._own: List[Attempt] = []
        self._unsettled = 0
        self._unreached: Set[int] = set()
        self._ifaces: Set[Tuple[int, str]] = set()
        self._active = False
        self._limit_s: Optional[float] = None
        self._since = Deadline(None)

    def begin(self, targets: Sequence[Dict[str, Any]], limit_s: float) -> None:
        """Dial every address of every target at once, and report when all attempts have ended. A target has a
        ``rank``, its ``addresses`` and its ``machine``; ``limit_s`` is for the slowest address.
        """
        self._active = True
        self._limit_s = None
        self._since = Deadline(limit_s)
        probes: List[Probe] = []
        own = {item.address for item in own_addresses()}
        for target in targets:
            elsewhere = target.get("machine") != machine()
            claim = self._claim._replace(target=int(target["rank"]))
            for offer in target["addresses"]:
                if offer.get("kind") in (LOOPBACK, LOCAL):
                    continue
                if elsewhere and offer["address"] in own:
                    # It leads to this host (docker0's does, on many hosts), not to the target.
                    self._own.append(not_dialled(claim.source, claim.target, offer))
                    continue
                for scope in scopes_of(str(offer["address"]), self._interfaces):
                    probes.append(
                        Probe(
                            self._reactor,
                            self._key,
                            claim,
                            offer,
                            scope,
                            self._interfaces,
                            self._settled,
                            limit_s,
                            self._encryption,
                        )
                    )
        self._probes = probes
        self._unsettled = len(probes)
        self._unreached = {probe.target for probe in probes}
        self._ifaces = set()
        if not probes:
            self._finish()

    def _settled(self, probe: Probe) -> None:
        """Report if all probes have ended; wait only a moment longer if every host has answered."""
        self._unsettled -= 1
        if probe.why == "":
            self._ifaces.add((probe.target, probe.iface))
            if probe.attempt().kind != VIRTUAL:
                self._unreached.discard(probe.target)
        if not self._active:
            return
        if not self._unsettled:
            self._finish()
        elif not self._unreached:
            going = (item for item in self._probes if item.why is None)
            again = all(item.scope and (item.target, item.iface) in self._ifaces for item in going)
            least_s = _LINK_LOCAL_GRACE_S if again else _GRACE_S
            if self._limit_s is None or least_s < self._limit_s:
                self._limit_s = least_s
                wait_s = grace_s(self._since.elapsed_s(), least_s)
                self._reactor.after(wait_s, partial(self._stop_waiting, list(self._probes)))

    def _stop_waiting(self, probes: Sequence[Probe]) -> None:
        for probe in probes:
            if probe.why is None:
                waited_s = self._since.elapsed_s()
                probe.give_up(f"no answer within {waited_s:.1f} s, while another address had answered")

    def _finish(self) -> None:
        attempts = [item.to_json() for item in (*(probe.attempt() for probe in self._probes), *self._own)]
        self.close()
        self._report(attempts)

    def close(self) -> None:
        """Close everything that is still open; nothing is reported any more."""
        self._active = False
        for probe in self._probes:
            probe.close()
        self._probes = []
