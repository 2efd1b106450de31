"""One simulated rank: its links over cables that may be cut, its heartbeats, and its progress."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from ringcomm.collective.observe import Progress
from ringcomm.engine.peer_channels import PeerChannels, SilenceLimits
from ringcomm.errors import PeerLostError, PeerStalledError, RingcommError
from ringcomm.rendezvous.control import error_from
from ringcomm.rendezvous.routing import ranges_of
from ringcomm.testing.faulty import FaultyFabric
from ringcomm.transport.base import Fabric, Link, LinkClosed

if TYPE_CHECKING:
    from tests.sim.jobs import Simulated

DEAD_AFTER_S = 3.0
ROOT_CAUSE_S, CENSUS_S = 5.0, 1.5


class Wire:
    """The state of every pair's cable, whatever links lead over it."""

    def __init__(self) -> None:
        self.silent: set[frozenset[int]] = set()
        self.broken: set[frozenset[int]] = set()


class _Cable(Link):
    """A link over a cable that may be cut."""

    def __init__(self, link: Link, wire: Wire, rank: int) -> None:
        self.peer, self._link, self._wire = link.peer, link, wire
        self._pair = frozenset((rank, link.peer))

    def _move(self, call: Any, views: Any) -> int:
        if self._pair in self._wire.broken:
            raise LinkClosed(self.peer, "connection reset by peer")
        return 0 if self._pair in self._wire.silent else int(call(views))

    def send(self, views: Any) -> int:
        return self._move(self._link.send, views)

    def recv(self, views: Any) -> int:
        return self._move(self._link.recv, views)

    @property
    def carrier(self) -> str:
        return self._link.carrier

    def close(self) -> None:
        self._link.close()


class Cables(Fabric):
    """A fabric over such cables."""

    def __init__(self, fabric: Fabric, wire: Wire) -> None:
        self.rank, self.size, self._fabric = fabric.rank, fabric.size, fabric
        self._links = {
            peer: _Cable(fabric.link(peer), wire, self.rank) for peer in range(self.size) if peer != self.rank
        }

    def link(self, peer: int) -> Link:
        return self._links[peer]

    def wait(self, reading: Any, writing: Any, timeout_s: float) -> None:
        raise AssertionError("no process waits in a simulation")

    make_wakeable = wake = lambda self: None

    def close(self) -> None:
        self._fabric.close()


class _Ask(Exception):
    """A rank has found something, and asks the rendezvous what it means."""

    def __init__(self, peer: int, why: str, kind: str) -> None:
        super().__init__(why)
        self.message = {"type": "lost", "peer": peer, "doing": "a collective", "why": why, "kind": kind}


class Rank:
    """One rank: its links, its heartbeats, and its progress."""

    def __init__(self, job: Simulated, rank: int, calls: Fabric, control: Fabric) -> None:
        self.job, self.rank = job, rank
        self.calls = FaultyFabric(calls, job.faults, job.turns)
        self.control = FaultyFabric(control, job.faults, job.turns)
        self.inbox: List[Tuple[float, Dict[str, Any]]] = []
        self.error: Optional[RingcommError] = None
        self.done = 0
        self.dead = False
        self.frozen_until_s = 0.0
        self.asking_until_s: Optional[float] = None
        self.own_view: Optional[RingcommError] = None
        self._noted: set[int] = set()
        self._part: Any = None
        hosts = [f"pc{number}" for number in range(job.plan.size)]
        self.peers = PeerChannels(
            self.control,
            hosts,
            SilenceLimits(DEAD_AFTER_S),
            _Ask,
            lambda: (self.progress(), Progress()),
            job.clock,
        )

    def progress(self) -> Progress:
        if self._part is None:
            return Progress(2 * self.done)
        waits_for = tuple(sorted({link.peer for link in self._part.waiting_for()[0]}))
        exchanged = tuple((peer, *pair) for peer, pair in self._part.exchanged().items())
        return Progress(2 * self.done + 2, self._part.moved_bytes, "a collective", waits_for, exchanged)

    @property
    def over(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.dead or self.error is not None

    def step(self) -> bool:
        """Do what can be done now; whether anything was."""
        now_s = self.job.now_s
        arrived = [message for at_s, message in self.inbox if at_s <= now_s]
        self.inbox = [item for item in self.inbox if item[0] > now_s]
        for message in arrived:
            if message["type"] == "ping":
                heard, silent = self.peers.divided()
                pong = {"type": "pong", "heard": ranges_of(heard), "silent": ranges_of(silent)}
                self.job.report(self.rank, pong)
            elif message["type"] == "abort":
                return self.end(error_from(message))
        if self.asking_until_s is not None:
            if now_s >= self.asking_until_s:
                assert self.own_view is not None
                return self.end(self.own_view)
            return bool(arrived)
        try:
            self.peers.awake = True
            self.peers.pulse()
            self.peers.messages.flush()
            for peer in set(self.peers.messages.gone) - self._noted:
                self._noted.add(peer)
                self.job.report(self.rank, {"type": "closed", "peer": peer, "why": "it hung up"})
            return self._advance() or bool(arrived)
        except _Ask as ask:
            self._ask(ask.message)
        except LinkClosed as closed:
            self._ask(_Ask(closed.peer, closed.reason, "lost").message)
        return True

    def _ask(self, message: Dict[str, Any]) -> None:
        lost = message["kind"] == "lost"
        error = PeerLostError if lost else PeerStalledError
        peer = self.rank if message["kind"] == "cut off" else message["peer"]
        self.own_view = error(message["why"], rank=peer)
        self.asking_until_s = self.job.now_s + (ROOT_CAUSE_S if lost else CENSUS_S)
        self.job.report(self.rank, message)

    def _advance(self) -> bool:
        if self.done == len(self.job.plan.calls):
            return False
        if self._part is None:
            self._part = self.job.start(self)
        before = self._part.moved_bytes
        if self._part.advance():
            self.job.cases[self.done].check(self.rank)
            self._part = None
            self.done += 1
            return True
        return bool(self._part.moved_bytes != before)

    def end(self, error: Optional[RingcommError]) -> bool:
        """It has raised (or, with None, died): its links close, as those of a process that ends."""
        self.error, self.dead = error, error is None
        self.calls.close()
        self.control.close()
        return True
