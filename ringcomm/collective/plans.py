"""The plans of a runner's calls, kept for calls that come again, and the sums over all their runs."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence

import numpy as np

from ..schedule.staging import plan_copies
from ..schedule.steps import Step
from ..transport.base import Fabric
from .calls import Call, Plan
from .flows import SegmentPool
from .part import Part
from .reduce import Kernel
from .short import make_execution
from .staged import StagedExecution, Staging
from .totals import Totals

_PLANS_KEPT = 512


class Plans:
    """The plans of one runner, the segments that they share, and what they have done.

    Args:
        fabric: links to all peers.
        segment_bytes: size of the segments; 0: what suits the link.
        generation: membership epoch, part of every header.

    Attributes:
        get: the plan of an earlier call that was equal to this one; None without one.
    """

    def __init__(self, fabric: Fabric, segment_bytes: int, generation: int) -> None:
        self._fabric = fabric
        self._generation = generation
        self._pool = SegmentPool(segment_bytes)
        self._plans: Dict[Call, Plan] = {}
        self._dropped = Totals()  # of plans that are not kept any more
        self.get: Callable[[Call], Optional[Plan]] = self._plans.get

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, call: Call, schedule: Sequence[Step], fold: Optional[Kernel] = None) -> Plan:
        """Return what is needed to run this call, from the last time if it was the same schedule."""
        plan = self._plans.get(call)
        if plan is None or plan.schedule is not schedule:
            if plan is None and len(self._plans) >= _PLANS_KEPT:
                plan = self._plans.pop(next(iter(self._plans)))
            if plan is not None:
                self._dropped.add(plan, self._fabric.rank_of)
            plan = self._plans[call] = Plan(call, schedule, call.header(self._generation), fold)
        return plan

    def execution(self, plan: Plan, dtype: np.dtype[Any]) -> Part:
        """Return what runs a plan on arrays in host memory from now on."""
        plan.execution = make_execution(
            plan.schedule, self._fabric, plan.header, dtype, self._pool, plan.fold
        )
        return plan.execution

    def staged(self, plan: Plan, staging: Staging, dtype: np.dtype[Any]) -> Part:
        """Return what runs a plan on arrays of devices."""
        execution = plan.staged
        if execution is None:
            copies = plan_copies(plan.schedule, staging.results)
            execution = plan.staged = StagedExecution(
                plan.schedule, self._fabric, plan.header, dtype, self._pool, plan.fold, copies
            )
        execution.attach(staging)
        return execution

    def totals(self) -> Totals:
        """Return what all runs that have ended did. For any thread."""
        totals = self._dropped.copy()
        for plan in list(self._plans.values()):
            totals.add(plan, self._fabric.rank_of)
        return totals

    def release(self) -> None:
        """Free the plans and the segments; the sums remain."""
        for plan in self._plans.values():
            self._dropped.add(plan, self._fabric.rank_of)
        self._plans.clear()
        self._pool.release()
