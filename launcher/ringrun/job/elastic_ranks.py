"""The policy of an elastic job: hosts and processes come and go while the job runs.

:class:`~ringrun.elastic.membership.Membership` decides what is started and ended;
:class:`~ringrun.job.supervise.Supervisor` has the loop, the agents and the output.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ringcomm.config import Slot
from ringcomm.errors import ConfigError
from ringcomm.rendezvous.membership import Notice

from ..agent import processes, threads
from ..diagnosis.failure_report import last_error, local_file_hint, missing_module_hint, traceback_lines
from ..diagnosis.first_failure import Exit
from ..elastic.job import Discovery, ElasticJob, host_key, timeout_text
from ..elastic.membership import (
    Action,
    CloseHost,
    Exclude,
    Fail,
    Finish,
    Membership,
    OpenHost,
    ReportExit,
    Say,
    StartProcess,
    StopProcess,
    change_of,
)
from ..plan.hosts import HostSpec, parse_host
from ..plan.job import HostJob
from ..reach.named_hosts import with_lists
from .agents import Steps
from .outcome import Outcome, with_changes
from .rendezvous import OpenRendezvous, rendezvous_variables
from .supervise import END, term

if TYPE_CHECKING:
    from .supervise import Commands, Notifiers, Supervisor

LOST: Steps = ((9, 2.0),)
"""For a process that the rendezvous has declared lost: it may be writing its traceback, or be frozen."""


class ElasticRanks:
    """The policy of one elastic job, with the methods of :class:`ringrun.job.supervise.FixedRanks`."""

    def __init__(self, supervisor: Supervisor, job: ElasticJob, open_rendezvous: OpenRendezvous) -> None:
        self._supervisor, self._job = supervisor, job
        self.membership = Membership(job.limits, supervisor.loop.clock())
        self.rendezvous = supervisor.opened(open_rendezvous)
        self.stopped_because: Optional[str] = None
        self.notices: Notifiers = {
            "view": self._view, "lost": self._declared_lost, "waiting": self._waiting, "failed": self._failed
        }  # fmt: skip
        self.commands: Commands = {"add": self._command, "drop": self._command}
        self._endpoints: List[Tuple[str, int]] = []
        self._local: Dict[str, bool] = {}  # by host, whether it is this machine
        self._finished = False
        self._ended_members: Set[int] = set()  # since the last view
        self._last_error: Sequence[str] = ()  # the last lines on stderr of the last rank that has failed
        self._discovery: Optional[Discovery] = None

    @property
    def may_end(self) -> bool:
        return self._finished or bool(self._supervisor.ending.reason)

    @property
    def has_failed(self) -> bool:
        return self.stopped_because is not None

    @property
    def never_began(self) -> bool:
        if self._supervisor.ending.reason == "start":
            return True
        return self.stopped_because == "" and any(state.problem for state in self._supervisor.hosts)

    @property
    def changes(self) -> Sequence[Tuple[float, str]]:
        return self.membership.log.lines

    @property
    def _now_s(self) -> float:
        return self._supervisor.loop.clock()

    # -- hosts ---------------------------------------------------------------------------------

    def begin(self) -> None:
        self._endpoints = self.rendezvous.start()
        limits, call = self._job.limits, self._supervisor.loop.call
        if limits.script:
            self._discovery = Discovery(
                limits.script, limits.slots, self._listed,
                lambda text: call(lambda: self._supervisor.printer.show(text)),
                lambda text: call(lambda: self._take([Fail(text)])),
            )  # fmt: skip
            self._discovery.start()
            self._take([])
        else:
            self._find_local(self._job.specs)
            self._take(self.membership.list_hosts(self._job.specs, self._now_s))

    def stop(self) -> None:
        if self._discovery is not None:
            self._discovery.stop()

    def _listed(self, specs: Sequence[HostSpec]) -> None:
        """Take the hosts that the script printed (any thread)."""
        self._find_local(specs)
        self._supervisor.loop.call(lambda: self._take(self.membership.list_hosts(specs, self._now_s)))

    def _find_local(self, specs: Sequence[HostSpec]) -> None:
        """Determine which hosts are this machine (any thread). This may take seconds."""
        new = [spec for spec in specs if host_key(spec) not in self._local]
        self._local.update(zip(map(host_key, new), self._job.maker.doors.find_local(new)))

    def ready(self, host: HostJob) -> None:
        supervisor, facts = self._supervisor, self._supervisor.hosts[host.index].ready or {}
        supervisor.loop.cancel(f"start {host.index}")
        supervisor.printer.show(
            threads.describe({host.name: facts["limits"]}, self._job.settings.threads)
        )
        env = rendezvous_variables(self._endpoints, host, facts)
        supervisor.agents.send(host, {"do": "go", "env": env})
        self._take(self.membership.host_ready(host.index, self._now_s))

    def problem(self, host: HostJob, text: str) -> None:
        self._supervisor.loop.cancel(f"start {host.index}")
        if not self.may_end:
            self._supervisor.hosts[host.index].problem = text
            self._take(self.membership.host_failed(host.index, text, self._now_s))

    def confused(self, host: HostJob, why: str) -> None:
        if self.membership.processes:
            self._supervisor.printer.show(why)
        self.problem(host, why)

    def lost(self, host: HostJob, text: str) -> None:
        if host.is_local:
            processes.sweep(self._job.id, host.index)
        self.problem(host, text)

    def _late_host(self, host: HostJob) -> None:
        """Give up a host that is not ready in time."""
        text = self._supervisor.not_ready(host)
        self._supervisor.agents.abandon(host)
        self.problem(host, text)

    # -- actions -------------------------------------------------------------------------------

    def _take(self, actions: Sequence[Action]) -> None:
        """Perform actions, then set the timer for the next ones."""
        loop, ending = self._supervisor.loop, self._supervisor.ending
        for action in actions:
            if not ending.reason or isinstance(action, (Say, Fail)):
                _ACTIONS[type(action)](self, action)
        due_s = self.membership.due_s()
        if due_s is None or self.may_end:
            loop.cancel("elastic")
        else:
            loop.after("elastic", max(0.0, due_s - loop.clock()), self._tick)

    def _tick(self) -> None:
        self._take(self.membership.tick(self._now_s))

    def _say(self, action: Say) -> None:
        self._supervisor.printer.show(action.text)

    def _open_host(self, action: OpenHost) -> None:
        try:
            is_local = self._local[host_key(action.spec)]
            host = self._job.open_host(action.agent, action.spec, action.slots, is_local)
        except ConfigError as problem:
            self._fail(str(problem))
            return
        self._supervisor.add_host()
        self._supervisor.agents.add(host)
        limit_s = self._job.settings.start_timeout_s
        self._supervisor.loop.after(f"start {host.index}", limit_s, lambda: self._late_host(host))

    def _close_host(self, action: CloseHost) -> None:
        self._supervisor.loop.cancel(f"start {action.agent}")
        state = self._supervisor.hosts[action.agent]
        state.is_done = state.is_done or state.ready is None  # the end of its login is expected
        self._supervisor.agents.stop_host(self._job.hosts[action.agent], fetch=bool(self._job.fetch))

    def _start_process(self, action: StartProcess) -> None:
        host = self._job.hosts[action.agent]
        staying = [item for item in self.membership.processes.values() if not item.leaving]
        before = sum(item.joined or item.member < action.member for item in staying)
        place = (action.member, action.agent, action.local)
        rank = self._job.add_member(*place, before, len(staying))
        self.rendezvous.expect(action.member, Slot(action.agent, action.local), host.name)
        self._supervisor.hosts[action.agent].ranks.add(action.member)
        try:
            self._supervisor.printer.add(action.member, host.name)
        except ConfigError as problem:
            self._fail(str(problem))
            return
        self._supervisor.agents.send(host, {"do": "start", "rank": rank})

    def _stop_process(self, action: StopProcess) -> None:
        steps = LOST if action.is_lost else END
        if action.is_dropped:
            steps = term(self._job.grace_s)
            self._supervisor.ending.ask(action.member, steps)
        command = {"do": "end", "rank": action.member, "steps": list(steps)}
        self._supervisor.agents.send(self._job.host_of(action.member), command)

    def _exclude(self, action: Exclude) -> None:
        self.rendezvous.exclude(action.member, action.why)

    def _report_exit(self, action: ReportExit) -> None:
        self.rendezvous.process_exited(action.member, action.how, False)
        self._supervisor.printer.ended(action.member, False)
        self._ended_members.add(action.member)

    def _finish(self, _: Finish) -> None:
        self._finished = True
        self._supervisor.agents.stop(END, fetch=bool(self._job.fetch))

    def _fail(self, text: str) -> None:
        """End a job that cannot continue; "" if the hosts' problems are the reason."""
        if self.stopped_because is None and not self._finished:
            self.stopped_because = text
            if not self.membership.processes:
                self._supervisor.ending.begin("failure" if text else "start")

    # -- ends of processes ---------------------------------------------------------------------

    def exited(self, end: Exit) -> None:
        self._ended_members.add(end.rank)
        tail = self._supervisor.printer.tails().get(end.rank, [])
        if not end.ok and traceback_lines(tail):
            self._last_error = tail
        ended, error = bool(end.sent) and end.signal == end.sent, ""
        if not end.ok:
            error = self._error_of(end.rank, tail)
        how = end.status, end.describe(), self._now_s, ended, error
        self._take(self.membership.exited(end.rank, *how))
        if not self._supervisor.ending.reason:
            self._supervisor.show_killed()

    def _error_of(self, member: int, tail: Sequence[str]) -> str:
        """Return a line with the error of a process and a remedy if one is known; or ""."""
        host = self._job.host_of(member)
        found = (self._supervisor.hosts[host.index].ready or {}).get("found") or {}
        hint = missing_module_hint(tail, host.name, found.get("python", ""))
        return ". ".join(filter(None, (last_error(tail), hint or local_file_hint(self._job, host, tail))))

    # -- the rendezvous' notices ---------------------------------------------------------------

    def _view(self, notice: Notice) -> None:
        supervisor, change = self._supervisor, change_of(notice.detail)
        supervisor.watching.history.linked(notice.detail.get("links", ()))
        supervisor.watching.history.changed(change.members)
        supervisor.inquiry.members = change.members
        # The job has survived the failures so far: it continues without the ranks that have failed.
        supervisor.failure.survived()
        supervisor.printer.settle()
        for member in self._ended_members:
            supervisor.printer.remove(member)
        self._ended_members.clear()
        self._take(self.membership.view(change, self._now_s))
        if self._job.settings.verbose:
            supervisor.printer.show(str(notice.detail.get("table", "")))

    def _declared_lost(self, notice: Notice) -> None:
        self._take(self.membership.lost(notice.detail.get("member"), notice.text, self._now_s))

    def _waiting(self, notice: Notice) -> None:
        self._supervisor.printer.show(notice.text)

    def _failed(self, notice: Notice) -> None:
        limits = self._job.limits
        is_late = notice.detail.get("kind") == "timeout"
        self._fail(f"{timeout_text(limits, limits.min_np)}\n{notice.text}" if is_late else notice.text)

    # -- the user's commands -------------------------------------------------------------------

    def _command(self, command: Mapping[str, Any]) -> str:
        """Execute ``ringrun add`` or ``ringrun drop`` (any thread)."""
        what, text = command["do"], command.get("host")
        if not isinstance(text, str):
            raise ConfigError(f"ringrun {what} needs a host.")
        specs = with_lists([parse_host(text, f"ringrun {what}")], os.environ)
        self._find_local(specs)
        act = self._add if what == "add" else self._drop
        return "\n".join(self._supervisor.loop.ask(lambda: [act(spec) for spec in specs]))

    def _add(self, spec: HostSpec) -> str:
        self._take(self.membership.add_host(spec, self._now_s))
        slots = self.membership.hosts[host_key(spec)].slots
        return f"{spec.target} with {slots} slot{'' if slots == 1 else 's'} is being added"

    def _drop(self, spec: HostSpec) -> str:
        actions = self.membership.drop_host(spec.target, self._now_s)
        if actions is None:
            raise ConfigError(f"{spec.target} is no host of this job.")
        self._take(actions)
        if self.membership.is_postponed(spec):
            return f"{spec.target} leaves when other hosts have joined: --min-np {self._job.limits.min_np}"
        return f"{spec.target} leaves at the next commit"

    def concluded(self, outcome: Outcome) -> Outcome:
        ended_well = [member for member, end in sorted(outcome.exits.items()) if end.ok]
        last = [member for member in self._supervisor.inquiry.members if member in ended_well]
        # A rank that has returned may have left before the last view.
        rest = [item for item in ended_well if item in outcome.results and item not in last]
        outcome.members = last + rest
        log = self.membership.log
        return with_changes(outcome, self.stopped_because, log.lines, log.excluded, self._last_error)


_ACTIONS: Mapping[type, Callable[[ElasticRanks, Any], None]] = {
    Say: ElasticRanks._say,
    OpenHost: ElasticRanks._open_host,
    CloseHost: ElasticRanks._close_host,
    StartProcess: ElasticRanks._start_process,
    StopProcess: ElasticRanks._stop_process,
    Exclude: ElasticRanks._exclude,
    ReportExit: ElasticRanks._report_exit,
    Fail: lambda ranks, action: ranks._fail(action.text),
    Finish: ElasticRanks._finish,
}
