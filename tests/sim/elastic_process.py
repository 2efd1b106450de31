"""One process of a simulated elastic job, and the views that it is in; see elastic.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from ringcomm.collective.execute import SegmentPool
from ringcomm.collective.reduce import Kernel
from ringcomm.collective.short import make_execution
from ringcomm.dtypes import code_of
from ringcomm.errors import Recoverable, RingcommError
from ringcomm.ops import Collective, Sum
from ringcomm.rendezvous.control import error_from
from ringcomm.transport.memory import memory_fabrics
from ringcomm.wire.frames import NO_OP, NO_ROOT, Header
from ringcomm.wire.messages import validate
from tests.sim.rank import DEAD_AFTER_S, Cables, Rank, Wire
from tests.unit.schedule.building import make as make_schedule

if TYPE_CHECKING:
    from tests.sim.elastic import ElasticSim

VERSION = "1.2.3"
_WIDTH = 5


class _Plan(NamedTuple):
    size: int
    calls: range


class Epoch:
    """One view: its members' ranks, connected by memory: the ``job`` of :class:`tests.sim.rank.Rank`."""

    def __init__(self, sim: ElasticSim, number: int, members: List[int]) -> None:
        self.sim, self.number, self.members = sim, number, members
        size = len(members)
        self.plan = _Plan(size, range(10**6))
        self.faults, self.turns, self.clock, self.dice = sim.faults, sim.turns, sim.clock, sim.dice
        self.cases = self
        self.wire = Wire()
        channels = [memory_fabrics(size, 200) for _ in range(2)]
        self.ranks = [
            Rank(self, rank, *(Cables(channel[rank], self.wire) for channel in channels))
            for rank in range(size)
        ]

    @property
    def now_s(self) -> float:
        return self.sim.now_s

    def __getitem__(self, _: int) -> Epoch:
        return self

    def process(self, rank: int) -> Process:
        return self.sim.processes[self.members[rank]]

    def check(self, rank: int) -> None:
        """A collective of this rank has ended."""
        self.process(rank).collected()

    def report(self, rank: int, message: Dict[str, Any]) -> None:
        process = self.process(rank)
        if process.epoch is self:
            self.sim.send(process, message)

    def start(self, rank: Rank) -> Any:
        """The next collective of this rank."""
        return self.process(rank.rank).next_collective(rank)


class Process:
    """One process: what it has computed, and how far it is in joining."""

    def __init__(self, sim: ElasticSim, number: int) -> None:
        self.sim, self.number = sim, number
        self.connection = sim.new_connection(self)
        self.steps, self.position = 0, 0
        self.weights = np.zeros(_WIDTH, np.int64)
        self.epoch: Optional[Epoch] = None
        self.rank: Optional[Rank] = None
        self.assignment: Optional[Dict[str, Any]] = None
        self.last_epoch = -1
        self.changes = 0
        self.stage = "positions"
        self.data = np.zeros(0, np.int64)
        self.outcome = ""
        self.error: Optional[RingcommError] = None
        self.frozen = False
        self.inbox: List[Tuple[float, Dict[str, Any]]] = []

    @property
    def over(self) -> bool:
        return self.outcome != "" or self.frozen

    def ask(self) -> None:
        """Ask for the next view."""
        self.assignment = self.epoch = self.rank = None
        self.sim.send(
            self,
            validate({
                "type": "join", "version": VERSION, "hostname": "pc", "pid": 100 + self.number,
                "addresses": [], "dead_after": DEAD_AFTER_S, "member": self.number,
                "epoch": self.last_epoch, "position": self.position,
            }),
        )  # fmt: skip

    # ---- joining ------------------------------------------------------------------------------

    def take(self, message: Dict[str, Any]) -> None:
        """A message of the rendezvous."""
        kind = message["type"]
        if kind == "updated":
            self.changes |= message["change"]
        elif kind in ("excluded", "refused"):
            self.end(kind)
        elif self.rank is not None:
            if int(message.get("epoch", self.epoch.number)) == self.epoch.number:
                self.rank.inbox.append((self.sim.now_s, message))
        elif kind == "ping":
            self.sim.send(self, {"type": "pong", "heard": [], "silent": []})
        elif kind == "abort":
            number = -1 if self.assignment is None else self.assignment["generation"]
            if "epoch" not in message:
                self.error = error_from(message)
                self.end("failed")
            elif message["epoch"] == number:
                self.ask()
        elif kind == "probe":
            self.assignment = message
            self.last_epoch = message["generation"]
        elif kind == "link":
            self.sim.send(self, {"type": "linked", "links": []})
        elif kind == "go":
            members = [item["member"] for item in self.assignment["members"]]
            self.epoch = self.sim.epoch(self.assignment["generation"], members)
            self.rank = self.epoch.ranks[self.assignment["rank"]]
            self.stage, self.changes = "positions", 0

    # ---- the program --------------------------------------------------------------------------

    def next_collective(self, rank: Rank) -> Any:
        size, own = self.epoch.plan.size, rank.rank
        if self.stage == "positions":
            self.data = np.zeros(size, np.int64)
            self.data[own] = self.position
        elif self.stage == "sync":
            self.data = np.concatenate([[self.steps, self.position], self.weights])
        else:
            self.data = np.full(_WIDTH + 1, (self.number + 1) * (self.steps + 1), np.int64)
            self.data[-1] = self.changes
        broadcast = self.stage == "sync"
        kind = "broadcast" if broadcast else "allreduce"
        name = "tree" if broadcast else "direct" if rank.done % 2 else "ring"
        schedule = make_schedule(kind, name, own, size, self.data.size, root=0)
        header = Header(
            0, self.epoch.number, Collective.ALLREDUCE, NO_OP, code_of(self.data.dtype), NO_ROOT, 0, 0
        )
        kernel = None if broadcast else Kernel(Sum, self.data.dtype, size)
        part = make_execution(
            schedule, rank.calls, header, self.data.dtype, SegmentPool(self.sim.segment_bytes), kernel
        )
        part.arm(rank.done + 1, self.data, None)
        return part

    def collected(self) -> None:
        """The collective has ended: use its result."""
        if self.stage == "positions":
            assert self.data[0] == max(self.data), f"rank 0 is behind: {self.sim.describe()}"
            same = len(set(self.data.tolist())) == 1 and self.data[0] > 0
            self.stage = "step" if same else "sync"
        elif self.stage == "sync":
            self.steps, self.position = int(self.data[0]), max(1, int(self.data[1]))
            self.weights = self.data[2:].copy()
            self.stage = "step"
        else:
            numbers = sum(number + 1 for number in self.epoch.members)
            assert (self.data[:-1] == numbers * (self.steps + 1)).all(), self.sim.describe()
            self.weights = self.weights + self.data[:-1]
            self.steps += 1
            self.position += 1
            self.sim.compare(self)
            if self.steps == self.sim.steps:
                self.end("finished")
            elif self.data[-1]:
                self.leave_view()

    def leave_view(self) -> None:
        """At a boundary: end the links, and ask for the next view."""
        rank = self.rank
        rank.peers.close()
        rank.end(None)
        self.ask()

    def turn(self) -> bool:
        """Do what can be done now; whether anything was."""
        now_s = self.sim.now_s
        arrived = [item for item in self.inbox if item[0] <= now_s]
        for item in arrived:
            if item in self.inbox and not self.over:
                self.inbox.remove(item)
                self.take(item[1])
        if self.rank is None or self.over:
            return bool(arrived)
        rank = self.rank
        if self.epoch.plan.size == 1:
            self.alone(rank)
            return True
        moved = rank.step()
        if rank.error is not None and self.rank is rank:
            if isinstance(rank.error, Recoverable):
                self.sim.raised(self.epoch, self, rank.error)
                self.ask()
            else:
                self.error = rank.error
                self.end("failed")
        return moved or bool(arrived)

    def alone(self, rank: Rank) -> None:
        """With one rank every collective is done at once."""
        for _, message in rank.inbox:
            if message["type"] == "ping":
                self.sim.send(self, {"type": "pong", "heard": [], "silent": []})
        rank.inbox.clear()
        self.data = np.full(_WIDTH + 1, (self.number + 1) * (self.steps + 1), np.int64)
        self.data[-1] = self.changes
        self.stage, self.position = "step", max(1, self.position)
        self.collected()

    def end(self, outcome: str) -> None:
        """It ends: regularly, or with an error."""
        self.outcome = outcome
        ok = outcome == "finished"
        if self.rank is not None:
            if ok:
                self.rank.peers.close()
            self.rank.end(None)
        if outcome in ("finished", "failed"):
            self.sim.send(self, {"type": "leaving", "reason": outcome, "ok": ok})
        self.sim.hang_up(self)
