"""Collectives on flat arrays: from a call to a schedule, a header and an execution.

Arrays are contiguous and one-dimensional here, and counts are in elements. All calls go through
:meth:`~.call_runner.CallRunner._run`, in the calling thread and one at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Optional, Sequence, Tuple

import numpy as np

from ..config import Settings
from ..dtypes import dtype_named, type_names, usable_codec
from ..group.failures import FailureReporter
from ..ops import Collective, ReduceOp
from ..schedule.hierarchy import Hosts
from ..schedule.select import Selector
from ..schedule.steps import Step, even_bounds
from ..transport.base import Fabric, StoppableWatch
from ..transport.subset import Subset
from ..wire.frames import NO_OP, NO_ROOT
from ..wire.signature import Signature
from .call_runner import CallRunner
from .device_group import DEVICE_TYPES
from .mirror import Mirror
from .placement import MIN_BYTES, Placement
from .plans import Plan
from .progress import Progress
from .reduce import Kernel, kernel
from .totals import Totals

if TYPE_CHECKING:
    from .coded import CodedPlans
    from .host_groups import HostGroups


class Runner(CallRunner):
    """The collectives of one rank over one fabric.

    Args:
        fabric: links to all peers.
        settings: algorithm, segment size, limits.
        generation: membership epoch, part of every header.
        spin_s: how long to poll before sleeping.
        reporter: asked for the common error when something goes wrong.
        selector: chooses the schedules; may be shared by runners of the same rank and job.

    Attributes:
        reduced_bytes: payload of all all-reduces so far.
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
        super().__init__(fabric, settings, generation, spin_s, reporter)
        self._settings = settings
        self._selector = selector or Selector(fabric.rank, fabric.size, settings.algorithm or None)
        self._coded: Optional[CodedPlans] = None
        self._placement = Placement(fabric.size)
        self._groups: Optional[HostGroups] = None
        self.reduced_bytes = 0
        self.use_device_groups(self._selector.device_hosts)

    def use_device_groups(self, hosts: Optional[Hosts]) -> None:
        """Let devices of one host exchange directly in long all-reduces; all ranks call it, or none.

        Args:
            hosts: see :func:`ringcomm.schedule.hierarchy.device_hosts`; None: there are no such groups.
        """
        if hosts is None:
            return
        from .host_groups import HostGroups

        def among(ranks: Sequence[int]) -> Runner:
            links = Subset(self._fabric, sorted(ranks))
            return Runner(links, self._settings, self._generation, self.spin_s, self._reporter)

        watch = self._fabric.watch
        self._groups = HostGroups(hosts, self.rank, self, among, self._reporter, watch)

    def progress(self) -> Progress:
        """Return how far this rank is. For any thread, and at any time."""
        progress = super().progress()
        inner = self._groups.progress() if self._groups is not None else None
        return progress if inner is None else inner._replace(sequence=progress.sequence)

    def totals(self) -> Totals:
        """Return what its calls have done so far, the present one included. For any thread."""
        totals = super().totals()
        inner = self._groups.totals() if self._groups is not None else None
        if inner is not None:
            totals.merge(inner)
        return totals

    def stop(self, watch: Optional[StoppableWatch] = None) -> None:
        """Refuse further calls: this rank has left the job; see :meth:`.CallRunner.stop`."""
        super().stop(watch)
        if self._groups is not None:
            self._groups.close()

    def release(self) -> None:
        """Free what is kept for the next call, when there is none."""
        if self._groups is not None:
            self._groups.close()
        super().release()

    def with_settings(self, settings: Settings) -> Runner:
        """Return another runner over the same links that chooses by rule, to measure with before this one."""
        return Runner(self._fabric, settings, self._generation, self.spin_s, self._reporter)

    def all_reduce(
        self,
        data: np.ndarray[Any, Any],
        op: ReduceOp,
        name: str = "",
        shape: Tuple[int, ...] = (),
        prescale: float = 1.0,
        postscale: float = 1.0,
        collective: Collective = Collective.ALLREDUCE,
        intent: Optional[Signature] = None,
        codec: int = 0,
        residuals: Optional[np.ndarray[Any, Any]] = None,
        mirror: Optional[Mirror] = None,
        fused: bool = False,
        bounds: Tuple[int, ...] = (),
    ) -> None:
        """Reduce ``data`` over all ranks, in place. ``residuals`` are for a codec's error feedback.

        ``mirror``: of an array on a device, of which ``data`` is the host's block; a long one may be reduced
        there. ``fused``: ``data`` consists of several arrays of the program. ``bounds``: of the parts that
        the ranks' programs get of it.
        """
        codec = usable_codec(codec, data.dtype, op) if codec and self.size > 1 else 0
        placed = data.nbytes >= MIN_BYTES and self.size > 1 and not codec and not fused
        is_loaded = placed or mirror is None
        if not is_loaded or codec and data.dtype != np.float32:
            how = prescale, postscale, collective, intent, codec, residuals, None, fused, bounds
            if not is_loaded:
                with self.loaded(mirror, None, (0, data.size)):
                    self.all_reduce(data, op, name, shape, *how)
                return
            with np.errstate(all="ignore"):
                single = data.astype(np.float32)
                self.all_reduce(single, op, name, shape, *how)
                data[:] = single
            return
        self.reduced_bytes += data.nbytes
        # Plain integers: they hash faster than members of enumerations.
        scales = (prescale, postscale)
        call = Signature(
            name, 0, int(collective), int(op), NO_ROOT, type_names(data.dtype), (shape,), prescale, postscale,
            codec, False, bounds, data.size,
        )  # fmt: skip
        call = call if intent is None else call.meaning(intent)
        if placed:
            self._all_reduce_placed(call, data, op, scales, mirror)
            return
        plan = self._plans.get(call)
        if plan is None:
            if self.size == 1:
                fold = kernel(op, data.dtype, self.size, prescale, postscale)
                fold.prepare(data)
                fold.finish_alone(data)
                return
            plan = self._reduction(call, data, op, scales)
        if prescale != 1.0 and plan.fold is not None:
            plan.fold.prepare(data)
        self._run(plan, data, residuals if codec else None)

    def _reduction(
        self, call: Signature, data: np.ndarray[Any, Any], op: ReduceOp, scales: Tuple[float, float]
    ) -> Plan:
        """The plan of a new all-reduce."""
        fold = kernel(op, data.dtype, self.size, *scales)
        if call.codec:
            plan = self._plans.find(call, (), fold)
            if self._coded is None:
                from .coded import CodedPlans  # codecs are not needed by most jobs

                self._coded = CodedPlans(self._fabric, self._selector)
            plan.execution = self._coded.execution(plan.header, data.size, fold)
            return plan
        single = fold.needs_single_fold
        schedule = self._selector.all_reduce(data.size, data.itemsize, single)
        return self._plans.find(call, schedule, fold)

    def _all_reduce_placed(
        self,
        call: Signature,
        data: np.ndarray[Any, Any],
        op: ReduceOp,
        scales: Tuple[float, float],
        mirror: Optional[Mirror],
    ) -> None:
        """A long all-reduce: where the arrays of all ranks are on devices, by means that are for those."""
        placement, everything = self._placement, (0, data.size)
        with self.exclusive(parts=1):
            if placement.agreed and self._within_hosts(call, op, scales, mirror):
                return
            with self.loaded(mirror, everything, everything):
                plan = self._plans.get(call) or self._reduction(call, data, op, scales)
                if plan.fold is not None:
                    plan.fold.prepare(data)
                vote = placement.vote(mirror is not None and not mirror.shared)
                placement.record_votes(self._run(plan, data, None, True, vote))

    def _within_hosts(
        self, call: Signature, op: ReduceOp, scales: Tuple[float, float], mirror: Optional[Mirror]
    ) -> bool:
        """Return whether a long all-reduce could be run with the devices of each host as a group."""
        groups, dtype = self._groups, dtype_named(call.dtypes[0])
        fold = kernel(op, dtype, self.size, *scales)
        if groups is None or fold.needs_single_fold or call.kind != Collective.ALLREDUCE:
            return False
        if dtype.name not in DEVICE_TYPES:
            return False
        if op in (ReduceOp.MIN, ReduceOp.MAX) and dtype.kind not in "iu":
            return False  # MIN and MAX on devices may ignore NaN.
        self._errors.check_usable()  # here nothing has begun that other ranks could wait for
        mirror = None if mirror is None or mirror.shared else mirror
        try:
            if not groups.decided:
                groups.prepare(call, mirror)
            if not groups.active:
                return False
            done = groups.all_reduce(call, mirror, fold, op)
        except BaseException as problem:
            # What the devices have begun cannot be called again, and other ranks wait for it.
            self._errors.outside_call(problem, self._doing(call))
            raise
        if not done:
            self._placement.withdraw()
        return done

    def reduce_scatter(
        self,
        data: np.ndarray[Any, Any],
        bounds: Tuple[int, ...],
        op: ReduceOp,
        name: str = "",
        shape: Tuple[int, ...] = (),
        prescale: float = 1.0,
        postscale: float = 1.0,
        intent: Optional[Signature] = None,
    ) -> None:
        """Reduce over all ranks; afterwards chunk ``rank`` of ``data`` is finished, the rest is not."""
        call = Signature(
            name, 0, int(Collective.REDUCESCATTER), int(op), NO_ROOT, type_names(data.dtype), (shape,),
            prescale, postscale, items=data.size, bounds=bounds,
        )  # fmt: skip
        call = call if intent is None else call.meaning(intent)
        plan = self._plans.get(call)
        fold = plan.fold if plan is not None else None
        if fold is None:
            fold = kernel(op, data.dtype, self.size, prescale, postscale)
        fold.prepare(data)
        if self.size == 1:
            fold.finish_alone(data)
            return
        if plan is None or intent is not None:
            schedule = self._selector.reduce_scatter(bounds, data.itemsize, fold.needs_single_fold)
            plan = self._plans.find(call, schedule, fold)
        self._run(plan, data)

    def all_gather(
        self,
        data: np.ndarray[Any, Any],
        bounds: Tuple[int, ...],
        name: str = "",
        shape: Tuple[int, ...] = (),
        collective: Collective = Collective.ALLGATHER,
        intent: Optional[Signature] = None,
    ) -> None:
        """Fill ``data`` with every rank's chunk; this rank's own must be in its place already."""
        if self.size == 1:
            return
        # The number of elements makes the header differ from that of the exchange before it.
        call = Signature(
            name, 0, int(collective), NO_OP, NO_ROOT, type_names(data.dtype), (shape,), items=data.size,
            bounds=bounds,
        )  # fmt: skip
        call = call if intent is None else call.meaning(intent)
        plan = self._plans.get(call)
        if plan is None or intent is not None:
            plan = self._plans.find(call, self._selector.all_gather(bounds, data.itemsize))
        self._run(plan, data)

    def exchange(
        self,
        values: Any,
        collective: Collective,
        dtype: np.dtype[Any],
        name: str,
        shape: Tuple[int, ...],
        op: int = NO_OP,
        weighted: bool = False,
    ) -> np.ndarray[Any, Any]:
        """Return a few numbers of every rank (how many rows will come), one row per rank.

        ``dtype``, ``shape``, ``op``, ``weighted``: of the operation that follows, which is compared here.
        """
        numbers = np.zeros((self.size, len(values)), np.int64)
        numbers[self.rank] = values
        if self.size > 1:
            flat = numbers.reshape(-1)
            call = _ahead(name, int(collective), op, dtype, shape, weighted)
            plan = self._plans.get(call)
            if plan is None or plan.items != flat.size:
                bounds = even_bounds(flat.size, self.size)
                plan = self._plans.find(call, self._selector.all_gather(bounds, flat.itemsize))
                plan.items = flat.size
            self._run(plan, flat)
        return numbers

    def complete(self) -> None:
        """Count the exchange that was made last as a whole call: nothing follows it."""
        self._plans.complete(self._last)

    def broadcast(
        self,
        data: np.ndarray[Any, Any],
        root: int,
        name: str = "",
        shape: Tuple[int, ...] = (),
        collective: Collective = Collective.BROADCAST,
    ) -> None:
        """Overwrite ``data`` on all ranks with the root's."""
        if self.size == 1:
            return
        call = Signature(
            name, 0, int(collective), NO_OP, root, type_names(data.dtype), (shape,), items=data.size
        )
        plan = self._plans.get(call)
        if plan is None:
            plan = self._plans.find(call, self._selector.broadcast(root, data.size, data.itemsize))
        self._run(plan, data)

    def all_to_all(
        self,
        source: np.ndarray[Any, Any],
        data: np.ndarray[Any, Any],
        send_bounds: Tuple[int, ...],
        recv_bounds: Tuple[int, ...],
        name: str = "",
        shape: Tuple[int, ...] = (),
        intent: Optional[Signature] = None,
        has_own: bool = False,
    ) -> None:
        """Chunk ``i`` of ``source`` goes to rank i; chunk ``i`` of ``data`` comes from it.

        ``has_own``: this rank's own chunk is in its place already.
        """
        if not has_own:
            mine = source[send_bounds[self.rank] : send_bounds[self.rank + 1]]
            data[recv_bounds[self.rank] : recv_bounds[self.rank + 1]] = mine
        if self.size == 1:
            return
        schedule = self._selector.all_to_all(send_bounds, recv_bounds)
        kind = int(Collective.ALLTOALL)
        call = Signature(name, 0, kind, NO_OP, NO_ROOT, type_names(data.dtype), (shape,))
        call = call if intent is None else call.meaning(intent)
        self._run(self._plans.find(call, schedule), data, source)

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
        kind = int(Collective.EXCHANGE)
        call = Signature(name, 0, kind, NO_OP, NO_ROOT, type_names(data.dtype), ((),))
        self._run(self._plans.find(call, schedule, fold), data, source, counted=False)


@lru_cache(maxsize=512)
def _ahead(
    name: str, kind: int, op: int, dtype: np.dtype[Any], shape: Tuple[int, ...], weighted: bool
) -> Signature:
    """Return the exchange of numbers ahead of a call; cached, since making it takes twice as long."""
    return Signature(name, 0, kind, op, NO_ROOT, type_names(dtype), (shape,), weighted=weighted, ahead=True)
