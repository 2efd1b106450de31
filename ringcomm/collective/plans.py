"""The plans of a runner's calls, kept for repeated calls, and the sums over all their runs."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence

import numpy as np

from ..schedule.steps import Step
from ..transport.base import Fabric
from ..wire.frames import Header
from ..wire.signature import Signature
from .call_sites import nowhere
from .flows import SegmentPool
from .part import Part
from .reduce import Kernel
from .short import make_execution
from .totals import OperationTotal, Totals

_PLANS_KEPT = 512


class Plan:
    """The way to run a call, kept for the next equal call."""

    __slots__ = (
        "call", "complete", "execution", "fold", "header", "items", "runs", "schedule", "site",
        "took_s", "warns",
    )  # fmt: skip

    def __init__(
        self, call: Signature, schedule: Sequence[Step], header: Header, fold: Optional[Kernel]
    ) -> None:
        self.call = call
        self.schedule = schedule
        self.header = header
        self.fold = fold
        self.items = -1
        self.warns = fold is not None and fold.warns
        self.execution: Optional[Part] = None
        self.site = nowhere()
        # complete runs; those of an exchange of numbers that were all of their call
        self.runs = self.complete = 0
        self.took_s = 0.0  # of all these runs

    def add_to(self, totals: Totals, rank_of: Callable[[int], int]) -> None:
        """Add its totals to sums; another thread may run it. ``rank_of``: a peer's rank in the whole job."""
        runs, took_s = self.runs, self.took_s
        execution = self.execution
        if execution is None:
            return
        moved_bytes = 0
        for peer, (sent, received) in execution.volume().items():
            totals.peer(rank_of(peer)).exchanged(runs * sent, runs * received)
            moved_bytes += runs * (sent + received)
        for peer, seconds in list(execution.slept_s.items()):
            totals.peer(rank_of(peer)).slept_s += seconds
        call = self.call
        counted = self.complete if call.ahead else runs
        if counted and not call.is_internal:
            took_s, moved_bytes = took_s * counted / runs, moved_bytes * counted // runs
            for sums, name in ((totals.kinds, call.verb), (totals.operations, call.describe())):
                sums.setdefault(name, OperationTotal()).add(counted, took_s, moved_bytes)


class Plans:
    """The plans of one runner, their common segments, and their totals. ``segment_bytes`` 0: by link."""

    def __init__(self, fabric: Fabric, segment_bytes: int, generation: int) -> None:
        self._fabric = fabric
        self._generation = generation
        self._pool = SegmentPool(segment_bytes)
        self._plans: Dict[Signature, Plan] = {}
        self._dropped = Totals()  # of plans that are not kept any more
        self.get: Callable[[Signature], Optional[Plan]] = self._plans.get  # of an equal earlier call

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, call: Signature, schedule: Sequence[Step], fold: Optional[Kernel] = None) -> Plan:
        """Return the plan of this call: the last one if it has the same schedule."""
        plan = self._plans.get(call)
        if plan is None or plan.schedule is not schedule:
            if plan is None and len(self._plans) >= _PLANS_KEPT:
                plan = self._plans.pop(next(iter(self._plans)))
            if plan is not None:
                plan.add_to(self._dropped, self._fabric.rank_of)
            plan = self._plans[call] = Plan(call, schedule, call.header(self._generation), fold)
        return plan

    def complete(self, call: Optional[Signature]) -> None:
        """Count a run of an exchange of numbers as all of its call; without other ranks there is no plan."""
        plan = None if call is None else self._plans.get(call)
        if plan is not None and plan.call.ahead:
            plan.complete += 1

    def execution(self, plan: Plan, dtype: np.dtype[Any]) -> Part:
        """Return the part that runs a plan on arrays in host memory from now on."""
        plan.execution = make_execution(
            plan.schedule, self._fabric, plan.header, dtype, self._pool, plan.fold
        )
        return plan.execution

    def totals(self) -> Totals:
        """Return the totals of all runs that have ended. For any thread."""
        totals = self._dropped.copy()
        for plan in list(self._plans.values()):
            plan.add_to(totals, self._fabric.rank_of)
        return totals

    def release(self) -> None:
        """Free the plans and the segments; the sums remain."""
        for plan in self._plans.values():
            plan.add_to(self._dropped, self._fabric.rank_of)
        self._plans.clear()
        self._pool.release()
