"""Collectives by name: what adapters and :class:`~ringcomm.job.context.Context` call.

Every rank has a runner of buckets; with other ranks it has a thread, too, and rank 0 has the coordinator.
Arrays are flat, contiguous and native here; shapes travel beside them. Every operation returns a
:class:`~.request.Handle` at once.
"""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Union

from ..arrays.kinds import BlockMirror
from ..clock import StepClock
from ..collective.observe import KEPT, Progress, call_site, note_truncation, nowhere
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
from .bucket_runner import BucketRunner, check_adasum
from .observer import Observer, OwnTrace, label_of
from .process_sets import GLOBAL_SET, ProcessSets
from .request import Handle, OperationHistory, Request

if TYPE_CHECKING:
    from .coordinator import Coordinator
    from .thread import EngineThread

Convert = Optional[Callable[[Any], Any]]
Mirrors = Sequence[Optional[BlockMirror]]
_MAX_KNOWN = 4096  # programs that give each step's tensors new names have their options checked every time
NEGOTIATION_S = 200e-6  # what it takes at least to ask rank 0, and to be answered

_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")


class Engine:
    """The engine of one rank. ``calls`` returns how far the rank is in calls that do not go through it."""

    def __init__(
        self, channels: Channels, settings: Settings, generation: int, spin_s: float,
        reporter: FailureReporter, hosts: Sequence[str], selector: Optional[Selector],
        calls: Callable[[], Progress],
    ) -> None:  # fmt: skip
        self.rank = channels.background.rank
        self.size = channels.background.size
        self.sets = ProcessSets(self.rank, self.size)
        self.coordinator: Optional[Coordinator] = None
        self.history: Optional[OperationHistory] = None
        self.repeated = StepClock()
        self._known: Dict[Tuple[Any, ...], Tuple[Signature, List[Any]]] = {}
        self._thread: Union[EngineThread, _Alone]

        def make_runner(fabric: Fabric) -> Runner:
            whole = fabric is channels.background
            # Its history has one call: of a bucket only how far it is; its members are remembered.
            return Runner(fabric, settings, generation, spin_s, reporter, selector if whole else None)

        self.buckets = BucketRunner(channels.background, make_runner, self.sets)
        if self.size == 1:
            self._thread = _Alone(self.buckets)
        else:
            from .peer_channels import SilenceLimits  # what follows is not needed by a rank that is alone
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
        thread = self._thread
        self.joins = 0  # calls of :meth:`join`: equally many on all ranks when one has ended
        self.pending, self.finish_earlier = thread.pending, thread.finish_earlier
        self.observe, self.settle = thread.observe, thread.settle

    def join(self) -> Handle:
        """Return a handle that gives the number of the last rank to join."""
        self.joins += 1
        return self._thread.join()

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

    # ---- collectives -----------------------------------------------------------------------------

    # Of all of them: ``shapes`` are those of the arrays, which are flat. ``urgent`` does not wait for others
    # to be fused with. ``convert`` makes the handle's result of the engine's, and ``mirrors`` are those of
    # arrays on devices, one for each array (see :class:`~.request.Request`).

    def allreduce(
        self, arrays: Sequence[Array], op: Union[ReduceOp, Options], name: Optional[str] = None,
        shapes: Optional[Sequence[Shape]] = None, process_set: int = GLOBAL_SET, urgent: bool = False,
        convert: Convert = None, *, residuals: Sequence[Array] = (), absent: int = 0, mirrors: Mirrors = (),
        **options: Any,
    ) -> Handle:  # fmt: skip
        """Reduce the arrays in place, all of them or none. ``op`` may be all options, of which ``name`` and
        ``process_set`` are replaced. ``residuals`` of error feedback are one for each array. ``absent`` has a
        bit for each part of the arrays that this rank does not have; the handle's has those that no rank has.
        """
        chosen = op if isinstance(op, Options) else Options(op, **options)
        shapes = [*map(_shape_of, arrays)] if shapes is None else shapes
        signature, place = self._reduction(Collective.ALLREDUCE, chosen, arrays, shapes, name, process_set)
        weight = 1.0 if chosen.weight is None else _weight(arrays, chosen)
        return self._submit(
            signature, arrays, urgent, convert, place,
            mirrors=mirrors, residuals=residuals, absent=absent, weight=weight,
        )  # fmt: skip

    def _reduction(
        self, kind: Collective, options: Options, arrays: Sequence[Array], shapes: Sequence[Shape],
        name: Optional[str], process_set: int, bounds: Sequence[int] = (),
    ) -> Tuple[Signature, List[Any]]:  # fmt: skip
        """Return the signature of a reduction, checked the first time, and the place of the call if known."""
        op, prescale, postscale = options.op, options.prescale_factor, options.postscale_factor
        described = (
            int(kind), name, int(op), prescale, postscale, options.compression, options.weight is None,
            process_set, *map(_dtype_of, arrays), *shapes, *bounds,
        )  # fmt: skip
        try:
            known = self._known.get(described)
        except TypeError:  # a shape is a list, say
            known = None
        if known is not None:
            if process_set != GLOBAL_SET:
                self.sets.check_member(process_set)
            return known
        for array in arrays:
            if self.rank == 0:
                note_truncation(op, array.dtype)
            if op == ReduceOp.ADASUM:
                check_adasum(array.dtype)
            else:
                kernel(op, array.dtype, self.size, factor_of(prescale), factor_of(postscale))
        signature = self._signature(
            kind, arrays, shapes, name, process_set, int(op),
            prescale=factor_of(prescale), postscale=factor_of(postscale), bounds=tuple(bounds),
            codec=codec_number(options.compression), weighted=options.weight is not None,
        )  # fmt: skip
        known = signature, nowhere()
        if signature.name and len(self._known) < _MAX_KNOWN:
            with suppress(TypeError):
                self._known[described] = known
        return known

    def reducescatter(
        self, arrays: Sequence[Array], shapes: Sequence[Shape], options: Options,
        process_set: int = GLOBAL_SET, urgent: bool = False, convert: Convert = None, mirrors: Mirrors = (),
    ) -> Handle:  # fmt: skip
        """Reduce the arrays, which become working space; the handle gives this rank's rows of each."""
        layout = scatter_layout(shapes, len(self.sets.check_member(process_set)), options)
        if options.op == ReduceOp.ADASUM:
            raise UnsupportedDtypeError("Adasum exists for allreduce only.")
        bounds = [edge for edges in layout.edges for edge in edges]
        signature, place = self._reduction(
            Collective.REDUCESCATTER, options, arrays, shapes, options.name, process_set, bounds
        )
        weight = 1.0 if options.weight is None else _weight(arrays, options)
        return self._submit(signature, arrays, urgent, convert, place, mirrors=mirrors, weight=weight)

    def allgather(
        self, arrays: Sequence[Array], shapes: Sequence[Shape], name: Optional[str] = None,
        process_set: int = GLOBAL_SET, urgent: bool = False, convert: Convert = None, mirrors: Mirrors = (),
        bounds: Sequence[int] = (),
    ) -> Handle:  # fmt: skip
        """Concatenate every rank's rows, by ``bounds`` in place; the handle gives a list of results."""
        check_rows("allgather", shapes)
        inner, rows = [shape[1:] for shape in shapes], [shape[0] for shape in shapes]
        signature = self._signature(
            Collective.ALLGATHER, arrays, inner, name, process_set, bounds=tuple(bounds)
        )
        return self._submit(signature, arrays, urgent, convert, mirrors=mirrors, rows=rows)

    def broadcast(
        self, arrays: Sequence[Array], root: int, name: Optional[str] = None,
        shapes: Optional[Sequence[Shape]] = None, process_set: int = GLOBAL_SET, urgent: bool = False,
        convert: Convert = None, mirrors: Mirrors = (),
    ) -> Handle:  # fmt: skip
        """Overwrite the arrays with those of the root, which is a rank of the job."""
        members, root = self.sets.check_member(process_set), root_of(root)
        if root not in members:
            owner = "this job" if process_set == GLOBAL_SET else f"process set {process_set}"
            raise ConfigError(f"root_rank={root}: {owner} has the ranks {', '.join(map(str, members))}.")
        shapes = [*map(_shape_of, arrays)] if shapes is None else shapes
        signature = self._signature(Collective.BROADCAST, arrays, shapes, name, process_set, root=root)
        return self._submit(signature, arrays, urgent, convert, mirrors=mirrors)

    def alltoall(
        self, array: Array, shape: Shape, splits: Optional[Sequence[int]], name: Optional[str] = None,
        process_set: int = GLOBAL_SET, urgent: bool = False, convert: Convert = None, mirrors: Mirrors = (),
        in_place: bool = False,
    ) -> Handle:  # fmt: skip
        """Send ``splits[i]`` rows (or as many) to the i-th member; the handle gives rows and their counts."""
        check_rows("alltoall", [shape])
        counts = row_counts(shape[0], splits, len(self.sets.check_member(process_set)))
        bounds = cumulative(counts) if in_place else ()
        signature = self._signature(
            Collective.ALLTOALL, [array], [shape[1:]], name, process_set, bounds=bounds
        )
        return self._submit(signature, [array], urgent, convert, mirrors=mirrors, splits=counts)

    def barrier(
        self, name: Optional[str] = None, process_set: int = GLOBAL_SET, urgent: bool = True
    ) -> Handle:
        """Done once every member has called it."""
        return self._submit(self._signature(Collective.BARRIER, [], [], name, process_set), [], urgent)

    def _signature(
        self, kind: Collective, arrays: Sequence[Array], shapes: Sequence[Shape], name: Optional[str],
        process_set: int, op: int = NO_OP, root: int = NO_ROOT, **agreed: Any,
    ) -> Signature:  # fmt: skip
        """Describe an operation; ``agreed`` are further fields."""
        if process_set != GLOBAL_SET:
            self.sets.check_member(process_set)
        dtypes = [type_names(array.dtype)[0] for array in arrays]
        for dtype in dtypes:
            code_of_name(dtype)
        return Signature(
            name_of(name), process_set, int(kind), op, root, tuple(dtypes), tuple(map(tuple, shapes)),
            **agreed,
        )  # fmt: skip

    def _submit(
        self, signature: Signature, arrays: Sequence[Array], urgent: bool, convert: Convert = None,
        place: Optional[List[Any]] = None, **facts: Any,
    ) -> Handle:  # fmt: skip
        """Submit an operation that is called now; ``facts`` are further ones of the :class:`.Request`."""
        name, thread = signature.name, self._thread
        if name:
            self.repeated.add(name)
        handle = Handle(name or signature.verb, thread.wait, convert)
        return thread.submit(Request(signature, arrays, handle, call_site(place), **facts), urgent)

    # ---- process sets, pauses, observation and the end ---------------------------------------------

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Make a group of ranks, and return its number; every rank of the job must call it."""
        return self._change_sets(ProcessSets.change("add", self.sets.check_new(ranks)))

    def remove_process_set(self, number: int) -> bool:
        """Dissolve a group; every rank of the job must call it. Whether there was one."""
        if number == GLOBAL_SET or number not in self.sets.numbers():
            return False
        self._change_sets(ProcessSets.change("remove", self.sets.members(number)))
        return True

    def _change_sets(self, change: str) -> int:
        signature = self._signature(Collective.PROCESS_SET, [], [], change, GLOBAL_SET)
        return self._submit(signature, [], urgent=True).wait()

    @contextmanager
    def pause(self, reason: str) -> Iterator[None]:
        self._thread.pause(reason)
        try:
            yield
        except BaseException:
            # What ended the block is raised; a failure of the job is raised by the next call.
            with suppress(RingcommError):
                self._thread.resume()
            raise
        self._thread.resume()

    @contextmanager
    def in_parts(self) -> Iterator[None]:
        """End the job if an exception ends the block, of a call in several operations."""
        try:
            yield
        except BaseException as problem:
            if not isinstance(problem, RingcommError):  # no other rank could know
                self._thread.abandon(describe_error(problem))
            raise

    @property
    def observer(self) -> Optional[Observer]:
        return self._thread.observer

    @property
    def waited_s(self) -> float:
        return self._thread.waited_s

    @property
    def late_s(self) -> Dict[int, float]:
        """On rank 0: by rank, how long operations have waited for it alone; empty on other ranks."""
        return {} if self.coordinator is None else dict(self.coordinator.reports.late_s)

    def stop(self) -> None:
        """End the thread; what is still on its way fails."""
        self._thread.stop()
        self.buckets.release()


def _weight(arrays: Sequence[Array], options: Options) -> float:
    for array in arrays:
        check_weighable(array.dtype, options.op)
    return weight_of(options.weight)


class _Alone(OwnTrace):
    """In place of the thread in a job of one rank: operations run when they are submitted."""

    wait = None
    waited_s = 0.0

    def __init__(self, buckets: BucketRunner) -> None:
        super().__init__()
        self._buckets = buckets
        self._lock = threading.RLock()  # a signal handler may submit an operation within one
        self._unnamed: Counter[int] = Counter()

    def submit(self, request: Request, urgent: bool) -> Handle:
        """Run an operation in the calling thread, and report it to an observer if there is one."""
        signature, observer, handle = request.signature, self.observer, request.handle
        traced: List[Tuple[str, Signature]] = []
        if signature.weighted:
            if not request.weight:
                raise Misuse(f"{signature.describe(named=False)}: {NO_WEIGHTS}")
            request.total = Total.of([request.weight])
        with self._lock:
            if observer is not None:
                self._unnamed[signature.process_set] += not signature.name
                traced = [(label_of(signature, self._unnamed[signature.process_set]), signature)]
            request.finish(self._buckets.run([(signature, request)], observer, traced)[0])
        return handle

    def join(self) -> Handle:
        """Return a handle that gives the number of the last rank to join."""
        handle = Handle("join")
        handle.finish(0)
        return handle

    def finish_earlier(self, name: str, process_set: int = GLOBAL_SET) -> None:
        """All earlier operations have ended."""

    def pending(self) -> List[Request]:
        """Nothing is on its way."""
        return []

    def pause(self, reason: str) -> None:
        """No other rank waits."""

    def resume(self) -> None:
        """No other rank has waited."""

    def abandon(self, why: str) -> None:
        """No other rank needs to know."""
