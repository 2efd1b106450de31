"""Runs a job, with ``--restarts`` again after a failure. The program resumes from its own checkpoint."""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace
from typing import Callable, Optional

from ..elastic.job import ElasticJob
from ..plan.job import Job
from ..show.console import Console
from .outcome import Outcome
from .rendezvous import rendezvous_for
from .supervise import FixedRanks, Policy, Supervisor

FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0
"""Wait before the first restart, and the maximum: each wait is twice the previous one."""
USAGE_CODE = 2
"""The conventional exit code for an invalid command line. A restart would fail in the same way."""

Run = Callable[[Job, Callable[[Supervisor], None]], Outcome]
"""Runs a job to its end; calls the second argument with the supervisor when it exists."""


def is_worthwhile(outcome: Outcome, attempt: int) -> bool:
    """Return whether another attempt may succeed; attempts count from 0. If a later attempt than the first
    could not start, a missing host may return.
    """
    if outcome.reason == "start":
        return attempt > 0
    exit_of = outcome.cause.exit if outcome.cause is not None else None
    return outcome.reason == "failure" and not (exit_of is not None and exit_of.code == USAGE_CODE)


def attempt_of(job: Job, attempt: int, restarts: int) -> Job:
    """Return the job for one attempt, with a new identifier and key: old processes cannot join."""
    folder = job.output_dir
    if restarts and folder is not None:
        folder = folder / f"attempt.{attempt}"
    job = job.fresh() if isinstance(job, ElasticJob) else job
    return replace(
        job, output_dir=folder, attempt=attempt, restarts=restarts,
        id=secrets.token_hex(8), key=secrets.token_bytes(32),
    )  # fmt: skip


def launch(job: Job, console: Console, started: Callable[[Supervisor], None]) -> Outcome:
    """Run a job with a rendezvous of its own to its end, in the calling thread."""

    def policy(made: Supervisor) -> Policy:
        if not isinstance(job, ElasticJob):
            return FixedRanks(made, rendezvous_for(job))
        from .elastic_ranks import ElasticRanks  # a job of a fixed size does without

        return ElasticRanks(made, job, rendezvous_for(job))

    supervisor = Supervisor(job, console, policy)
    started(supervisor)
    return supervisor.run()


class Attempts:
    """Runs a job until it succeeds, or has been restarted `restarts` times."""

    def __init__(self, job: Job, restarts: int, console: Console, run: Optional[Run] = None) -> None:
        self.job, self._restarts, self._console = job, restarts, console
        self._run = run or (lambda job, started: launch(job, console, started))
        self._interrupted = threading.Event()
        self._supervisor: Optional[Supervisor] = None
        self.signum = 0  # of interrupt()

    def interrupt(self, signum: int) -> None:
        """End the job as :meth:`.supervise.Supervisor.interrupt` does, without another attempt."""
        self.signum = signum
        self._interrupted.set()
        if self._supervisor is not None:
            self._supervisor.interrupt(signum)

    def diagnose(self) -> None:
        """Show what every rank is doing (:meth:`.supervise.Supervisor.diagnose`); the job continues."""
        if self._supervisor is not None:
            self._supervisor.diagnose()

    def run(self) -> Outcome:
        """Run all attempts and return the last outcome; reports of earlier attempts have been shown."""
        attempt, first = 0, self.job
        while True:
            self.job = attempt_of(first, attempt, self._restarts)
            outcome = self._run(self.job, self._started)
            self._supervisor = None
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

    def _started(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        if self.signum:
            supervisor.interrupt(self.signum)
