"""Requests to all ranks while they run: flight records after a failure or for the user, and counters for the
live view and the report.
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import time
import tty
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from ringcomm.storage.files import open_named

from ..diagnosis.first_failure import FirstFailure
from ..diagnosis.records import Records, explain, has_operations, keep_records
from ..plan.job import Job
from ..reach.agent_process import AgentLink
from ..show.output import Printer
from ..watch import views
from ..watch.history import History
from ..watch.views import ReportFacts, html_report
from .agents import READ, Loop

ANSWER_S = 1.8
"""Seconds to wait for the agents' records; see :data:`ringrun.agent.recorders.ANSWER_S`."""
ASK_S = 1.0
"""Seconds between two requests for counters."""
LINE_S = 30.0
"""Seconds between two lines about counters without a terminal."""


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
        """Return the last paragraph of the failed job's box, which perhaps `names_calls` that differ; ""
        without a record of an operation.
        """
        contents = self._complete()
        return self._text(contents, names_calls) if has_operations(contents) else ""

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
        self._shows = job.observation.watch
        self.began_at = time.time()
        self.history = History(loop.clock())
        self._next_line_s = loop.clock() + LINE_S

    def start(self) -> None:
        """Begin to request counters, if an option needs them."""
        if self._job.observation.needs_numbers:
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

    def take(self, process: int, data: bytes) -> None:
        """Store the counters of a process; invalid ones are ignored."""
        self.history.take(process, data, self._loop.clock())

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
        path = self._job.observation.report
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
