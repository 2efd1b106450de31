"""A membership that a test feeds, and what it asks for."""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

from ringrun.elastic.job import HostLimits
from ringrun.elastic.membership import Change, Membership, OpenHost, Say, StartProcess
from ringrun.plan.hosts import parse_hosts


class Simulated:
    """A job whose agents and rendezvous do at once what they are asked to."""

    def __init__(self, hosts: str, limits: HostLimits, ready: bool = True) -> None:
        self.now_s = 0.0
        self.membership = Membership(limits, 0.0)
        self.ready = ready
        self.done: List[Any] = []
        self.epoch = -1
        self.view: Tuple[int, ...] = ()
        self.waiting: List[int] = []
        if hosts:
            self.list(hosts)

    def take(self, actions: Optional[List[Any]]) -> List[Any]:
        """Record actions; agents become ready and processes wait for the next view."""
        assert actions is not None
        taken = list(actions)
        self.done += actions
        for action in actions:
            if isinstance(action, OpenHost) and self.ready:
                taken += self.take(self.membership.host_ready(action.agent, self.now_s))
            elif isinstance(action, StartProcess):
                self.waiting.append(action.member)
        return taken

    def list(self, hosts: str) -> List[Any]:
        return self.take(self.membership.list_hosts(parse_hosts(hosts) if hosts else [], self.now_s))

    def publish(
        self, lost: Tuple[int, ...] = (), left: Tuple[int, ...] = (), pause_s: float = 0.0, join: bool = True
    ) -> List[Any]:
        """The next view, with all waiting processes if ``join``."""
        staying = tuple(member for member in self.view if member not in (*lost, *left))
        joined = tuple(self.waiting) if join else ()
        self.waiting = [] if join else self.waiting
        self.epoch += 1
        self.view = staying + joined
        change = Change(self.view, left, pause_s)
        return self.take(self.membership.view(change, self.now_s))

    def exit(
        self, member: int, code: int = 137, how: str = "killed by SIGKILL", ended: bool = False,
        error: str = "",
    ) -> List[Any]:  # fmt: skip
        self.waiting = [other for other in self.waiting if other != member]
        return self.take(self.membership.exited(member, code, how, self.now_s, ended, error))

    def after(self, seconds: float) -> List[Any]:
        """Let time pass, with a tick whenever one is due."""
        end_s, taken = self.now_s + seconds, []
        while True:
            due_s = self.membership.due_s()
            if due_s is None or due_s > end_s:
                break
            self.now_s = due_s
            taken += self.take(self.membership.tick(self.now_s))
        self.now_s = end_s
        return taken


def kinds(actions: List[Any], *classes: type) -> List[Any]:
    return [action for action in actions if isinstance(action, classes)]


def texts(actions: List[Any]) -> List[str]:
    return [action.text for action in kinds(actions, Say)]
