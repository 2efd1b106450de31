"""Collectives by name: what adapters and :class:`~ringcomm.job.context.Context` call.

Every rank has a runner of buckets; with other ranks it has a thread, too, and rank 0 has the coordinator.
Arrays are flat, contiguous and native here; shapes travel beside them. Every operation returns a
:class:`~.request.Handle` at once.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from ..arrays.kinds import BlockMirror
from ..clock import StepClock, Stopwatch
from ..collective.observe import KEPT, Progress, call_site, note_truncation
from ..collective.options import Options
from ..collective.reduce import NO_WEIGHTS, Total, kernel
from ..collective.rows import check_rows, cumulative, row_counts, scatter_layout
from ..collective.runner import Runner
from ..config import Settings
from ..dtypes import Array, check_weighable, code_of_name, dtype_named, type_names
from ..errors import ConfigError, Misuse, RingcommError, UnsupportedDtypeError, describe_error
from ..group.failures import FailureReporter
from ..ops import Collective, ReduceOp, codec_number, factor_of, name_of, root_of, weight_of
from ..schedule.select import Selector
from ..transport.base import Channels, Fabric, StoppableWatch
from ..wire.frames import NO_OP, NO_ROOT
from ..wire.signature import Shape, Signature
from .adasum import check_adasum
from .bucket_runner import BucketRunner
from .observer import Observer, OwnTrace, Sink, label_of
from .process_sets import GLOBAL_SET, ProcessSets
from .request import Handle, OperationHistory, Request

if TYPE_CHECKING:
    from .coordinator import Coordinator
    from .thread import EngineThread

Convert = Optional[Callable[[Any], Any]]
Mirrors = Sequence[Optional[BlockMirror]]
_MAX_KNOWN = 4096
"""Programs that give each step's tensors new names have their options checked every time."""
NEGOTIATION_S = 200e-6
"""What it takes at least to ask rank 0, and to be answered."""


class Engine:
    """The engine of one rank. ``calls`` returns how far the rank is in calls that do not go through it."""

    def __init__(
        self,
        channels: Channels,
        settings: Settings,
        generation: int,
        spin_s: float,
        reporter: FailureReporter,
        hosts: Sequence[str],
        selector: Optional[Selector],
        calls: Callable[[], Progress],
    ) -> None:
        self.rank = channels.background.rank
        self.size = channels.background.size
        self.sets = ProcessSets(self.rank, self.size)
        self.coordinator: Optional[Coordinator] = None
        self.history: Optional[OperationHistory] = None
        self.repeated = StepClock()
        self._known: Dict[Tuple[Any, ...], Signature] = {}
        self._thread: Optional[EngineThread] = None

        def make_runner(fabric: Fabric) -> Runner:
            whole = fabric is channels.background
            # Its history has one call: of a bucket only how far it is; its members are remembered.
            return Runner(fabric, settings, generation, spin_s, reporter, selector if whole else None)

        self.buckets = BucketRunner(channels.background, make_runner, self.sets)
        if self.size == 1:
            self._alone = _Alone(self.buckets)
            return
        from .failure_detector import SilenceLimits  # what follows is not needed by a rank that is alone
        from .thread import EngineThread

        watch = StoppableWatch(channels.background.watch)
        channels.background.watch = channels.control.watch = watch
        if self.rank == 0:
            self.coordinator = self._make_coordinator(settings, hosts, selector)
        self.history = OperationHistory(KEPT, self.buckets.moved_bytes)
        limits = SilenceLimits(settings.dead_after_s, settings.stall_warning_s, settings.late_after_s)
        self._thread = EngineThread(
            channels, self.buckets, self.coordinator, watch, reporter, calls, hosts, spin_s, limits,
            self.history,
        )  # fmt: skip

    def _make_coordinator(
        self, settings: Settings, hosts: Sequence[str], selector: Optional[Selector]
    ) -> Coordinator:
        from .coordinator import Coordinator, Tuning

        def one_round(signatures: Sequence[Signature]) -> bool:
            """Return whether operations, reduced alike, may be added up by every rank itself."""
            first = signatures[0]
            dtype = dtype_named(first.dtypes[0])
            count = sum(item.nbytes for item in signatures) // dtype.itemsize
            single = kernel(ReduceOp(first.op), dtype, self.size).needs_single_fold
            return selector is None or selector.one_round(count, dtype.itemsize, single, NEGOTIATION_S)

        tuning = Tuning(
            settings.fusion_bytes, settings.cycle_ms * 1e-3, settings.stall_warning_s, settings.late_after_s,
            one_round,
        )  # fmt: skip
        return Coordinator(hosts, self.sets.members, tuning)

    def allreduce(
        self,
        arrays: Sequence[Array],
        op: Union[ReduceOp, Options],
        name: Optional[str] = None,
        shapes: Optional[Sequence[Shape]] = None,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        *,
        residuals: Sequence[Array] = (),
        absent: int = 0,
        mirrors: Mirrors = (),
        **options: Any,
    ) -> Handle:
        """Reduce the arrays in place, all of them or none.

        ``op`` may be all options, of which ``name`` and ``process_set`` are replaced. ``residuals`` of error
        feedback and ``mirrors`` of arrays on devices (see :class:`~.request.Request`) are one for each array.
        ``absent`` has a bit for each part of the arrays that this rank does not have; the handle's has those
        that no rank has.
        """
        chosen = op if isinstance(op, Options) else Options(op, **options)
        request = self._reduction(Collective.ALLREDUCE, chosen, arrays, shapes, name, process_set, convert)
        request.mirrors, request.residuals, request.absent = mirrors, residuals, absent
        return self._submit(request, urgent)

    def _reduction(
        self, kind: Collective, options: Options, arrays: Sequence[Array], shapes: Optional[Sequence[Shape]],
        name: Optional[str], process_set: int, convert: Convert, bounds: Sequence[int] = (),
    ) -> Request:  # fmt: skip
        """Return the request of a reduction with these options, checked the first time."""
        op, prescale, postscale = options.op, options.prescale_factor, options.postscale_factor
        shapes = [array.shape for array in arrays] if shapes is None else shapes
        described = (
            kind, name, op, prescale, postscale, options.compression, options.weight is None, process_set,
            *[array.dtype for array in arrays], *shapes, *bounds,
        )  # fmt: skip
        try:
            signature = self._known.get(described)
        except TypeError:  # a shape is a list, say
            signature = None
        if signature is None:
            self._check_reducible(arrays, op, prescale, postscale)
            signature = self._signature(
                kind, arrays, shapes, name, process_set, int(op),
                prescale=factor_of(prescale), postscale=factor_of(postscale), bounds=tuple(bounds),
                codec=codec_number(options.compression), weighted=options.weight is not None,
            )  # fmt: skip
            if signature.name and len(self._known) < _MAX_KNOWN:
                with suppress(TypeError):
                    self._known[described] = signature
        elif process_set != GLOBAL_SET:
            self.sets.check_member(process_set)
        request = self._request(signature, arrays, convert)
        if options.weight is not None:
            for array in arrays:
                check_weighable(array.dtype, op)
            request.weight = weight_of(options.weight)
        return request

    def reducescatter(
        self,
        arrays: Sequence[Array],
        shapes: Sequence[Shape],
        options: Options,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
    ) -> Handle:
        """Reduce the arrays, which become working space; the handle gives this rank's rows of each."""
        layout = scatter_layout(shapes, len(self.sets.check_member(process_set)), options)
        if options.op == ReduceOp.ADASUM:
            raise UnsupportedDtypeError("Adasum exists for allreduce only.")
        bounds = [edge for edges in layout.edges for edge in edges]
        request = self._reduction(
            Collective.REDUCESCATTER, options, arrays, shapes, options.name, process_set, convert, bounds
        )
        request.mirrors = mirrors
        return self._submit(request, urgent)

    def allgather(
        self,
        arrays: Sequence[Array],
        shapes: Sequence[Shape],
        name: Optional[str] = None,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
        bounds: Sequence[int] = (),
    ) -> Handle:
        """Concatenate every rank's rows; the handle gives a list with the result for each array.

        ``bounds``: of the ranks' rows, in an array that is completed in place.
        """
        check_rows("allgather", shapes)
        inner = [shape[1:] for shape in shapes]
        signature = self._signature(
            Collective.ALLGATHER, arrays, inner, name, process_set, bounds=tuple(bounds)
        )
        request = self._request(signature, arrays, convert, mirrors)
        request.rows = [shape[0] for shape in shapes]
        return self._submit(request, urgent)

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
        members, root = self.sets.check_member(process_set), root_of(root)
        if root not in members:
            owner = "this job" if process_set == GLOBAL_SET else f"process set {process_set}"
            raise ConfigError(f"root_rank={root}: {owner} has the ranks {', '.join(map(str, members))}.")
        signature = self._signature(Collective.BROADCAST, arrays, shapes, name, process_set, root=root)
        return self._submit(self._request(signature, arrays, convert, mirrors), urgent)

    def alltoall(
        self,
        array: Array,
        shape: Shape,
        splits: Optional[Sequence[int]],
        name: Optional[str] = None,
        process_set: int = GLOBAL_SET,
        urgent: bool = False,
        convert: Convert = None,
        mirrors: Mirrors = (),
        in_place: bool = False,
    ) -> Handle:
        """Send ``splits[i]`` rows to the i-th member; the handle gives rows, and the count from each rank.

        Without ``splits`` every member gets as many. ``in_place``: the rows replace those that were sent.
        """
        check_rows("alltoall", [shape])
        counts = row_counts(shape[0], splits, len(self.sets.check_member(process_set)))
        bounds = cumulative(counts) if in_place else ()
        signature = self._signature(
            Collective.ALLTOALL, [array], [shape[1:]], name, process_set, bounds=bounds
        )
        request = self._request(signature, [array], convert, mirrors)
        request.splits = counts
        return self._submit(request, urgent)

    def barrier(
        self, name: Optional[str] = None, process_set: int = GLOBAL_SET, urgent: bool = True
    ) -> Handle:
        """Done once every member has called it."""
        signature = self._signature(Collective.BARRIER, [], None, name, process_set)
        return self._submit(self._request(signature, []), urgent)

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
        except BaseException:
            # What ended the block is raised; a failure of the job is raised by the next call.
            with suppress(RingcommError):
                self._thread.resume()
            raise
        self._thread.resume()

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Make a group of ranks, and return its number; every rank of the job must call it."""
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
        signature = self._signature(Collective.PROCESS_SET, [], None, change, GLOBAL_SET)
        number: int = self._submit(self._request(signature, []), urgent=True).wait()
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

    # ---- observation and the end ----------------------------------------------------------------

    def stop(self) -> None:
        """End the thread; what is still on its way fails."""
        if self._thread is not None:
            self._thread.stop()
        self.buckets.release()

    def settle(self, limit_s: float) -> None:
        """Wait for what is on its way at the end; see :meth:`~.thread.EngineThread.settle`."""
        if self._thread is not None:
            self._thread.settle(limit_s)

    @property
    def observer(self) -> Optional[Observer]:
        """The observer that receives the engine's events, if there is one."""
        return self._alone.trace.observer if self._thread is None else self._thread.observer

    def observe(self, observer: Optional[Observer], sink: Optional[Sink] = None) -> None:
        """Report what happens from now on to an observer, or none: :meth:`~.thread.EngineThread.observe`."""
        if self._thread is not None:
            self._thread.observe(observer, sink)
        else:
            self._alone.trace.observe(observer, sink)

    @property
    def waited(self) -> Stopwatch:
        """The time that threads of this rank have waited for operations."""
        return Stopwatch() if self._thread is None else self._thread.waited

    @property
    def late_s(self) -> Dict[int, float]:
        """On rank 0: by rank, how long operations have waited for it alone; empty on other ranks."""
        return {} if self.coordinator is None else dict(self.coordinator.reports.late_s)

    def finish_earlier(self, name: str, process_set: int = GLOBAL_SET) -> None:
        """Wait for this rank's own operation of this name, if one is on its way that its program has left.

        For names that a program cannot change, such as those of a model's gradients: ranks then match the
        next operation of the name with each other's next one.
        """
        if self._thread is not None:
            self._thread.finish_earlier(name, process_set)

    def pending(self) -> List[Request]:
        """Return what is on its way, in the order of submission."""
        return self._thread.pending() if self._thread is not None else []

    # ---- the way in --------------------------------------------------------------------------

    def _check_reducible(
        self, arrays: Sequence[Array], op: ReduceOp, prescale: float, postscale: float
    ) -> None:
        for array in arrays:
            if self.rank == 0:
                note_truncation(op, array.dtype)
            if op == ReduceOp.ADASUM:
                check_adasum(array.dtype)
            else:
                kernel(op, array.dtype, self.size, factor_of(prescale), factor_of(postscale))

    def _signature(
        self,
        kind: Collective,
        arrays: Sequence[Array],
        shapes: Optional[Sequence[Shape]],
        name: Optional[str],
        process_set: int,
        op: int = NO_OP,
        root: int = NO_ROOT,
        **agreed: Any,
    ) -> Signature:
        """Describe an operation; ``agreed`` are further fields."""
        if process_set != GLOBAL_SET:
            self.sets.check_member(process_set)
        dtypes = [type_names(array.dtype)[0] for array in arrays]
        for dtype in dtypes:
            code_of_name(dtype)
        return Signature(
            name_of(name), process_set, int(kind), op, root, tuple(dtypes),
            tuple(array.shape for array in arrays) if shapes is None else tuple(map(tuple, shapes)),
            **agreed,
        )  # fmt: skip

    def _request(
        self, signature: Signature, arrays: Sequence[Array], convert: Convert = None, mirrors: Mirrors = ()
    ) -> Request:
        """Return an operation that is called now."""
        name, thread = signature.name, self._thread
        if name:
            self.repeated.add(name)
        handle = Handle(name or signature.verb, None if thread is None else thread.wait, convert)
        request = Request(signature, arrays, handle, site=call_site())
        request.mirrors = mirrors
        return request

    def _submit(self, request: Request, urgent: bool) -> Handle:
        if self._thread is not None:
            return self._thread.submit(request, urgent)
        request.finish(self._alone.run(request))
        return request.handle


class _Alone:
    """Runs the requests of a job of one rank, and reports them to an observer while there is one."""

    def __init__(self, buckets: BucketRunner) -> None:
        self.trace = OwnTrace()
        self._buckets = buckets
        self._lock = threading.Lock()
        self._unnamed: Counter[int] = Counter()

    def run(self, request: Request) -> Any:
        """Run an operation in the calling thread; return its result."""
        signature, observer = request.signature, self.trace.observer
        if signature.weighted:
            if not request.weight:
                raise Misuse(f"{signature.describe(named=False)}: {NO_WEIGHTS}")
            request.total = Total.of([request.weight])
        if observer is None:
            return self._buckets.run([(signature, request)])[0]
        with self._lock:
            if not signature.name:
                self._unnamed[signature.process_set] += 1
            traced = [(label_of(signature, self._unnamed[signature.process_set]), signature)]
            observer.started(traced)
            self._buckets.on_activity = lambda name: observer.activity(traced, name)
            try:
                return self._buckets.run([(signature, request)])[0]
            finally:
                self._buckets.on_activity = None
                observer.ended(traced)
