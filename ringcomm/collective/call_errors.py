"""The errors that end a runner's calls: the one that all ranks raise, and those of later calls."""

from __future__ import annotations

import os
from typing import Callable, Optional

from ..errors import (
    MismatchError,
    NotInitializedError,
    RingcommError,
    another_call_text,
    describe_error,
    failed_before,
    fresh_copy,
    used_in_fork,
)
from ..group.failures import FailureReporter
from ..transport.base import Fabric, LinkClosed, Stopped
from ..wire.signature import Signature
from .call_sites import Site, call_site, site_text
from .drive import StoodStill
from .part import Part


class CallErrors:
    """The failures of one runner. The reporter is asked for the common error; ``doing`` describes a call."""

    def __init__(self, fabric: Fabric, reporter: FailureReporter, doing: Callable[[Signature], str]) -> None:
        self.broken: Optional[BaseException] = None  # has ended the calls
        self.stopped = False  # this rank has left the job
        self._fabric = fabric
        self._reporter = reporter
        self._doing = doing
        self._interrupted: Optional[RingcommError] = None
        self._pid = os.getpid()

    def check_usable(self) -> None:
        """Raise the error that has ended the calls, if there is one."""
        if os.getpid() != self._pid:
            raise used_in_fork(self._fabric.rank, self._pid)
        if self.stopped:
            raise NotInitializedError(
                "This rank has left the job (shutdown() or Context.close() was called): it has no links "
                "to other ranks. Call ringcomm.init() again first."
            )
        if self._interrupted is not None:
            # The others have been told at once; this rank reads the same at its next call.
            self.broken, self._interrupted = self._reporter.root_cause(self._interrupted), None
            raise fresh_copy(self.broken)
        if self.broken is None and self._reporter.abort_error is not None:
            # Other ranks have received the end of the job already; they will not enter this call.
            self.broken = self._reporter.abort_error
            raise fresh_copy(self.broken)
        if self.broken is not None:
            raise failed_before(self.broken) from self.broken

    def outside_call(self, problem: BaseException, doing: str) -> None:
        """End the calls for an exception between two of them; other ranks wait for the next one."""
        if self.broken is None:
            self.broken = problem
            if self._reporter.abort_error is None or not isinstance(problem, RingcommError):
                self._interrupted = self._reporter.note_interrupted(doing, describe_error(problem))

    def in_call(
        self, problem: BaseException, execution: Part, call: Signature, site: Optional[Site], timeout_s: float
    ) -> BaseException:
        """End the calls for an exception that has stopped one; return the error that it raises, the same on
        every rank. ``site``: of the program's call, if that was in another thread; ``timeout_s``: the limit
        without progress.
        """
        self.broken = problem  # also if this thread is interrupted while it reports that
        self.broken = self._translated(problem, execution, call, site, timeout_s)
        return self.broken

    def _translated(
        self, problem: BaseException, execution: Part, call: Signature, site: Optional[Site], timeout_s: float
    ) -> BaseException:
        doing = self._doing(call)
        error: BaseException = problem
        if self.stopped and isinstance(problem, Exception):
            error = NotInitializedError(
                "This rank has left the job (shutdown() or Context.close() was called) while it was in "
                f"{doing}, which has not been completed."
            )
        elif isinstance(problem, LinkClosed):
            error = self._reporter.report_lost(problem.peer, doing, problem.reason)
        elif isinstance(problem, MismatchError) and problem.peer is not None:
            peer, rank = self._fabric.rank_of(problem.peer), self._fabric.rank_of(self._fabric.rank)
            place = call_site() if site is None else site_text(site)
            text = another_call_text(rank, f"{call.describe()} at {place}", peer, str(problem))
            error = self._reporter.report_mismatch(peer, text)
        elif isinstance(problem, StoodStill):
            reading, writing = execution.waiting_for()
            peer = self._fabric.rank_of((reading or writing)[0].peer)
            moved = f"{execution.moved_bytes} bytes into it"
            why = f"not a byte for {timeout_s:g} s (the timeout is over), {moved}"
            error = self._reporter.report_lost(peer, doing, why, "stalled")
        elif not isinstance(problem, Stopped) and self._reporter.abort_error is None:
            # Ctrl-C, or another exception from a signal handler: no other rank can detect it.
            far = f"{doing}, {execution.moved_bytes} bytes into it"
            self._interrupted = self._reporter.note_interrupted(far, describe_error(problem))
        return error
