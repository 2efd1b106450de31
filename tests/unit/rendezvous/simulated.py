"""A rendezvous without sockets: connections are numbers, time is an argument, what it says is recorded."""

from __future__ import annotations

from collections import defaultdict

from ringcomm.config import Slot
from ringcomm.configuration.membership import Limits
from ringcomm.rendezvous.epoch import Phase
from ringcomm.rendezvous.membership import NO_RELAY, Drop, Notice, Seat, Send, Terms, Timer
from ringcomm.rendezvous.state import Rendezvous
from ringcomm.wire.messages import encode, validate

VERSION = "1.2.3"


def seats_of(*slots_per_host):
    """Seats on hosts ``host0``, ``host1``, … with so many slots each."""
    return [
        Seat(Slot(index, slot), f"host{index}")
        for index, slots in enumerate(slots_per_host)
        for slot in range(slots)
    ]


def join_message(hostname="host0", pid=100, slot=None, rank=None, version=VERSION, addresses=None, **more):
    message = {"type": "join", "version": version, "hostname": hostname, "pid": pid, **more}
    message["addresses"] = [] if addresses is None else addresses
    if slot is not None:
        message["slot"] = list(slot)
    if rank is not None:
        message["rank"] = rank
    return validate(message)


def offer(address, iface="eth0", kind="wired", port=5000):
    return {"address": address, "iface": iface, "kind": kind, "port": port}


def attempt(source, target, address, why="", **more):
    values = {
        "source": source, "target": target, "address": address, "port": 5000, "local": "10.0.0.1",
        "local_iface": "eth0", "remote_iface": "eth0", "kind": "wired", "why": why, "mb_per_s": None,
        "too_slow": False,
    }  # fmt: skip
    values.update(more)
    return values


class Fed:
    """A state machine that a test feeds; its actions are kept: messages by connection, closed connections,
    notices to the launcher, and times at which it requires a tick.
    """

    def __init__(self, state):
        self.state = state
        self.now_s = 1000.0
        self.told = defaultdict(list)
        self.dropped = []
        self.notices = []
        self.timers = []

    def take(self, actions):
        for action in actions:
            if isinstance(action, Send):
                encode(validate(action.message))  # whatever is told can travel
                self.told[action.connection].append(action.message)
            elif isinstance(action, Drop):
                self.dropped.append(action.connection)
            elif isinstance(action, Timer):
                assert action.delay_s >= 0
                self.timers.append(self.now_s + action.delay_s)
            else:
                assert isinstance(action, Notice)
                self.notices.append(action)
        return actions

    def hang_up(self, connection):
        return self.take(self.state.disconnected(connection, self.now_s))

    def tick(self):
        return self.take(self.state.tick(self.now_s))

    def pass_time(self, delay_s):
        """Let time pass; ticks come when they were asked for, as from the real server."""
        until_s = self.now_s + delay_s
        while self.timers and min(self.timers) <= until_s:
            self.now_s = max(self.now_s, min(self.timers))
            self.timers.remove(min(self.timers))
            self.tick()
        self.now_s = until_s


class Job(Fed):
    """Feeds one :class:`Rendezvous`."""

    def __init__(self, size=3, seats=(), start_timeout_s=60.0, relay=NO_RELAY):
        super().__init__(Rendezvous(Terms(VERSION, start_timeout_s, size, tuple(seats), relay=relay)))
        self.seats = list(seats)
        self.size = size

    # ---- events ------------------------------------------------------------------------------

    def say(self, connection, message):
        return self.take(self.state.handle(connection, message, self.now_s))

    def join(self, connection, **message):
        return self.say(connection, join_message(**message))

    def join_seat(self, connection, rank, **message):
        """The process that was started for this rank joins."""
        seat = self.seats[rank]
        return self.join(
            connection, **{"slot": seat.slot, "hostname": seat.host, "pid": 100 + rank, **message}
        )

    def lost(self, connection, peer, kind="lost", doing="allreduce(8 x float32)", why="connection reset"):
        return self.say(connection, {"type": "lost", "peer": peer, "doing": doing, "why": why, "kind": kind})

    def mismatch(self, connection, peer, text):
        return self.say(connection, {"type": "mismatch", "peer": peer, "text": text})

    def leave(self, connection, reason="it called shutdown()", ok=True):
        return self.say(connection, {"type": "leaving", "reason": reason, "ok": ok})

    def exit(self, rank, how="exit code 3", ok=False):
        return self.take(self.state.process_exited(rank, how, ok, self.now_s))

    def probed(self, connection, *attempts):
        return self.say(connection, {"type": "probed", "attempts": list(attempts)})

    def measured(self, connection, *speeds):
        return self.say(connection, {"type": "measured", "speeds": list(speeds)})

    def linked(self, connection, *links):
        return self.say(connection, {"type": "linked", "links": list(links)})

    def unlinked(self, connection, reason="rank 1 did not answer", peer=1):
        return self.say(connection, {"type": "unlinked", "reason": reason, "peer": peer})

    # ---- whole stretches ---------------------------------------------------------------------

    def run_on_one_host(self, first_connection=0):
        """All ranks join, on one host, and connect; connection ``first + r`` becomes rank r."""
        connections = range(first_connection, first_connection + self.size)
        for rank, connection in enumerate(connections):
            if self.seats:
                self.join_seat(connection, rank)
            else:
                self.join(connection, rank=rank, pid=100 + rank)
        self.link_all(connections)
        return list(connections)

    def link_all(self, connections):
        for connection in connections:
            self.linked(connection)
        assert self.state.phase is Phase.RUNNING

    # ---- what came of it ---------------------------------------------------------------------

    def kinds(self, connection):
        return [message["type"] for message in self.told[connection]]

    def ranks(self):
        """The rank that each connection was told."""
        return {
            connection: message["rank"]
            for connection, messages in self.told.items()
            for message in messages
            if message["type"] == "probe"
        }

    def aborts(self):
        """The abort that each connection was told, which must be one at most and the same for all."""
        found = {
            connection: [message for message in messages if message["type"] == "abort"]
            for connection, messages in self.told.items()
        }
        assert all(len(messages) <= 1 for messages in found.values()), found
        aborts = {connection: messages[0] for connection, messages in found.items() if messages}
        assert len({str(message) for message in aborts.values()}) <= 1, aborts
        return aborts

    def root_cause(self):
        """The one abort message that all ranks got."""
        (root_cause,) = {str(message): message for message in self.aborts().values()}.values()
        return root_cause

    def notice(self, kind):
        """The only notice of this kind."""
        (notice,) = [item for item in self.notices if item.kind == kind]
        return notice


def three_hosts(relay=NO_RELAY):
    """Ranks 0 to 3 on three hosts, 10.0.0.0 to 10.0.0.2; rank 2 is the second on its host."""
    job = Job(4, seats_of(1, 2, 1), relay=relay)
    for rank, host in enumerate((0, 1, 1, 2)):
        job.join_seat(rank, rank, addresses=[offer(f"10.0.0.{host}"), offer("127.0.0.1", "lo", "loopback")])
    return job


IFACES = {"10.1": "eth0", "10.2": "eth1", "10.3": "wlan0"}
"""Between hosts with several wires, by the beginning of the address."""


def speed(rank, address, mb_per_s, iface=None):
    """What a rank says of a wire that it has measured."""
    return {
        "rank": rank, "address": address, "iface": iface or IFACES[address[:4]], "mb_per_s": mb_per_s
    }  # fmt: skip


# ---- an elastic rendezvous without sockets, fed by a test ----------------------------------------


class ElasticJob(Fed):
    """Feeds one :class:`Rendezvous`. The process of connection ``n`` is member ``n`` at first."""

    def __init__(self, launched=False, start_timeout_s=60.0, **limits):
        terms = Terms(VERSION, start_timeout_s, limits=Limits(**limits), launched=launched)
        super().__init__(Rendezvous(terms))
        self.launched = launched
        self.answering = ()

    def expect(self, *numbers, host="pc"):
        for number in numbers:
            self.take(self.state.expect(number, Slot(0, number), host))

    def join(self, connection, member=None, position=0, **more):
        number = connection if member is None else member
        if self.launched or more.pop("named", False):
            more["member"] = number
        message = join_message(pid=100 + number, position=position, dead_after=6.0, **more)
        self.take(self.state.handle(connection, message, self.now_s))

    def again(self, *connections, position=1):
        """These members ask for the next view."""
        for connection in connections:
            process = self.state._processes.at(connection)
            self.join(connection, process.number, position)

    def link(self, *connections):
        for connection in connections:
            self.relay(connection, {"type": "linked", "links": []})

    def relay(self, connection, message):
        self.take(self.state.handle(connection, validate(message), self.now_s))

    def start(self, size):
        """The first view, of so many processes."""
        if self.launched:
            self.expect(*range(size))
        for connection in range(size):
            self.join(connection)
        self.link(*range(size))
        return self

    def leave(self, connection, ok=True):
        self.relay(connection, {"type": "leaving", "reason": "its program ended", "ok": ok})

    def exit(self, number, how="killed by SIGKILL", ok=False):
        self.take(self.state.process_exited(number, how, ok, self.now_s))

    def pass_time(self, delay_s, answering=()):
        """Let time pass; these connections answer pings."""
        self.answering = answering
        super().pass_time(delay_s)

    def tick(self):
        super().tick()
        for connection in self.answering:
            if any(item["type"] == "ping" for item in self.told[connection]):
                self.told[connection] = [x for x in self.told[connection] if x["type"] != "ping"]
                self.relay(connection, {"type": "pong", "heard": [], "silent": []})

    def kinds(self, connection):
        return [item["type"] for item in self.told[connection] if item["type"] not in ("ping", "waiting")]

    def last(self, connection):
        return [item for item in self.told[connection] if item["type"] != "ping"][-1]

    def all(self, kind):
        return [item for item in self.notices if item.kind == kind]

    def members(self):
        return self.state.view.numbers
