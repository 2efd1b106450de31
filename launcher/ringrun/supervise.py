"""The supervisor: one loop over all agents, from the first login until nothing is left anywhere.

It runs in the thread that calls :meth:`Supervisor.run`. Other threads and signal handlers reach it
through a queue and a socket that wakes it.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Any, Deque, Dict, List, Mapping, Optional, Sequence, Set, Tuple

from ringcomm.clock import Clock, monotonic
from ringcomm.endpoints import format_endpoint
from ringcomm.errors import ProtocolError

from . import agent, processes, report, ssh
from .console import Console
from .inquiry import Inquiry
from .job import HostJob, Job
from .link import Link
from .loop import READ, WRITE, Loop
from .outcome import Outcome, ended, not_started
from .printer import STDERR, STDOUT, Printer
from .protocol import Frame, event_facts
from .rendezvous import NoticeLike, OpenRendezvous, RendezvousLike, master_variables
from .trace import missing_timeline
from .verdict import Complaint, Exit, Verdict, signal_name

GRACE_S = 2.0
"""After the first failure the others have this long to end by themselves, with a typed error."""
LEAVING_S = 10.0
"""One that has said goodbye has this much longer: frameworks take their time, and its exit code counts."""
GATHER_S = 2.0
"""After the first host that does not start the others have this long to say what they lack."""
FORCE_S = 1.2
"""After the last signal an agent has this long to report that all is over."""
LINGER_S = 3.0
"""After all is over on a host, its ssh has this long to end."""
PING_S = 10.0
Steps = Sequence[Tuple[int, float]]
END: Steps = ((15, 0.0), (9, 1.5))
INTERRUPT: Steps = ((2, 0.0), (15, 2.0), (9, 3.5))
AT_ONCE: Steps = ((9, 0.0),)
REFUSALS_SHOWN = 20


class Supervisor:
    """Runs one :class:`~ringrun.job.Job`, once."""

    def __init__(
        self,
        job: Job,
        console: Console,
        open_rendezvous: Optional[OpenRendezvous] = None,
        coloured: Optional[Mapping[int, bool]] = None,
        clock: Clock = monotonic,
    ) -> None:
        self.job = job
        self._console = console
        self._printer = Printer(job, console, coloured or {1: False, 2: False}, clock)
        self._loop = Loop(clock)
        self._clock = clock
        self._began_s = time.time()
        self._leaving: Set[int] = set()  # ranks that failed, and said goodbye
        self._patient = False
        self._open_rendezvous = open_rendezvous
        self._rendezvous: Optional[RendezvousLike] = None
        self._verdict = Verdict()
        self._links = [Link(host.argv) for host in job.hosts]
        self._inquiry = Inquiry(job, self._links, self._loop, self._printer.say, self._verdict.exits)
        self._unstarted: Deque[HostJob] = deque(job.hosts)
        self._ready: Dict[int, Dict[str, Any]] = {}  # by host, what its agent found
        self._done: Set[int] = set()
        self._closed: Set[int] = set()
        self._fading: Dict[int, float] = {}  # links whose stdout ended, and when
        self._problems: Dict[int, str] = {}
        self._results: Dict[int, bytearray] = {}
        self._going = False
        self._ending = ""  # why we end the job, if we do
        self._signum = 0
        self._refusals = 0

    def interrupt(self, signum: int) -> None:
        """End the job as this signal asks: in order the first time, at once the second.

        May be called from other threads and from signal handlers.
        """
        self._loop.call(lambda: self._interrupted(signum))

    def diagnose(self) -> None:
        """Show what every rank is doing; the job goes on. For other threads and signal handlers, too."""
        self._loop.call(self._inquiry.for_the_user)

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Start, watch and end the job. Whatever happens, nothing of it is left afterwards."""
        self._console.on_change(self._loop.wake)
        try:
            self._loop.after("start", self.job.settings.start_timeout_s, self._start_timed_out)
            self._loop.after("ping", PING_S, self._ping)
            while len(self._closed) < len(self._links):
                self._turn()
        finally:
            self._tear_down()
        return self._outcome()

    def _turn(self) -> None:
        self._start_more()
        for index in range(len(self._links)):
            self._watch(index)
        self._loop.turn(0.02 if self._fading else 0.25 if self._printer.waiting else PING_S)
        now = self._clock()
        for index, since in list(self._fading.items()):
            if self._links[index].poll() is not None or now - since > 1.0:
                del self._fading[index]
                self._link_ended(self.job.hosts[index])
        self._printer.tick()
        if self._console.broken and not self._ending:
            self._end("pipe", END)
        if self._verdict.failed and not self._ending and not self._loop.is_set("grace"):
            self._loop.after("grace", GRACE_S, self._grace_over)
            self._inquiry.after_failure()

    def _watch(self, index: int) -> None:
        """Have the loop wait for just what this link can use now."""
        link, host = self._links[index], self.job.hosts[index]
        readable = link.alive and not self._console.full
        self._loop.watch(link.descriptor("stdout"), READ if readable else 0, lambda: self._read(host))
        self._loop.watch(link.descriptor("stderr"), READ, lambda: self._read_stderr(host))
        self._loop.watch(link.descriptor("stdin"), WRITE if link.has_outgoing else 0, link.write)

    def _forget(self, index: int, *names: str) -> None:
        """Stop watching descriptors that are about to be closed."""
        self._loop.forget(*(self._links[index].descriptor(name) for name in names))

    # -- starting ------------------------------------------------------------------------------

    def _start_more(self) -> None:
        """Start agents, but not more logins at once than a jump host would take."""
        logins = sum(link.alive and not link.answered for link in self._links)
        while self._unstarted and logins < ssh.LOGINS_AT_ONCE:
            self._start(self._unstarted.popleft())
            logins += 1

    def _start(self, host: HostJob) -> None:
        link = self._links[host.index]
        try:
            link.start(self.job.agent_config(host), self.job.payload)
        except OSError as problem:
            self._closed.add(host.index)
            if host.is_local:
                text = (
                    f"{host.name}: there is no Python at {host.python} that can be started "
                    f"({problem.strerror}). {ssh.other_python(host.name)}"
                )
            else:
                text = (
                    f"{host.name}: {host.argv[0]!r} cannot be started on this machine ({problem.strerror}). "
                    "Install an ssh client, or name one with --ssh."
                )
            self._problem(host, text)

    def _problem(self, host: HostJob, text: str) -> None:
        """A host does not start. The others may say what they lack too, but not for long."""
        if not self._ending:
            self._problems.setdefault(host.index, text)
            if not self._loop.is_set("gather"):
                self._loop.after("gather", GATHER_S, lambda: self._end("start", END))
            if len(self._problems) + len(self._ready) == len(self._links):
                self._end("start", END)

    def _start_timed_out(self) -> None:
        limit_s = self.job.settings.start_timeout_s
        for host in self.job.hosts:
            if host.index not in self._ready:
                link = self._links[host.index]
                said = ssh.last_lines(link.stderr_text + "\n" + link.noise)
                self._problems.setdefault(
                    host.index,
                    f"{host.name}: not ready within {limit_s:g} s (--start-timeout). "
                    f"{'Its agent had' if link.answered else 'It had not'} answered; it said: {said}.",
                )
        self._end("start", END)

    def _go(self) -> None:
        """Every host has what it needs: open the rendezvous and start the ranks."""
        self._going = True
        self._loop.cancel("start")
        endpoints: List[Tuple[str, int]] = []
        if self._open_rendezvous is not None and self.job.plan.size > 1:
            self._rendezvous = self._open_rendezvous(
                lambda notice: self._loop.call(lambda: self._notice(notice))
            )
            endpoints = [] if self._rendezvous is None else self._rendezvous.start()
        for host in self.job.hosts:
            usable = [item for item in endpoints if host.is_local or not item[0].startswith(("127.", "::1"))]
            env = master_variables(self.job, host, self._ready)
            if usable:
                env["RINGCOMM_RENDEZVOUS"] = ",".join(format_endpoint(*item) for item in usable)
            self._links[host.index].send({"do": "go", "env": env})

    def _ping(self) -> None:
        """Remote agents take a launcher that says nothing for dead."""
        for host in self.job.hosts:
            if not host.is_local and self._links[host.index].alive:
                self._links[host.index].send({"do": "ping"})
        self._loop.after("ping", PING_S, self._ping)

    # -- what agents say -----------------------------------------------------------------------

    def _read(self, host: HostJob) -> None:
        link = self._links[host.index]
        if not link.alive:
            return
        try:
            for frame in link.read():
                self._frame(host, frame)
        except ProtocolError as problem:
            self._forget(host.index, "stdin", "stdout", "stderr")
            link.kill()
            link.alive = False
            self._fading[host.index] = self._clock()
            why = f"{host.name}: its answer makes no sense: {problem}."
            if self._going:
                self._printer.say(why)
            else:
                self._problem(host, why)
            return
        if link.at_end:
            self._forget(host.index, "stdout")
            self._fading[host.index] = self._clock()

    def _read_stderr(self, host: HostJob) -> None:
        link = self._links[host.index]
        descriptor = link.descriptor("stderr")
        data = link.read_stderr()
        if link.descriptor("stderr") < 0:
            self._loop.forget(descriptor)
        if data and self.job.settings.verbose:
            for line in data.splitlines():
                self._printer.say(f"{host.name}: {line.decode('utf-8', 'replace')}")

    def _frame(self, host: HostJob, frame: Frame) -> None:
        if frame.kind in (agent.STDOUT, agent.STDERR):
            self._printer.printed(frame.rank, STDOUT if frame.kind == agent.STDOUT else STDERR, frame.data)
        elif frame.kind == agent.RESULT:
            self._results.setdefault(frame.rank, bytearray()).extend(frame.data)
        elif frame.kind == agent.RECORD:
            self._inquiry.take(frame.rank, frame.data)
        else:
            self._event(host, frame.rank, event_facts(frame.data))

    def _event(self, host: HostJob, rank: int, facts: Dict[str, Any]) -> None:
        name = facts["event"]
        if name == "ready":
            self._ready[host.index] = facts
            if len(self._ready) == len(self._links) and not self._ending:
                self._go()
            elif self._problems and len(self._problems) + len(self._ready) == len(self._links):
                self._end("start", END)
        elif name == "problem":
            self._problem(host, report.host_problem(host.name, facts, host.is_local))
        elif name == "exit":
            self._rank_exited(rank, facts)
        elif name == "asked":  # somebody has sent a rank SIGUSR1
            self._inquiry.for_the_user()
        elif name == "done":
            self._done.add(host.index)
            self._forget(host.index, "stdin")
            self._links[host.index].close_stdin()
            self._loop.after(f"linger {host.index}", LINGER_S, lambda: self._cut(host))
        elif name == "started" and self.job.settings.verbose:
            self._printer.say(f"rank {rank} runs on {host.name} as process {facts['pid']}")

    def _grace_over(self) -> None:
        """End the job, but let whoever failed first end by itself if it is about to."""
        if self._leaving - set(self._verdict.exits) and not self._patient:
            self._patient = True
            self._loop.after("grace", LEAVING_S, self._grace_over)
        else:
            self._end("failure", END)

    def _rank_exited(self, rank: int, facts: Mapping[str, Any]) -> None:
        end = Exit(rank, facts["code"], facts["signal"], facts["sent"])
        self._verdict.exited(end)
        self._printer.ended(rank, end.ok)
        if self._rendezvous is not None:
            self._rendezvous.process_exited(self.job.slot_of(rank), end.describe(), end.ok)
        if self._patient and self._loop.is_set("grace") and not self._leaving - set(self._verdict.exits):
            self._loop.cancel("grace")
            self._end("failure", END)

    def _notice(self, notice: NoticeLike) -> None:
        if notice.kind == "failed":
            if not self._ending:
                link = notice.detail.get("kind") == "cut"
                self._verdict.complained(Complaint(notice.rank, notice.culprit, notice.text, link))
                if notice.culprit is not None and notice.detail.get("leaving"):
                    self._leaving.add(notice.culprit)
        elif notice.kind == "refused":
            self._refusals += 1
            if self._refusals <= REFUSALS_SHOWN:
                more = " (further ones are not shown)" if self._refusals == REFUSALS_SHOWN else ""
                self._printer.say(f"refused: {notice.text}{more}")
        elif self.job.settings.verbose and notice.text:
            self._printer.say(notice.text)

    def _cut(self, host: HostJob) -> None:
        """All is over on that host, but ssh stays: do without its farewell."""
        if host.index not in self._closed:
            self._forget(host.index, "stdin", "stdout", "stderr")
            self._links[host.index].kill()
            self._links[host.index].alive = False
            self._fading[host.index] = self._clock()

    # -- links that end ------------------------------------------------------------------------

    def _link_ended(self, host: HostJob) -> None:
        link = self._links[host.index]
        self._forget(host.index, "stdin", "stdout", "stderr")  # before anything closes a descriptor
        link.drain_stderr()
        status = link.poll()
        link.close()
        if host.index in self._done or self._ending:
            self._closed.add(host.index)
        elif self._going:
            self._closed.add(host.index)
            self._host_lost(host, ssh.explain_loss(host.name, status, link.stderr_text, host.is_local))
        elif link.answered:
            self._closed.add(host.index)
            self._problem(host, ssh.explain_loss(host.name, status, link.stderr_text, host.is_local))
        else:
            said = link.stderr_text or link.noise
            failure = ssh.explain_start(host.name, host.argv, host.python, status, said, host.is_local)
            if failure.retry and link.attempt <= ssh.RETRIES:
                delay_s = ssh.retry_delay_s(link.attempt, random.random())
                self._loop.after(f"retry {host.index}", delay_s, lambda: self._start(host))
            else:
                self._closed.add(host.index)
                self._problem(host, failure.text)

    def _host_lost(self, host: HostJob, text: str) -> None:
        ranks = [place.rank for place in self.job.plan.on_host(host.index)]
        unfinished = [rank for rank in ranks if rank not in self._verdict.exits]
        if host.is_local:
            processes.sweep(self.job.id, host.index)
        self._verdict.host_lost(host.index, text)
        for rank in unfinished:
            self._printer.ended(rank, False)
            if self._rendezvous is not None:
                self._rendezvous.process_exited(self.job.slot_of(rank), "lost with its host", False)

    # -- ending --------------------------------------------------------------------------------

    def _interrupted(self, signum: int) -> None:
        if self._ending == "interrupt" or (self._ending and self._signum):
            self._end(self._ending, AT_ONCE)
            return
        self._signum = signum
        if self._verdict.failed or self._ending:
            self._end(self._ending or "failure", END)
        else:
            self._printer.say(f"{signal_name(signum)}: ending all ranks on all hosts (once more: at once)")
            self._end("interrupt", INTERRUPT if signum == 2 else END)

    def _end(self, reason: str, steps: Steps) -> None:
        """Have every agent end its ranks by these steps, (signal, seconds from now), and leave."""
        self._ending = self._ending or reason
        self._unstarted.clear()
        self._loop.cancel("start", "gather", "grace", "retry")
        for index, link in enumerate(self._links):
            if index in self._closed or index in self._fading:
                continue
            if link.answered and link.alive:
                link.send({"do": "stop", "steps": list(steps)})
            elif link.alive:  # still logging in: nothing of the job is there yet
                self._forget(index, "stdin")
                link.kill()
            else:  # between two attempts
                self._closed.add(index)
        self._loop.after("force", max(after_s for _, after_s in steps) + FORCE_S, self._force)

    def _force(self) -> None:
        """Do not wait any longer: cut the links. Agents that are alive end everything on their own."""
        for index, link in enumerate(self._links):
            if index not in self._closed:
                self._fading.pop(index, None)
                self._forget(index, "stdin", "stdout", "stderr")
                link.kill()
                link.close()
                self._closed.add(index)
                if self.job.hosts[index].is_local:
                    processes.sweep(self.job.id, index)

    def _tear_down(self) -> None:
        try:
            if len(self._closed) < len(self._links):  # an exception: the caller's Ctrl-C, or a defect
                self._end("abandoned", END)
                while len(self._closed) < len(self._links):
                    self._turn()
        finally:
            self._force()
            if self._rendezvous is not None:
                self._rendezvous.stop()
            self._printer.close()
            self._console.on_change(lambda: None)
            self._loop.close()

    def _outcome(self) -> Outcome:
        if self._problems and self._ending in ("start", ""):
            return not_started(self.job, self._problems, set(self._ready))
        failed = self._verdict.failed and self._ending not in ("pipe", "interrupt")
        told, tails = self._inquiry.conclude() if failed else "", self._printer.tails()
        self._verdict.explained(self._inquiry.explanations(tails))
        found = ended(self.job, self._verdict, self._ending, self._signum, tails, told)
        if found.reason != "interrupt":
            self._printer.settle(range(self.job.plan.size) if self.job.settings.verbose else found.to_show)
        if found.reason == "done":
            self._printer.say(missing_timeline(self.job, self._began_s))
        found.results = {rank: bytes(data) for rank, data in self._results.items()}
        return found
