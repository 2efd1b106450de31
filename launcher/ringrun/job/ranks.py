"""When a job's ranks start, and what follows when a host or a rank ends: the policies of jobs of a fixed size
and of elastic jobs; and the job's rendezvous, with the ranks' variables for it.

:class:`~ringrun.job.supervise.Supervisor` has the loop, the agents and the output. All methods of a policy
run in the loop's thread, except for those of its `commands`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ringcomm.config import Slot
from ringcomm.configuration.membership import format_endpoint, is_loopback, numeric
from ringcomm.errors import ConfigError
from ringcomm.rendezvous.membership import Notice, Seat

from ..agent import processes
from ..diagnosis.failure_report import last_error, local_file_hint, missing_module_hint, traceback_lines
from ..diagnosis.first_failure import Complaint, Exit
from ..elastic import membership as actions
from ..elastic.job import Discovery, ElasticJob, host_key, timeout_text
from ..elastic.membership import Action, Membership, OpenHost, StartProcess, StopProcess, change_of
from ..plan.hosts import HostSpec, parse_host
from ..plan.job import HostJob, Job
from ..reach.named_hosts import with_lists
from .agents import END, Steps, term
from .outcome import Outcome, with_changes

if TYPE_CHECKING:
    from ringcomm.rendezvous.server import RendezvousServer  # imported when a job of several ranks starts

    from .supervise import Supervisor

LOST: Steps = ((9, 2.0),)
"""For a process that the rendezvous has declared lost: it may be writing its traceback, or be frozen."""
GATHER_S = 2.0  # after the first host's problem, in which other hosts can report theirs
Notifiers = Mapping[str, Callable[[Notice], None]]
Commands = Mapping[str, Callable[[Mapping[str, Any]], str]]


class FixedRanks:
    """The policy of a job of a fixed size: ranks start together, and the first failure ends all of them."""

    may_end = True  # the job is over when all agents have ended
    stopped_because = None  # why an elastic job cannot continue
    changes: Sequence[Tuple[float, str]] = ()  # of the ranks: seconds since the start, and text
    commands: Commands = {}  # ``ringrun add`` and so on

    def __init__(self, supervisor: Supervisor) -> None:
        self.rendezvous: Optional[RendezvousServer] = None  # once it is open
        self.notices: Notifiers = {"failed": self._failed}  # of the rendezvous, by kind
        self._supervisor = supervisor
        self._has_started = False

    @property
    def has_failed(self) -> bool:
        """Whether the job has failed, so that it ends soon."""
        return self._supervisor.failure.failed

    @property
    def never_began(self) -> bool:
        """Whether the job is over because hosts did not start."""
        has_problems = any(state.problem for state in self._supervisor.hosts)
        return has_problems and self._supervisor.ending.reason in ("start", "")

    def begin(self) -> None:
        """Begin to start the agents, which the loop does."""
        limit_s = self._supervisor.job.settings.start_timeout_s
        self._supervisor.loop.after("start", limit_s, self._timed_out)

    def _timed_out(self) -> None:
        for host, state in zip(self._supervisor.job.hosts, self._supervisor.hosts):
            if state.ready is None:
                state.problem = state.problem or self._supervisor.agents.not_ready(host)
        self._supervisor.ending.begin("start")

    def problem(self, host: HostJob, text: str) -> None:
        """Handle a host that does not start."""
        supervisor, state = self._supervisor, self._supervisor.hosts[host.index]
        if not supervisor.ending.reason:
            state.problem = state.problem or text
            if not supervisor.loop.is_set("gather"):
                supervisor.loop.after("gather", GATHER_S, lambda: supervisor.ending.begin("start"))
            self._end_if_all_reported()

    def ready(self, host: HostJob) -> None:
        """Handle a host that has everything that ranks need."""
        supervisor = self._supervisor
        if all(state.ready is not None for state in supervisor.hosts) and not supervisor.ending.reason:
            self._start()
        else:
            self._end_if_all_reported()

    def _end_if_all_reported(self) -> None:
        states = self._supervisor.hosts
        all_reported = all(state.problem or state.ready is not None for state in states)
        if not self._has_started and all_reported and any(state.problem for state in states):
            self._supervisor.ending.begin("start")

    def _start(self) -> None:
        """Open the rendezvous and start the ranks."""
        self._has_started = True
        supervisor, job = self._supervisor, self._supervisor.job
        facts = {index: state.ready or {} for index, state in enumerate(supervisor.hosts)}
        limits = {host.name: facts[host.index]["limits"] for host in job.hosts}
        supervisor.printer.show(processes.describe_threads(limits, job.settings.threads))
        supervisor.loop.cancel("start")
        endpoints: List[Tuple[str, int]] = []
        if job.plan.size > 1:
            self.rendezvous = supervisor.open_rendezvous()
            endpoints = self.rendezvous.start()
        for host in job.hosts:
            supervisor.hosts[host.index].ranks = {place.rank for place in job.plan.on_host(host.index)}
            env = master_variables(job, host, facts)
            env.update(rendezvous_variables(endpoints, host, facts[host.index]))
            supervisor.agents.send(host, {"do": "go", "env": env})

    def confused(self, host: HostJob, why: str) -> None:
        """Handle invalid data of a host."""
        if self._has_started:
            self._supervisor.printer.show(why)
        else:
            self.problem(host, why)

    def lost(self, host: HostJob, text: str) -> None:
        """Handle the loss of an agent that had answered."""
        if not self._has_started:
            self.problem(host, text)
            return
        supervisor = self._supervisor
        if host.is_local:
            processes.sweep(supervisor.job.id, host.index)
        supervisor.failure.host_lost(host.index, text)
        for rank in sorted(supervisor.hosts[host.index].ranks.difference(supervisor.failure.exits)):
            supervisor.printer.ended(rank, False)
            if self.rendezvous is not None:
                self.rendezvous.process_exited(rank, "lost with its host", False)

    def _failed(self, notice: Notice) -> None:
        """End the job after the rendezvous has aborted it."""
        if not self._supervisor.ending.reason:
            is_link = notice.detail.get("kind") == "cut"
            complaint = Complaint(notice.rank, notice.culprit, notice.text, is_link)
            self._supervisor.failure.complained(complaint)
            if notice.culprit is not None and notice.detail.get("leaving"):
                self._supervisor.ending.leaving.add(notice.culprit)

    def exited(self, end: Exit) -> None:
        """Handle the end of a rank; the first failure has noted it."""

    def concluded(self, outcome: Outcome) -> Outcome:
        """Return the job's outcome from that of its last ranks."""
        return outcome

    def stop(self) -> None:
        """End the rendezvous."""
        if self.rendezvous is not None:
            self.rendezvous.stop()


# -- elastic jobs -----------------------------------------------------------------------------


class ElasticRanks:
    """The policy of an elastic job, whose :class:`~ringrun.elastic.membership.Membership` decides."""

    def __init__(self, supervisor: Supervisor) -> None:
        job = supervisor.job
        assert isinstance(job, ElasticJob)
        self._supervisor: Supervisor = supervisor
        self._job = job
        self.membership = Membership(job.limits, supervisor.loop.clock())
        self.rendezvous: RendezvousServer = supervisor.open_rendezvous()
        self.stopped_because: Optional[str] = None
        self.notices: Notifiers = {
            "view": self._view, "failed": self._failed,
            "waiting": lambda it: supervisor.printer.show(it.text),
            "lost": lambda it: self._take(
                self.membership.lost(it.detail.get("member"), it.text, self._now_s)
            ),
        }  # fmt: skip
        self.commands: Commands = {"add": self._command, "drop": self._command}
        self._endpoints: List[Tuple[str, int]] = []
        self._local: Dict[str, bool] = {}  # by host, whether it is this machine
        self._refused: Set[str] = set()  # why hosts of the script are left out, as shown
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
                lambda text: call(lambda: self._take([actions.Fail(text)])),
            )  # fmt: skip
            self._discovery.start()
            self._take([])
        else:
            self._find_local(self._job.specs)
            self._take(self.membership.list_hosts(self._job.specs, self._now_s))

    def stop(self) -> None:
        if self._discovery is not None:
            self._discovery.stop()
        self.rendezvous.stop()

    def _listed(self, specs: Sequence[HostSpec]) -> None:
        """Take the hosts that the script printed (any thread). ConfigError if the first ones need encryption;
        later ones are left out then.
        """
        self._find_local(specs)
        refused = {spec: text for spec in specs for text in [self._why_clear(spec)] if text}
        if refused and not self.membership.hosts:
            raise ConfigError(next(iter(refused.values())))
        told = sorted(set(refused.values()) - self._refused)
        self._refused.update(told)
        usable = [spec for spec in specs if spec not in refused]
        act = [*map(actions.Say, told)]
        self._supervisor.loop.call(
            lambda: self._take([*act, *self.membership.list_hosts(usable, self._now_s)])
        )

    def _find_local(self, specs: Sequence[HostSpec]) -> None:
        """Determine which hosts are this machine (any thread). This may take seconds."""
        new = [spec for spec in specs if host_key(spec) not in self._local]
        self._local.update(zip(map(host_key, new), self._job.maker.doors.find_local(new)))

    def _why_clear(self, spec: HostSpec) -> str:
        """Return why a new host may not be used, if it has a public address and the job does not encrypt."""
        is_old = self._local[host_key(spec)] or host_key(spec) in self.membership.hosts
        if not self._job.needs_private or is_old or not self._job.maker.doors.public_host([spec.name]):
            return ""
        return (
            f"{spec.name} has a public address, but this job does not encrypt its connections. Start the job "
            "with --encrypt, or with --no-encrypt to use the host without encryption."
        )

    def ready(self, host: HostJob) -> None:
        supervisor, facts = self._supervisor, self._supervisor.hosts[host.index].ready or {}
        supervisor.loop.cancel(f"start {host.index}")
        limits = {host.name: facts["limits"]}
        supervisor.printer.show(processes.describe_threads(limits, self._job.settings.threads))
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
        text = self._supervisor.agents.not_ready(host)
        self._supervisor.agents.abandon(host)
        self.problem(host, text)

    # -- actions -------------------------------------------------------------------------------

    def _take(self, due: Sequence[Action]) -> None:
        """Perform actions, then set the timer for the next ones."""
        loop, ending = self._supervisor.loop, self._supervisor.ending
        for action in due:
            if not ending.reason or isinstance(action, (actions.Say, actions.Fail)):
                _ACTIONS[type(action)](self, action)
        due_s = self.membership.due_s()
        if due_s is None or self.may_end:
            loop.cancel("elastic")
        else:
            seconds = max(0.0, due_s - loop.clock())
            loop.after("elastic", seconds, lambda: self._take(self.membership.tick(self._now_s)))

    def _say(self, action: actions.Say) -> None:
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

    def _close_host(self, action: actions.CloseHost) -> None:
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

    def _report_exit(self, action: actions.ReportExit) -> None:
        self.rendezvous.process_exited(action.member, "lost with its host", False)
        self._supervisor.printer.ended(action.member, False)
        self._ended_members.add(action.member)

    def _finish(self, _: actions.Finish) -> None:
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
        ended = bool(end.sent) and end.signal == end.sent
        error = "" if end.ok else self._error_of(end.rank, tail)
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
        for spec in specs:
            if what == "add" and self._why_clear(spec):
                raise ConfigError(self._why_clear(spec))
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
        if self.membership.is_postponed(spec.target):
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
    actions.Say: ElasticRanks._say,
    actions.OpenHost: ElasticRanks._open_host,
    actions.CloseHost: ElasticRanks._close_host,
    actions.StartProcess: ElasticRanks._start_process,
    actions.StopProcess: ElasticRanks._stop_process,
    actions.Exclude: lambda it, action: it.rendezvous.exclude(action.member, action.why),
    actions.ReportExit: ElasticRanks._report_exit,
    actions.Fail: lambda it, action: it._fail(action.text),
    actions.Finish: ElasticRanks._finish,
}


# -- the rendezvous ---------------------------------------------------------------------------


def open_rendezvous(job: Job, notify: Callable[[Notice], None]) -> RendezvousServer:
    """Return the rendezvous of a job, which gives its notices to `notify`."""
    from ringcomm.rendezvous.server import RendezvousServer
    from ringcomm.transport.reactor import encryption_of

    elastic = isinstance(job, ElasticJob)
    places = () if elastic else job.plan.places  # those of an elastic job are announced one by one
    return RendezvousServer(
        key=job.key, job=job.id, notify=notify, start_timeout_s=job.settings.start_timeout_s,
        addresses=rendezvous_addresses(job),
        seats=[Seat(job.slot_of(place.rank), job.host_of(place.rank).name) for place in places],
        limits=job.limits if isinstance(job, ElasticJob) else None, launched=elastic,
        encryption=encryption_of(job.certificate), port=job.port, joining=job.joining,
    )  # fmt: skip


def rendezvous_addresses(job: Job) -> List[str]:
    """Return the addresses on which the rendezvous listens; ConfigError if no interface matches."""
    if job.all_local:
        return ["127.0.0.1"]
    from ringcomm.transport.nics import LOOPBACK, own_addresses

    # --iface does not apply without ranks here; in an elastic job only if there is such an interface here.
    spec = next((host.env.get("RINGCOMM_IFACE", "") for host in job.hosts if host.is_local), "")
    try:
        addresses = own_addresses(job.settings.iface if job.is_elastic else spec)
    except ConfigError:
        if not job.is_elastic:
            raise
        addresses = own_addresses()
    # A link-local address is not usable on another host without the name of that host's interface.
    found = [item for item in addresses if not item.scope]
    if not job.is_elastic and all(item.kind == LOOPBACK for item in found):
        raise ConfigError(
            "This machine has no network address except the loopback's"
            + (f" that matches --iface {spec}" if spec else "")
            + ", but the job's other hosts must reach it. `ip address` lists the addresses."
        )
    return [item.address for item in found]


def rendezvous_variables(
    endpoints: Sequence[Tuple[str, int]], host: HostJob, facts: Mapping[str, Any]
) -> Dict[str, str]:
    """Return the variables with the addresses of the rendezvous, for the ranks of one host."""
    from ringcomm.transport.nics import VIRTUAL, machine, own_addresses

    # Addresses of virtual interfaces may exist on several hosts: ranks try them last.
    usable = [item for item in endpoints if host.is_local or not is_loopback(item[0])]
    if not usable:
        return {}
    real = {item.address for item in own_addresses() if item.kind != VIRTUAL}
    first = [item for item in usable if item[0] in real or is_loopback(item[0])]
    last = [item for item in usable if item not in first]
    login = str(facts.get("login", "")).split()
    # A machine that has joined may have dialled a router, which forwards the port to this machine.
    if host.reach.dials_port and len(login) == 4 and login[1].isdigit():
        first = list(dict.fromkeys([*first, (login[0], int(login[1]))]))
    groups = [",".join(format_endpoint(*item) for item in group) for group in (first, last) if group]
    return {"RINGCOMM_RENDEZVOUS": ";".join(groups), "RINGCOMM_RENDEZVOUS_MACHINE": machine()}


def master_variables(job: Job, host: HostJob, facts: Mapping[int, Mapping[str, Any]]) -> Dict[str, str]:
    """Return ``MASTER_ADDR`` and ``MASTER_PORT``, for ``torch.distributed``, unless the user passes them."""
    first = job.host_of(0)
    found = {
        "MASTER_PORT": str(facts[first.index]["port"]),
        "MASTER_ADDR": _master_address(job, first, facts),
    }
    if not {*found, "RANK", "WORLD_SIZE"} & set(host.env):
        found["RINGCOMM_MASTER"] = f"{found['MASTER_ADDR']},{found['MASTER_PORT']},{job.plan.size}"
    return {name: value for name, value in found.items() if name not in host.env}


def _master_address(job: Job, first: HostJob, facts: Mapping[int, Mapping[str, Any]]) -> str:
    """Return an address of rank 0's host that the other hosts reach: an ssh login has used it."""
    if len(job.hosts) == 1 or job.all_local:
        return "127.0.0.1"
    if not first.is_local:
        _, server = _login(facts[first.index])
        return server or first.name
    own = [address for address in rendezvous_addresses(job) if not is_loopback(address)]
    seen = {numeric(_login(facts[host.index])[0]) for host in job.hosts if not host.is_local}
    return next((address for address in own if numeric(address) in seen), own[0])


def _login(facts: Mapping[str, Any]) -> Tuple[str, str]:
    """Return the addresses of an agent's ssh connection, the launcher's first; "" if not usable elsewhere."""
    words = str(facts.get("login", "")).split()
    if len(words) != 4:
        return "", ""
    client, server = ("" if "%" in word or is_loopback(word) else word for word in (words[0], words[2]))
    return client, server
