"""The hosts of an elastic job with their slots, and the processes that run there."""

from __future__ import annotations

from enum import Enum
from typing import Dict, Iterable, List, NamedTuple, Optional, Union

from ..plan.hosts import HostSpec
from .cooldown import Cooldown
from .discovery import host_key
from .limits import HostLimits

FIRST_PAUSE_S = 1.0
"""Time until an agent is started again on a host that was lost, in seconds."""
QUICK_FAILURES = 3
"""A slot whose processes fail so often, one after the other, before they join is not started again."""


class OpenHost(NamedTuple):
    """Start an agent on a host; ``agent`` is a new number for it, ``slots`` the most ranks there."""

    agent: int
    spec: HostSpec
    slots: int


class CloseHost(NamedTuple):
    """No process runs on this host any more: end its agent."""

    agent: int


class StartProcess(NamedTuple):
    """Announce a new member to the rendezvous, and start its process; ``local`` is its slot there."""

    member: int
    agent: int
    local: int


class StopProcess(NamedTuple):
    """End a process.

    One that ``is_lost`` may be frozen, or about to end by itself. One that ``is_dropped`` has as long as
    after SIGTERM: its host is not available any more.
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
    """End the job: it cannot continue. ``text`` is "" if hosts could not start, which the box explains."""

    text: str


class Finish(NamedTuple):
    """Every process has ended, and the job has succeeded."""


Action = Union[
    OpenHost, CloseHost, StartProcess, StopProcess, Exclude, ReportExit, Say, Fail, Finish
]  # fmt: skip


class Phase(Enum):
    """The state of a host's agent."""

    CLOSED = "closed"
    OPENING = "opening"
    READY = "ready"


class Process:
    """A process of the job.

    Attributes:
        member: its number, which no other process of the job gets.
        host: its host.
        local: its slot on the host.
        joined: whether it is or was part of a view.
        leaving: why it leaves, if the job asked it to; its end is then no failure.
        cause: why the rendezvous has declared it lost, or "".
        leaves_by_s: when it is ended if it has not left by itself.
    """

    def __init__(self, member: int, host: Host, local: int) -> None:
        self.member, self.host, self.local = member, host, local
        self.joined = False
        self.leaving = ""
        self.cause = ""
        self.leaves_by_s: Optional[float] = None


class Host:
    """A host that the job may use.

    Attributes:
        spec: as the list, the script or the user names it.
        slots: most processes there.
        listed: whether the list or the script names it now.
        added: whether the user has added it.
        dropped: whether the user has removed it.
        phase: the state of its agent.
        agent: the number of its present or last agent; -1: none yet.
        cooldown: its exclusion after failures.
        problem: why it could not be used the last time, or "".
        processes: the processes there, by slot.
    """

    def __init__(self, spec: HostSpec, limits: HostLimits) -> None:
        self.spec = spec
        self.slots = spec.slots or limits.slots
        self.listed = self.added = self.dropped = False
        self.phase = Phase.CLOSED
        self.agent = -1
        self.problem = ""
        self.cooldown = Cooldown(FIRST_PAUSE_S)
        self.processes: Dict[int, Process] = {}
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
        """The exclusion of one of its slots."""
        if local not in self._slot_cooldowns:
            self._slot_cooldowns[local] = Cooldown(quick_failures=QUICK_FAILURES)
        return self._slot_cooldowns[local]

    def free_slots(self, now_s: float) -> List[int]:
        """The slots in which a process may be started now."""
        if not self.is_available(now_s):
            return []
        return [
            local for local in range(self.slots)
            if local not in self.processes and not self.slot_cooldown(local).excludes(now_s)
        ]  # fmt: skip

    def capacity(self, now_s: float) -> int:
        """Return how many processes run or could run there, if its agent starts."""
        if self.phase is Phase.OPENING:
            return self.slots
        return len(self.processes) + len(self.free_slots(now_s))

    def forgive(self) -> None:
        """End all exclusions: the user has added the host again."""
        self.cooldown.forgive()
        self._slot_cooldowns.clear()

    def due_s(self) -> List[float]:
        """Return when its exclusions end."""
        return [self.cooldown.until_s, *(item.until_s for item in self._slot_cooldowns.values())]


def describe_sources(hosts: Iterable[Host], script: str, now_s: float) -> str:
    """Return where ranks may come from while there are too few, for the end of a sentence.

    "" if from nowhere.

    Args:
        hosts: the job's hosts.
        script: the discovery script, or "".
        now_s: the time.
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
