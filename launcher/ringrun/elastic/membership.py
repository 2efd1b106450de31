"""An elastic job's hosts and processes as a state machine: events and the time go in, actions come out. Pure.

It decides where processes run, when a failed slot or host is used again, and when the job cannot continue.
The rendezvous decides which of these processes are the ranks: it publishes the views.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from enum import Enum
from typing import Any, DefaultDict, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple, Union

from ..plan.hosts import HostSpec
from ..plan.ranks import counted
from .job import HostLimits, failed_text, host_key, timeout_text

FIRST_PAUSE_S = 1.0
"""Seconds until an agent is restarted on a host that was lost."""
QUICK_FAILURES = 3
"""After this number of consecutive failures before joining, a slot is not used again."""
NEVER = float("inf")
MAX_PAUSE_S = 30.0
SHOWN_S = 1.0  # shorter exclusions are not reported
LEAVE_S = 60.0  # for a process of a removed host, before it is ended
_IN_SHORT = re.compile(r"uncaught [^\n]*|no heartbeat for [\d.]+ s|no answer for [\d.]+ s")
"""The part of a root cause for a line."""
NO_HOST_REMAINS = "No hosts from previous set remaining, unable to broadcast state."


# -- actions ----------------------------------------------------------------------------------


class OpenHost(NamedTuple):
    """Start an agent with a new number on a host; `slots` is the maximum number of ranks there."""

    agent: int
    spec: HostSpec
    slots: int


class CloseHost(NamedTuple):  # one without processes
    agent: int


class StartProcess(NamedTuple):
    """Announce a new member to the rendezvous, and start its process in the slot `local`."""

    member: int
    agent: int
    local: int


class StopProcess(NamedTuple):
    """End a process, one that `is_lost` (perhaps frozen) late, one that `is_dropped` as after SIGTERM."""

    member: int
    is_lost: bool = False
    is_dropped: bool = False


class Exclude(NamedTuple):  # by the rendezvous, at the next commit or step
    member: int
    why: str


class ReportExit(NamedTuple):  # to the rendezvous: a process is lost with its host
    member: int


class Say(NamedTuple):  # to the user
    text: str


class Fail(NamedTuple):  # the job cannot continue; "" if hosts could not start, which the box explains
    text: str


class Finish(NamedTuple):
    """End a job that has succeeded: every process has ended."""


Action = Union[OpenHost, CloseHost, StartProcess, StopProcess, Exclude, ReportExit, Say, Fail, Finish]


# -- hosts and processes ----------------------------------------------------------------------


class Cooldown:
    """The exclusion of one host or slot: the first lasts ``first_s`` seconds, the next ones 1, 2, 4, … up to
    30 s. After `quick_failures` consecutive failures to start the exclusion is permanent.
    """

    def __init__(self, first_s: float = 0.0, quick_failures: float = NEVER) -> None:
        self._first_s, self._most_quick = first_s, quick_failures
        self._failures = self._quick = 0
        self.until_s = 0.0

    def fail(self, now_s: float, was_member: bool) -> None:
        """Count a failure; that of a process that `was_member` of the job is not a failure to start."""
        self._quick = 0 if was_member else self._quick + 1
        if now_s < self.until_s:
            return  # a second failure within the exclusion does not lengthen it
        pause_s = min(MAX_PAUSE_S, 2.0 ** (self._failures - 1)) if self._failures else self._first_s
        self.until_s = NEVER if self._quick >= self._most_quick else now_s + pause_s
        self._failures += 1

    @property
    def has_failed(self) -> bool:
        """Whether there was a failure since the last success."""
        return self._failures > 0

    def forgive(self) -> None:
        """End the exclusion: a process has joined the job, or the user adds the host again."""
        self.until_s, self._failures, self._quick = 0.0, 0, 0

    def excludes(self, now_s: float) -> bool:
        return now_s < self.until_s


class Phase(Enum):
    """The state of a host's agent."""

    CLOSED = "closed"
    OPENING = "opening"
    READY = "ready"


class Process:
    """A process of the job, with a unique member number, in the slot `local` of its host."""

    def __init__(self, member: int, host: Host, local: int) -> None:
        self.member, self.host, self.local = member, host, local
        self.joined, self.rank = False, -1  # whether it is or was part of a view, and where in the last one
        self.leaving = ""  # why the job asked it to leave; its end is then no failure
        self.cause = ""  # why the rendezvous declared it lost, or ""
        self.exit = ""  # how it failed without a signal of the job, or ""
        self.leaves_by_s: Optional[float] = None  # when it is ended if it has not left

    @property
    def place(self) -> Tuple[str, int]:
        return self.host.name, self.local

    @property
    def loss(self) -> str:
        """Why it was lost, in a few words."""
        found = _IN_SHORT.search(self.cause)
        if found is not None and (not self.exit or found[0].startswith("uncaught")):
            return found[0].rstrip(".")
        return self.exit or self.cause.rstrip(".") or "no connection"


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
        self.slot_cooldowns: DefaultDict[int, Cooldown] = defaultdict(
            lambda: Cooldown(quick_failures=QUICK_FAILURES)
        )

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_wanted(self) -> bool:
        """Whether the job may use it."""
        return (self.listed or self.added) and not self.dropped

    @property
    def may_start_soon(self) -> bool:
        """Whether its first agent has not answered yet."""
        return self.is_wanted and self.phase is Phase.OPENING and not self.cooldown.has_failed

    def free_slots(self, now_s: float) -> List[int]:
        """Return the slots in which a process may be started now."""
        if not self.is_wanted or self.phase is not Phase.READY or self.cooldown.excludes(now_s):
            return []
        free = [local for local in range(self.slots) if local not in self.processes]
        return [local for local in free if not self.slot_cooldowns[local].excludes(now_s)]

    def capacity(self, now_s: float) -> int:
        """Return the number of processes that run or could run there, if its agent starts."""
        if self.phase is Phase.OPENING:
            return self.slots
        return len(self.processes) + len(self.free_slots(now_s))

    def forgive(self) -> None:
        """End all exclusions after the user has added the host again."""
        self.cooldown.forgive()
        self.slot_cooldowns.clear()

    def due_s(self) -> List[float]:
        """Return the ends of its exclusions."""
        return [self.cooldown.until_s, *(item.until_s for item in self.slot_cooldowns.values())]


# -- the lines that report changes -----------------------------------------------------------


class Change(NamedTuple):
    """A view that the rendezvous has published."""

    members: Tuple[int, ...]  # by rank
    left: Tuple[int, ...] = ()  # those that the job asked to leave since the previous view
    pause_s: float = 0.0  # from the failure, or from the last step, to this view


def change_of(detail: Mapping[str, Any]) -> Change:
    """Return the change in the facts of the rendezvous' ``view`` notice."""
    rows = sorted(detail["members"], key=lambda row: int(row["rank"]))
    members = tuple(int(row["member"]) for row in rows)
    return Change(members, tuple(detail["left"]), float(detail["pause_s"]))


class ChangeLog:
    """Makes lines of every change; `known` has every process that was ever started, by member."""

    def __init__(self, began_s: float, known: Mapping[int, Process]) -> None:
        self.lines: List[Tuple[float, str]] = []  # (seconds since the start, text)
        self.excluded: List[str] = []  # the hosts and slots in lines of exclusions
        self._began_s, self._known = began_s, known
        self._used: Set[Tuple[str, int]] = set()  # hosts and slots of which a process has been a rank
        self._members: Optional[Tuple[int, ...]] = None  # of the last view

    def publish(self, change: Change, now_s: float) -> List[str]:
        """Take a view that the rendezvous has published, and return the lines about it."""
        lines: List[str] = []
        if self._members is not None:
            # The last view that was reported counts: one that failed at once may be between them.
            gone = [self._known[member] for member in self._members if member not in change.members]
            joined = [self._known[member] for member in change.members if member not in self._members]
            lost = [
                item for item in gone
                if item.exit or (item.member not in change.left and (item.cause or not item.leaving))
            ]  # fmt: skip
            left = [item for item in gone if item not in lost]
            lines = self._describe(change, lost, left, joined)
            self.lines += [(now_s - self._began_s, line) for line in lines]
        for rank, member in enumerate(change.members):
            self._known[member].rank = rank
            self._used.add(self._known[member].place)
        self._members = change.members
        return lines

    def exclude(self, place: str, why: str, now_s: float) -> None:
        """Note why a host or slot is excluded; repeated failures for the same reason are one line."""
        line = f"{place} is excluded: {why}"
        if line not in [text for _, text in self.lines]:
            self.excluded.append(place)
            self.lines.append((now_s - self._began_s, line))

    def _describe(
        self, change: Change, lost: List[Process], left: Sequence[Process], joined: Sequence[Process]
    ) -> List[str]:
        size = counted(len(change.members), "rank")
        lines: List[str] = []
        if lost:
            lost.sort(key=lambda item: item.rank)
            parts = [f"rank {item.rank} ({item.host.name}) lost: {item.loss}" for item in lost]
            lines.append(f"{'; '.join(parts)}; going on with {size} after {change.pause_s:.1f} s")
        if left:
            lines.append(f"{_hosts_of(left)} left: {size}")
        for word, again in (("joined again", True), ("joined", False)):
            processes = [item for item in joined if (item.place in self._used) is again]
            if processes:
                lines.append(f"{_hosts_of(processes)} {word}: {size}")
        return lines


def _hosts_of(processes: Sequence[Process]) -> str:
    """Return the hosts of processes, with their number of processes unless it is one."""
    counts = Counter(item.host.name for item in processes)
    parts = [(name, "" if count == 1 else f" ({counted(count, 'rank')})") for name, count in counts.items()]
    return ", ".join(map("".join, parts))


def describe_history(changes: Sequence[Tuple[float, str]], most: int = 40) -> str:
    """Return the paragraph with every change and its time, of more than `most` without the middle."""
    lines = []
    for at_s, text in changes:
        minutes, seconds = divmod(int(at_s), 60)
        lines.append(f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}  {text}")
    if len(lines) > most:
        half = most // 2
        lines = [*lines[:half], f"… {len(lines) - 2 * half} changes left out …", *lines[-half:]]
    return "\n".join(lines)


# -- decisions --------------------------------------------------------------------------------


class Membership:
    """The hosts and processes of one elastic job. Times are seconds on one clock; `now_s` is the start."""

    def __init__(self, limits: HostLimits, now_s: float) -> None:
        self.limits = limits
        self.hosts: Dict[str, Host] = {}  # by host_key, in order of arrival
        self.processes: Dict[int, Process] = {}  # running ones, by member number
        self.finishing = False  # a rank has ended with exit code 0; start no more
        self._known: Dict[int, Process] = {}  # all that were started
        self.log = ChangeLog(now_s, self._known)
        self._began_s = now_s
        self._by_agent: List[Host] = []
        self._started = self._has_view = self._ended = False
        self._holders: Set[int] = set()  # processes that have the job's state: the present view's
        self._first_failure: Optional[Tuple[str, int, int]] = None
        self._failed_late = False  # a rank has failed after another has ended with exit code 0
        self._ticked_s = now_s

    # -- which hosts there are -------------------------------------------------------------------

    def list_hosts(self, specs: Sequence[HostSpec], now_s: float) -> List[Action]:
        """Take the complete list of hosts of the user or the script."""
        named = {host_key(spec): spec for spec in specs}
        for key, host in self.hosts.items():
            host.listed = key in named
            if not (host.listed or host.added):
                host.dropped = False  # the script may name it again later
        for spec in specs:
            self._host_of(spec).listed = True
        return self._plan(now_s)

    def add_host(self, spec: HostSpec, now_s: float) -> List[Action]:
        """Add a host, also one that was removed or excluded, on the user's command."""
        host = self._host_of(spec)
        host.added, host.dropped = True, False
        host.forgive()
        given = {name: value for name, value in spec._asdict().items() if value is not None}
        before, host.spec = host.spec, host.spec._replace(**given)
        # The agent has the interpreter and the directory of before.
        is_other = before._replace(slots=host.spec.slots) != host.spec
        return [*(self._close(host) if is_other and not host.processes else []), *self._plan(now_s)]

    def _close(self, host: Host) -> List[Action]:
        if host.phase is Phase.CLOSED:
            return []
        host.phase = Phase.CLOSED
        return [CloseHost(host.agent)]

    def drop_host(self, name: str, now_s: float) -> Optional[List[Action]]:
        """Remove a host (named with or without the user) on the user's command; None if there is none."""
        found = self._named(name)
        for host in found:
            host.added, host.dropped = False, True
        return self._plan(now_s) if found else None

    def is_postponed(self, name: str) -> bool:
        """Return whether a removed host stays until others have joined, since too few would remain."""
        return any(not item.leaving for host in self._named(name) for item in host.processes.values())

    def _named(self, name: str) -> List[Host]:
        wanted = name.lower()
        return [it for it in self.hosts.values() if wanted in (host_key(it.spec), it.name.lower())]

    def _host_of(self, spec: HostSpec) -> Host:
        host = self.hosts.setdefault(host_key(spec), Host(spec, self.limits))
        host.slots = spec.slots or host.slots  # one that is added again keeps its own
        return host

    # -- agents ------------------------------------------------------------------------------------

    def host_ready(self, agent: int, now_s: float) -> List[Action]:
        """Take a host that has everything that ranks need."""
        host = self._by_agent[agent]
        if host.agent == agent and host.phase is Phase.OPENING:
            host.phase, host.problem = Phase.READY, ""
        return self._plan(now_s)

    def host_failed(self, agent: int, text: str, now_s: float) -> List[Action]:
        """Take a host that cannot start processes, or is lost with its processes; `text` is a paragraph."""
        host = self._by_agent[agent]
        if host.agent != agent or host.phase is Phase.CLOSED:
            return []
        was_ready, host.phase = host.phase is Phase.READY, Phase.CLOSED
        host.cooldown.fail(now_s, was_ready)
        is_shown = text != host.problem and (self._started or bool(self.limits.script))
        host.problem = text
        actions: List[Action] = [Say(text)] if is_shown else []
        for process in list(host.processes.values()):
            actions.append(ReportExit(process.member))
            actions += self._gone(process, "lost with its host", 255, now_s)
        possible = sum(other.capacity(now_s) for other in self.hosts.values())
        if self._started:
            actions += self._report_exclusion(host.name, host.cooldown, now_s, text, is_told=True)
        elif possible < self.limits.start_np and not self.limits.script:
            return [*actions, *self._fail("")]
        return actions + self._plan(now_s)

    # -- processes ---------------------------------------------------------------------------------

    def exited(
        self, member: int, code: int, how: str, now_s: float, ended: bool = False, error: str = ""
    ) -> List[Action]:
        """Take the end of a process; `code` may be 128 plus a signal; `ended` means by one of the job."""
        process = self.processes.get(member)
        if process is None:
            return []
        if code and not ended:
            process.exit = how
        return [*self._after_exit(process, code, how, now_s, error), *self._plan(now_s)]

    def _after_exit(self, process: Process, code: int, how: str, now_s: float, error: str) -> List[Action]:
        if process.leaving and not process.cause:
            self._forget(process)
        elif code == 0:
            self._forget(process)
            if process.joined or not self._has_view:  # it may be a program that does not use ringcomm
                self.finishing = True
            else:
                process.host.slot_cooldowns[process.local].fail(now_s, was_member=False)
        else:
            return self._gone(process, process.cause or how, code, now_s, error)
        return []

    def _forget(self, process: Process) -> None:
        self.processes.pop(process.member, None)
        process.host.processes.pop(process.local, None)
        self._holders.discard(process.member)

    def _gone(self, process: Process, how: str, code: int, now_s: float, error: str = "") -> List[Action]:
        """Handle the failure or loss of a process."""
        host = process.host
        self._forget(process)
        if not process.cause:  # otherwise the rendezvous has reported it before
            self._blame(process, how, code)
        if host.phase is not Phase.READY:
            return []  # the host itself is excluded
        # That of a rank is in the line for the change of the ranks.
        why = "" if process.joined else f"{how}: {error}" if error else how
        cooldown = host.slot_cooldowns[process.local]
        cooldown.fail(now_s, process.joined)
        return self._report_exclusion(f"slot {process.local} of {host.name}", cooldown, now_s, why)

    def _blame(self, process: Process, how: str, code: int) -> None:
        process.cause = process.cause or how
        if self._first_failure is None:
            self._first_failure = (process.host.name, process.local, code)
        self._failed_late = self._failed_late or (self.finishing and process.joined)

    def _report_exclusion(
        self, name: str, cooldown: Cooldown, now_s: float, why: str, is_told: bool = False
    ) -> List[Action]:
        """Return the line for an exclusion that lasts, and keep the reason, which may have been shown."""
        rest_s = cooldown.until_s - now_s
        if rest_s < SHOWN_S or not self._holders or self.finishing:
            return []
        text = f"{name} is excluded for {rest_s:.0f} s"
        if cooldown.until_s == NEVER:
            text = f"{name} is excluded for the rest of the job, unless `ringrun add` names its host"
        start = f"{name}: "  # of a paragraph about a host
        why = why[len(start) :] if why.startswith(start) else why
        if why:
            self.log.exclude(name, why, now_s)
        return [Say(f"{text}: {why}" if why and not is_told else text)]

    def lost(self, member: Optional[int], text: str, now_s: float) -> List[Action]:
        """Take the loss of a member (None: of no single one), whose process may be frozen or disconnected."""
        process = None if member is None else self.processes.get(member)
        if process is None or process.cause:
            return []
        self._blame(process, text, 128 + 9)
        process.leaving = text
        self._holders.discard(process.member)
        return [StopProcess(process.member, is_lost=True)]

    def view(self, change: Change, now_s: float) -> List[Action]:
        """Take a view of the rendezvous: its members are the ranks from now on."""
        self._has_view = True
        for member in change.members:
            process = self.processes.get(member)
            if process is not None and not process.joined:
                process.joined = True
                process.host.slot_cooldowns[process.local].forgive()
                process.host.cooldown.forgive()
        self._holders = {member for member in change.members if member in self.processes}
        self._first_failure = None
        return [*map(Say, self.log.publish(change, now_s)), *self._plan(now_s)]

    # -- time ----------------------------------------------------------------------------------------

    def due_s(self) -> Optional[float]:
        """Return the next time for :meth:`tick`; None: not before another event."""
        due = [until_s for host in self.hosts.values() for until_s in host.due_s()]
        due += [item.leaves_by_s for item in self.processes.values() if item.leaves_by_s is not None]
        if not self._started:
            due.append(self._began_s + self.limits.timeout_s)
        due = [until_s for until_s in due if until_s != NEVER and until_s > self._ticked_s]
        return min(due) if due else None

    def tick(self, now_s: float) -> List[Action]:
        """Return the actions that are due."""
        self._ticked_s = now_s
        actions: List[Action] = []
        for process in self.processes.values():
            if process.leaves_by_s is not None and process.leaves_by_s <= now_s:
                process.leaves_by_s = None
                actions.append(StopProcess(process.member, is_dropped=True))
        if not self._started and now_s >= self._began_s + self.limits.timeout_s:
            return actions + self._fail(timeout_text(self.limits, self.limits.start_np))
        return actions + self._plan(now_s)

    # -- decisions -------------------------------------------------------------------------------------

    def _plan(self, now_s: float) -> List[Action]:
        """Return the actions for the present state."""
        self._ticked_s = max(self._ticked_s, now_s)
        if self._ended:
            return []
        ending = self._end(now_s)
        if ending:
            return ending
        if self.finishing:
            return self._stop_newcomers()
        return self._remove(now_s) + self._open(now_s) + self._start(now_s)

    def _end(self, now_s: float) -> List[Action]:
        if self.finishing:
            if self.processes:
                return []
            if self._failed_late and self._first_failure is not None:
                return self._fail(failed_text(self.limits, *self._first_failure))
            self._ended = True
            return [Finish()]
        if not self._started or self._holders:
            return []
        if self._first_failure is not None:
            return self._fail(failed_text(self.limits, *self._first_failure))
        return self._fail(NO_HOST_REMAINS)

    def _fail(self, text: str) -> List[Action]:
        self._ended = True
        return [Fail(text)]

    def _open(self, now_s: float) -> List[Action]:
        """Start agents on hosts that are available and needed."""
        actions: List[Action] = []
        slots = sum(host.capacity(now_s) for host in self.hosts.values())
        for host in self.hosts.values():
            needed = self.limits.max_np is None or slots < self.limits.max_np or not self._started
            is_free = host.phase is Phase.CLOSED and not host.cooldown.excludes(now_s) and not host.processes
            if host.is_wanted and needed and is_free:
                host.phase, host.agent = Phase.OPENING, len(self._by_agent)
                self._by_agent.append(host)
                slots += host.slots
                actions.append(OpenHost(host.agent, host.spec, host.slots))
        return actions

    def _start(self, now_s: float) -> List[Action]:
        """Start processes in free slots: first all together, later in any free slot."""
        free = [(host, local) for host in self.hosts.values() for local in host.free_slots(now_s)]
        if not self._started:
            if any(host.may_start_soon for host in self.hosts.values()) or len(free) < self.limits.start_np:
                return []
            self._started = True
            self._holders = set(range(self._room(len(free))))
        elif not self._has_view and len(self._holders) >= self.limits.min_np:
            return []  # the first view does not wait for replacements
        actions: List[Action] = []
        for host, local in free[: self._room(len(free))]:
            process = Process(len(self._known), host, local)
            self._known[process.member] = process
            self.processes[process.member] = host.processes[local] = process
            actions.append(StartProcess(process.member, host.agent, local))
        return actions

    def _room(self, most: int) -> int:
        """Return the number of processes that may be started, at most `most`."""
        if self.limits.max_np is None:
            return most
        running = sum(not process.leaving for process in self.processes.values())
        return min(most, max(0, self.limits.max_np - running))

    def _remove(self, now_s: float) -> List[Action]:
        """Have processes leave removed hosts and slots."""
        unwanted = [
            process for process in self.processes.values()
            if not process.leaving and (not process.host.is_wanted or process.local >= process.host.slots)
        ]  # fmt: skip
        actions: List[Action] = []
        staying = len(self._holders - {process.member for process in unwanted})
        for process in unwanted:
            why = f"{process.host.name} is not available any more"
            if not process.joined:
                process.leaving = why
                actions.append(StopProcess(process.member, is_dropped=True))
            elif self._has_view and staying >= self.limits.min_np:
                process.leaving, process.leaves_by_s = why, now_s + LEAVE_S
                actions.append(Exclude(process.member, why))
        for host in self.hosts.values():
            if not host.is_wanted and not host.processes:
                actions += self._close(host)
        return actions

    def _stop_newcomers(self) -> List[Action]:
        """End processes that have not joined when the job ends."""
        newcomers = [
            item for item in self.processes.values() if item.member not in self._holders and not item.leaving
        ]
        for process in newcomers:
            process.leaving = "the job has ended"
        return [StopProcess(process.member) for process in newcomers]
