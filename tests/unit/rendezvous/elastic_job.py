"""An elastic rendezvous without sockets, fed by a test."""

from __future__ import annotations

from ringcomm.config import Slot
from ringcomm.configuration.membership import Limits
from ringcomm.rendezvous.state import Rendezvous
from ringcomm.rendezvous.terms import Terms
from ringcomm.wire.messages import validate
from tests.unit.rendezvous.simulated import VERSION, Fed, join_message


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
        message = {"type": "leaving", "reason": "its program ended", "ok": ok}
        self.take(self.state.handle(connection, message, self.now_s))

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
                pong = {"type": "pong", "heard": [], "silent": []}
                self.take(self.state.handle(connection, pong, self.now_s))

    def kinds(self, connection):
        return [item["type"] for item in self.told[connection] if item["type"] not in ("ping", "waiting")]

    def last(self, connection):
        return [item for item in self.told[connection] if item["type"] != "ping"][-1]

    def all(self, kind):
        return [item for item in self.notices if item.kind == kind]

    def members(self):
        return self.state.view.numbers
