"""Simulated jobs on machines with CPU quotas: a process runs until its part of a period is used up."""

from __future__ import annotations

from random import Random
from statistics import median
from typing import List, NamedTuple, Optional, Sequence, Tuple

from ringcomm.balance.plan import ShareLimits, Shares, proportional_shares
from ringcomm.balance.replan import RankTimes, Replanner, typical_s

COMMUNICATION_S = 0.004
AHEAD = 1
"""What a program without a loader takes in advance."""


class Throttled:
    """A machine with a CPU quota."""

    def __init__(self, quota: float, period_s: float, draw: Random) -> None:
        self.quota = quota
        self._period_s = period_s
        self._phase_s = draw.random() * period_s
        self._period = -1
        self._left_s = 0.0

    def end_s(self, now_s: float, cpu_s: float) -> float:
        """Return when a computation of so many seconds of a core ends that begins now."""
        while True:
            period = int((now_s + self._phase_s) / self._period_s + 1e-9)
            if period != self._period:
                self._period, self._left_s = period, self.quota * self._period_s
            stop_s = (period + 1) * self._period_s - self._phase_s
            ran_s = max(0.0, min(cpu_s, self._left_s, stop_s - now_s))
            cpu_s, self._left_s, now_s = cpu_s - ran_s, self._left_s - ran_s, now_s + ran_s
            if cpu_s <= 1e-12:
                return now_s
            now_s = max(now_s, stop_s) + 1e-12


class Setup(NamedTuple):
    """Machines and their work."""

    quotas: Sequence[float] = (0.9, 0.3, 0.3)  # parts of a core
    period_s: float = 0.01  # of the quotas
    step_s: float = 0.17  # of balanced ranks without communication and noise
    noise: float = 0.03  # relative standard deviation of a step's work
    fixed: float = 0.1  # part of a step's work that does not depend on the number of samples
    total: int = 96  # samples of a global batch


class Job(NamedTuple):
    """What happened: seconds of computing by step and rank, of whole steps, and the steps of changes."""

    computed: List[List[float]]
    steps_s: List[float]
    changes: List[Tuple[int, Shares]]

    def spread(self, first: int, last: int) -> float:
        """Return how much the median compute times of ranks differ, as a part of the longest."""
        medians = [median(column) for column in zip(*self.computed[first:last])]
        return (max(medians) - min(medians)) / max(medians)


def train(setup: Setup, steps: int, seed: int, slow: Optional[Tuple[int, int, float]] = None) -> Job:
    """Return a job that measures, reports and changes shares as :class:`ringcomm.balance.pace.Pace` does;
    `slow` is a step, a rank, and the rank's quota from this step on.
    """
    draw = Random(seed)
    machines = [Throttled(quota, setup.period_s, draw) for quota in setup.quotas]
    size, work_s = len(machines), setup.step_s * sum(setup.quotas)
    hosts = [str(n) for n in range(size)]
    planner = Replanner(proportional_shares([1] * size, setup.total), setup.total, ShareLimits(), hosts)
    shares, coming, effective, now_s = planner.shares, planner.shares, -1, 0.0
    job, window = Job([], [], []), []
    reports: Optional[List[RankTimes]] = None
    for step in range(steps):
        if slow is not None and step == slow[0]:
            machines[slow[1]].quota = slow[2]
        parts = [setup.fixed / size + (1.0 - setup.fixed) * share / setup.total for share in shares]
        work = [work_s * part * max(0.5, draw.gauss(1.0, setup.noise)) for part in parts]
        ends = [machine.end_s(now_s, cpu_s) for machine, cpu_s in zip(machines, work)]
        end_s = max(ends) + COMMUNICATION_S
        job.computed.append([own_s - now_s for own_s in ends])
        job.steps_s.append(end_s - now_s)
        window.append([(own_s - now_s, end_s - own_s) for own_s in ends])
        now_s = end_s
        if reports is not None:
            change = planner.decide(step + 1, reports)
            reports = None
            if change is not None:
                effective, coming = step + 1 + change.lead, change.shares
                job.changes.append((effective, coming))
        if effective == step + 1:
            shares, effective, window = coming, -1, []
        elif effective < 0 and len(window) >= planner.window:
            # Nothing is known about the first step of a job: no reduction has ended before it.
            rows = list(zip(*(window[1:] if step < planner.window else window)))
            reports = [
                RankTimes(share, typical_s([t for t, _ in row]), typical_s([w for _, w in row]), AHEAD)
                for share, row in zip(shares, rows)
            ]
            window = []
    return job
