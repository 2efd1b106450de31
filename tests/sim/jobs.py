"""A whole job in one thread: real executors, real heartbeats, the real rendezvous; and things go wrong.

What is simulated is the network (memory that delays, splits, holds back and cuts, by a seed), the clock, and
which rank runs when. Every rank runs the same collectives. While nothing breaks for good, all must end with
the right numbers; otherwise all surviving ranks must end with the same error, and it must name the culprit.
"""

from __future__ import annotations

import random
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from ringcomm.collective.execute import SegmentPool
from ringcomm.collective.observe import Progress
from ringcomm.collective.short import make_execution
from ringcomm.dtypes import code_of
from ringcomm.engine.peer_channels import PeerChannels, SilenceLimits
from ringcomm.errors import PeerLostError, PeerStalledError, RingcommError
from ringcomm.ops import Collective
from ringcomm.rendezvous.control import error_from
from ringcomm.rendezvous.routing import ranges_of
from ringcomm.testing.faulty import Faults, FaultyFabric, Turns
from ringcomm.transport.base import Fabric, Link, LinkClosed
from ringcomm.transport.memory import memory_fabrics
from ringcomm.wire.frames import NO_OP, NO_ROOT, Header
from tests.sim.cases import CASES
from tests.unit.rendezvous.simulated import Job as RendezvousJob
from tests.unit.rendezvous.simulated import seats_of

DEAD_AFTER_S = 3.0
ROOT_CAUSE_S, CENSUS_S = 5.0, 1.5
FAULTS = (
    "none", "slow", "frozen for a while", "silent for a while", "dies", "freezes", "is isolated",
    "link falls silent", "link breaks",
)  # fmt: skip
HARMLESS = FAULTS[:4]


class Plan(NamedTuple):
    """What a seed stands for."""

    size: int
    calls: List[Tuple[str, int]]
    fault: str
    victim: int
    other: int
    at_s: float
    lasts_s: float

    @classmethod
    def of(cls, seed: int, faults: Sequence[str] = FAULTS) -> Plan:
        """The plan of this seed."""
        dice = random.Random(seed)
        size = dice.choice((2, 3, 3, 4))
        names = sorted(CASES)
        calls = [(dice.choice(names), dice.choice((0, 1, 7, 40, 90))) for _ in range(dice.randint(2, 5))]
        victim, other = dice.sample(range(size), 2)
        return cls(
            size, calls, faults[seed % len(faults)], victim, other, dice.random() ** 2 * 0.3,
            DEAD_AFTER_S * dice.uniform(0.1, 0.45),
        )  # fmt: skip


class Simulated:
    """One seed's job, with these possible faults."""

    def __init__(self, seed: int, faults: Sequence[str] = FAULTS) -> None:
        self.seed = seed
        self.plan = Plan.of(seed, faults)
        self.dice = random.Random(f"order/{seed}")
        self.now_s = 1000.0
        self.turns = Turns()
        self.faults = Faults(seed=seed, would_block=0.1, short=0.4, most_bytes=60, delay=0.02, most_turns=30)
        self.wire = Wire()
        self.cases = [CASES[name](self.plan.size, count, np.int32) for name, count in self.plan.calls]
        self.rendezvous = RendezvousJob(self.plan.size, seats_of(*[1] * self.plan.size))
        self._seat_all_ranks()
        self.outbox: List[Tuple[float, int, Dict[str, Any]]] = []
        channels = [memory_fabrics(self.plan.size, 200) for _ in range(2)]
        self.ranks = [
            Rank(self, rank, *(Cables(channel[rank], self.wire) for channel in channels))
            for rank in range(self.plan.size)
        ]
        self.segments = [self.dice.choice((16, 64, 4096)) for _ in self.ranks]
        self._struck = False

    def clock(self) -> float:
        """The virtual time."""
        return self.now_s

    def _seat_all_ranks(self) -> None:
        for rank in range(self.plan.size):
            self.rendezvous.join_seat(rank, rank)
        leaders = range(self.plan.size)
        for rank in leaders:
            attempts = [
                {
                    "source": rank, "target": peer, "address": f"10.0.0.{peer}", "port": 5000,
                    "local": "", "local_iface": "eth0", "remote_iface": "eth0", "kind": "wired",
                    "why": "", "mb_per_s": None, "too_slow": False,
                }
                for peer in leaders
                if peer != rank
            ]  # fmt: skip
            self.rendezvous.probed(rank, *attempts)
        self.rendezvous.link_all(range(self.plan.size))

    def start(self, rank: Rank) -> Any:
        """A rank's part in its next call."""
        case = self.cases[rank.done]
        data = case.data[rank.rank]
        header = Header(0, 0, Collective.ALLREDUCE, NO_OP, code_of(data.dtype), NO_ROOT, 0, 0)
        kernel = case.kernel()
        part = make_execution(
            case.schedules[rank.rank], rank.calls, header, data.dtype,
            SegmentPool(self.segments[rank.rank]), kernel() if kernel is not None else None,
        )  # fmt: skip
        part.arm(rank.done + 1, data, case.sources[rank.rank] if case.sources is not None else None)
        return part

    # ---- the rendezvous ----------------------------------------------------------------------

    def report(self, rank: int, message: Dict[str, Any]) -> None:
        """A rank says something to the rendezvous, which takes a while."""
        self.outbox.append((self.now_s + self.dice.random() * 0.02, rank, message))

    def _isolated(self, rank: int) -> bool:
        return self._struck and self.plan.fault == "is isolated" and rank == self.plan.victim

    def _serve(self) -> bool:
        """Give the rendezvous what has arrived, and all ranks what it sends."""
        state = self.rendezvous
        state.pass_time(max(0.0, self.now_s - state.now_s))
        arrived = [item for item in self.outbox if item[0] <= self.now_s and not self._isolated(item[1])]
        for item in arrived:
            self.outbox.remove(item)
            _, rank, message = item
            state.say(rank, message)
        for rank in self.ranks:
            told, state.told[rank.rank] = state.told[rank.rank], []
            if not self._isolated(rank.rank):
                delay_s = self.dice.random() * 0.02
                rank.inbox += [
                    (self.now_s + delay_s, item) for item in told if item["type"] in ("ping", "abort")
                ]
        return bool(arrived)

    # ---- what goes wrong ---------------------------------------------------------------------

    def _strike(self) -> None:
        plan = self.plan
        victim = self.ranks[plan.victim]
        if not self._struck and self.now_s >= 1000.0 + plan.at_s:
            self._struck = True
            pairs = {frozenset((plan.victim, rank)) for rank in range(plan.size) if rank != plan.victim}
            pair = frozenset((plan.victim, plan.other))
            if plan.fault == "frozen for a while":
                victim.frozen_until_s = self.now_s + plan.lasts_s * 2
            elif plan.fault == "freezes":
                victim.frozen_until_s = float("inf")
            elif plan.fault == "dies":
                victim.end(None)
                self.rendezvous.hang_up(plan.victim)
                if self.dice.random() < 0.7:
                    self.rendezvous.exit(plan.victim, "killed by SIGKILL")
            elif plan.fault == "is isolated":
                self.wire.silent |= pairs
            elif plan.fault in ("link falls silent", "silent for a while"):
                self.wire.silent.add(pair)
            elif plan.fault == "link breaks":
                self.wire.broken.add(pair)
        if plan.fault == "silent for a while" and self.now_s >= 1000.0 + plan.at_s + plan.lasts_s:
            self.wire.silent.clear()

    # ---- time --------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every rank has ended in one of the two ways; AssertionError for any other."""
        idle = 0
        while not self._ended():
            self.turns.now += 1
            self._strike()
            moved = self._serve()
            awake = [rank for rank in self.ranks if not rank.over and rank.frozen_until_s <= self.now_s]
            slow = self.plan.fault == "slow" and self.dice.random() < 0.9
            if awake and not (slow and len(awake) == self.plan.size and awake[0].rank == self.plan.victim):
                moved = self.dice.choice(awake).step() or moved
            idle = 0 if moved else idle + 1
            self.now_s += self.dice.random() * 0.002
            if idle > 60:
                self._skip()
                idle = 0
            assert self.now_s < 1060.0, f"seed {self.seed}: no end. {self.describe()}"
        self._judge()

    def _skip(self) -> None:
        """Nothing moves: go on to when something is due."""
        times = [at_s for at_s, *_ in self.outbox] + list(self.rendezvous.timers)
        for rank in self.ranks:
            if not rank.over and rank.frozen_until_s <= self.now_s:
                times += [at_s for at_s, _ in rank.inbox]
                times += [self.now_s + rank.peers.alarm_s()]
                times += [] if rank.asking_until_s is None else [rank.asking_until_s]
            elif rank.frozen_until_s < float("inf"):
                times.append(rank.frozen_until_s)
        times += [] if self._struck else [1000.0 + self.plan.at_s]
        later = [at_s for at_s in times if at_s > self.now_s]
        self.now_s = min([*later, self.now_s + 0.25])

    def _ended(self) -> bool:
        here = [rank for rank in self.ranks if not rank.dead and rank.frozen_until_s < float("inf")]
        if all(rank.error is not None for rank in here):
            return True
        finished = all(rank.done == len(self.plan.calls) for rank in self.ranks)
        return finished and self.plan.fault in HARMLESS and all(rank.error is None for rank in here)

    def _judge(self) -> None:
        plan, where = self.plan, f"seed {self.seed}: {self.describe()}"
        here = [rank for rank in self.ranks if not rank.dead and rank.frozen_until_s < float("inf")]
        if self._isolated(plan.victim):
            here.remove(self.ranks[plan.victim])
            alone = self.ranks[plan.victim].error
            assert isinstance(alone, PeerLostError), where
        if plan.fault in HARMLESS:
            assert all(rank.error is None and rank.done == len(plan.calls) for rank in here), where
            return
        assert len({(type(rank.error), str(rank.error)) for rank in here}) == 1, where
        error: Any = here[0].error
        assert isinstance(error, PeerLostError), where
        if plan.fault.startswith("link"):
            assert error.rank is None and set(getattr(error, "ranks", ())) == {plan.victim, plan.other}, where
        else:
            assert error.rank == plan.victim, where

    def describe(self) -> str:
        """Return what happened, for the reader of a failure."""
        ranks = "; ".join(
            f"rank {rank.rank}: {rank.done} of {len(self.plan.calls)} calls, "
            f"{'dead' if rank.dead else rank.error!r}"
            for rank in self.ranks
        )
        return f"{self.plan}, after {self.now_s - 1000.0:.2f} s: {ranks}"


# ---- one rank ----------------------------------------------------------------------------------


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
