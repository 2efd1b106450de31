"""An elastic job in one thread: processes die, freeze, join and leave while the others compute.

The executors, the heartbeats and the rendezvous are the real ones; the network, the clock and the processes
are simulated. Every process runs the same program: find out which rank has the newest state, take it, and
then one all-reduce after another, each of which is a step.
"""

from __future__ import annotations

import random
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np

from ringcomm.collective.execute import SegmentPool
from ringcomm.collective.reduce import Kernel
from ringcomm.collective.short import make_execution
from ringcomm.config import Slot
from ringcomm.configuration.membership import Limits
from ringcomm.dtypes import code_of
from ringcomm.errors import ProtocolError, Recoverable, RingcommError
from ringcomm.ops import Collective, Sum
from ringcomm.rendezvous.control import error_from
from ringcomm.rendezvous.membership import Drop, Notice, Send, Terms, Timer
from ringcomm.rendezvous.state import Rendezvous
from ringcomm.testing.faulty import Faults, Turns
from ringcomm.transport.memory import memory_fabrics
from ringcomm.wire.frames import NO_OP, NO_ROOT, Header
from ringcomm.wire.messages import encode, validate
from tests.sim.jobs import DEAD_AFTER_S, Cables, Rank, Wire
from tests.unit.schedule.building import make as make_schedule

VERSION = "1.2.3"
_WIDTH = 5
EVENTS = ("dies", "dies", "freezes", "joins", "joins", "is excluded", "link breaks", "is slow")


class ElasticSim:
    """One seed's job."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(f"elastic/{seed}")
        dice = self.dice
        self.launched = dice.random() < 0.5
        self.start_size = dice.choice((1, 2, 2, 3, 4))
        self.min_size = dice.randint(1, self.start_size)
        self.steps = dice.choice((3, 10, 40))
        self.segment_bytes = dice.choice((16, 64, 4096))
        self.now_s = 1000.0
        self.turns = Turns()
        self.faults = Faults(seed=seed, would_block=0.1, short=0.4, most_bytes=60, delay=0.02, most_turns=30)
        most = dice.choice((None, self.start_size, self.start_size + 1))
        limits = Limits(self.start_size, self.min_size, most, timeout_s=30.0)
        self.state = Rendezvous(Terms(VERSION, 20.0, limits=limits, launched=self.launched))
        self.processes: List[Process] = []
        self.connections: Dict[int, Process] = {}
        self.epochs: Dict[int, Epoch] = {}
        self.views: Dict[int, Any] = {}
        self.raises: Dict[int, Dict[str, set[int]]] = {}
        self.results: Dict[Tuple[int, int], bytes] = {}
        self.to_rendezvous: List[Tuple[float, int, Any]] = []
        self.last_s: Dict[Tuple[str, int], float] = {}
        self.timers: List[float] = []
        self.notices: List[Notice] = []
        self.history: List[str] = []
        self.slow: Optional[Process] = None
        self.plan = sorted(
            (1000.0 + dice.random() ** 2 * dice.choice((0.3, 1.0, 4.0)), dice.choice(EVENTS))
            for _ in range(dice.randint(0, 6))
        )
        for _ in range(self.start_size):
            self.spawn()

    def clock(self) -> float:
        return self.now_s

    def new_connection(self, process: Process) -> int:
        number = len(self.connections)
        self.connections[number] = process
        return number

    def spawn(self) -> None:
        """Start one more process."""
        number = len(self.processes)
        process = Process(self, number)
        self.processes.append(process)
        if self.launched:
            self.act(self.state.expect(number, Slot(0, number), "pc"))
        process.ask()

    def epoch(self, number: int, members: List[int]) -> Epoch:
        """The epoch with this number; its members must be the same for all of them."""
        if number not in self.epochs:
            self.epochs[number] = Epoch(self, number, members)
        assert self.epochs[number].members == members, f"two views of epoch {number}: {self.describe()}"
        return self.epochs[number]

    def raised(self, epoch: Epoch, process: Process, error: RingcommError) -> None:
        """A member has raised an error."""
        texts = self.raises.setdefault(epoch.number, {})
        texts.setdefault(f"{type(error).__name__}: {error}", set()).add(process.number)

    def compare(self, process: Process) -> None:
        """In one epoch all ranks have the same numbers after the same step."""
        key = process.epoch.number, process.steps
        mine = process.weights.tobytes()
        assert self.results.setdefault(key, mine) == mine, f"{key} differs: {self.describe()}"

    # ---- messages -----------------------------------------------------------------------------

    def _at(self, way: str, connection: int) -> float:
        at_s = max(self.now_s + self.dice.random() * 0.02, self.last_s.get((way, connection), 0.0))
        self.last_s[way, connection] = at_s
        return at_s

    def send(self, process: Process, message: Any) -> None:
        """From a process to the rendezvous, in order."""
        self.to_rendezvous.append((self._at("up", process.connection), process.connection, message))

    def hang_up(self, process: Process) -> None:
        """The control connection of a process ends, after what it has sent."""
        self.send(process, None)

    def act(self, actions: Any) -> None:
        """Do what the rendezvous wants."""
        for action in actions:
            if isinstance(action, Send):
                encode(validate(action.message))
                if action.message["type"] == "probe":
                    members = [item["member"] for item in action.message["members"]]
                    number = action.message["generation"]
                    assert self.views.setdefault(number, members) == members, f"two views: {self.describe()}"
                process = self.connections[action.connection]
                process.inbox.append((self._at("down", action.connection), action.message))
            elif isinstance(action, Timer):
                self.timers.append(self.now_s + action.delay_s)
            elif isinstance(action, Notice):
                self.history.append(f"{self.now_s - 1000:.2f} {action.kind}: {action.text[:150]}")
                self.notices.append(action)
            else:
                assert isinstance(action, Drop)
                self.inbox_end(self.connections[action.connection])

    def inbox_end(self, process: Process) -> None:
        """The rendezvous has closed the connection."""
        at_s = self._at("down", process.connection)
        process.inbox.append((at_s, {"type": "refused", "reason": "it closed the connection"}))

    def serve(self) -> bool:
        """Give the rendezvous what has arrived."""
        due = [at_s for at_s in self.timers if at_s <= self.now_s]
        if due:
            self.timers = [at_s for at_s in self.timers if at_s > self.now_s]
            self.act(self.state.tick(self.now_s))
        arrived = sorted((item for item in self.to_rendezvous if item[0] <= self.now_s), key=lambda x: x[0])
        for item in arrived:
            self.to_rendezvous.remove(item)
            self.take(item[1], item[2])
        return bool(arrived or due)

    def take(self, connection: int, message: Any) -> None:
        """One message at the rendezvous."""
        state, now_s = self.state, self.now_s
        if message is None:
            self.act(state.disconnected(connection, now_s))
            return
        try:
            self.act(state.handle(connection, message, now_s))
        except ProtocolError as problem:
            raise AssertionError(f"{problem}: {self.describe()}") from problem

    # ---- what happens -------------------------------------------------------------------------

    def strike(self) -> None:
        """What is due happens to a process."""
        while self.plan and self.plan[0][0] <= self.now_s:
            _, what = self.plan.pop(0)
            here = [item for item in self.processes if not item.over]
            self.history.append(f"{self.now_s - 1000:.2f} {what}")
            if what == "joins":
                self.spawn()
            elif here:
                self.hit(what, self.dice.choice(here))

    def hit(self, what: str, victim: Process) -> None:
        """One event of one process."""
        self.history[-1] += f" {victim.number}"
        if what == "dies":
            if victim.rank is not None:
                victim.rank.end(None)
            victim.outcome = "dead"
            self.hang_up(victim)
            if self.launched and self.dice.random() < 0.8:
                self.act(self.state.process_exited(victim.number, "killed by SIGKILL", False, self.now_s))
        elif what == "freezes":
            victim.frozen = True
        elif what == "is slow":
            self.slow = victim
        elif what == "is excluded" and self.launched:
            self.act(self.state.exclude(victim.number, "its host was removed", self.now_s))
        elif what == "link breaks" and victim.epoch is not None and victim.epoch.plan.size > 1:
            rank = victim.rank.rank
            other = self.dice.choice([item for item in range(victim.epoch.plan.size) if item != rank])
            victim.epoch.wire.broken.add(frozenset((rank, other)))

    # ---- time ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until every process has ended; AssertionError if anything is not as it must be."""
        idle = 0
        while not all(item.over for item in self.processes) or self.plan:
            self.turns.now += 1
            self.strike()
            moved = self.serve()
            awake = [item for item in self.processes if not item.over]
            if self.slow in awake and len(awake) > 1 and self.dice.random() < 0.9:
                awake.remove(self.slow)
            if awake:
                moved = self.dice.choice(awake).turn() or moved
            idle = 0 if moved else idle + 1
            self.now_s += self.dice.random() * 0.002
            if idle > 80:
                self._skip()
                idle = 0
            assert self.now_s < 1200.0, f"seed {self.seed}: no end. {self.describe()}"
        self._judge()

    def _skip(self) -> None:
        """Nothing moves: go on to when something is due."""
        times = [item[0] for item in self.to_rendezvous] + list(self.timers)
        times += [at_s for at_s, _ in self.plan]
        for process in self.processes:
            if not process.over:
                times += [at_s for at_s, _ in process.inbox]
                if process.rank is not None:
                    times.append(self.now_s + process.rank.peers.alarm_s())
                    if process.rank.asking_until_s is not None:
                        times.append(process.rank.asking_until_s)
        later = [at_s for at_s in times if at_s > self.now_s]
        self.now_s = min([*later, self.now_s + 0.25])

    def _judge(self) -> None:
        where = f"seed {self.seed}: {self.describe()}"
        for number, texts in self.raises.items():
            assert len(texts) == 1, f"epoch {number} raised {texts}: {where}"
        failed = [item for item in self.processes if item.outcome == "failed"]
        assert len({str(item.error) for item in failed}) <= 1, where
        finished = [item for item in self.processes if item.outcome == "finished"]
        ends = {(item.epoch.number, item.steps, item.weights.tobytes()) for item in finished if item.epoch}
        assert len({item[0] for item in ends}) == len(ends), where
        kinds = [item.kind for item in self.notices if item.kind in ("failed", "ended")]
        assert len(kinds) <= 1, where
        if failed:
            assert kinds == ["failed"] and not finished, where

    def describe(self) -> str:
        """Return what happened, for the reader of a failure."""
        processes = "; ".join(
            f"{item.number}: {item.outcome or item.stage}{' frozen' if item.frozen else ''}, "
            f"{item.steps} steps, epoch {item.last_epoch}"
            for item in self.processes
        )
        return (
            f"launched={self.launched} min={self.min_size} start={self.start_size} steps={self.steps}\n"
            + "\n".join(self.history) + f"\n{processes}\nraised: {self.raises}"
        )


# ---- one process, and the views that it is in ---------------------------------------------------


class _Plan(NamedTuple):
    size: int
    calls: range


class Epoch:
    """One view: its members' ranks, connected by memory: the ``job`` of :class:`tests.sim.jobs.Rank`."""

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
