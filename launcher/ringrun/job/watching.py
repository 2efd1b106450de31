"""Requests counters of ranks while a job runs, for the live view and the report."""

from __future__ import annotations

import sys
import time
from typing import Any, Callable, Dict, Mapping, Sequence, Tuple

from ringcomm.storage.files import open_named

from ..plan.job import Job
from ..reach.agent_process import AgentLink
from ..show.console import Console
from ..show.printer import Printer
from ..watch import table
from ..watch.history import History
from ..watch.html_report import ReportFacts, html_report
from .event_loop import Loop
from .keyboard import Keys

ASK_S = 1.0
"""Seconds between two requests to all ranks."""
LINE_S = 30.0
"""Seconds between two lines without a terminal."""


class Watching:
    """The counters of one job (`history`). The table is shown above the printer's lines, with colours if
    `coloured`; `diagnose` shows the stacks of all ranks.
    """

    def __init__(
        self,
        job: Job,
        links: Sequence[AgentLink],
        loop: Loop,
        printer: Printer,
        console: Console,
        coloured: bool,
        diagnose: Callable[[], None],
    ) -> None:
        self._job, self._links, self._loop, self._printer = job, links, loop, printer
        self._console, self._coloured = console, coloured
        self._diagnose = diagnose
        self._keys = Keys(loop, self._typed)
        self._shows = job.observation.watch
        self._began_at = time.time()
        self.history = History(loop.clock())
        self._next_line_s = loop.clock() + LINE_S

    def start(self) -> None:
        """Begin to request counters, if an option needs them."""
        if not self._job.observation.needs_numbers:
            return
        if self._shows and self._console.terminals:
            self._keys.start()
        self._loop.after("numbers", ASK_S, self._ask)

    def _ask(self) -> None:
        for link in self._links:
            if link.answered and link.alive:
                link.send({"do": "numbers"})
        self._loop.after("numbers", ASK_S, self._ask)
        self._show()

    def take(self, process: int, data: bytes) -> None:
        """Store the counters of a process; invalid ones are ignored."""
        self.history.take(process, data, self._loop.clock())

    def linked(self, links: Sequence[Mapping[str, Any]]) -> None:
        """Store the links of the ranks; see :func:`ringcomm.rendezvous.routing.link_rows`."""
        self.history.linked(links)

    # -- the live view -------------------------------------------------------------------------

    def _hosts(self) -> Dict[int, str]:
        return {place.rank: self._job.hosts[place.host_index].name for place in self._job.plan.places}

    def _show(self) -> None:
        """Update the table or the line."""
        now_s = self._loop.clock()
        if not self._shows:
            return
        if self._console.terminals:
            rows = max(5, self._console.rows // 2)
            lines = table.table(
                self.history, self._hosts(), now_s, self._coloured, self._keys.active, rows
            )
            self._printer.block = [line.encode("utf-8", "replace") for line in lines]
        elif now_s >= self._next_line_s:
            self._next_line_s = now_s + LINE_S
            self._show_line()

    def _show_line(self) -> None:
        text = table.line(self.history, self._hosts())
        if text:
            self._printer.show(text)

    def _typed(self, keys: bytes) -> None:
        if b"s" in keys:
            self._diagnose()
        if b"q" in keys:
            self._leave_view()

    def _leave_view(self) -> None:
        self._shows = False
        self._printer.block = ()
        self._keys.stop()

    # -- the end -------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the live view: its last table or line stays."""
        self._loop.cancel("numbers")
        self._keys.stop()
        if self._shows:
            self._shows = False
            block, self._printer.block = self._printer.block, ()
            if block:
                now_s = self._loop.clock()
                lines = table.table(self.history, self._hosts(), now_s, False, False, sys.maxsize)
                self._printer.show("\n".join(lines))
            elif not self._console.terminals:
                self._show_line()

    def write_report(self, reason: str, failure: str, changes: Sequence[Tuple[float, str]]) -> None:
        """Write the file of ``--report``, if it is given. `reason` says in a few words how the job ended,
        `failure` is the report of the failure or "", `changes` are (seconds since the start, text).
        """
        path = self._job.observation.report
        if path is None:
            return
        facts = ReportFacts(
            self._job.command.shown, self._job.version, self._began_at,
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
