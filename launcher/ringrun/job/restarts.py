"""``--restarts``: a job that fails is started again, whole, from the user's checkpoint."""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace
from typing import Callable, Optional

from ..plan.job import Job
from ..show.console import Console
from .launch import launch
from .outcome import Outcome
from .supervise import Supervisor

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
"""Before the first restart, and before a late one: each wait is twice the one before."""
USAGE_CODE = 2
"""What programs end with, by convention, when their command line makes no sense. It will not next time."""

Run = Callable[[Job, Callable[[Supervisor], None]], Outcome]
"""Runs a job to its end; tells of the supervisor as soon as there is one."""


def wait_s(attempt: int) -> float:
    """How long to wait after an attempt that failed, in seconds; attempts count from 0."""
    return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(attempt, 10)))


def is_worthwhile(outcome: Outcome, attempt: int) -> bool:
    """Whether another attempt may end better.

    Not if it ended well, if the user ended it, if nobody reads the output any more, if the first rank to
    fail did not understand its command line, or if the job could not start at all. A host that is missing
    after an attempt in which it was there may come back.
    """
    if outcome.reason == "start":
        return attempt > 0
    exit_of = outcome.cause.exit if outcome.cause is not None else None
    return outcome.reason == "failure" and not (exit_of is not None and exit_of.code == USAGE_CODE)


def attempt_of(job: Job, attempt: int, restarts: int) -> Job:
    """The job for one attempt: a name and a key of its own, so that nothing old can get in."""
    folder = job.output_dir
    if restarts and folder is not None:
        folder = folder / f"attempt.{attempt}"
    return replace(
        job, id=secrets.token_hex(8), key=secrets.token_bytes(32), output_dir=folder, attempt=attempt
    )


class Attempts:
    """Runs a job until it ends well, or has been started again so many times.

    Args:
        job: what to run; each attempt gets a name and a key of its own.
        restarts: how often it may be started again.
        console: where the boxes of failed attempts go, and what is said between attempts.
        run: runs one attempt.
        wait: sleeps for so many seconds, or until :meth:`interrupt`.
    """

    def __init__(
        self,
        job: Job,
        restarts: int,
        console: Console,
        run: Optional[Run] = None,
        wait: Optional[Callable[[float], object]] = None,
    ) -> None:
        self._job, self._restarts, self._console = job, restarts, console
        self._run = run or (lambda job, started: launch(job, console, started=started))
        self._interrupted = threading.Event()
        self._wait = wait or self._interrupted.wait
        self._supervisor: Optional[Supervisor] = None
        self._signum = 0

    def interrupt(self, signum: int) -> None:
        """End it all, as :meth:`.supervise.Supervisor.interrupt`; there is no other attempt."""
        self._signum = signum
        self._interrupted.set()
        if self._supervisor is not None:
            self._supervisor.interrupt(signum)

    def diagnose(self) -> None:
        """As :meth:`.supervise.Supervisor.diagnose`."""
        if self._supervisor is not None:
            self._supervisor.diagnose()

    def run(self) -> Outcome:
        """Run it; how the last attempt went. The boxes of those before have been shown."""
        attempt = 0
        while True:
            outcome = self._run(attempt_of(self._job, attempt, self._restarts), self._started)
            self._supervisor = None
            again = attempt < self._restarts and not self._signum and is_worthwhile(outcome, attempt)
            if not again:
                return outcome
            self._show(outcome.report)
            seconds = wait_s(attempt)
            self._show(
                f"ringrun: attempt {attempt + 1} of {self._restarts + 1} has failed; the next one starts in "
                f"{seconds:g} s (--restarts {self._restarts}).\n"
            )
            self._wait(seconds)
            if self._signum:
                return replace(outcome, exit_code=128 + self._signum, reason="interrupt", report="")
            attempt += 1

    def _started(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        if self._signum:
            supervisor.interrupt(self._signum)

    def _show(self, text: str) -> None:
        self._console.write(2, text.encode("utf-8", "replace"))
