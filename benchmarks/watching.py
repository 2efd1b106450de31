"""The cost of counting calls and of answering ringrun's questions for numbers.

    ringrun -np 2 benchmarks/watching.py

Counting is part of every call, so it is measured by itself, and compared with the shortest all-reduce.
"""

from __future__ import annotations

import json
import time
from typing import Callable

import numpy as np

import ringcomm as rc
from ringcomm.clock import StepClock, Stopwatch

ROUNDS, CALLS = 7, 2000
PLANS = 200


class Plan:
    """The counters of :class:`ringcomm.collective.plans.Plan`."""

    __slots__ = ("runs", "took_s")

    def __init__(self) -> None:
        self.runs = 0
        self.took_s = 0.0


def seconds(work: Callable[[], object], calls: int) -> float:
    """The processor time of one call, from the best of several rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began_s = time.process_time()
        for _ in range(calls):
            work()
        best = min(best, (time.process_time() - began_s) / calls)
    return best


def main() -> None:
    """Measure on all ranks, and print on rank 0."""
    rc.init()
    small, plan, watch, steps = np.ones(2, np.float32), Plan(), Stopwatch(), StepClock()
    began_s = watch.start()
    watch.stop(began_s)

    def count() -> None:
        plan.runs += 1
        plan.took_s += watch.last_s - began_s

    allreduce_s = seconds(lambda: rc.allreduce_(small), CALLS)
    empty_s = seconds(lambda: None, CALLS)
    count_s = seconds(count, CALLS) - empty_s
    name_s = seconds(lambda: steps.add("gradient"), CALLS) - empty_s
    for size in range(1, PLANS):
        rc.allreduce(np.ones(size, np.float32))
    answer_s = seconds(lambda: json.dumps(rc.stats()), 20)
    if rc.rank() == 0:
        print(f"all-reduce of 8 bytes: {1e6 * allreduce_s:.1f} us of processor time")
        print(f"counting a call: {1e9 * count_s:.0f} ns, {100 * count_s / allreduce_s:.2f} % of it")
        print(f"counting an operation by name: {1e9 * name_s:.0f} ns")
        print(f"an answer after {PLANS} different calls: {1e3 * answer_s:.2f} ms, once a second")
    rc.barrier()


if __name__ == "__main__":
    main()
