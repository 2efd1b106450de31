"""Collectives by name: the engine as adapters and :class:`~ringcomm.context.Context` use it.

Arrays are flat, contiguous and native here; shapes travel beside them. Every method returns a
:class:`~.request.Handle` at once.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import IO, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from ..clock import StepClock, Stopwatch
from ..collective.call_history import CallHistory
from ..collective.call_sites import call_site
from ..collective.progress import Progress
from ..collective.reduce import kernel
from ..collective.reporter import Reporter
from ..collective.runner import Runner
from ..collective.staged import Mirror
from ..collective.totals import Totals
from ..config import Settings
from ..dtypes import Array, check_weighable, code_of
from ..errors import ConfigError, Misuse, RingcommError, ShapeError, UnsupportedDtypeError, describe_error
from ..files import open_named
from ..group.failures import FailureReporter
from ..ops import Collective, ReduceOp, codec_number, factor_of, name_of, weight_of
from ..schedule.select import Selector
from ..transport.base import Channels, Fabric
from ..wire.frames import NO_OP, NO_ROOT
from .adasum import check_adasum
from .bucket_runner import BucketRunner
from .coordinator import Coordinator, Tuning
from .observer import Observer
from .operation_history import OperationHistory
from .peer_channels import Limits, StopWatch
from .process_sets import GLOBAL_SET, ProcessSets
from .request import Handle, Request, Shape, Signature
from .single_rank import SingleRank
from .thread import EngineThread
from .tracing import Sink
from .tuning import Autotuner

logger = logging.getLogger("ringcomm.engine")

Convert = Optional[Callable[[Any], Any]]
Mirrors = Sequence[Optional[Mirror]]


class Engine:
    """The engine of one rank.

    Args:
        channels: the links of this rank.
        settings: tunables.
        generation: membership epoch.
        spin_s: how long to poll while a caller waits, in seconds.
        reporter: reports lost peers to the rendezvous, or None.
        hosts: of every rank, for messages.
        selector: chooses algorithms among all ranks.
        calls: how far this rank is in collectives that do not go through the engine.

    Attributes:
        history: the last operations, if they are recorded.
        on_reduction: as for :class:`~ringcomm.collective.runner.Runner`.
        repeated: counts the repetitions of operations with names; most programs repeat them once per step.
    """

    def __init__(
        self,
        channels: Channels,
        settings: Settings,
        generation: int = 0,
        spin_s: float = 0.0,
        reporter: Optional[FailureReporter] = None,
        hosts: Sequence[str] = ("localhost",),
        selector: Optional[Selector] = None,
        calls: Callable[[], Progress] = Progress,
    ) -> None:
        self.rank = channels.background.rank
        self.size = channels.background.size
        self.sets = ProcessSets(self.rank, self.size)
        self.coordinator: Optional[Coordinator] = None
        self.history: Optional[OperationHistory] = None
        self.on_reduction: Optional[Callable[[int, bool, str], None]] = None
        self.repeated = StepClock()
        self._thread: Optional[EngineThread] = None
        self._log: Optional[IO[str]] = None
        self._tuner: Optional[Autotuner] = None
        reporter = Reporter() if reporter is None else reporter

        def make_runner(fabric: Fabric) -> Runner:
            whole = fabric is channels.background
            runner = Runner(fabric, settings, generation, spin_s, reporter, selector if whole else None)
            if settings.flight_recorder:
                runner.history = CallHistory(1)  # of a bucket only how far it is; its members are remembered
            return runner

        self._bucket_runner = BucketRunner(channels.background, make_runner, self.sets)
        if self.size == 1:
            self._single = SingleRank(self._bucket_runner)
            return
        watch = StopWatch(channels.background.watch)
        channels.background.watch = channels.control.watch = watch
        if self.rank == 0:
            self.coordinator = self._make_coordinator(settings, hosts)
        self._thread = EngineThread(
            channels.control,
            channels.background,
            self._bucket_runner,
            self.coordinator,
            watch,
            reporter,
            calls,
            hosts,
            channels.direct.wake,
            spin_s,
            Limits(settings.dead_after_s, settings.stall_warning_s, settings.late_after_s),
        )
        if settings.flight_recorder:
            self.history = OperationHistory(settings.flight_recorder, self._bucket_runner.moved_bytes)
            self._thread.record(self.history)

    def _make_coordinator(self, settings: Settings, hosts: Sequence[str]) -> Coordinator:
        coordinator = Coordinator(
            hosts,
            self.sets.members,
            Tuning(settings.fusion_bytes, settings.cycle_ms * 1e-3),
            settings.stall_warning_s,
            settings.late_after_s,
            settings.cache_capacity,
            settings.check_calls,
        )
        if settings.autotune:
            self._autotune(coordinator, settings.autotune_log)
        return coordinator

    def prioritize(self, names: Sequence[str]) -> None:
        """Say in which order the program needs the results of operations; to be called on every rank.

        When several are ready they run in this order, and not too many at once.

        Args:
            names: as passed to the operations; replaces what was said before.
        """
        if self.coordinator is not None:
            self.coordinator.needed = {name: place for place, name in enumerate(names)}

    def _autotune(self, coordinator: Coordinator, log: str) -> None:
        try:
            self._log = open(open_named(log), "w") if log else None  # noqa: SIM115 - open until stop()
        except OSError as problem:
            raise ConfigError(f"The autotuning log {log} cannot be written: {problem.strerror}.") from None
        file = self._log

        def write(line: str) -> None:
            if file is not None:
                file.write(f"{line}\n")
                file.flush()

        tuner = self._tuner = Autotuner(coordinator.tuning, log=write)

        def ran(nbytes: int, now_s: float) -> None:
            if tuner.ran(nbytes, now_s):
                coordinator.tuning = tuner.tuning

        coordinator.on_responses = ran

    def stop(self) -> None:
        """End the thread; what is still on its way fails."""
        if self._thread is not None:
            self._thread.stop()
        if self._tuner is not None:
            logger.warning("%s", self._tuner.result())
            self._tuner = None
        if self._log is not None:
            self._log.close()
        self._bucket_runner.release()

    def settle(self, limit_s: float) -> None:
        """Wait for what is on its way at the end; see :meth:`~.thread.EngineThread.settle`."""
        if self._thread is not None:
            self._thread.settle(limit_s)

    @property
    def observer(self) -> Optional[Observer]:
        """The observer that receives the engine's events, if there is one."""
        return self._single.trace.observer if self._thread is None else self._thread.observer

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Report what happens from now on to an observer, or none: :meth:`~.thread.EngineThread.observe`."""
        if self._thread is not None:
            self._thread.observe(observer, sink)
        else:
            self._single.trace.observe(observer, sink)

    @property
    def waited(self) -> Stopwatch:
        """The time that threads of this rank have waited for operations."""
        return Stopwatch() if self._thread is None else self._thread.waited

    @property
    def reduced_bytes(self) -> int:
        """Payload of all all-reduces by name so far."""
        return self._bucket_runner.reduced_bytes

    def totals(self) -> Totals:
        """What the collectives that ran its operations have done so far. For any thread."""
        return self._bucket_runner.totals()

    def delivered(self) -> Dict[int, Tuple[int, float]]:
        """What its links have delivered; see :func:`ringcomm.transport.pace.delivered`. For any thread."""
        return self._bucket_runner.delivered()

    def progress(self) -> Progress:
        """How far this rank is in them. For any thread."""
        return self._bucket_runner.progress()

    @property
    def late_s(self) -> Dict[int, float]:
        """On rank 0: by rank, how long operations have waited for it alone; empty on other ranks."""
        return {} if self.coordinator is None else dict(self.coordinator.late_s)

    def pending(self) -> List[Request]:
        """What is on its way, in the order of submission."""
        return self._thread.pending() if self._thread is not None else []

    # ---- collectives -------------------------------------------------------------------------

    def allreduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp,
        name: Optional[str] = None,
        shapes: Optional[Sequence[Shape]] = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        *,
        compression: Any = None,
        residuals: Sequence[Array] = (),
        weight: Optional[float] = None,
        mirrors: Mirrors = (),
    ) -> Handle:
        """Reduce the arrays in place, all of them or none.

        Args:
            compression: as for :func:`ringcomm.ops.codec_number`.
            residuals: of error feedback, one for each array.
            weight: of this rank's contribution to a weighted average; None on all ranks: there are none.
            mirrors: of arrays on devices; see :class:`~.request.Request`. Results are stored to them.

        Raises:
            UnsupportedDtypeError: the reduction has no meaning for these elements.
            Misuse: the weight is none, or the reduction is no average.
            DuplicateNameError, UnknownProcessSetError: as the names say.
        """
        self._check_reducible(arrays, op, prescale, postscale)
        if self.on_reduction is not None:
            self.on_reduction(sum(array.nbytes for array in arrays), urgent, name or "")
        if weight is not None:
            weight = weight_of(weight)
            for array in arrays:
                check_weighable(array.dtype, op)
        return self._submit(
            Collective.ALLREDUCE, arrays, shapes, name, process_set, urgent, convert,
            op=int(op), prescale=factor_of(prescale), postscale=factor_of(postscale),
            codec=codec_number(compression), residuals=residuals, weight=weight, mirrors=mirrors,
        )  # fmt: skip

    def reducescatter(
        self,
        arrays: Sequence[Array],
        shapes: Sequence[Shape],
        op: ReduceOp,
        name: Optional[str] = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
    ) -> Handle:
        """Reduce the arrays, which become working space; the handle gives this rank's rows of each."""
        self._check_reducible(arrays, op, prescale, postscale)
        _check_rows("reducescatter", shapes)
        if op == ReduceOp.ADASUM:
            raise UnsupportedDtypeError("Adasum exists for allreduce only.")
        return self._submit(
            Collective.REDUCESCATTER, arrays, shapes, name, process_set, urgent, convert,
            op=int(op), prescale=factor_of(prescale), postscale=factor_of(postscale), mirrors=mirrors,
        )  # fmt: skip

    def allgather(
        self,
        arrays: Sequence[Array],
        shapes: Sequence[Shape],
        name: Optional[str] = None,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
    ) -> Handle:
        """Concatenate every rank's rows; the handle gives a list with the result for each array."""
        _check_rows("allgather", shapes)
        rows = [shape[0] for shape in shapes]
        return self._submit(
            Collective.ALLGATHER, arrays, [shape[1:] for shape in shapes], name, process_set, urgent, convert,
            rows=rows, mirrors=mirrors,
        )  # fmt: skip

    def broadcast(
        self,
        arrays: Sequence[Array],
        root: int,
        name: Optional[str] = None,
        shapes: Optional[Sequence[Shape]] = None,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
    ) -> Handle:
        """Overwrite the arrays with those of the root, which is a rank of the job."""
        members = self.sets.check_member(process_set)
        if root not in members:
            owner = "this job" if process_set == GLOBAL_SET else f"process set {process_set}"
            raise ConfigError(f"root_rank={root}: {owner} has the ranks {', '.join(map(str, members))}.")
        return self._submit(
            Collective.BROADCAST, arrays, shapes, name, process_set, urgent, convert, root=int(root),
            mirrors=mirrors,
        )  # fmt: skip

    def alltoall(
        self,
        array: Array,
        shape: Shape,
        splits: Sequence[int],
        name: Optional[str] = None,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
    ) -> Handle:
        """Send ``splits[i]`` rows to the i-th member; the handle gives rows, and the count from each rank."""
        _check_rows("alltoall", [shape])
        members = self.sets.check_member(process_set)
        if len(splits) != len(members) or min(splits) < 0 or sum(splits) != shape[0]:
            raise Misuse(
                f"alltoall: {len(members)} splits, none negative, must add up to the array's {shape[0]} "
                f"rows; got {list(splits)}."
            )
        return self._submit(
            Collective.ALLTOALL, [array], [shape[1:]], name, process_set, urgent, convert, splits=splits,
            mirrors=mirrors,
        )  # fmt: skip

    def barrier(
        self, name: Optional[str] = None, process_set: int = GLOBAL_SET, urgent: bool = True
    ) -> Handle:
        """Done once every member has called it."""
        return self._submit(Collective.BARRIER, [], None, name, process_set, urgent, None)

    def join(self) -> Handle:
        """Say that this rank has no more data; done when all ranks have, giving the last one's number."""
        if self._thread is None:
            handle = Handle("join")
            handle.finish(0)
            return handle
        return self._thread.join()

    @contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        """See :func:`ringcomm.pause`."""
        if self._thread is None:
            yield
            return
        self._thread.pause(reason)
        try:
            yield
        finally:
            self._thread.resume()

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Make a group of ranks; every rank of the job must call it. Its number.

        Raises:
            ConfigError: such a group cannot be, or exists already.
        """
        change = ProcessSets.change("add", self.sets.check_new(ranks))
        number: int = self._change_sets(change)
        return number

    def remove_process_set(self, number: int) -> bool:
        """Dissolve a group; every rank of the job must call it. Whether there was one."""
        if number == GLOBAL_SET or number not in self.sets.numbers():
            return False
        self._change_sets(ProcessSets.change("remove", self.sets.members(number)))
        return True

    def _change_sets(self, change: str) -> int:
        handle = self._submit(Collective.PROCESS_SET, [], None, change, GLOBAL_SET, True, None)
        number: int = handle.wait()
        return number

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """A ``with`` block from the first wait of a call in several operations to the end of the last one.

        If an exception (Ctrl-C, say) ends it, no other rank could find out; so the job ends.
        """
        try:
            yield
        except BaseException as problem:
            if self._thread is not None and not isinstance(problem, RingcommError):
                self._thread.abandon(describe_error(problem))
            raise

    # ---- the way in --------------------------------------------------------------------------

    def _check_reducible(
        self, arrays: Sequence[Array], op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        for array in arrays:
            if op == ReduceOp.ADASUM:
                check_adasum(array.dtype)
            else:
                kernel(op, array.dtype, self.size, factor_of(prescale), factor_of(postscale))

    def _submit(
        self,
        kind: Collective,
        arrays: Sequence[Array],
        shapes: Optional[Sequence[Shape]],
        name: Optional[str],
        process_set: int,
        urgent: bool,
        convert: Convert,
        op: int = NO_OP,
        root: int = NO_ROOT,
        prescale: float = 1.0,
        postscale: float = 1.0,
        rows: Sequence[int] = (),
        splits: Sequence[int] = (),
        codec: int = 0,
        residuals: Sequence[Array] = (),
        weight: Optional[float] = None,
        mirrors: Mirrors = (),
    ) -> Handle:
        if process_set != GLOBAL_SET:
            self.sets.check_member(process_set)
        for array in arrays:
            code_of(array.dtype)
        name = name_of(name)
        if name:
            self.repeated.add(name)
        signature = Signature(
            name, process_set, int(kind), op, root,
            tuple(array.dtype.name for array in arrays),
            tuple(array.shape for array in arrays) if shapes is None else tuple(map(tuple, shapes)),
            prescale, postscale, codec, weight is not None,
        )  # fmt: skip
        thread = self._thread
        label = name or kind.name.lower()
        handle = Handle(label, None if thread is None else thread.wait, convert)
        own = 1.0 if weight is None else weight
        request = Request(signature, arrays, handle, rows, splits, call_site(), own)
        request.residuals = residuals
        request.mirrors = mirrors
        if thread is not None:
            return thread.submit(request, urgent)
        handle.finish(self._single.run(request))
        return handle


def _check_rows(what: str, shapes: Sequence[Tuple[int, ...]]) -> None:
    for shape in shapes:
        if not shape:
            raise ShapeError(f"{what} divides the first dimension, and a zero-dimensional array has none.")
