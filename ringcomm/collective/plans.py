"""The plans of a runner's calls, kept for calls that come again, and the sums over all their runs."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Sequence

import numpy as np

from ..ops import Collective
from ..schedule.steps import Step
from ..transport.base import Fabric
from ..wire.frames import Header
from ..wire.signature import Signature
from .call_sites import Site, nowhere, number_of_known
from .flows import SegmentPool
from .part import Part
from .reduce import Kernel
from .short import make_execution
from .totals import OperationTotal, Totals

_PLANS_KEPT = 512


class Plan:
    """How a call is run, kept for the next time the same call comes.

    Attributes:
        runs: how often it has been run to its end.
        complete: how often such a run, of an exchange of numbers, was all of its call.
        took_s: the time of all these runs, in seconds.
    """

    __slots__ = (
        "call", "complete", "execution", "fold", "has_place", "header", "items", "runs", "schedule", "site",
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
        # Ranks may well wait for each other at different lines: one prepares what the others then use.
        self.has_place = call.kind != Collective.BARRIER
        self.warns = fold is not None and fold.warns
        self.execution: Optional[Part] = None
        self.site = nowhere()
        self.runs = self.complete = 0
        self.took_s = 0.0

    def site_number(self, site: Site) -> int:
        """For the header: where the program makes this call; 0 where ranks may well be at different lines."""
        if not self.has_place:
            return 0
        known = self.site
        if site[1] == known[2] and site[0] is known[1]:
            return int(known[3])
        return number_of_known(site, known)

    def add_to(self, totals: Totals, rank_of: Callable[[int], int]) -> None:
        """Add what it has done so far to sums; another thread may be running it.

        Args:
            totals: the sums.
            rank_of: the rank in the whole job of a peer.
        """
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
        self._plans: Dict[Signature, Plan] = {}
        self._dropped = Totals()  # of plans that are not kept any more
        self.get: Callable[[Signature], Optional[Plan]] = self._plans.get

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, call: Signature, schedule: Sequence[Step], fold: Optional[Kernel] = None) -> Plan:
        """Return what is needed to run this call, from the last time if it was the same schedule."""
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
        """Return what runs a plan on arrays in host memory from now on."""
        plan.execution = make_execution(
            plan.schedule, self._fabric, plan.header, dtype, self._pool, plan.fold
        )
        return plan.execution

    def totals(self) -> Totals:
        """Return what all runs that have ended did. For any thread."""
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
