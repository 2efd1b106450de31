"""What a job tells the user: remarks, exit code and box, flight records of the ranks after a failure or on
request, and their counters in the live view and the report.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import termios
import time
import tty
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Set, Tuple

from ringcomm.rendezvous.membership import Notice
from ringcomm.storage.files import open_named

from ..diagnosis import failure_report
from ..diagnosis.failure_report import (
    NO_DIAGNOSIS,
    Diagnosis,
    is_shown_whole,
    local_file_hint,
    search_path_hint,
    shadow_hint,
    traceback_lines,
)
from ..diagnosis.first_failure import Cause, Exit, FirstFailure
from ..diagnosis.records import Records, explain, has_operations, keep_records
from ..elastic.membership import describe_history
from ..plan.job import HostJob, Job
from ..reach.protocol import AgentLink
from ..show import views
from ..show.history import History
from ..show.output import Printer
from ..show.views import ReportFacts, html_report
from ..show.visible import visible
from .agents import READ, Loop

ANSWER_S = 1.8
"""Seconds to wait for the agents' records; see :data:`ringrun.agent.framing.ANSWER_S`."""
ASK_S = 1.0  # between two requests for counters
LINE_S = 30.0  # between two lines about counters without a terminal
BROKEN_PIPE = 141
"""The exit code after the output's reader has ended, as for SIGPIPE in a shell."""
REFUSALS_SHOWN = 20
_ALONE = "no rank called ringcomm.init(): each trained alone"
_IMPORT = re.compile(r"^\s*(import|from)\s+(ringcomm|horovod)\b", re.MULTILINE)
_NO_CALL = (
    "every rank called init(), and none made a collective: if they were to train one model, each has trained "
    "its own. A DistributedOptimizer, or allreduce() of the gradients, makes them train together"
)
_NO_ADVICE = (
    "No advice: the program ended without it. It must call init() of ringcomm or of an adapter, and take its "
    "data from balanced batches (see docs/unequal.md)."
)


@dataclass
class Outcome:
    """The result of a job."""

    exit_code: int  # 0, or the first failed rank's
    report: str  # the box for the user, or ""
    reason: str  # done, failure, start, interrupt or pipe
    cause: Optional[Cause] = None  # the first failure
    exits: Dict[int, Exit] = field(default_factory=dict)
    # per rank, from its result descriptor; None if its signature is not valid
    results: Dict[int, Optional[bytes]] = field(default_factory=dict)
    told: Optional[int] = None  # the rank whose last traceback is complete in the report
    members: Optional[List[int]] = None  # elastic: processes that succeeded, by last rank


def not_started(job: Job, problems: Mapping[int, str], ready: Iterable[int]) -> Outcome:
    """Return the outcome if hosts (by index) could not do their part: one paragraph for each."""
    hosts, known = job.last_hosts, {*problems, *ready}
    texts = {host.name: problems[host.index] for host in job.hosts if host.index in problems}
    told = {name: _shadowed(job, text) or text for name, text in texts.items()}
    silent = [host.name for host in hosts if host.index not in known and host.name not in texts]
    title, paragraphs = "the job did not start", list(told.values())
    if len(hosts) > 1:
        title += f": {len(texts)} of {len(hosts)} hosts failed"
        names = ",".join(host.planned.spec.target for host in hosts)
        if all(host.reach.is_named for host in hosts):
            paragraphs.append(f"ringrun doctor -H {names} examines these hosts and the network between them.")
    if silent:
        paragraphs.append(f"Not heard of until then: {', '.join(silent)}.")
    return Outcome(1, visible(failure_report.box(title, paragraphs, "exit code 1")), "start")


def ended(
    job: Job, failure: FirstFailure, ending: str, signum: int, tails: Mapping[int, List[str]],
    diagnosis: Diagnosis = NO_DIAGNOSIS, pythons: Optional[Mapping[str, str]] = None, first: str = "",
) -> Outcome:  # fmt: skip
    """Return the outcome of ranks that had started. `ending` is why the launcher ended them, or "";
    `pythons` has known interpreters by host; `first` is put before all other paragraphs.
    """
    exits = dict(failure.exits)
    if ending == "pipe":
        return Outcome(BROKEN_PIPE, "", "pipe", None, exits)
    if ending == "interrupt":
        return Outcome(128 + signum, "", "interrupt", None, exits)
    cause = failure.cause()
    if cause is None:
        return Outcome(0, "", "done", None, exits)
    paragraphs = [first]
    tail = [] if cause.rank is None else tails.get(cause.rank, [])
    if cause.rank is not None:
        paragraphs.append(_shadowed(job, "\n".join(traceback_lines(tail))))
        host = job.host_of(cause.rank)
        paragraphs += [local_file_hint(job, host, tail), search_path_hint(host, tail)]
    hosts = {place.rank: job.hosts[place.host_index].name for place in job.plan.places}
    names = [host.name for host in job.hosts]
    text = failure_report.failure_box(
        failure, hosts, names, tails, diagnosis, pythons, list(filter(None, paragraphs))
    )
    told = cause.rank if is_shown_whole(tail) else None
    return Outcome(failure.exit_code(), visible(text), "failure", cause, exits, told=told)


def with_changes(
    outcome: Outcome, failure: Optional[str], changes: Sequence[Tuple[float, str]],
    excluded: Sequence[str] = (), tail: Sequence[str] = (),
) -> Outcome:  # fmt: skip
    """Return the outcome of an elastic job from that of its last processes. `failure` is why the job could
    not continue, or None; `excluded` are the hosts and slots in `changes`; `tail` is of the last failed rank.
    """
    if outcome.reason in ("interrupt", "pipe"):
        return outcome
    history = [f"What changed while the job ran:\n{describe_history(changes)}"] if changes else []
    if failure is None:
        count = len(changes) - len(excluded)
        parts = [f"the ranks changed {count} time{'' if count == 1 else 's'}"] if count else []
        parts += [f"{place} was excluded" for place in dict.fromkeys(excluded)]
        report = failure_report.box(", ".join(parts), history, "exit code 0") if changes else ""
        return replace(outcome, exit_code=0, report=visible(report), reason="done", cause=None, told=None)
    code, report = outcome.exit_code or 1, outcome.report
    if not report:
        paragraphs = [failure, *failure_report.error_paragraphs(tail), *history]
        report = visible(failure_report.box("the job cannot continue", paragraphs, f"exit code {code}"))
    elif history:
        lines = "".join(f"│ {line}\n" for line in history[0].splitlines())
        report = report.replace("\n╰─", f"\n│\n{visible(lines)}╰─")
    return replace(outcome, exit_code=code, reason="failure", report=report)


def _shadowed(job: Job, text: str) -> str:
    """Return a paragraph if a file beside the script replaces the module that an error names, or ""."""
    return shadow_hint(text, Path(job.command.script or "").parent)


# -- remarks ----------------------------------------------------------------------------------


class Notices:
    """Shows messages for the user, and keeps the topics that ranks report at their end."""

    def __init__(self, job: Job, printer: Printer) -> None:
        self._job, self._printer = job, printer
        self._joined = False  # whether any process has called init()
        self._refusals: Set[str] = set()
        self._topics: Set[str] = set()

    def take(self, notice: Notice) -> None:
        """Show or keep a notice of the rendezvous."""
        self._joined = self._joined or notice.kind not in ("log", "refused")
        if notice.kind == "refused":
            if notice.text not in self._refusals and len(self._refusals) < REFUSALS_SHOWN:
                self._refusals.add(notice.text)  # a program may try again and again
                self._printer.show(notice.text)
            return
        if notice.kind == "warning":
            self._topics.add(str(notice.detail.get("topic", "")))
        if notice.kind == "warning" or self._job.settings.verbose:
            self._printer.show(notice.text)

    def ready(self, host: HostJob, facts: Mapping[str, Any]) -> None:
        """Show how a ready host differs from the request, and a searched interpreter."""
        unbound = facts["limits"]["unbound"]
        if unbound:
            self._printer.show(f"--bind has no effect on {host.name}: {unbound}")
        python = str((facts.get("found") or {}).get("python") or host.python)
        if host.fallback and python != host.python:
            self._printer.show(f"{host.name}: the ranks run {python}")

    def exited(self, facts: Mapping[str, Any]) -> None:
        """Note the end of a rank; ``joined`` tells whether it used ringcomm."""
        self._joined = self._joined or facts.get("joined", True)

    def conclude(self, outcome: Outcome, made_no_call: bool = False) -> None:
        """Show remarks on a job whose ranks all succeeded."""
        job = self._job
        if job.plan.size > 1 and not self._joined and _imports_ringcomm(job.command.script):
            self._printer.show(_ALONE)
        if job.plan.size > 1 and self._joined and made_no_call and job.trains and not job.is_elastic:
            self._printer.show(_NO_CALL)
        if job.settings.advise and "advise" not in self._topics:
            outcome.exit_code = 1
            if "no advice" not in self._topics:
                self._printer.show(_NO_ADVICE)


def _imports_ringcomm(script: Optional[str]) -> bool:
    """Return whether a script imports ringcomm; other scripts may use another library."""
    try:
        return bool(script and _IMPORT.search(Path(script).read_text("utf-8", "replace")))
    except OSError:
        return False


# -- requests to the ranks --------------------------------------------------------------------


def _ask(links: Sequence[AgentLink], what: str) -> None:
    for link in links:
        if link.answered and link.alive:
            link.send({"do": what})


class Inquiry:
    """One job's flight records, from the request to the files."""

    def __init__(
        self, job: Job, links: Sequence[AgentLink], loop: Loop, show: Callable[[str], None],
        failure: FirstFailure,
    ) -> None:  # fmt: skip
        self._job, self._links, self._loop, self._print, self._failure = job, links, loop, show, failure
        self.records = Records(job)
        self.members: Sequence[int] = ()  # processes of an elastic job by rank
        self._has_asked = False

    def after_failure(self) -> None:
        """Request records from the ranks that are alive, once. Records of ranks that failed stay."""
        if not self._has_asked:
            self._has_asked = True
            self.records.forget(failed=True)
            _ask(self._links, "diagnose")

    def for_the_user(self) -> None:
        """Show the records on the user's request; the job continues."""
        if not self._has_asked and not self._loop.is_set("inquiry"):
            self.records.forget()
            _ask(self._links, "diagnose")
            self._loop.after("inquiry", ANSWER_S, self._show)

    def take(self, rank: int, data: bytes) -> str:
        """Store an answer, or the record of a rank that fails or ends; return its reason."""
        reason, exits = self.records.take(rank, data), self._failure.exits
        living = self._job.plan.size - len(exits)
        if self._loop.is_set("inquiry") and self.records.answered(exits) >= living:
            self._loop.cancel("inquiry")
            self._show()
        return reason

    def _show(self) -> None:
        self._print(self._text(self._complete()))

    def conclude(self, names_calls: bool) -> str:
        """Return the last paragraph of the failed job's box: about all ranks, or without an operation about
        ranks that held up the others in init() and are still running; "" without both.
        """
        contents, held_up = self._complete(), {item.culprit for item in self._failure.complaints}
        if not has_operations(contents):
            contents = {
                rank: row for rank, row in contents.items()
                if rank in held_up and row["reason"] in ("asked", "silent") and row.get("state") != "absent"
            }  # fmt: skip
        return self._text(contents, names_calls) if contents else ""

    def _complete(self) -> Dict[int, Dict[str, Any]]:
        return self.records.complete(self._failure.exits, self._failure.lost, self.members)

    def _text(self, contents: Mapping[int, Mapping[str, Any]], names_calls: bool = False) -> str:
        """Write the files; return the diagnosis and their place."""
        changed = [f"rank {rank} is process {it}" for rank, it in enumerate(self.members) if rank != it]
        numbers = f"In the last view {', '.join(changed)}." if changed else ""
        try:
            where = f"Their last operations and stacks: ringrun diagnose {keep_records(self._job, contents)}"
        except OSError as problem:
            where = f"The flight records could not be written: {problem}. Name a folder with --diagnose-dir."
        return "\n".join(filter(None, (numbers, explain(contents, names_calls), where)))


class Keys:
    """Reads keys from the terminal on stdin as they are typed. Ctrl-C and Ctrl-Z keep their meaning."""

    def __init__(self, loop: Loop, take: Callable[[bytes], None]) -> None:
        self._loop, self._take = loop, take
        self._before: Optional[List[Any]] = None
        self.active = False

    def start(self) -> None:
        """Read keys, if stdin is a terminal that belongs to this process."""
        try:
            if os.isatty(0) and os.tcgetpgrp(0) == os.getpgrp():
                self._before = termios.tcgetattr(0)
                tty.setcbreak(0, termios.TCSADRAIN)
                self._loop.watch(0, READ, self._read)
                self.active = True
        except (OSError, termios.error):
            pass  # no terminal

    def _read(self) -> None:
        try:
            data = os.read(0, 1024)
        except OSError:
            data = b""
        if data:
            self._take(data)
        else:
            self.stop()

    def stop(self) -> None:
        """Restore the terminal's modes."""
        if self.active:
            self.active = False
            self._loop.forget(0)
            with contextlib.suppress(OSError, termios.error):
                termios.tcsetattr(0, termios.TCSADRAIN, self._before or [])


class Watching:
    """The counters of one job (`history`)."""

    def __init__(
        self, job: Job, links: Sequence[AgentLink], loop: Loop, printer: Printer, coloured: bool,
        diagnose: Callable[[], None],
    ) -> None:  # fmt: skip
        self._job, self._links, self._loop, self._printer = job, links, loop, printer
        self._coloured, self._diagnose = coloured, diagnose
        self._keys = Keys(loop, self._typed)
        self._shows = job.watch
        self.began_at = time.time()
        self.history = History(loop.clock())
        self._next_line_s = loop.clock() + LINE_S

    def start(self) -> None:
        """Begin to request counters, if an option needs them."""
        if self._job.watch or self._job.report is not None:
            if self._shows and self._printer.console.terminals:
                self._keys.start()
            self._loop.after("numbers", ASK_S, self._turn)

    def _turn(self) -> None:
        _ask(self._links, "numbers")
        self._loop.after("numbers", ASK_S, self._turn)
        now_s, console = self._loop.clock(), self._printer.console
        if self._shows and console.terminals:
            lines = self._table(self._coloured, self._keys.active, max(5, console.rows // 2))
            self._printer.block = [line.encode("utf-8", "replace") for line in lines]
        elif self._shows and now_s >= self._next_line_s:
            self._next_line_s = now_s + LINE_S
            self._printer.show(views.line(self.history, self._hosts()))

    def _table(self, coloured: bool, keys: bool, rows: int) -> List[str]:
        return views.table(self.history, self._hosts(), self._loop.clock(), coloured, keys, rows)

    def _hosts(self) -> Dict[int, str]:
        return {place.rank: self._job.hosts[place.host_index].name for place in self._job.plan.places}

    def _typed(self, keys: bytes) -> None:
        if b"s" in keys:
            self._diagnose()
        if b"q" in keys:  # leave the view
            self._shows = False
            self._printer.block = ()
            self._keys.stop()

    def stop(self) -> None:
        """End the live view: its last table or line stays."""
        self._loop.cancel("numbers")
        self._keys.stop()
        block, self._printer.block = self._printer.block, ()
        if self._shows and block:
            self._printer.show("\n".join(self._table(False, False, sys.maxsize)))
        elif self._shows and not self._printer.console.terminals:
            self._printer.show(views.line(self.history, self._hosts()))
        self._shows = False

    def write_report(self, reason: str, failure: str, changes: Sequence[Tuple[float, str]]) -> None:
        """Write the file of ``--report``, if it is given."""
        path = self._job.report
        if path is None:
            return
        facts = ReportFacts(
            self._job.command.shown, self._job.version, self.began_at,
            self._loop.clock() - self.history.began_s, reason, failure, tuple(changes),
            self._job.setting_rows,
        )  # fmt: skip
        try:
            with open(open_named(path), "wb") as file:
                file.write(html_report(facts, self.history, self._hosts()).encode("utf-8", "replace"))
        except OSError as problem:
            self._printer.show(f"The report {path} cannot be written: {problem.strerror}.")
        else:
            self._printer.show(f"report: {path}")
