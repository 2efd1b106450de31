"""Runs calls one at a time over one fabric, and reports their progress and totals.

:meth:`CallRunner._run` is the one way to the wire. It runs in the calling thread.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Optional, Sequence, Tuple, Type

import numpy as np

from ..clock import POLLING, Stopwatch
from ..config import Settings
from ..errors import DeviceError, RingcommError
from ..group.failures import FailureReporter, Reporter
from ..transport.base import Fabric, StoppableWatch
from ..transport.huge_pages import MIN_BYTES
from ..wire.signature import Signature
from .call_errors import CallErrors
from .call_history import CallHistory, Row
from .call_sites import Site, find_site
from .drive import run
from .mirror import Done, Mirror
from .part import Part
from .plans import Plan, Plans
from .progress import Progress
from .totals import Tally, Totals

Span = Tuple[int, int]

_LEAVING_S = 1.0
"""How long a rank that leaves waits for the call of another thread to end."""
_MIN_NAP_S, _MAX_NAP_S = 50e-6, 1e-3
"""Between two looks at a device's copy; 4 MB take some 0.1 to 0.4 ms."""
_NOTHING_TO_DO: ContextManager[Any] = nullcontext()


class Parts:
    """A ``with`` block of several parts (calls of the runner), which must not be left between them."""

    __slots__ = ("_but", "_count", "_first", "_left", "_lock", "_started")

    def __init__(
        self,
        lock: Any,  # a ``threading.RLock``; keeps other threads out
        started: Callable[[], int],  # calls that the runner has started
        count: float,  # parts; ``math.inf``: unknown
        left: Callable[[BaseException], None],  # called if an exception ends the block between parts
        but: Type[BaseException],  # raised alike by all ranks, or reported already: not counted
    ) -> None:
        self._lock = lock
        self._started = started
        self._count = count
        self._left = left
        self._but = but
        self._first = 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._first = self._started()

    def __exit__(self, kind: Any, problem: Any, traceback: Any) -> None:
        try:
            counts = problem is not None and not isinstance(problem, self._but)
            if counts and 0 < self._started() - self._first < self._count:
                self._left(problem)
        finally:
            self._lock.release()


class CallRunner:
    """Runs the plans of calls; the base of :class:`~.runner.Runner`, which makes plans.

    ``spin_s``, ``may_poll`` and ``timeout_s`` are those of :func:`~.drive.run`, and may be changed from call
    to call.
    """

    def __init__(
        self,
        fabric: Fabric,
        settings: Settings,
        generation: int = 0,
        spin_s: float = 0.0,
        reporter: Optional[FailureReporter] = None,
    ) -> None:
        self.rank = fabric.rank
        self.size = fabric.size
        self.spin_s = spin_s
        self.may_poll: Optional[Callable[[], bool]] = None
        self.timeout_s = settings.timeout_s or math.inf
        self.waited = Stopwatch()  # time in calls, moving data or waiting for other ranks
        self.history: Optional[CallHistory] = None
        self.called_at: Optional[Site] = None  # of the next call, if made in another thread
        self.purpose: Optional[Callable[[], str]] = None  # describes calls that the program has not made
        self.tally: Optional[Tally] = None  # counts the calls for the present purpose
        self.before_call: Optional[Callable[[], None]] = None  # called outside of the lock
        self._fabric = fabric
        self._reporter: FailureReporter = reporter if reporter is not None else Reporter()
        self._generation = generation
        self._plans = Plans(fabric, settings.segment_bytes, generation)
        self._errors = CallErrors(fabric, self._reporter, self._doing)
        self._lock = threading.RLock()
        self._sequence = 0
        self._started = 0
        self._last: Optional[Signature] = None
        self._running: Optional[Tuple[Signature, Part, bool]] = None

    def progress(self) -> Progress:
        """Return the progress of this rank. For any thread, and at any time."""
        running, sequence = self._running, 2 * self._sequence
        if running is None:
            return Progress(sequence)
        call, part, counted = running
        sequence += not counted
        waits_for = tuple(self._fabric.rank_of(peer) for peer in part.waits_for)
        exchanged = tuple((self._fabric.rank_of(peer), *pair) for peer, pair in part.exchanged().items())
        purpose = self.purpose
        doing = call.describe() if purpose is None else purpose()
        return Progress(sequence, part.moved_bytes, doing, waits_for, exchanged, call.needs)

    def totals(self) -> Totals:
        """Return the totals of its calls so far, the present one included. For any thread."""
        running, totals = self._running, self._plans.totals()
        if running is not None and running is self._running:
            for peer, (sent, received) in running[1].exchanged().items():
                totals.peer(self._fabric.rank_of(peer)).exchanged(sent, received)
        return totals

    def delivered(self) -> Dict[int, Tuple[int, float]]:
        """Return the bytes that its links have delivered; see :func:`ringcomm.transport.tcp.delivered`."""
        from ..transport.tcp import delivered  # asked for once a second at most, and of TCP links

        return delivered(self._fabric)

    @property
    def last_call(self) -> str:
        """Return a description of the call that it runs or has run last; "" before the first."""
        return "" if self._last is None else self._last.describe()

    def rows(self) -> List[Row]:
        """Return the last calls, for the flight recorder; empty without a history. For any thread."""
        if self.history is None:
            return []
        running = self._running
        return self.history.rows(running[1].moved_bytes if running is not None else None)

    def fetch(self, mirrors: Sequence[Mirror]) -> None:
        """Wait until arrays of devices have been loaded, for the call that follows. Other ranks wait in that
        call, so if a copy fails the job ends, and they receive the reason.
        """
        for mirror in mirrors:
            self._fetch(mirror)

    def _fetch(self, mirror: Mirror, start: int = 0, stop: Optional[int] = None) -> None:
        try:
            mirror.fetch(self.await_copy, start, stop)
        except BaseException as problem:
            doing = "a copy from a device" if self.purpose is None else self.purpose()
            self._errors.outside_call(problem, doing)
            raise

    def await_copy(self, copy: Done) -> None:
        """Wait for a copy: poll for a while, then look again after short naps. Raises DeviceError if it
        failed or exceeds the time limit of calls, RingcommError if the watch announced the end of the job.
        """
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
        self, mirror: Optional[Mirror], reads: Optional[Span] = None, *writes: Span
    ) -> ContextManager[None]:
        """Load an array's block on the host for the calls of a ``with`` block, and store it after them.
        ``reads``: the elements to load (None: all); ``writes``: the spans to store. Without a mirror nothing
        is copied.
        """
        return _NOTHING_TO_DO if mirror is None else self._loaded(mirror, reads, writes)

    @contextmanager
    def _loaded(self, mirror: Mirror, reads: Optional[Span], writes: Sequence[Span]) -> Iterator[None]:
        itemsize = mirror.host.itemsize
        start, stop = (0, mirror.host.size) if reads is None else reads
        if start < stop or mirror.shared:
            self._fetch(mirror, start * itemsize, stop * itemsize)
        yield
        for start, stop in writes:
            if start < stop:
                mirror.store(start * itemsize, stop * itemsize)

    def stop(self, watch: Optional[StoppableWatch] = None) -> None:
        """Refuse further calls: this rank has left the job. Waits at most a second for a call of another
        thread, which ``watch``, the fabric's, ends with an error.
        """
        self._errors.stopped = True  # before the call ends: its error says so
        if watch is not None:
            watch.stopping = True
        self._fabric.wake()
        if self._lock.acquire(timeout=_LEAVING_S):
            self.release()
            self._lock.release()

    def release(self) -> None:
        """Free the memory kept for the next call, when there is none. Some cycles of references keep a runner
        until Python's garbage collector runs. An elastic job has a new one in every view.
        """
        self._plans.release()

    def exclusive(
        self, parts: float = math.inf, but: Type[BaseException] = RingcommError
    ) -> ContextManager[None]:
        """Keep other threads out, so that calls that belong together follow each other on every rank. An
        exception between the ``parts`` calls ends the job, since other ranks wait for the rest, except
        ``but``, which all ranks raise alike.
        """
        if self.before_call is not None:
            self.before_call()
        return Parts(self._lock, lambda: self._started, parts, self._left_between, but)

    @contextmanager
    def calls_of(self, site: Site) -> Iterator[None]:
        """Make an :meth:`exclusive` block whose calls belong to ``site``, a line of the program."""
        with self.exclusive():
            self.called_at = site
            try:
                yield
            finally:
                self.called_at = None

    def _left_between(self, problem: BaseException) -> None:
        if self._last is not None:
            self._errors.outside_call(problem, f"{self._doing(self._last)}, between its parts")

    def _run(
        self,
        plan: Plan,
        data: np.ndarray[Any, Any],
        source: Optional[np.ndarray[Any, Any]] = None,
        counted: bool = True,
    ) -> None:
        """Run a plan on arrays in host memory. ``counted``: it is one of the calls that all ranks make."""
        if self.before_call is not None:
            self.before_call()
        with self._lock:
            self._errors.check_usable()
            sequence = self._sequence + counted
            execution = plan.execution
            if execution is None:
                execution = self._plans.execution(plan, data.dtype)
            if data.nbytes >= MIN_BYTES:
                self._fabric.prepare(data.ctypes.data, data.nbytes)
            history = self.history
            if history is not None:
                # Inside are this method and its caller.
                history.begin(sequence, plan.call, self.called_at or find_site(3, plan.site))
            execution.arm(sequence, data, source)
            try:
                # Not before: a call that fails earlier has sent nothing, and may be repeated.
                self._sequence = sequence
                self._started, self._last = self._started + 1, plan.call
                self._running = (plan.call, execution, counted)
                began_s = self.waited.start()
                try:
                    # Overflow and NaN are the caller's numbers; a warning on one rank would be useless.
                    with np.errstate(all="ignore") if plan.warns else _NOTHING_TO_DO:
                        run(execution, self._fabric, self.timeout_s, self.spin_s, self.may_poll)
                    plan.runs += 1
                finally:
                    self.waited.stop(began_s)
                    took_s = self.waited.last_s - began_s
                    plan.took_s += took_s
                    if self.tally is not None:
                        self.tally.add(plan.call, took_s)
            except BaseException as problem:
                # From here on the caller may overwrite what peers have not read.
                self._fabric.revoke()
                # The streams stop in the middle of a message: nothing can be sent on them any more.
                error = self._errors.in_call(problem, execution, plan.call, self.called_at, self.timeout_s)
                if history is not None:
                    history.fail(error, execution.moved_bytes)
                if error is problem:
                    raise
                raise error from None
            finally:
                self._running = None
                execution.disarm()

    def _doing(self, call: Signature) -> str:
        """Return a call for messages, in the program's own terms."""
        number = "" if call.is_internal else f", call number {self._sequence}"
        return f"{call.describe()}{number}" if self.purpose is None else self.purpose()
