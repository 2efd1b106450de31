"""The hosts of an elastic job with their slots, and the processes that run there."""

from __future__ import annotations

from enum import Enum
from typing import Dict, Iterable, List, NamedTuple, Optional, Union

from ..plan.hosts import HostSpec
from .cooldown import Cooldown
from .discovery import host_key
from .limits import HostLimits

FIRST_PAUSE_S = 1.0
"""Seconds until an agent is restarted on a host that was lost."""
QUICK_FAILURES = 3
"""After this number of consecutive failures before joining, a slot is not used again."""


class OpenHost(NamedTuple):
    """Start an agent with a new number on a host; `slots` is the maximum number of ranks there."""

    agent: int
    spec: HostSpec
    slots: int


class CloseHost(NamedTuple):
    """End the agent of a host without processes."""

    agent: int


class StartProcess(NamedTuple):
    """Announce a new member to the rendezvous, and start its process in the slot `local`."""

    member: int
    agent: int
    local: int


class StopProcess(NamedTuple):
    """End a process. One that `is_lost` may be frozen, or about to end. One that `is_dropped` has as long as
    after SIGTERM: its host has been removed.
    """

    member: int
    is_lost: bool = False
    is_dropped: bool = False


class Exclude(NamedTuple):
    """Have the rendezvous remove a member at the next commit or step."""

    member: int
    why: str


class ReportExit(NamedTuple):
    """Report to the rendezvous that a process is lost with its host."""

    member: int
    how: str


class Say(NamedTuple):
    """Show a line to the user."""

    text: str


class Fail(NamedTuple):
    """End a job that cannot continue. `text` is "" if hosts could not start, which the box explains."""

    text: str


class Finish(NamedTuple):
    """End a job that has succeeded: every process has ended."""


Action = Union[
    OpenHost, CloseHost, StartProcess, StopProcess, Exclude, ReportExit, Say, Fail, Finish
]  # fmt: skip


class Phase(Enum):
    """The state of a host's agent."""

    CLOSED = "closed"
    OPENING = "opening"
    READY = "ready"


class Process:
    """A process of the job, with a unique member number, in the slot `local` of its host."""

    def __init__(self, member: int, host: Host, local: int) -> None:
        self.member, self.host, self.local = member, host, local
        self.joined = False  # is or was part of a view
        self.leaving = ""  # why the job asked it to leave; its end is then no failure
        self.cause = ""  # why the rendezvous declared it lost, or ""
        self.leaves_by_s: Optional[float] = None  # when it is ended if it has not left


class Host:
    """A host that the job may use."""

    def __init__(self, spec: HostSpec, limits: HostLimits) -> None:
        self.spec = spec
        self.slots = spec.slots or limits.slots  # maximum number of processes there
        # By the list or the script, now; by the user.
        self.listed = self.added = self.dropped = False
        self.phase = Phase.CLOSED
        self.agent = -1  # number of the present or last agent; -1: none yet
        self.problem = ""  # why it could not be used the last time, or ""
        self.cooldown = Cooldown(FIRST_PAUSE_S)
        self.processes: Dict[int, Process] = {}  # by slot
        self._slot_cooldowns: Dict[int, Cooldown] = {}

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.spec.name

    @property
    def key(self) -> str:
        """Its name in comparisons."""
        return host_key(self.spec)

    @property
    def is_wanted(self) -> bool:
        """Whether the job may use it."""
        return (self.listed or self.added) and not self.dropped

    def is_available(self, now_s: float) -> bool:
        """Return whether processes may be started there now."""
        return self.is_wanted and self.phase is Phase.READY and not self.cooldown.excludes(now_s)

    @property
    def may_start_soon(self) -> bool:
        """Whether its first agent has not answered yet."""
        return self.is_wanted and self.phase is Phase.OPENING and not self.cooldown.has_failed

    def slot_cooldown(self, local: int) -> Cooldown:
        if local not in self._slot_cooldowns:
            self._slot_cooldowns[local] = Cooldown(quick_failures=QUICK_FAILURES)
        return self._slot_cooldowns[local]

    def free_slots(self, now_s: float) -> List[int]:
        """Return the slots in which a process may be started now."""
        if not self.is_available(now_s):
            return []
        return [
            local for local in range(self.slots)
            if local not in self.processes and not self.slot_cooldown(local).excludes(now_s)
        ]  # fmt: skip

    def capacity(self, now_s: float) -> int:
        """Return the number of processes that run or could run there, if its agent starts."""
        if self.phase is Phase.OPENING:
            return self.slots
        return len(self.processes) + len(self.free_slots(now_s))

    def forgive(self) -> None:
        """End all exclusions after the user has added the host again."""
        self.cooldown.forgive()
        self._slot_cooldowns.clear()

    def due_s(self) -> List[float]:
        """Return the ends of its exclusions."""
        return [self.cooldown.until_s, *(item.until_s for item in self._slot_cooldowns.values())]


def describe_sources(hosts: Iterable[Host], script: str, now_s: float) -> str:
    """Return the possible sources of further ranks, for the end of a sentence; or "". `script` is the
    discovery script, or "".
    """
    parts: List[str] = []
    for host in hosts:
        starting = any(not item.joined and not item.leaving for item in host.processes.values())
        left_s = host.cooldown.until_s - now_s
        if starting or host.phase is Phase.OPENING:
            parts.append(f"{host.name} is starting")
        elif host.is_wanted and left_s > 0:
            parts.append(f"{host.name} is excluded for {left_s:.0f} s more")
    if script:
        parts.append(f"{script} may name other hosts")
    return f" ({'; '.join(parts)})" if parts else ""
