"""Runs a job: one loop over all agents, from the first login until all processes have ended everywhere; and
with ``--restarts`` the job again after a failure. The loop runs in the thread that calls
:meth:`Supervisor.run`; others reach it by a queue and a socket.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Mapping, Optional, Set, Union

from ringcomm.clock import monotonic
from ringcomm.errors import ConfigError
from ringcomm.rendezvous.membership import Notice

from ..agent import framing
from ..diagnosis.failure_report import NO_DIAGNOSIS, host_problem
from ..diagnosis.first_failure import Exit, FirstFailure, ranks_text, signal_name
from ..plan.hosts import crowding
from ..plan.job import HostJob, Job
from ..plan.ranks import Plan
from ..reach.incoming import Incoming
from ..reach.protocol import AgentLink, Frame
from ..show.output import STDERR, STDOUT, Console, Printer
from .agents import END, INTERRUPT, KILL, PING_S, Agents, Loop, Steps, failed_start, term
from .control import ControlSocket, ForeignFolderError, job_facts
from .files import FETCHED, FetchedFiles, Supply
from .outcome import Inquiry, Notices, Outcome, Watching, ended, not_started
from .ranks import ElasticRanks, FixedRanks, open_rendezvous

if TYPE_CHECKING:
    from ringcomm.rendezvous.server import RendezvousServer

GRACE_S = 2.0
"""Seconds after the first failure in which the other ranks can end with a typed error."""
LEAVING_S = 10.0
"""Further seconds for a rank that has left the job (frameworks are slow, and its exit code counts) or gets no
processor, and may explain the failure as soon as it does."""
SAME_S = 1.0
"""A second signal within this time is the same request, unless it is Ctrl-C: ``timeout`` sends it to a
process and to its group, and systemd SIGHUP after SIGTERM."""

FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0
"""Wait before the first restart, and the maximum: each wait is twice the previous one."""
USAGE_CODE = 2
"""The conventional exit code for an invalid command line. A restart would fail in the same way."""
Facts = Dict[str, Any]
OpenRendezvous = Callable[[Callable[[Notice], None]], "RendezvousServer"]


# -- how a job ends ---------------------------------------------------------------------------


class Ending:
    """Why and how a job ends; `stop` has every agent end its ranks by steps, `exits` grows as ranks end."""

    def __init__(self, loop: Loop, exits: Mapping[int, Exit], stop: Callable[[Steps], None]) -> None:
        self.reason = ""  # start, failure, interrupt, pipe or abandoned; "" unless the launcher ends the job
        self.signum = 0  # the user's first signal
        self.leaving: Set[int] = set()  # ranks that have left or are starved, and perhaps failed
        self._loop, self._exits, self._stop = loop, exits, stop
        self._waits_longer = False
        self._signalled_s = self._at_once_s = 0.0  # when the user's first and second signal came
        self._asked: Dict[int, Steps] = {}  # by rank that the user ends

    def begin(self, reason: str, steps: Steps = END) -> None:
        """Have every agent end its ranks by these steps and exit; the first reason counts."""
        self.reason = self.reason or reason
        self._loop.cancel("start", "gather", "grace")
        self._stop(steps)
        self._loop.wake()  # all links may have ended already

    def after_failure(self) -> bool:
        """Give the other ranks time to end; return False if they have it already."""
        if self._loop.is_set("grace"):
            return False
        self._loop.after("grace", GRACE_S, self._over)
        return True

    def _over(self) -> None:
        # The rank that failed first may be about to end.
        if self.leaving - set(self._exits) and not self._waits_longer:
            self._waits_longer = True
            self._loop.after("grace", LEAVING_S, self._over)
        else:
            self.begin("failure")

    def exited(self) -> None:
        """Handle the end of a rank."""
        if self._waits_longer and self._loop.is_set("grace") and not self.leaving - set(self._exits):
            self.begin("failure")

    def signalled(self, signum: int, grace_s: float, ranks: Iterable[int], has_failed: bool) -> str:
        """End the job: in order at the first signal, at once at the second. Return a line to show, or ""."""
        now_s = self._loop.clock()
        if self.signum and signum != signal.SIGINT and now_s - self._signalled_s < SAME_S:
            return ""
        if self.reason == "interrupt" or (self.reason and self.signum):
            self._at_once_s = self._at_once_s or now_s
            self.begin(self.reason, KILL)
            return ""
        self.signum, self._signalled_s = signum, now_s
        if has_failed or self.reason:
            self.begin("failure")
            return ""
        steps, limit = INTERRUPT, ""
        if signum != signal.SIGINT:
            steps, limit = term(grace_s), f"; they have {grace_s:g} s (--grace)"
        for rank in ranks:
            self.ask(rank, steps)
        self.begin("interrupt", steps)
        return f"{signal_name(signum)}: ending all ranks on all hosts (once more: at once){limit}"

    def ask(self, rank: int, steps: Steps) -> None:
        """Note that the user ends a rank by these steps."""
        self._asked[rank] = steps

    def killed(self) -> Dict[str, List[int]]:
        """Return the ranks that did not end in time since the last call, by the text about them."""
        found: Dict[str, List[int]] = {}
        for rank in sorted(self._asked.keys() & self._exits.keys()):
            steps, end = self._asked.pop(rank), self._exits[rank]
            if end.signal == end.sent == signal.SIGKILL:
                found.setdefault(self._killed_text(steps), []).append(rank)
        return found

    def _killed_text(self, steps: Steps) -> str:
        name, limit_s, at_once_s = signal_name(steps[0][0]), steps[-1][1], self._at_once_s - self._signalled_s
        if 0 < at_once_s < limit_s:
            return f"killed by the second signal, {at_once_s:.1f} s after {name}, while handling it"
        advice = "; --grace S gives them longer" if name == "SIGTERM" else ""
        return f"killed {limit_s:g} s after {name}, while handling it{advice}"


# -- the supervisor ---------------------------------------------------------------------------


@dataclass
class HostState:
    """The reports of one host's agent."""

    incoming: Incoming
    ranks: Set[int] = field(default_factory=set)  # those that have been started
    ready: Optional[Facts] = None  # the facts of its event
    is_done: bool = False
    problem: str = ""


class Supervisor:
    """Runs one :class:`~ringrun.plan.job.Job`, once. `opens` opens its rendezvous."""

    def __init__(self, job: Job, console: Console, opens: OpenRendezvous) -> None:
        self._opens = opens
        coloured = console.coloured(os.environ)
        self.job, self.loop, self.failure = job, Loop(monotonic), FirstFailure()
        self.printer = Printer(job, console, coloured, monotonic)
        self.agents = Agents(job, self.loop, self)
        self.ending = Ending(self.loop, self.failure.exits, self.agents.stop)
        self.hosts: List[HostState] = []
        for _ in job.hosts:
            self.add_host()
        links = self.agents.links
        self.inquiry = Inquiry(job, links, self.loop, self.printer.show, self.failure)
        self.watching = Watching(
            job, links, self.loop, self.printer, coloured[STDERR], self.inquiry.for_the_user
        )
        self.policy: Union[FixedRanks, ElasticRanks]
        self.policy = ElasticRanks(self) if job.is_elastic else FixedRanks(self)
        self.supply = Supply(self.agents, self.loop, self.printer.show, self.policy.problem)
        self.fetched = FetchedFiles(Path(FETCHED))
        self._notices = Notices(job, self.printer)
        self.results: Dict[int, bytearray] = {}
        self._control = ControlSocket(job.id, self._command)

    def interrupt(self, signum: int) -> None:
        """End the job: in order the first time, immediately the second. For other threads and signals."""
        self.loop.call(lambda: self._interrupted(signum))

    def diagnose(self) -> None:
        """Show what every rank is doing; the job continues. For other threads and signal handlers."""
        self.loop.call(self.inquiry.for_the_user)

    # -- the loop ------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Start, watch and end the job. No process, file or socket of it remains, whatever happens."""
        self.printer.console.on_change(self.loop.wake)
        try:
            self.printer.show("" if self.job.attempt else "\n".join(self.job.notes))
            self.loop.after("ping", PING_S, self.agents.ping)
            self.watching.start()
            self._open_control()
            self.policy.begin()
            while not self._is_over:
                self._run_once()
        finally:
            self._tear_down()
        outcome = self._outcome()
        failure = outcome.report if outcome.exit_code else ""
        self.watching.write_report(outcome.reason, failure, self.policy.changes)
        return outcome

    def _open_control(self) -> None:
        """Let commands reach the job; jobs of fixed size work without."""
        try:
            self._control.start()
        except ConfigError as problem:
            matters = self.job.settings.verbose or self.job.is_elastic
            if matters or isinstance(problem, ForeignFolderError):
                self.printer.show(str(problem))

    @property
    def _is_over(self) -> bool:
        return self.agents.all_closed and self.policy.may_end

    def _run_once(self) -> None:
        console = self.printer.console
        self.agents.go_on(reading=not console.full)
        self.loop.run_once(0.02 if self.agents.fading else 0.25 if self.printer.waiting else PING_S)
        self.agents.look()
        self.printer.tick()
        if console.broken and not self.ending.reason:
            self.ending.begin("pipe")
        if self.policy.has_failed and not self.ending.reason and self.ending.after_failure():
            self.inquiry.after_failure()

    # -- agents --------------------------------------------------------------------------------

    def add_host(self) -> None:
        """Add a host, whose index is the next one."""
        self.hosts.append(HostState(Incoming(self.job.payload is not None, self.loop.clock)))

    def chattered(self, host: HostJob, data: bytes) -> None:
        """Show stderr of an agent or its ssh with --verbose."""
        if self.job.settings.verbose:
            for line in data.splitlines():
                self.printer.show(f"{host.name}: {line.decode('utf-8', 'replace')}")

    def hung_up(self, host: HostJob, link: AgentLink, status: Optional[int]) -> bool:
        """Handle the end of a link; return whether to start it again."""
        state = self.hosts[host.index]
        if state.is_done or state.problem or self.ending.reason:
            return False
        if link.answered:
            self.policy.lost(host, host.reach.explain_loss(host.name, status, link.stderr_text))
            return False
        failed = failed_start(host, link, status, self.printer.show)
        if failed is not None:
            self.policy.problem(host, failed)
        return failed is None

    def received(self, host: HostJob, frame: Frame) -> None:
        """Handle a frame of an agent; ProtocolError if the agent may not send it."""
        state = self.hosts[host.index]
        facts = state.incoming.admit(frame, state.ranks)
        if frame.kind == framing.EVENT:
            _EVENTS[facts["event"]](self, host, frame.rank, facts)
        else:
            _FRAMES[frame.kind](self, host, frame)

    def _recorded(self, _: HostJob, frame: Frame) -> None:
        reason = self.inquiry.take(frame.rank, frame.data)
        victim = self.inquiry.records.is_victim(frame.rank)
        if reason == "starved" or (reason == "ended" and not victim):
            self.ending.leaving.add(frame.rank)  # its end may fail the others

    def _is_ready(self, host: HostJob, _: int, facts: Facts) -> None:
        odd = crowding(host.planned.spec, facts["limits"]["cores"]) if self.job.checks_slots else ""
        if odd:
            self.policy.problem(host, odd)
            self.agents.abandon(host)
        else:
            self._notices.ready(host, facts)
            self.hosts[host.index].ready = facts
            self.policy.ready(host)

    def _exited(self, _: HostJob, rank: int, facts: Facts) -> None:
        self._notices.exited(facts)
        end = Exit(rank, facts["code"], facts["signal"], facts["sent"])
        self.failure.exited(end)
        self.printer.ended(rank, end.ok)
        if self.policy.rendezvous is not None:
            self.policy.rendezvous.process_exited(rank, end.describe(), end.ok)
        self.policy.exited(end)
        self.ending.exited()

    def _is_done(self, host: HostJob, *_: object) -> None:
        self.hosts[host.index].is_done = True
        self.agents.dismiss(host)

    def _started(self, host: HostJob, rank: int, facts: Facts) -> None:
        if self.job.settings.verbose:
            self.printer.show(f"rank {rank} runs on {host.name} as process {facts['pid']}")

    # -- the rendezvous and the user -----------------------------------------------------------

    def open_rendezvous(self) -> RendezvousServer:
        """Open the rendezvous, whose notices the loop handles."""
        return self._opens(lambda notice: self.loop.call(lambda: self._notice(notice)))

    def _notice(self, notice: Notice) -> None:
        if notice.kind in self.policy.notices:
            self.policy.notices[notice.kind](notice)
        else:
            self.watching.history.linked(notice.detail.get("links", ()))
            self._notices.take(notice)

    def _command(self, command: Mapping[str, Any]) -> str:
        """Execute a command in a thread of the control socket; ConfigError if it is not valid."""
        what = str(command.get("do"))
        if what == "info":
            began_at, exits = self.watching.began_at, self.failure.exits
            return str(self.loop.ask(lambda: job_facts(self.job, began_at, len(exits))))
        if what == "stop":
            self.interrupt(signal.SIGTERM)
            return f"the job {self.job.id} ({self.job.command.shown}) is being ended"
        if what in self.policy.commands:
            return self.policy.commands[what](command)
        raise ConfigError(f"There is no command {what!r} for this job.")

    def _interrupted(self, signum: int) -> None:
        ranks = [rank for host in self.hosts for rank in host.ranks]
        has_failed = self.policy.has_failed
        self.printer.show(self.ending.signalled(signum, self.job.grace_s, ranks, has_failed))

    # -- the end -------------------------------------------------------------------------------

    def _tear_down(self) -> None:
        try:
            if not self._is_over:  # an exception: the caller's Ctrl-C, or a defect
                self.ending.begin("abandoned")
                while not self.agents.all_closed:
                    self._run_once()
        finally:
            self.agents.force()
            self.watching.stop()
            self._control.stop()
            self.policy.stop()
            self.printer.close()
            self.printer.console.on_change(lambda: None)
            self.loop.close()

    def _outcome(self) -> Outcome:
        if self.policy.never_began:
            problems = {index: host.problem for index, host in enumerate(self.hosts) if host.problem}
            ready = {index for index, host in enumerate(self.hosts) if host.ready is not None}
            return not_started(self.job, problems, ready)
        outcome = self.policy.concluded(self._explained())
        self.printer.settle(outcome.told)
        self.show_killed()
        if self.job.fetch:
            self.printer.show(self.fetched.describe(self.job))
        if outcome.reason == "done":
            self._notices.conclude(outcome, self.inquiry.records.made_no_call())
        return outcome

    def _explained(self) -> Outcome:
        """Return the outcome of ranks that had started, with their explanations."""
        policy, ending = self.policy, self.ending
        failed = policy.has_failed and ending.reason not in ("pipe", "interrupt")
        diagnosis = self.inquiry.conclude if failed else NO_DIAGNOSIS
        tails = self.printer.tails()
        self.failure.explained(self.inquiry.records.explanations(tails))
        found = [(host, (state.ready or {}).get("found")) for host, state in zip(self.job.hosts, self.hosts)]
        pythons = {host.name: facts["python"] for host, facts in found if facts}
        how = self.failure, ending.reason, ending.signum, tails, diagnosis, pythons
        outcome = ended(self.job, *how, policy.stopped_because or "")
        outcome.results = {  # b"" if a rank wrote none, None if its signature is not valid
            rank: self.job.verified_result(rank, bytes(data)) if data else b""
            for rank, data in self.results.items()
        }
        return outcome

    def show_killed(self) -> None:
        """Name the ranks that had to be killed after the user's signal."""
        for how, ranks in self.ending.killed().items():
            hosts = sorted({self.job.host_of(rank).name for rank in ranks})
            self.printer.show(f"{ranks_text(ranks)} on {', '.join(hosts)}: {how}")


_FRAMES: Mapping[int, Callable[[Supervisor, HostJob, Frame], object]] = {
    framing.STDOUT: lambda it, _, frame: it.printer.printed(frame.rank, STDOUT, frame.data),
    framing.STDERR: lambda it, _, frame: it.printer.printed(frame.rank, STDERR, frame.data),
    framing.RESULT: lambda it, _, frame: it.results.setdefault(frame.rank, bytearray()).extend(frame.data),
    framing.RECORD: Supervisor._recorded,
    framing.FILE: lambda it, host, frame: it.fetched.take(
        host.name, frame.data, it.job.fetch if host.gets_code else ()
    ),
    framing.NUMBERS: lambda it, _, frame: it.watching.history.take(frame.rank, frame.data, it.loop.clock()),
}
_EVENTS: Mapping[str, Callable[[Supervisor, HostJob, int, Facts], None]] = {
    "ready": Supervisor._is_ready,
    "problem": lambda it, host, _, facts: it.policy.problem(
        host, host_problem(host.name, facts, host.is_local, host.reach.is_named)
    ),
    "lacks": lambda it, host, _, facts: it.supply.send(host, facts),
    "needs": lambda it, host, _, facts: it.supply.provision(host, facts),
    "started": Supervisor._started,
    "asked": lambda it, *_: it.inquiry.for_the_user(),  # a rank got SIGUSR1
    "exit": Supervisor._exited,
    "done": Supervisor._is_done,
}


# -- attempts ---------------------------------------------------------------------------------


def is_worthwhile(outcome: Outcome, attempt: int) -> bool:
    """Return whether another attempt may succeed: hosts that are missing later than at first may return."""
    if outcome.reason == "start":
        return attempt > 0
    exit_of = outcome.cause.exit if outcome.cause is not None else None
    return outcome.reason == "failure" and not (exit_of is not None and exit_of.code == USAGE_CODE)


def attempt_of(job: Job, attempt: int, restarts: int) -> Job:
    """Return the job for one attempt, with a new identifier and key: old processes cannot join."""
    folder = job.output_dir
    if restarts and folder is not None:
        folder = folder / f"attempt.{attempt}"
    if job.is_elastic:
        job = replace(job, plan=Plan([], []), hosts=[])
    return replace(
        job, output_dir=folder, attempt=attempt, restarts=restarts,
        id=secrets.token_hex(8), key=secrets.token_bytes(32),
    )  # fmt: skip


class Attempts:
    """Runs a job until it succeeds, or has been restarted `restarts` times."""

    def __init__(self, job: Job, restarts: int, console: Console) -> None:
        self.job, self._restarts, self._console = job, restarts, console
        self._interrupted = threading.Event()
        self._supervisor: Optional[Supervisor] = None
        self.signum = 0  # of interrupt()

    def interrupt(self, signum: int) -> None:
        """End the job as :meth:`Supervisor.interrupt` does, without another attempt."""
        self.signum = signum
        self._interrupted.set()
        if self._supervisor is not None:
            self._supervisor.interrupt(signum)

    def diagnose(self) -> None:
        """Show what every rank is doing (:meth:`Supervisor.diagnose`); the job continues."""
        if self._supervisor is not None:
            self._supervisor.diagnose()

    def run(self) -> Outcome:
        """Run all attempts and return the last outcome; reports of earlier attempts have been shown."""
        attempt, first = 0, self.job
        while True:
            self.job = attempt_of(first, attempt, self._restarts)
            outcome = self._attempt()
            again = attempt < self._restarts and not self.signum and is_worthwhile(outcome, attempt)
            if not again:
                return outcome
            seconds = min(MAX_WAIT_S, FIRST_WAIT_S * 2.0 ** min(attempt, 10))
            text = (
                f"{outcome.report}ringrun: attempt {attempt + 1} of {self._restarts + 1} has failed; the "
                f"next one starts in {seconds:g} s (--restarts {self._restarts}).\n"
            )
            self._console.write(2, text.encode("utf-8", "replace"))
            self._interrupted.wait(seconds)
            if self.signum:
                return replace(outcome, exit_code=128 + self.signum, reason="interrupt", report="")
            attempt += 1

    def _attempt(self) -> Outcome:
        """Run the job with a rendezvous of its own to its end, in the calling thread."""
        opens = partial(open_rendezvous, self.job)
        self._supervisor = supervisor = Supervisor(self.job, self._console, opens)
        if self.signum:
            supervisor.interrupt(self.signum)
        try:
            return supervisor.run()
        finally:
            self._supervisor = None
