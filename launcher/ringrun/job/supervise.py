"""The supervisor: one loop over all agents, from the first login until all processes have ended everywhere.
The loop runs in the thread that calls :meth:`Supervisor.run`; others reach it by a queue and a socket.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ringcomm.clock import monotonic
from ringcomm.errors import ConfigError
from ringcomm.rendezvous.actions import Notice

from ..agent import framing, processes, threads
from ..diagnosis.failure_report import host_problem, ranks_text
from ..diagnosis.first_failure import Complaint, Exit, FirstFailure, signal_name
from ..plan.hosts import crowding
from ..plan.job import HostJob, Job
from ..reach.agent_process import AgentLink
from ..reach.incoming import Incoming
from ..reach.origin import install_for
from ..reach.protocol import Frame
from ..ship.source_tree import FETCHED
from ..show.console import Console
from ..show.printer import STDERR, STDOUT, Printer
from ..show.timeline_file import missing_timeline
from .agents import END, INTERRUPT, KILL, PING_S, Agents, Steps, term
from .control_socket import ControlSocket, job_facts
from .event_loop import Loop
from .fetch import FetchedFiles
from .grace import Grace, killed_text
from .inquiry import Inquiry
from .notices import Notices
from .outcome import Outcome, ended, not_started, verified_results
from .rendezvous import OpenRendezvous, master_variables, rendezvous_variables
from .starting import failed_start, not_ready_text
from .supply import Supply
from .watching import Watching

if TYPE_CHECKING:
    from ringcomm.rendezvous.server import RendezvousServer

SAME_S = 1.0
"""A second signal within this time is the same request, unless it is Ctrl-C: ``timeout`` sends it to a
process and to its group, and systemd SIGHUP after SIGTERM."""
GATHER_S = 2.0
"""Seconds after the first host's problem in which other hosts can report theirs."""
STREAMS = {framing.STDOUT: STDOUT, framing.STDERR: STDERR}


class Supervisor:
    """Runs one :class:`~ringrun.plan.job.Job`, once; ``ElasticSupervisor`` overrides what differs there.
    `open_rendezvous` is needed for several ranks (:mod:`.rendezvous`); `coloured` tells by stream (1 and 2)
    whether prefixes have colours.
    """

    def __init__(
        self, job: Job, console: Console, open_rendezvous: Optional[OpenRendezvous] = None,
        coloured: Optional[Mapping[int, bool]] = None,
    ) -> None:  # fmt: skip
        self.job, self._console = job, console
        self._printer = Printer(job, console, coloured or {1: False, 2: False}, monotonic)
        self._loop, self._began_s = Loop(monotonic), time.time()
        self._open_rendezvous = open_rendezvous
        self._rendezvous: Optional[RendezvousServer] = None
        self._failure = FirstFailure()
        self._grace = Grace(self._loop, self._failure.exits, lambda: self._end("failure", END))
        self._agents = Agents(job, self._loop, self)
        self._ranks_now: Sequence[int] = ()  # of an elastic job: the members of the last view, by rank
        self._inquiry = Inquiry(
            job, self._agents.links, self._loop, self._printer.show, self._failure, lambda: self._ranks_now
        )
        self._watching = Watching(
            job, self._agents.links, self._loop, self._printer, console,
            bool(coloured and coloured.get(STDERR)), self._inquiry.for_the_user,
        )  # fmt: skip
        self._control = ControlSocket(job.id, self._command)
        self._fetched = FetchedFiles(Path(FETCHED))
        self._supply = Supply(self._agents, self._loop, self._printer.show, self.problem)
        self._incoming: Dict[int, Incoming] = {}  # by host
        self._ranks: List[Set[int]] = [set() for _ in job.hosts]  # those that have been started, by host
        self._ready: Dict[int, Dict[str, Any]] = {}  # its agent's facts, by host
        self._done: Set[int] = set()
        self._problems: Dict[int, str] = {}
        self._results: Dict[int, bytearray] = {}
        self._going, self._signum = False, 0  # whether the ranks have been started; the user's signal
        self._signalled_s = self._at_once_s = 0.0  # when the user's first and second signal came
        self._asked: Dict[int, Steps] = {}  # by rank that the user ends
        self._killed: Dict[str, List[int]] = {}  # ranks that did not end in time, by the line about them
        self._ending = ""  # why we end the job, if we do: start, failure, interrupt, pipe or abandoned
        self._stopped_because: Optional[str] = None  # why an elastic job cannot continue
        self._notices = Notices(job, self._printer)

    def interrupt(self, signum: int) -> None:
        """End the job: in order the first time, immediately the second. For other threads and signals."""
        self._loop.call(lambda: self._interrupted(signum))

    def diagnose(self) -> None:
        """Show what every rank is doing; the job continues. For other threads and signal handlers."""
        self._loop.call(self._inquiry.for_the_user)

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Start, watch and end the job. No process, file or socket of it remains, whatever happens."""
        self._console.on_change(self._loop.wake)
        try:
            self._printer.show("" if self.job.attempt else "\n".join(self.job.notes))
            self._loop.after("ping", PING_S, self._agents.ping)
            self._watching.start()
            self._control.start_if_possible(self.job, self._printer.show)
            self._begin()
            while not self._is_over:
                self._run_once()
        finally:
            self._tear_down()
        outcome = self._outcome()
        failure = outcome.report if outcome.exit_code else ""
        self._watching.write_report(outcome.reason, failure, self._changes())
        return outcome

    def _changes(self) -> Sequence[Tuple[float, str]]:
        """Return the changes of the ranks: seconds since the start, and text."""
        return ()

    @property
    def _is_over(self) -> bool:
        return self._agents.all_closed

    @property
    def _has_failed(self) -> bool:
        """Whether the job has failed, so that it ends soon."""
        return self._failure.failed

    def _run_once(self) -> None:
        self._agents.go_on(reading=not self._console.full)
        self._loop.run_once(0.02 if self._agents.fading else 0.25 if self._printer.waiting else PING_S)
        self._agents.look()
        self._printer.tick()
        if self._console.broken and not self._ending:
            self._end("pipe", END)
        if self._has_failed and not self._ending and self._grace.begin():
            self._inquiry.after_failure()

    # -- starting ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin to start the agents of all hosts, which the loop does."""
        self._loop.after("start", self.job.settings.start_timeout_s, self._start_timed_out)

    def problem(self, host: HostJob, text: str) -> None:
        """Note a host that does not start; the others have :data:`GATHER_S` to report their problems."""
        if not self._ending:
            self._problems.setdefault(host.index, text)
            if not self._loop.is_set("gather"):
                self._loop.after("gather", GATHER_S, lambda: self._end("start", END))
            if len(self._problems) + len(self._ready) == len(self.job.hosts):
                self._end("start", END)

    def _start_timed_out(self) -> None:
        for host in self.job.hosts:
            if host.index not in self._ready:
                self._problems.setdefault(host.index, self._not_ready(host))
        self._end("start", END)

    def _not_ready(self, host: HostJob) -> str:
        link, limit_s = self._agents.links[host.index], self.job.settings.start_timeout_s
        return not_ready_text(host, link, limit_s, self._supply.waits_for(host))

    def _go(self) -> None:
        """Open the rendezvous and start the ranks. Call when all hosts are ready."""
        self._going = True
        limits = {host.name: self._ready[host.index]["limits"] for host in self.job.hosts}
        self._printer.show(threads.describe(limits, self.job.settings.threads))
        self._loop.cancel("start")
        endpoints: List[Tuple[str, int]] = []
        if self._open_rendezvous is not None and self.job.plan.size > 1:
            self._rendezvous = self._opened(self._open_rendezvous)
            endpoints = self._rendezvous.start()
        for host in self.job.hosts:
            self._ranks[host.index] = {place.rank for place in self.job.plan.on_host(host.index)}
            env = master_variables(self.job, host, self._ready)
            env.update(rendezvous_variables(endpoints, host, self._ready[host.index]))
            self._agents.send(host, {"do": "go", "env": env})

    def _opened(self, open_rendezvous: OpenRendezvous) -> RendezvousServer:
        return open_rendezvous(lambda notice: self._loop.call(lambda: self._notice(notice)))

    # -- agents' reports -----------------------------------------------------------------------

    def confused(self, host: HostJob, why: str) -> None:
        """Handle invalid data of a host."""
        if self._going:
            self._printer.show(why)
        else:
            self.problem(host, why)

    def chattered(self, host: HostJob, data: bytes) -> None:
        """Show stderr of an agent or its ssh with --verbose."""
        if self.job.settings.verbose:
            for line in data.splitlines():
                self._printer.show(f"{host.name}: {line.decode('utf-8', 'replace')}")

    def received(self, host: HostJob, frame: Frame) -> None:
        """Handle a frame of an agent; ProtocolError if the agent may not send it."""
        incoming = self._incoming.get(host.index)
        if incoming is None:
            incoming = self._incoming[host.index] = Incoming(self.job.payload is not None, self._loop.clock)
        facts = incoming.admit(frame, self._ranks[host.index])
        if frame.kind in STREAMS:
            self._printer.printed(frame.rank, STREAMS[frame.kind], frame.data)
        elif frame.kind == framing.NUMBERS:
            self._watching.take(frame.rank, frame.data)
        elif frame.kind == framing.RESULT:
            self._results.setdefault(frame.rank, bytearray()).extend(frame.data)
        elif frame.kind == framing.RECORD:
            reason = self._inquiry.take(frame.rank, frame.data)
            if reason == "ended":
                self._printer.ending(frame.rank)
            if reason == "starved" or (reason == "ended" and not self._inquiry.is_victim(frame.rank)):
                self._grace.leaving.add(frame.rank)  # its end may fail the others
        elif frame.kind == framing.FILE:
            self._fetched.take(host.name, frame.data, self.job.fetch if host.gets_code else ())
        else:
            self._event(host, frame.rank, facts)

    def _event(self, host: HostJob, rank: int, facts: Dict[str, Any]) -> None:
        name = facts["event"]
        if name == "ready":
            odd = crowding(host.planned.spec, facts["limits"]["cores"]) if self.job.checks_slots else ""
            if odd:
                self.problem(host, odd)
                self._agents.abandon(host)
                return
            self._ready[host.index] = self._notices.ready(host, facts)
            self._host_ready(host)
        elif name == "problem":
            self.problem(host, host_problem(host.name, facts, host.is_local, install_for(host)))
        elif name == "exit":
            self._notices.exited(facts)
            self._rank_exited(rank, facts)
        elif name == "lacks":
            self._supply.send(host, facts)
        elif name == "needs":
            self._supply.provision(host, facts)
        elif name == "asked":  # the user has sent a rank SIGUSR1
            self._inquiry.for_the_user()
        elif name == "done":
            self._done.add(host.index)
            self._agents.dismiss(host)
        elif name == "started" and self.job.settings.verbose:
            self._printer.show(f"rank {rank} runs on {host.name} as process {facts['pid']}")

    def _host_ready(self, host: HostJob) -> None:
        """Start the ranks after the last host has become ready."""
        if len(self._ready) == len(self.job.hosts) and not self._ending:
            self._go()
        elif self._problems and len(self._problems) + len(self._ready) == len(self.job.hosts):
            self._end("start", END)

    def _rank_exited(self, rank: int, facts: Mapping[str, Any]) -> None:
        end = Exit(rank, facts["code"], facts["signal"], facts["sent"])
        self._failure.exited(end)
        if rank in self._asked and end.signal == end.sent == signal.SIGKILL:
            at_once_s = self._at_once_s - self._signalled_s if self._at_once_s else None
            self._killed.setdefault(killed_text(self._asked[rank], at_once_s), []).append(rank)
        self._printer.ended(rank, end.ok)
        self._report_exit(end)
        self._grace.exited()

    def _report_exit(self, end: Exit) -> None:
        """Report the end of a rank to the rendezvous."""
        if self._rendezvous is not None:
            self._rendezvous.process_exited(end.rank, end.describe(), end.ok)

    def _failed_notice(self, notice: Notice) -> None:
        """End the job after the rendezvous has aborted it."""
        if not self._ending:
            link = notice.detail.get("kind") == "cut"
            self._failure.complained(Complaint(notice.rank, notice.culprit, notice.text, link))
            if notice.culprit is not None and notice.detail.get("leaving"):
                self._grace.leaving.add(notice.culprit)

    def _notice(self, notice: Notice) -> None:
        if notice.kind == "failed":
            self._failed_notice(notice)
        else:
            self._watching.linked(notice.detail.get("links", ()))
            self._notices.take(notice)

    # -- the user's commands -------------------------------------------------------------------

    def _command(self, command: Mapping[str, Any]) -> str:
        """Execute a command in a thread of the control socket; ConfigError if it is not valid."""
        if command.get("do") == "info":
            return self._loop.ask(lambda: job_facts(self.job, self._began_s, len(self._failure.exits)))
        if command.get("do") == "stop":
            self.interrupt(signal.SIGTERM)
            return f"the job {self.job.id} ({self.job.command.shown}) is being ended"
        raise ConfigError(f"There is no command {command.get('do')!r} for this job.")

    # -- links that end ------------------------------------------------------------------------

    def hung_up(self, host: HostJob, link: AgentLink, status: Optional[int]) -> bool:
        """Handle the end of a link; return whether to start it again."""
        if host.index in self._done or self._ending:
            return False
        if self._going:
            self._host_lost(host, host.reach.explain_loss(host.name, status, link.stderr_text))
        elif link.answered:
            self.problem(host, host.reach.explain_loss(host.name, status, link.stderr_text))
        else:
            failed = failed_start(host, link, status, self._printer.show)
            if failed is None:
                return True
            self.problem(host, failed)
        return False

    def _host_lost(self, host: HostJob, text: str) -> None:
        unfinished = sorted(self._ranks[host.index].difference(self._failure.exits))
        if host.is_local:
            processes.sweep(self.job.id, host.index)
        self._failure.host_lost(host.index, text)
        for rank in unfinished:
            self._printer.ended(rank, False)
            if self._rendezvous is not None:
                self._rendezvous.process_exited(rank, "lost with its host", False)

    # -- ending --------------------------------------------------------------------------------

    def _interrupted(self, signum: int) -> None:
        now_s = self._loop.clock()
        if self._signum and signum != signal.SIGINT and now_s - self._signalled_s < SAME_S:
            return
        if self._ending == "interrupt" or (self._ending and self._signum):
            self._at_once_s = self._at_once_s or now_s
            self._end(self._ending, KILL)
            return
        self._signum, self._signalled_s = signum, now_s
        if self._has_failed or self._ending:
            self._end(self._ending or "failure", END)
            return
        steps, limit = INTERRUPT, ""
        if signum != signal.SIGINT:
            steps, limit = term(self.job.grace_s), f"; they have {self.job.grace_s:g} s (--grace)"
        name = signal_name(signum)
        self._printer.show(f"{name}: ending all ranks on all hosts (once more: at once){limit}")
        self._asked.update((rank, steps) for ranks in self._ranks for rank in ranks)
        self._end("interrupt", steps)

    def _end(self, reason: str, steps: Steps) -> None:
        """Have every agent end its ranks by these steps and exit."""
        self._ending = self._ending or reason
        self._loop.cancel("start", "gather", "grace")
        self._agents.stop(steps)
        self._loop.wake()  # all links may have ended already

    def _tear_down(self) -> None:
        try:
            if not self._is_over:  # an exception: the caller's Ctrl-C, or a defect
                self._end("abandoned", END)
                while not self._agents.all_closed:
                    self._run_once()
        finally:
            self._agents.force()
            self._watching.stop()
            self._control.stop()
            self._stop_services()
            self._printer.close()
            self._console.on_change(lambda: None)
            self._loop.close()

    def _stop_services(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.stop()

    @property
    def _never_began(self) -> bool:
        """Whether the job is over because hosts did not start."""
        return bool(self._problems) and self._ending in ("start", "")

    def _outcome(self) -> Outcome:
        if self._never_began:
            return not_started(self.job, self._problems, set(self._ready))
        outcome = self._explained()
        self._printer.settle(outcome.to_show, outcome.reported)
        self._show_killed()
        if self.job.fetch:
            self._printer.show(self._fetched.describe(self.job))
        if outcome.reason == "done":
            self._notices.conclude(outcome, self._inquiry.made_no_call)
            self._printer.show(missing_timeline(self.job, self._began_s, outcome.members or [0]))
        return outcome

    def _show_killed(self) -> None:
        """Name the ranks that had to be killed after the user's signal."""
        for how, ranks in self._killed.items():
            hosts = sorted({self.job.host_of(rank).name for rank in ranks})
            self._printer.show(f"{ranks_text(sorted(ranks))} on {', '.join(hosts)}: {how}")
        self._killed.clear()

    def _explained(self) -> Outcome:
        """Return the outcome of ranks that had started, with their explanations."""
        failed = self._has_failed and self._ending not in ("pipe", "interrupt")
        diagnosis = self._inquiry.conclude() if failed else ""
        tails = self._printer.tails()
        self._failure.explained(self._inquiry.explanations(tails))
        found = {self.job.hosts[index].name: facts.get("found") for index, facts in self._ready.items()}
        pythons = {name: facts["python"] for name, facts in found.items() if facts}
        how = self._failure, self._ending, self._signum, tails, diagnosis, pythons
        outcome = ended(self.job, *how, self._stopped_because or "")
        outcome.results = verified_results(self.job, self._results)
        return outcome
