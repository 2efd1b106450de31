"""Collectives on flat arrays: from a call to a schedule, a header and an execution.

Arrays are contiguous and one-dimensional here, and counts are in elements. All calls go through
:meth:`~.call_runner.CallRunner._run`, in the calling thread and one at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Optional, Sequence, Tuple

import numpy as np

from ..config import Settings
from ..dtypes import type_names, usable_codec
from ..group.failures import FailureReporter
from ..ops import Collective, ReduceOp
from ..schedule.select import Selector
from ..schedule.steps import Step, even_bounds
from ..transport.base import Fabric
from ..wire.frames import NO_OP, NO_ROOT
from ..wire.signature import Signature
from .call_runner import CallRunner
from .mirror import Mirror
from .plans import Plan
from .reduce import Kernel, kernel

if TYPE_CHECKING:
    from .coded import CodedPlans


class Runner(CallRunner):
    """The collectives of one rank over one fabric. Runners of the same rank and job may share a selector."""

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
        self.reduced_bytes = 0  # payload of all all-reduces so far

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
        bounds: Tuple[int, ...] = (),
    ) -> None:
        """Reduce ``data`` over all ranks, in place. ``residuals``: for a codec's error feedback; ``mirror``:
        of an array on a device, of which ``data`` is the host's block; ``bounds``: of the parts that the
        ranks' programs get of it.
        """
        codec = usable_codec(codec, data.dtype, op) if codec and self.size > 1 else 0
        if mirror is not None or codec and data.dtype != np.float32:
            how = prescale, postscale, collective, intent, codec, residuals, None, bounds
            if mirror is not None:
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
        call = Signature(
            name, 0, int(collective), int(op), NO_ROOT, type_names(data.dtype), (shape,), prescale, postscale,
            codec, False, bounds, data.size,
        )  # fmt: skip
        call = call if intent is None else call.meaning(intent)
        plan = self._plans.get(call)
        if plan is None:
            if self.size == 1:
                fold = kernel(op, data.dtype, self.size, prescale, postscale)
                fold.prepare(data)
                fold.finish_alone(data)
                return
            plan = self._reduction(call, data, op, (prescale, postscale))
        if prescale != 1.0 and plan.fold is not None:
            plan.fold.prepare(data)
        self._run(plan, data, residuals if codec else None)

    def _reduction(
        self, call: Signature, data: np.ndarray[Any, Any], op: ReduceOp, scales: Tuple[float, float]
    ) -> Plan:
        """Return the plan of a new all-reduce."""
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
        """Return a few numbers of every rank (how many rows will come), one row per rank. ``dtype``,
        ``shape``, ``op`` and ``weighted`` are of the operation that follows, which is compared here.
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
        """Count the last exchange as a whole call: nothing follows it."""
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
        """Send chunk ``i`` of ``source`` to rank i, and receive chunk ``i`` of ``data`` from it. ``has_own``:
        this rank's own chunk is in its place already.
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
        """Run a schedule in which not all ranks take part, so it is not counted among the calls. A schedule
        that folds needs ``fold``.
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
