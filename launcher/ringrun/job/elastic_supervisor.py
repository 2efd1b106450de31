"""The supervisor of an elastic job: hosts and processes come and go while the job runs.

:class:`~ringrun.elastic.membership.Membership` decides what is started and ended;
:class:`~ringrun.job.supervise.Supervisor` has the loop, the agents and the output.
"""

from __future__ import annotations

import os
from typing import Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ringcomm.clock import monotonic
from ringcomm.config import Slot
from ringcomm.errors import ConfigError
from ringcomm.rendezvous.actions import Notice

from ..agent import processes, threads
from ..diagnosis.failure_report import missing_module_hint
from ..diagnosis.first_failure import Exit
from ..diagnosis.local_files import local_file_hint
from ..diagnosis.tracebacks import last_error, traceback_lines
from ..elastic.changes import change_of
from ..elastic.discovery import host_key
from ..elastic.job import ElasticJob
from ..elastic.limits import timeout_text
from ..elastic.membership import Membership
from ..elastic.places import (
    Action,
    CloseHost,
    Exclude,
    Fail,
    Finish,
    OpenHost,
    ReportExit,
    Say,
    StartProcess,
    StopProcess,
    describe_sources,
)
from ..plan.hosts import HostSpec, parse_host
from ..plan.job import HostJob
from ..reach.agent_process import AgentLink
from ..reach.named_hosts import with_lists
from ..show.console import Console
from .agents import END, Steps, term
from .discovery import Discovery
from .outcome import Outcome, with_changes
from .rendezvous import OpenRendezvous, rendezvous_variables
from .supervise import Supervisor

LOST: Steps = ((9, 2.0),)
"""For a process that the rendezvous has declared lost: it may be writing its traceback, or be frozen."""


class ElasticSupervisor(Supervisor):
    """Runs one elastic job, once."""

    def __init__(
        self,
        job: ElasticJob,
        console: Console,
        open_rendezvous: OpenRendezvous,
        coloured: Optional[Mapping[int, bool]] = None,
    ) -> None:
        super().__init__(job, console, None, coloured)
        self._elastic_job, self._limits = job, job.limits
        self._membership = Membership(job.limits, monotonic())
        self._rendezvous = self._server = self._opened(open_rendezvous)
        self._endpoints: List[Tuple[str, int]] = []
        self._local: Dict[str, bool] = {}  # by host, whether it is this machine
        self._finished = False
        self._ended_members: Set[int] = set()  # since the last view
        self._last_error: Sequence[str] = ()  # the last lines on stderr of the last rank that has failed
        self._discovery: Optional[Discovery] = None

    @property
    def _is_over(self) -> bool:
        return (self._finished or bool(self._ending)) and self._agents.all_closed

    @property
    def _has_failed(self) -> bool:
        return self._stopped_because is not None

    # -- starting ------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._endpoints = self._server.start()
        limits = self._limits
        if limits.script:
            self._discovery = Discovery(
                limits.script, limits.slots, self._listed,
                lambda text: self._loop.call(lambda: self._printer.show(text)),
                lambda text: self._loop.call(lambda: self._take([Fail(text)])),
            )  # fmt: skip
            self._discovery.start()
            self._take([])
        else:
            self._find_local(self._elastic_job.specs)
            self._take(self._membership.list_hosts(self._elastic_job.specs, self._loop.clock()))

    def _listed(self, specs: Sequence[HostSpec]) -> None:
        """Take the hosts that the script printed (any thread)."""
        self._find_local(specs)
        self._loop.call(lambda: self._take(self._membership.list_hosts(specs, self._loop.clock())))

    def _find_local(self, specs: Sequence[HostSpec]) -> None:
        """Determine which hosts are this machine (any thread). This may take seconds."""
        new = [spec for spec in specs if host_key(spec) not in self._local]
        self._local.update(zip(map(host_key, new), self._elastic_job.maker.find_local(new)))

    # -- actions -------------------------------------------------------------------------------

    def _take(self, actions: Sequence[Action]) -> None:
        """Perform actions, then set the timer for the next ones."""
        for action in actions:
            if not self._ending or isinstance(action, (Say, Fail)):
                self._perform(action)
        due_s = self._membership.due_s()
        if due_s is None or self._ending or self._finished:
            self._loop.cancel("elastic")
        else:
            self._loop.after("elastic", max(0.0, due_s - self._loop.clock()), self._tick)

    def _tick(self) -> None:
        self._take(self._membership.tick(self._loop.clock()))

    def _perform(self, action: Action) -> None:
        if isinstance(action, Say):
            self._printer.show(action.text)
        elif isinstance(action, OpenHost):
            self._open_host(action)
        elif isinstance(action, CloseHost):
            self._loop.cancel(f"start {action.agent}")
            if action.agent not in self._ready:
                self._done.add(action.agent)  # the end of its login is expected
            self._agents.stop_host(self.job.hosts[action.agent], fetch=bool(self.job.fetch))
        elif isinstance(action, StartProcess):
            self._start_process(action)
        elif isinstance(action, StopProcess):
            host = self.job.host_of(action.member)
            steps = LOST if action.is_lost else END
            if action.is_dropped:
                steps = self._asked[action.member] = term(self.job.grace_s)
            self._agents.send(host, {"do": "end", "rank": action.member, "steps": list(steps)})
        elif isinstance(action, Exclude):
            self._server.exclude(action.member, action.why)
        elif isinstance(action, ReportExit):
            self._server.process_exited(action.member, action.how, False)
            self._printer.ended(action.member, False)
            self._ended_members.add(action.member)
        elif isinstance(action, Fail):
            self._fail(action.text)
        elif isinstance(action, Finish):
            self._finished = True
            self._agents.stop(END, fetch=bool(self.job.fetch))

    def _open_host(self, action: OpenHost) -> None:
        try:
            is_local = self._local[host_key(action.spec)]
            host = self._elastic_job.open_host(action.agent, action.spec, action.slots, is_local)
        except ConfigError as problem:
            self._fail(str(problem))
            return
        self._ranks.append(set())
        self._agents.add(host)
        limit_s = self.job.settings.start_timeout_s
        self._loop.after(f"start {host.index}", limit_s, lambda: self._late_host(host))

    def _late_host(self, host: HostJob) -> None:
        """Give up a host that is not ready in time."""
        text = self._not_ready(host)
        self._agents.abandon(host)
        self.problem(host, text)

    def _start_process(self, action: StartProcess) -> None:
        host = self.job.hosts[action.agent]
        staying = [item for item in self._membership.processes.values() if not item.leaving]
        before = sum(item.joined or item.member < action.member for item in staying)
        place = (action.member, action.agent, action.local)
        rank = self._elastic_job.add_member(*place, before, len(staying))
        self._server.expect(action.member, Slot(action.agent, action.local), host.name)
        self._ranks[action.agent].add(action.member)
        try:
            self._printer.add(action.member, host.name)
        except ConfigError as problem:
            self._fail(str(problem))
            return
        self._agents.send(host, {"do": "start", "rank": rank})

    def _fail(self, text: str) -> None:
        """End a job that cannot continue; "" if the hosts' problems are the reason."""
        if self._stopped_because is None and not self._finished:
            self._stopped_because = text
            if not self._membership.processes:
                self._end("failure" if text else "start", END)

    # -- agents' reports -----------------------------------------------------------------------

    def _host_ready(self, host: HostJob) -> None:
        self._loop.cancel(f"start {host.index}")
        limits = {host.name: self._ready[host.index]["limits"]}
        self._printer.show(threads.describe(limits, self.job.settings.threads))
        env = rendezvous_variables(self._endpoints, host, self._ready[host.index])
        self._agents.send(host, {"do": "go", "env": env})
        self._take(self._membership.host_ready(host.index, self._loop.clock()))

    def problem(self, host: HostJob, text: str) -> None:
        self._loop.cancel(f"start {host.index}")
        if not (self._ending or self._finished):
            self._problems[host.index] = text
            self._take(self._membership.host_failed(host.index, text, self._loop.clock()))

    def confused(self, host: HostJob, why: str) -> None:
        """Handle invalid data: the host counts as lost."""
        if self._membership.processes:
            self._printer.show(why)
        self.problem(host, why)

    def _host_lost(self, host: HostJob, text: str) -> None:
        if host.is_local:
            processes.sweep(self.job.id, host.index)
        self.problem(host, text)

    def hung_up(self, host: HostJob, link: AgentLink, status: Optional[int]) -> bool:
        """Handle the end of a link; return whether to start it again."""
        if host.index in {*self._done, *self._problems} or self._ending or self._finished:
            return False
        if host.index in self._ready:
            self._host_lost(host, host.reach.explain_loss(host.name, status, link.stderr_text))
            return False
        return super().hung_up(host, link, status)

    def _report_exit(self, end: Exit) -> None:
        super()._report_exit(end)
        self._ended_members.add(end.rank)
        tail = self._printer.tails().get(end.rank, ())
        if not end.ok and traceback_lines(tail):
            self._last_error = tail
        ended = bool(end.sent) and end.signal == end.sent
        now_s, error = self._loop.clock(), "" if end.ok else self._error_of(end.rank)
        self._take(self._membership.exited(end.rank, end.status, end.describe(), now_s, ended, error))
        if not self._ending:
            self._show_killed()

    def _error_of(self, member: int) -> str:
        """Return a line with the error of a process and a remedy if one is known; or ""."""
        host, tail = self.job.host_of(member), self._printer.tails().get(member, [])
        found = self._ready[host.index].get("found") or {}
        hint = missing_module_hint(tail, host.name, found.get("python", ""))
        return ". ".join(filter(None, (last_error(tail), hint or local_file_hint(self.job, host, tail))))

    # -- the rendezvous' reports ---------------------------------------------------------------

    def _notice(self, notice: Notice) -> None:
        now_s = self._loop.clock()
        if notice.kind == "view":
            change = change_of(notice.detail)
            self._watching.linked(notice.detail.get("links", ()))
            self._survived(change.members)
            self._take(self._membership.view(change, now_s))
            if self.job.settings.verbose:
                self._printer.show(str(notice.detail.get("table", "")))
        elif notice.kind == "lost":
            self._take(self._membership.lost(notice.detail.get("member"), notice.text, now_s))
        elif notice.kind == "waiting":
            sources = describe_sources(self._membership.hosts.values(), self._limits.script, now_s)
            self._printer.show(f"{notice.text}{sources}")
        else:
            super()._notice(notice)

    def _survived(self, members: Sequence[int]) -> None:
        """Drop the failures so far, which the job has survived."""
        self._ranks_now = members
        self._watching.history.changed(members)
        self._failure.survived()  # the job continues without the ranks that have failed until now
        self._printer.settle(self._ended_members)
        for member in self._ended_members:
            self._printer.remove(member)
        self._ended_members.clear()

    def _failed_notice(self, notice: Notice) -> None:
        limits, kind = self._limits, notice.detail.get("kind")
        if kind == "timeout":
            self._fail(f"{timeout_text(limits, limits.min_np)}\n{notice.text}")
        else:
            self._fail(notice.text)

    # -- the user's commands -------------------------------------------------------------------

    def _command(self, command: Mapping[str, Any]) -> str:
        what, text = command.get("do"), command.get("host")
        if what not in ("add", "drop"):
            return super()._command(command)
        if not isinstance(text, str):
            raise ConfigError(f"ringrun {what} needs a host.")
        specs = with_lists([parse_host(text, f"ringrun {what}")], os.environ)
        self._find_local(specs)
        act = self._add if what == "add" else self._drop
        return "\n".join(self._loop.ask(lambda: [act(spec) for spec in specs]))

    def _add(self, spec: HostSpec) -> str:
        self._take(self._membership.add_host(spec, self._loop.clock()))
        slots = self._membership.hosts[host_key(spec)].slots
        return f"{spec.target} with {slots} slot{'' if slots == 1 else 's'} is being added"

    def _drop(self, spec: HostSpec) -> str:
        actions = self._membership.drop_host(spec.target, self._loop.clock())
        if actions is None:
            raise ConfigError(f"{spec.target} is no host of this job.")
        self._take(actions)
        if self._membership.is_postponed(spec):
            return f"{spec.target} leaves when other hosts have joined: --min-np {self._limits.min_np}"
        return f"{spec.target} leaves at the next commit"

    # -- ending --------------------------------------------------------------------------------

    def _stop_services(self) -> None:
        if self._discovery is not None:
            self._discovery.stop()
        super()._stop_services()

    def _changes(self) -> Sequence[Tuple[float, str]]:
        return self._membership.log.lines

    @property
    def _never_began(self) -> bool:
        return self._ending == "start" or (self._stopped_because == "" and bool(self._problems))

    def _explained(self) -> Outcome:
        outcome = super()._explained()
        ended_well = [member for member, end in sorted(outcome.exits.items()) if end.ok]
        last = [member for member in self._ranks_now if member in ended_well]
        # A rank that has returned may have left before the last view.
        rest = [item for item in ended_well if item in outcome.results and item not in last]
        outcome.members = last + rest
        log = self._membership.log
        how = log.lines, log.excluded, self._last_error
        return with_changes(outcome, self._stopped_because, *how)
