"""Collectives on flat arrays: from a call to its plan, and from the plan to the wire.

Arrays are contiguous and one-dimensional here, and counts are in elements. A call is described by a
:class:`~ringcomm.wire.signature.Signature`, by which its :class:`Plan` is kept for the next equal call. Calls
run in the calling thread, one at a time; :meth:`Runner._run` is their one way to the wire.
"""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Tuple,
    Type,
)

import numpy as np

from ..clock import POLLING
from ..config import Settings
from ..dtypes import Array, check_weighable, type_names, usable_codec
from ..errors import (
    DeviceError,
    MismatchError,
    Misuse,
    NotInitializedError,
    RingcommError,
    another_call_text,
    describe_error,
    failed_before,
    fresh_copy,
    used_in_fork,
)
from ..group.failures import FailureReporter, Reporter
from ..ops import Collective, ReduceOp, weight_of
from ..schedule.select import Selector
from ..schedule.steps import Step, even_bounds
from ..transport.base import LARGE_BYTES, Fabric, LinkClosed, StoppableWatch, Stopped
from ..wire.signature import Signature, ahead_of, direct_call
from .execute import Part, SegmentPool, StoodStill, run
from .observe import (
    CallHistory,
    OperationTotal,
    Progress,
    Row,
    Site,
    Tally,
    Totals,
    call_site,
    find_frame,
    nowhere,
    site_text,
)
from .reduce import NO_WEIGHTS, Kernel, Total, kernel, weigh, weighable
from .short import make_execution

if TYPE_CHECKING:
    from ..arrays.kinds import BlockMirror, Done
    from .coded import CodedPlans

Span = Tuple[int, int]

_PLANS_KEPT = 512
_LEAVING_S = 1.0
"""How long a rank that leaves waits for the call of another thread to end."""
_MIN_NAP_S, _MAX_NAP_S = 50e-6, 1e-3
"""Between two looks at a device's copy; 4 MB take some 0.1 to 0.4 ms."""
_NOTHING_TO_DO: ContextManager[Any] = nullcontext()


class Plan:
    """The way to run a call, kept for the next equal call."""

    __slots__ = ("call", "complete", "fold", "items", "part", "runs", "schedule", "site", "took_s", "warns")

    def __init__(self, call: Signature, schedule: Sequence[Step], fold: Optional[Kernel]) -> None:
        self.call = call
        self.schedule = schedule
        self.fold = fold
        self.items = -1  # numbers of an exchange
        self.warns = fold is not None and fold.warns
        self.part: Optional[Part] = None  # made when it runs first
        self.site = nowhere()
        # complete runs; those of an exchange of numbers that were all of their call
        self.runs = self.complete = 0
        self.took_s = 0.0  # of all these runs

    def add_to(self, totals: Totals, rank_of: Callable[[int], int]) -> None:
        """Add its totals to sums; another thread may run it. ``rank_of``: a peer's rank in the whole job."""
        runs, took_s, part = self.runs, self.took_s, self.part
        if part is None:
            return
        moved_bytes = 0
        for peer, (sent, received) in part.volume().items():
            totals.peer(rank_of(peer)).exchanged(runs * sent, runs * received)
            moved_bytes += runs * (sent + received)
        for peer, seconds in list(part.slept_s.items()):
            totals.peer(rank_of(peer)).slept_s += seconds
        call = self.call
        counted = self.complete if call.ahead else runs
        if counted and not call.is_internal:
            took_s, moved_bytes = took_s * counted / runs, moved_bytes * counted // runs
            for sums, name in ((totals.kinds, call.verb), (totals.operations, call.describe())):
                sums.setdefault(name, OperationTotal()).add(counted, took_s, moved_bytes)


class Parts:
    """A ``with`` block of calls, which must not be left between them; see :meth:`Runner.exclusive`."""

    __slots__ = ("_but", "_count", "_first", "_runner")

    def __init__(self, runner: Runner, count: float, but: Type[BaseException]) -> None:
        self._runner = runner
        self._count = count
        self._but = but
        self._first = 0

    def __enter__(self) -> None:
        self._runner.lock.acquire()
        self._first = self._runner.sequence

    def __exit__(self, kind: Any, problem: Any, traceback: Any) -> None:
        runner = self._runner
        try:
            between = 0 < runner.sequence - self._first < self._count
            if between and problem is not None and not isinstance(problem, self._but):
                runner.end_between(problem, f"{runner.doing}, between its parts")
        finally:
            runner.lock.release()


class Runner:
    """The collectives of one rank over one fabric. Runners of the same rank and job may share a selector.
    ``spin_s``, ``may_poll`` and ``timeout_s`` (see :func:`~.execute.run`) may change between calls.
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
        self.spin_s = spin_s
        self.may_poll: Optional[Callable[[], bool]] = None
        self.timeout_s = settings.timeout_s or math.inf
        self.history = CallHistory(1)  # a longer one, where the last calls are recorded
        self.called_at: Optional[Site] = None  # of the next call, if made in another thread
        self.purpose: Optional[Callable[[], str]] = None  # describes calls that the program has not made
        self.tally: Optional[Tally] = None  # counts the calls for the present purpose
        self.before_call: Optional[Callable[[], None]] = None  # called outside of the lock
        self.waited_s = 0.0  # in calls, moving data or waiting for other ranks
        self.reduced_bytes = 0  # payload of all all-reduces so far
        self.sequence = 0  # of the last call that all ranks make
        self.lock = threading.RLock()
        self._fabric = fabric
        self._settings = settings
        self._generation = generation
        self._reporter: FailureReporter = reporter if reporter is not None else Reporter()
        self._selector = selector or Selector(fabric.rank, fabric.size, settings.algorithm or None)
        self._pool = SegmentPool(settings.segment_bytes)
        self._plans: Dict[Signature, Plan] = {}
        self._dropped = Totals()  # of plans that are not kept any more
        self._coded: Optional[CodedPlans] = None
        self._last: Optional[Signature] = None
        self._running: Optional[Tuple[Signature, Part, bool]] = None
        self._broken: Optional[BaseException] = None  # has ended the calls
        self._interrupted: Optional[RingcommError] = None  # the same, while the root cause is not known
        self._stopped = False  # this rank has left the job
        self._pid = os.getpid()

    def with_settings(self, settings: Settings) -> Runner:
        """Return another runner over the same links that chooses by rule, to measure with before this one."""
        return Runner(self._fabric, settings, self._generation, self.spin_s, self._reporter)

    # ---- collectives ---------------------------------------------------------------------------

    def all_reduce(self, data: Array, call: Signature, residuals: Optional[Array] = None) -> None:
        """Reduce ``data`` over all ranks, in place. ``residuals``: for the error feedback of a codec."""
        if call.codec:
            if self.size == 1 or not usable_codec(call.codec, data.dtype, call.op):
                call, residuals = call._replace(codec=0), None
            elif data.dtype != np.float32:
                with np.errstate(all="ignore"):
                    single = data.astype(np.float32)
                    self.all_reduce(single, call._replace(dtypes=type_names(single.dtype)), residuals)
                    data[:] = single
                return
        self.reduced_bytes += data.nbytes
        plan = self._plans.get(call) or self._new_all_reduce(call, data)
        if call.prescale != 1.0 and plan.fold is not None:
            plan.fold.prepare(data)
        self._run(plan, data, residuals)

    def _new_all_reduce(self, call: Signature, data: Array) -> Plan:
        fold = kernel(call.op, data.dtype, self.size, call.prescale, call.postscale)
        if not call.codec:
            schedule = self._selector.all_reduce(data.size, data.itemsize, fold.needs_single_fold)
            return self._plan(call, schedule, fold)
        if self._coded is None:
            from .coded import CodedPlans  # codecs are not needed by most jobs

            self._coded = CodedPlans(self._fabric, self._selector)
        plan = self._plan(call, (), fold)
        plan.part = self._coded.execution(call.header(self._generation), data.size, fold)
        return plan

    def reduce_scatter(self, data: Array, call: Signature) -> None:
        """Reduce over all ranks; afterwards only chunk ``rank`` of the call's bounds is finished."""
        plan = self._plans.get(call)
        if plan is None:
            fold = kernel(call.op, data.dtype, self.size, call.prescale, call.postscale)
            single = fold.needs_single_fold
            plan = self._plan(call, self._selector.reduce_scatter(call.bounds, data.itemsize, single), fold)
        if plan.fold is not None:
            plan.fold.prepare(data)
        self._run(plan, data)

    def all_gather(self, data: Array, call: Signature) -> None:
        """Fill ``data`` with every rank's chunk of the call's bounds; this rank's own is in its place."""
        # The number of elements makes the header differ from that of the exchange before it.
        plan = self._plans.get(call)
        if plan is None:
            plan = self._plan(call, self._selector.all_gather(call.bounds, data.itemsize))
        self._run(plan, data)

    def exchange(self, values: Any, call: Signature) -> Array:
        """Return a few numbers of every rank, one row per rank, ahead of the operation that follows."""
        numbers = np.zeros((self.size, len(values)), np.int64)
        numbers[self.rank] = values
        flat = numbers.reshape(-1)
        plan = self._plans.get(call)
        if plan is None or plan.items != flat.size:
            bounds = even_bounds(flat.size, self.size)
            plan = self._plan(call, self._selector.all_gather(bounds, flat.itemsize))
            plan.items = flat.size
        self._run(plan, flat)
        return numbers

    def weighted(self, data: Array, weight: Any, call: Signature) -> Array:
        """Multiply this rank's contribution to an average that follows (``call``) by its weight relative to
        all ranks'; return the flat array to average: ``data``, or for float16 a copy in float32.
        """
        own = np.array([weight_of(weight)])
        check_weighable(data.dtype, call.op)
        kind, shape = Collective(call.kind), call.shapes[0]
        ahead = ahead_of(kind, data.dtype, call.name, shape, call.op, weighted=True)
        bits = self.exchange(own.view(np.int64).tolist(), ahead)
        total = Total.of(bits.view(np.float64)[:, 0].tolist())
        if not total.part:
            raise Misuse(f"{call.verb}(shape {shape}, {data.dtype.name}): {NO_WEIGHTS}")
        weighted = weighable(data)
        weigh(weighted, total.share(float(own[0]), self.size))
        return weighted

    def complete(self) -> None:
        """Count the last exchange as a whole call: nothing follows it."""
        plan = None if self._last is None else self._plans.get(self._last)
        if plan is not None and plan.call.ahead:
            plan.complete += 1

    def broadcast(self, data: Array, call: Signature) -> None:
        """Overwrite ``data`` on all ranks with that of the call's root."""
        plan = self._plans.get(call)
        if plan is None:
            plan = self._plan(call, self._selector.broadcast(call.root, data.size, data.itemsize))
        self._run(plan, data)

    def all_to_all(
        self,
        source: Array,
        data: Array,
        send_bounds: Tuple[int, ...],
        recv_bounds: Tuple[int, ...],
        call: Signature,
        has_own: bool = False,
    ) -> None:
        """Send chunk i of ``source`` to rank i, and receive its chunk; ``has_own``: but the own one."""
        if not has_own:
            mine = source[send_bounds[self.rank] : send_bounds[self.rank + 1]]
            data[recv_bounds[self.rank] : recv_bounds[self.rank + 1]] = mine
        self._run(self._plan(call, self._selector.all_to_all(send_bounds, recv_bounds)), data, source)

    def barrier(self, name: str = "") -> None:
        """Return once every rank has called it: an allreduce of one byte."""
        byte = np.zeros(1, np.uint8)
        self.all_reduce(byte, direct_call(Collective.BARRIER, byte, name, op=ReduceOp.MAX))

    def run_apart(self, schedule: Sequence[Step], data: Array, source: Array, name: str) -> None:
        """Run a schedule in which not all ranks take part, so it is not counted among the calls."""
        call = direct_call(Collective.EXCHANGE, data, name, items=0)
        self._run(self._plan(call, schedule), data, source, counted=False)

    # ---- running -------------------------------------------------------------------------------

    def _plan(self, call: Signature, schedule: Sequence[Step], fold: Optional[Kernel] = None) -> Plan:
        """Return the plan of this call: the last one if it has the same schedule."""
        plan = self._plans.get(call)
        if plan is None or plan.schedule is not schedule:
            if plan is None and len(self._plans) >= _PLANS_KEPT:
                plan = self._plans.pop(next(iter(self._plans)))
            if plan is not None:
                plan.add_to(self._dropped, self._fabric.rank_of)
            plan = self._plans[call] = Plan(call, schedule, fold)
        return plan

    def _run(self, plan: Plan, data: Array, source: Optional[Array] = None, counted: bool = True) -> None:
        """Run a plan on arrays in host memory. ``counted``: it is one of the calls that all ranks make."""
        if self.size == 1:
            if plan.fold is not None:
                plan.fold.finish_alone(data)
            return
        if self.before_call is not None:
            self.before_call()
        with self.lock:
            self._check_usable()
            part = plan.part
            if part is None:
                header = plan.call.header(self._generation)
                part = make_execution(plan.schedule, self._fabric, header, data.dtype, self._pool, plan.fold)
                plan.part = part
            if data.nbytes >= LARGE_BYTES:
                self._fabric.prepare(data.ctypes.data, data.nbytes)
            sequence = self.sequence + counted
            # Inside are this method and its caller.
            site = self.called_at
            if site is None:
                frame = find_frame(3, plan.site)
                site = frame.f_code, frame.f_lasti
            self.history.begin(sequence, plan.call, site)
            part.arm(sequence, data, source)
            try:
                # Not before: a call that fails earlier has sent nothing, and may be repeated.
                self.sequence, self._last = sequence, plan.call
                self._running = (plan.call, part, counted)
                self._execute(plan, part)
            except BaseException as problem:
                error = self._failed(problem, plan.call, part)
                if error is problem:
                    raise
                raise error from None
            finally:
                self._running = None
                part.disarm()

    def _execute(self, plan: Plan, part: Part) -> None:
        """Move the bytes of a call, and measure it."""
        began_s = time.perf_counter()
        try:
            # Overflow and NaN are the caller's numbers; a warning on one rank would be useless.
            with np.errstate(all="ignore") if plan.warns else _NOTHING_TO_DO:
                run(part, self._fabric, self.timeout_s, self.spin_s, self.may_poll)
            plan.runs += 1
        finally:
            took_s = time.perf_counter() - began_s
            self.waited_s += took_s
            plan.took_s += took_s
            if self.tally is not None:
                self.tally.add(plan.call, took_s)

    def exclusive(self, parts: float = math.inf, but: Type[BaseException] = RingcommError) -> Parts:
        """Keep other threads out for calls that belong together. An exception between the ``parts`` calls
        ends the job, since other ranks wait for the rest, except ``but``, which all ranks raise alike.
        """
        if self.before_call is not None:
            self.before_call()
        return Parts(self, parts, but)

    @contextmanager
    def calls_of(self, site: Site) -> Iterator[None]:
        """Make an :meth:`exclusive` block whose calls belong to ``site``, a line of the program."""
        with self.exclusive():
            self.called_at = site
            try:
                yield
            finally:
                self.called_at = None

    # ---- arrays on devices ---------------------------------------------------------------------

    def fetch(self, mirror: BlockMirror, start: int = 0, stop: Optional[int] = None) -> None:
        """Wait until bytes of a device's array are loaded; a failed copy ends the job."""
        try:
            mirror.fetch(self.await_copy, start, stop)
        except BaseException as problem:
            self.end_between(problem, "a copy from a device" if self.purpose is None else self.purpose())
            raise

    def await_copy(self, copy: Done) -> None:
        """Wait for a copy: poll for a while, then look again after short naps."""
        watch = self._fabric.watch
        began_s = now_s = time.perf_counter()
        spin_until_s = POLLING.until(began_s, self.spin_s)
        check_at_s = began_s + (math.inf if watch is None else watch.interval_s)
        while not copy.poll():
            if now_s < spin_until_s:
                POLLING.give_way()
            else:
                # A long kernel of the program may be ahead of the copy.
                time.sleep(max(_MIN_NAP_S, min(_MAX_NAP_S, 0.1 * (now_s - began_s))))
            now_s = time.perf_counter()
            if now_s - began_s > self.timeout_s:
                raise DeviceError(f"the device has not copied anything for {self.timeout_s:g} s (timeout)")
            if watch is not None and now_s >= check_at_s:
                check_at_s = now_s + watch.interval_s
                watch.check()

    def loaded(
        self, mirror: Optional[BlockMirror], reads: Optional[Span] = None, *writes: Span
    ) -> ContextManager[None]:
        """Load an array's block on the host for the calls of a ``with`` block (``reads``: these elements,
        None: all), and store the spans ``writes`` after them. Without a mirror nothing is copied.
        """
        return _NOTHING_TO_DO if mirror is None else self._loaded(mirror, reads, writes)

    @contextmanager
    def _loaded(self, mirror: BlockMirror, reads: Optional[Span], writes: Sequence[Span]) -> Iterator[None]:
        itemsize = mirror.host.itemsize
        start, stop = (0, mirror.host.size) if reads is None else reads
        if start < stop or mirror.shared:
            self.fetch(mirror, start * itemsize, stop * itemsize)
        yield
        for start, stop in writes:
            if start < stop:
                mirror.store(start * itemsize, stop * itemsize)

    # ---- the end -------------------------------------------------------------------------------

    def _check_usable(self) -> None:
        """Raise the error that has ended the calls, if there is one."""
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

    def end_between(self, problem: BaseException, doing: str) -> None:
        """End the calls for an exception between two of them; other ranks wait for the next one."""
        if self._broken is None:
            self._broken = problem
            if self._reporter.abort_error is None or not isinstance(problem, RingcommError):
                self._interrupted = self._reporter.note_interrupted(doing, describe_error(problem))

    def _failed(self, problem: BaseException, call: Signature, part: Part) -> BaseException:
        """End the calls for an exception that has stopped one; return the error that every rank raises."""
        self._fabric.revoke()  # from here on the caller may overwrite what peers have not read
        # The streams stop in the middle of a message: nothing can be sent on them any more. Also if this
        # thread is interrupted while it reports that.
        self._broken = problem
        self._broken = error = self._root_cause(problem, call, part)
        self.history.fail(error, part.moved_bytes)
        return error

    def _root_cause(self, problem: BaseException, call: Signature, part: Part) -> BaseException:
        doing, rank_of, moved = self.doing, self._fabric.rank_of, f"{part.moved_bytes} bytes into it"
        if self._stopped and isinstance(problem, Exception):
            return NotInitializedError(
                "This rank has left the job (shutdown() or Context.close() was called) while it was in "
                f"{doing}, which has not been completed."
            )
        if isinstance(problem, LinkClosed):
            return self._reporter.report_lost(problem.peer, doing, problem.reason)
        if isinstance(problem, MismatchError) and problem.peer is not None:
            peer = rank_of(problem.peer)
            place = call_site() if self.called_at is None else site_text(self.called_at)
            where = f"{call.describe()} at {place}"
            return self._reporter.report_mismatch(
                peer, another_call_text(rank_of(self.rank), where, peer, str(problem))
            )
        if isinstance(problem, StoodStill):
            reading, writing = part.waiting_for()
            why = f"not a byte for {self.timeout_s:g} s (the timeout is over), {moved}"
            return self._reporter.report_lost(rank_of((reading or writing)[0].peer), doing, why, "stalled")
        if not isinstance(problem, Stopped) and self._reporter.abort_error is None:
            # Ctrl-C, or another exception from a signal handler: no other rank can detect it.
            self._interrupted = self._reporter.note_interrupted(f"{doing}, {moved}", describe_error(problem))
        return problem

    def stop(self, watch: Optional[StoppableWatch] = None) -> None:
        """Refuse further calls: this rank has left the job."""
        self._stopped = True  # before the call ends: its error says so
        if watch is not None:
            watch.stopping = True
        self._fabric.wake()
        if self.lock.acquire(timeout=_LEAVING_S):
            self.release()
            self.lock.release()

    def release(self) -> None:
        """Free the memory kept for the next call; reference cycles keep a runner for a while."""
        for plan in self._plans.values():
            plan.add_to(self._dropped, self._fabric.rank_of)
        self._plans.clear()
        self._pool.release()

    # ---- what it does, for any thread ----------------------------------------------------------

    @property
    def doing(self) -> str:
        """Return the call that it runs or has run last, for messages, in the program's own terms."""
        if self.purpose is not None:
            return self.purpose()
        number = "" if self._last is None or self._last.is_internal else f", call number {self.sequence}"
        return f"{self.last_call}{number}"

    @property
    def last_call(self) -> str:
        """Return a description of the call that it runs or has run last; "" before the first."""
        return "" if self._last is None else self._last.describe()

    def progress(self) -> Progress:
        """Return the progress of this rank."""
        running, sequence = self._running, 2 * self.sequence
        if running is None:
            return Progress(sequence)
        call, part, counted = running
        sequence += not counted
        rank_of, purpose = self._fabric.rank_of, self.purpose
        waits_for = tuple(rank_of(peer) for peer in part.waits_for)
        exchanged = tuple((rank_of(peer), *pair) for peer, pair in part.exchanged().items())
        doing = call.describe() if purpose is None else purpose()
        return Progress(sequence, part.moved_bytes, doing, waits_for, exchanged, call.needs)

    def totals(self) -> Totals:
        """Return the totals of its calls so far, the present one included."""
        running, totals, rank_of = self._running, Totals(), self._fabric.rank_of
        totals.merge(self._dropped)
        for plan in list(self._plans.values()):
            plan.add_to(totals, rank_of)
        if running is not None and running is self._running:
            for peer, (sent, received) in running[1].exchanged().items():
                totals.peer(rank_of(peer)).exchanged(sent, received)
        return totals

    def delivered(self) -> Dict[int, Tuple[int, float]]:
        """Return the bytes that its links have delivered; see :func:`ringcomm.transport.tcp.delivered`."""
        from ..transport.tcp import delivered  # asked for once a second at most, and of TCP links

        return delivered(self._fabric)

    def rows(self) -> List[Row]:
        """Return the last calls, for the flight recorder."""
        running = self._running
        return self.history.rows(running[1].moved_bytes if running is not None else None)
