"""Collectives on flat arrays: from a call to a schedule, a header and an execution.

Arrays are contiguous and one-dimensional here, and counts are in elements. All calls go through
:meth:`Runner._run`, in the calling thread and one at a time: that is the one way to the wire.
"""

from __future__ import annotations

import math
import os
import threading
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, List, Optional, Sequence, Tuple, Type

import numpy as np

from ..clock import Stopwatch
from ..config import Settings
from ..errors import (
    MismatchError,
    NotInitializedError,
    RingcommError,
    describe_error,
    failed_before,
    fresh_copy,
    used_in_fork,
)
from ..group.failures import FailureReporter
from ..ops import Collective, ReduceOp
from ..schedule.select import Selector
from ..schedule.staging import plan_copies
from ..schedule.steps import Step, even_bounds
from ..transport.base import Fabric, LinkClosed, Stopped
from ..transport.huge_pages import LEAST_BYTES
from ..transport.pace import delivered
from ..wire.frames import NO_OP, NO_ROOT
from .call_history import CallHistory, Row
from .call_lock import Parts
from .call_sites import CallSites, Site, call_site, find_site, site_text
from .calls import Call, Intent, Plan
from .coded import CodedPlans, usable_codec
from .drive import StoodStill, run
from .execute import Part
from .flows import SegmentPool
from .progress import Progress
from .reduce import Kernel, kernel
from .reporter import Reporter
from .short import make_execution
from .staged import Mirror, StagedExecution, Staging
from .totals import Totals

_PLANS_KEPT = 512
_LEAVING_S = 1.0
"""How long a rank that leaves waits for the call of another thread to end."""
_NOTHING_TO_SUPPRESS: ContextManager[Any] = nullcontext()


class Runner:
    """Runs collectives over one fabric.

    Args:
        fabric: links to all peers.
        settings: algorithm, segment size, limits.
        generation: membership epoch, part of every header.
        spin_s: how long to poll before sleeping.
        reporter: asked for the common error when something goes wrong.
        selector: chooses the schedules; may be shared by runners of the same rank and job.

    Attributes:
        spin_s, may_poll, timeout_s: as for :func:`~.drive.run`; may be changed from call to call.
        reduced_bytes: payload of all all-reduces so far.
        waited: the time spent in calls, moving data or waiting for other ranks.
        history: is told of every call, if set.
        called_at: where the next call was made, if that was not in the thread that runs it.
        on_reduction: called with the bytes of each all-reduce that is requested, whether its caller waits for
            it, and its name, if set.
        purpose: says what the calls are for, where they are not what the program has asked for.
        sites: is told of calls that other ranks make at other lines, if set; otherwise nothing is compared.
        before_call: called before each call, outside of the lock, if set.
    """

    def __init__(
        self,
        fabric: Fabric,
        settings: Settings,
        generation: int = 0,
        spin_s: float = 0.0,
        reporter: Optional[FailureReporter] = None,
        selector: Optional[Selector] = None,
    ) -> None:
        self.rank = fabric.rank
        self.size = fabric.size
        self._fabric = fabric
        self._settings = settings
        self._generation = generation
        self.spin_s = spin_s
        self.may_poll: Optional[Callable[[], bool]] = None
        self.timeout_s = settings.timeout_s or math.inf
        self._reporter: FailureReporter = reporter if reporter is not None else Reporter()
        self._pool = SegmentPool(settings.segment_bytes)
        self._selector = selector or Selector(fabric.rank, fabric.size, settings.algorithm or None)
        self._coded = CodedPlans(fabric, self._selector)
        self._plans: Dict[Call, Plan] = {}
        self._sequence = 0
        self._started = 0
        self._last: Optional[Call] = None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._stopped = False
        self._broken: Optional[BaseException] = None
        self._interrupted: Optional[RingcommError] = None
        self.history: Optional[CallHistory] = None
        self.called_at: Optional[Site] = None
        self.sites: Optional[CallSites] = None
        self.purpose: Optional[Callable[[], str]] = None
        self.before_call: Optional[Callable[[], None]] = None
        self._running: Optional[Tuple[Call, Part, bool]] = None
        self.waited = Stopwatch()
        self.reduced_bytes = 0
        self.on_reduction: Optional[Callable[[int, bool, str], None]] = None
        self._dropped = Totals()  # of plans that are not kept any more

    def progress(self) -> Progress:
        """How far this rank is. For any thread, and at any time."""
        running, sequence = self._running, 2 * self._sequence
        if running is None:
            return Progress(sequence)
        call, part, counted = running
        sequence += not counted
        waits_for = tuple(self._fabric.rank_of(peer) for peer in part.waits_for)
        exchanged = tuple((self._fabric.rank_of(peer), *pair) for peer, pair in part.exchanged().items())
        purpose = self.purpose
        doing = call.describe() if purpose is None else purpose()
        return Progress(sequence, part.moved_bytes, doing, waits_for, exchanged)

    def totals(self) -> Totals:
        """What its calls have done so far, the present one included. For any thread."""
        running, totals = self._running, self._dropped.copy()
        for plan in list(self._plans.values()):
            totals.add(plan, self._fabric.rank_of)
        if running is not None and running is self._running:
            for peer, (sent, received) in running[1].exchanged().items():
                totals.peer(self._fabric.rank_of(peer)).exchanged(sent, received)
        return totals

    def delivered(self) -> Dict[int, Tuple[int, float]]:
        """What its links have delivered; see :func:`ringcomm.transport.pace.delivered`. For any thread."""
        return delivered(self._fabric)

    @property
    def last_call(self) -> str:
        """A description of the call that it runs or has run last; "" before the first."""
        return "" if self._last is None else self._last.describe()

    def rows(self) -> List[Row]:
        """The last calls, for the flight recorder; empty without a history. For any thread."""
        if self.history is None:
            return []
        running = self._running
        return self.history.rows(running[1].moved_bytes if running is not None else None)

    def fetch(self, mirrors: Sequence[Mirror]) -> None:
        """Wait until arrays of devices have been loaded, for the call that follows.

        Other ranks wait in that call, so if a copy fails the job ends, and they receive the reason.
        """
        try:
            for mirror in mirrors:
                mirror.fetch(self._fabric.watch)
        except BaseException as problem:
            if self._broken is None:
                self._broken = problem
                if self._reporter.abort_error is None:
                    doing = "a copy from a device" if self.purpose is None else self.purpose()
                    self._interrupted = self._reporter.note_interrupted(doing, describe_error(problem))
            raise

    def twin(self, settings: Settings) -> Runner:
        """Another runner over the same links that chooses by rule: to measure with, before this one runs."""
        return Runner(self._fabric, settings, self._generation, self.spin_s, self._reporter)

    def stop(self) -> None:
        """Refuse further calls: this rank has left the job.

        If the fabric's watch says so too, a call of another thread ends with an error; otherwise it may end
        by itself before the links are closed. At most a second is spent on that.
        """
        self._stopped = True
        self._fabric.wake()
        if self._lock.acquire(timeout=_LEAVING_S):
            self.release()
            self._lock.release()

    def release(self) -> None:
        """Free what is kept for the next call, when there is none.

        Some cycles of references keep a runner until Python's garbage collector comes by. An elastic job has
        a new one in every view.
        """
        for plan in self._plans.values():
            self._dropped.add(plan, self._fabric.rank_of)
        self._plans.clear()
        self._pool.release()

    def exclusive(
        self, parts: float = math.inf, but: Type[BaseException] = RingcommError
    ) -> ContextManager[None]:
        """Keeps other threads out, so that calls that belong together follow each other on every rank.

        Args:
            parts: how many calls those are. An exception between them ends the job: others wait for the rest.
            but: exceptions that all ranks raise alike, so that they do not end it.
        """
        if self.before_call is not None:
            self.before_call()
        return Parts(self._lock, lambda: self._started, parts, self._left_between, but)

    def _left_between(self, problem: BaseException) -> None:
        if self._broken is None and self._last is not None:
            self._broken, doing = problem, f"{self._doing(self._last)}, between its parts"
            self._interrupted = self._reporter.note_interrupted(doing, describe_error(problem))

    def all_reduce(
        self,
        data: np.ndarray[Any, Any],
        op: ReduceOp,
        name: str = "",
        shape: Tuple[int, ...] = (),
        prescale: float = 1.0,
        postscale: float = 1.0,
        collective: Collective = Collective.ALLREDUCE,
        intent: Optional[Intent] = None,
        codec: int = 0,
        residuals: Optional[np.ndarray[Any, Any]] = None,
        staging: Optional[Staging] = None,
    ) -> None:
        """Reduce ``data`` over all ranks, in place. ``residuals`` are for a codec's error feedback.

        ``staging``, here and below: for arrays on devices, of which ``data`` is the host's block, if there is
        more than one rank and no codec.
        """
        if self.on_reduction is not None and collective == Collective.ALLREDUCE:
            self.on_reduction(data.nbytes, True, name)
        codec = usable_codec(codec, data.dtype, op) if codec else 0
        if codec and data.dtype != np.float32:
            single = data.astype(np.float32)
            self.all_reduce(
                single, op, name, shape, prescale, postscale, collective, intent, codec, residuals
            )
            data[:] = single
            return
        self.reduced_bytes += data.nbytes
        # The numbers of the enumerations: hashing those is quick.
        scales = (prescale, postscale)
        call = Call(
            int(collective), data.dtype, data.size, int(op), NO_ROOT, name, shape, scales, codec=codec
        )
        call = call if intent is None else intent.applied(call)
        plan = self._plans.get(call)
        if plan is None:
            fold = kernel(op, data.dtype, self.size, prescale, postscale)
            if self.size == 1:
                fold.prepare(data)
                fold.finish_alone(data)
                return
            if codec:
                plan = self._plan(call, (), fold)
                plan.execution = self._coded.execution(plan.header, data.size, fold)
            else:
                schedule = self._selector.all_reduce(data.size, data.itemsize, fold.needs_single_fold)
                plan = self._plan(call, schedule, fold)
        if prescale != 1.0 and plan.fold is not None and staging is None:
            plan.fold.prepare(data)
        self._run(plan, data, residuals if codec else None, True, staging)

    def reduce_scatter(
        self,
        data: np.ndarray[Any, Any],
        bounds: Tuple[int, ...],
        op: ReduceOp,
        name: str = "",
        shape: Tuple[int, ...] = (),
        prescale: float = 1.0,
        postscale: float = 1.0,
        intent: Optional[Intent] = None,
        staging: Optional[Staging] = None,
    ) -> None:
        """Reduce over all ranks; afterwards chunk ``rank`` of ``data`` is finished, the rest is not."""
        call = Call(
            int(Collective.REDUCESCATTER), data.dtype, data.size, int(op), NO_ROOT, name, shape,
            (prescale, postscale), bounds=bounds,
        )  # fmt: skip
        call = call if intent is None else intent.applied(call)
        plan = self._plans.get(call)
        fold = plan.fold if plan is not None else None
        if fold is None:
            fold = kernel(op, data.dtype, self.size, prescale, postscale)
        if staging is None:
            fold.prepare(data)
        if self.size == 1:
            fold.finish_alone(data)
            return
        schedule = self._selector.reduce_scatter(bounds, data.itemsize, fold.needs_single_fold)
        self._run(self._plan(call, schedule, fold), data, staging=staging)

    def all_gather(
        self,
        data: np.ndarray[Any, Any],
        bounds: Tuple[int, ...],
        name: str = "",
        shape: Tuple[int, ...] = (),
        collective: Collective = Collective.ALLGATHER,
        intent: Optional[Intent] = None,
        staging: Optional[Staging] = None,
    ) -> None:
        """Fill ``data`` with every rank's chunk; this rank's own must be in its place already."""
        if self.size == 1:
            return
        schedule = self._selector.all_gather(bounds, data.itemsize)
        # With the number of elements no header is the same as that of the exchange before it.
        call = Call(int(collective), data.dtype, data.size, NO_OP, NO_ROOT, name, shape, bounds=bounds)
        call = call if intent is None else intent.applied(call)
        self._run(self._plan(call, schedule), data, staging=staging)

    def exchange(
        self,
        values: Sequence[int],
        collective: Collective,
        dtype: np.dtype[Any],
        name: str,
        shape: Tuple[int, ...],
        op: int = NO_OP,
    ) -> np.ndarray[Any, Any]:
        """Exchange a few numbers (how many rows will come) with all ranks; returns one row per rank.

        ``dtype`` and ``shape`` are those of the operation that follows: if ranks disagree about
        it, they learn so here.
        """
        numbers = np.zeros((self.size, len(values)), np.int64)
        numbers[self.rank] = values
        if self.size > 1:
            flat = numbers.reshape(-1)
            call = Call(int(collective), dtype, 0, op, NO_ROOT, name, shape, ahead=True)
            plan = self._plans.get(call)
            if plan is None or plan.items != flat.size:
                bounds = even_bounds(flat.size, self.size)
                plan = self._plan(call, self._selector.all_gather(bounds, flat.itemsize))
                plan.items = flat.size
            self._run(plan, flat)
        return numbers

    def broadcast(
        self,
        data: np.ndarray[Any, Any],
        root: int,
        name: str = "",
        shape: Tuple[int, ...] = (),
        collective: Collective = Collective.BROADCAST,
        staging: Optional[Staging] = None,
    ) -> None:
        """Overwrite ``data`` on all ranks with the root's."""
        if self.size == 1:
            return
        schedule = self._selector.broadcast(root, data.size, data.itemsize)
        call = Call(int(collective), data.dtype, data.size, NO_OP, root, name, shape)
        self._run(self._plan(call, schedule), data, staging=staging)

    def all_to_all(
        self,
        source: np.ndarray[Any, Any],
        data: np.ndarray[Any, Any],
        send_bounds: Tuple[int, ...],
        recv_bounds: Tuple[int, ...],
        name: str = "",
        shape: Tuple[int, ...] = (),
        intent: Optional[Intent] = None,
        staging: Optional[Staging] = None,
    ) -> None:
        """Chunk ``i`` of ``source`` goes to rank i; chunk ``i`` of ``data`` comes from it.

        With ``staging`` this rank's own chunk must be in its place already.
        """
        if staging is None:
            mine = source[send_bounds[self.rank] : send_bounds[self.rank + 1]]
            data[recv_bounds[self.rank] : recv_bounds[self.rank + 1]] = mine
        if self.size == 1:
            return
        schedule = self._selector.all_to_all(send_bounds, recv_bounds)
        call = Call(int(Collective.ALLTOALL), data.dtype, 0, NO_OP, NO_ROOT, name, shape)
        call = call if intent is None else intent.applied(call)
        self._run(self._plan(call, schedule), data, source, staging=staging)

    def barrier(self, name: str = "") -> None:
        """Return once every rank has called it: an allreduce of one byte."""
        self.all_reduce(np.zeros(1, np.uint8), ReduceOp.MAX, name, collective=Collective.BARRIER)

    def run_apart(
        self, schedule: Sequence[Step], data: np.ndarray[Any, Any], source: np.ndarray[Any, Any], name: str,
        fold: Optional[Kernel] = None,
    ) -> None:  # fmt: skip
        """Run a schedule in which not all ranks take part, so it is not counted among the calls.

        A schedule that folds needs ``fold``.
        """
        call = Call(Collective.EXCHANGE, data.dtype, 0, NO_OP, NO_ROOT, name, ())
        self._run(self._plan(call, schedule, fold), data, source, counted=False)

    def _plan(self, call: Call, schedule: Sequence[Step], fold: Optional[Kernel] = None) -> Plan:
        """What is needed to run this call, from the last time if it was the same schedule."""
        plan = self._plans.get(call)
        if plan is None or plan.schedule is not schedule:
            if plan is None and len(self._plans) >= _PLANS_KEPT:
                plan = self._plans.pop(next(iter(self._plans)))
            if plan is not None:
                self._dropped.add(plan, self._fabric.rank_of)
            plan = self._plans[call] = Plan(call, schedule, call.header(self._generation), fold)
        return plan

    def _run(
        self,
        plan: Plan,
        data: np.ndarray[Any, Any],
        source: Optional[np.ndarray[Any, Any]] = None,
        counted: bool = True,
        staging: Optional[Staging] = None,
    ) -> None:
        if self.before_call is not None:
            self.before_call()
        with self._lock:
            self._check_usable()
            sequence = self._sequence + counted
            execution = plan.execution
            if staging is not None:
                execution = self._staged(plan, staging, data.dtype)
            elif execution is None:
                execution = plan.execution = make_execution(
                    plan.schedule, self._fabric, plan.header, data.dtype, self._pool, plan.fold
                )
            if data.nbytes >= LEAST_BYTES and staging is None:
                self._fabric.prepare(data.ctypes.data, data.nbytes)
            history, sites, number = self.history, self.sites, 0
            if history is not None or sites is not None:
                site = self.called_at or find_site(3, plan.site)  # inside are this method and its caller
                if history is not None:
                    history.begin(sequence, plan.call, site)
                if sites is not None:
                    number, execution.headers.checks_sites = plan.site_number(site), sites.strict
            execution.arm(sequence, data, source, number)
            try:
                # Not before: what has failed until here has sent nothing, and may be called again.
                self._sequence = sequence
                self._started, self._last = self._started + 1, plan.call
                self._running = (plan.call, execution, counted)
                began_s = self.waited.start()
                try:
                    # Overflow and NaN are the caller's numbers; a warning on one rank would be useless.
                    with np.errstate(all="ignore") if plan.warns else _NOTHING_TO_SUPPRESS:
                        run(execution, self._fabric, self.timeout_s, self.spin_s, self.may_poll)
                    plan.runs += 1
                finally:
                    self.waited.stop(began_s)
                    plan.took_s += self.waited.last_s - began_s
                    if sites is not None and execution.headers.other_sites:
                        sites.met(sequence, plan.call, self._fabric, execution.headers.other_sites)
            except BaseException as problem:
                # From here on the caller may overwrite what peers have not read.
                self._fabric.revoke()
                # The streams stop in the middle of a message: nothing can be sent on them any more.
                self._broken = problem  # also if this thread is interrupted while it reports that
                self._broken = self._translate(problem, execution, plan.call)
                if history is not None:
                    history.fail(self._broken, execution.moved_bytes)
                if self._broken is problem:
                    raise
                raise self._broken from None
            finally:
                self._running = None
                execution.disarm()

    def _staged(self, plan: Plan, staging: Staging, dtype: np.dtype[Any]) -> Part:
        """What runs the plan on arrays of devices."""
        execution = plan.staged
        if execution is None:
            copies = plan_copies(plan.schedule, staging.results)
            execution = plan.staged = StagedExecution(
                plan.schedule, self._fabric, plan.header, dtype, self._pool, plan.fold, copies
            )
        execution.attach(staging)
        return execution

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise used_in_fork(self.rank, self._pid)
        if self._stopped:
            raise NotInitializedError(
                "This rank has left the job (shutdown() or Context.close() was called): it has no links "
                "to other ranks. Call ringcomm.init() again first."
            )
        if self._interrupted is not None:
            # The others have been told at once; this rank reads the same at its next call.
            self._broken, self._interrupted = self._reporter.root_cause(self._interrupted), None
            raise fresh_copy(self._broken)
        if self._broken is None and self._reporter.abort_error is not None:
            # Other ranks have received the end of the job already; they will not enter this call.
            self._broken = self._reporter.abort_error
            raise fresh_copy(self._broken)
        if self._broken is not None:
            raise failed_before(self._broken) from self._broken

    def _doing(self, call: Call) -> str:
        """A call, for messages, in the program's own terms."""
        number = "" if call.is_internal else f", call number {self._sequence}"
        return f"{call.describe()}{number}" if self.purpose is None else self.purpose()

    def _translate(self, problem: BaseException, execution: Part, call: Call) -> BaseException:
        """The error for people, the same on every rank, for what stopped an execution."""
        doing = self._doing(call)
        error: BaseException = problem
        if self._stopped and isinstance(problem, Exception):
            error = NotInitializedError(
                "This rank has left the job (shutdown() or Context.close() was called) while it was in "
                f"{doing}, which has not been completed."
            )
        elif isinstance(problem, LinkClosed):
            error = self._reporter.report_lost(problem.peer, doing, problem.reason)
        elif isinstance(problem, MismatchError) and problem.peer is not None:
            peer = self._fabric.rank_of(problem.peer)
            site = call_site() if self.called_at is None else site_text(self.called_at)
            mine = f"rank {self._fabric.rank_of(self.rank)}: {call.describe()} at {site}"
            text = f"{mine}; rank {peer} makes another call: {problem}."
            error = self._reporter.report_mismatch(peer, text)
        elif isinstance(problem, StoodStill):
            reading, writing = execution.waiting_for()
            peer = self._fabric.rank_of((reading or writing)[0].peer)
            moved = f"{execution.moved_bytes} bytes into it"
            why = f"not a byte for {self.timeout_s:g} s (the timeout is over), {moved}"
            error = self._reporter.report_lost(peer, doing, why, "stalled")
        elif not isinstance(problem, Stopped) and self._reporter.abort_error is None:
            # Ctrl-C, or another exception from a signal handler: no other rank can detect it.
            far = f"{doing}, {execution.moved_bytes} bytes into it"
            self._interrupted = self._reporter.note_interrupted(far, describe_error(problem))
        return error
