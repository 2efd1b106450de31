"""Probing: which address leads to which rank.

A probe runs on the first rank of a host and dials one address of another host's first rank (:mod:`.probing`
starts all probes of a round). If the process that answers authenticates itself as a member of the same job
and sends that rank, the address leads to it. If several wires do (a wire is a pair of interfaces, one of each
host), they are measured over separate connections (:mod:`.race`), so that the fastest can be chosen.
"""

from __future__ import annotations

import socket
from typing import Any, Callable, Dict, Optional, Sequence

from ..transport.connect import Dial
from ..transport.kinds import WIRED, worse_kind
from ..transport.nics import Interface, interface_of
from ..transport.reactor import Reactor
from ..transport.routes import Attempt
from ..transport.secure import Encryption
from ..wire.auth import Claim, Purpose
from .echo import await_echo

PROBE_S = 3.0
"""Time limit for the slowest address to answer."""
PROBE_AGAIN_S = 10.0
"""The same in the second round, on hosts that are busy with other work."""


class Probe:
    """The asking side of a probe: dials one address, at once, and checks which rank answers.

    Its connection is for this question alone; :meth:`close` closes it. ``claim`` names this rank and the
    expected one; ``offer`` is the address as that rank offered it: ``address``, ``port``, ``iface`` and
    ``kind``; ``settled`` is called once, with this object, when the probe has succeeded or failed.
    """

    def __init__(
        self,
        reactor: Reactor,
        key: bytes,
        claim: Claim,
        offer: Dict[str, Any],
        scope: int,
        interfaces: Sequence[Interface],
        settled: Callable[[Probe], None],
        limit_s: float = PROBE_S,
        encryption: Optional[Encryption] = None,
    ) -> None:
        self.target = claim.target
        self.iface = str(offer.get("iface", "?"))
        self.scope = scope
        self.why: Optional[str] = None  # the failure; "" on success, None until the probe has ended
        self._reactor = reactor
        self._source = claim.source
        self._offer = offer
        self._interfaces = interfaces
        self._settled = settled
        self._local = ""
        address = (str(offer["address"]), int(offer["port"]))
        self._dial = Dial(
            reactor,
            address,
            key,
            claim._replace(purpose=Purpose.PROBE),
            self._proven,
            limit_s,
            scope,
            encryption,
        )

    @property
    def _sock(self) -> socket.socket:
        assert self._dial.sock is not None
        return self._dial.sock

    def _proven(self, dial: Dial) -> None:
        if dial.sock is None:
            self._settle(dial.reason)
        else:
            await_echo(
                self._reactor, dial.sock, dial.session, self.target, self._confirmed, self._settle
            )

    def _confirmed(self) -> None:
        self._local = str(self._sock.getsockname()[0]).split("%")[0]
        iface = interface_of(self._local, self._interfaces)
        self._settle("" if iface != "?" else f"it goes out by {self._local}, which --iface excludes")

    def _settle(self, why: str) -> None:
        if self.why is not None:
            return
        self.why = why
        if self._dial.sock is not None:
            self._reactor.forget(self._sock)
        self._settled(self)

    def give_up(self, why: str) -> None:
        """Stop waiting for an answer."""
        self._dial.give_up(why)
        self._settle(why)

    def close(self) -> None:
        """Close the connection, if there is one."""
        self._dial.give_up("the probe is over")
        if self._dial.sock is not None:
            self._reactor.forget(self._sock)
            self._sock.close()

    def attempt(self) -> Attempt:
        """Return the result, as it is reported to the rendezvous."""
        local = next((item for item in self._interfaces if item.address == self._local), None)
        return Attempt(
            source=self._source,
            target=self.target,
            address=str(self._offer["address"]),
            port=int(self._offer["port"]),
            local=self._local,
            local_iface=local.name if local else "?",
            remote_iface=self.iface,
            kind=worse_kind(local.kind if local else WIRED, str(self._offer.get("kind", WIRED))),
            why=self.why or "",
            too_slow=bool(self.why) and self._dial.too_slow,
        )
