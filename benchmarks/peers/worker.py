"""What every worker script shares: it reads a plan, times each task of it, and writes what it saw.

A worker is one rank of one peer. Its script makes an :class:`Adapter`, the peer as the benchmarks see it,
and calls :func:`main`. The plan is a JSON file, the same for all ranks:

    {"pace": {"budget_s": 0.3, "least": 5, "most": 200, "warmup": 3}, "bind": true, "tasks": [
        {"kind": "collective", "collective": "allreduce", "bytes": 1048576},
        {"kind": "step", "mode": "per-tensor"}]}

Every rank writes OUTPUT/rank-N.jsonl: one line per task with its own times in nanoseconds. The reader takes,
for every iteration, the slowest rank (see ``measure.py``). With ``bind`` each rank stays on a core of its
own, where there are as many.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any, Callable, Dict, List, Optional

import numpy as np

Array = Any  # numpy.ndarray; the peers differ in which versions of numpy they take
Run = Callable[[], Any]

ITEM = np.dtype(np.float32).itemsize


@dataclass
class Operation:
    """A collective on buffers that stay where they are.

    Attributes:
        source: what this rank puts in.
        run: the call to time.
        result: what this rank gets; asked for after ``run``.
    """

    source: Array
    run: Run
    result: Callable[[], Array]


class Adapter(ABC):
    """One peer.

    Attributes:
        averages: whether `reducer` divides by the number of ranks itself. If not, it adds up.
    """

    rank: int
    size: int
    averages = False

    @abstractmethod
    def barrier(self) -> None:
        """Return once all ranks are here."""

    @abstractmethod
    def operation(self, collective: str, count: int) -> Operation:
        """A collective over float32 buffers; the larger of its two buffers has ``count`` elements."""

    @abstractmethod
    def reducer(self, array: Array) -> Run:
        """The call that replaces an array by its average (or sum, see `averages`) over all ranks."""

    def starter(self, array: Array) -> Optional[Callable[[], Run]]:
        """The same without waiting: a call that starts it and returns the call that waits. None: has none."""
        return None

    def array(self, shape: Any) -> Array:
        """A new float32 array that is to be reduced, of ones."""
        return np.ones(shape, np.float32)

    def grouped(self, arrays: List[Array]) -> Run:
        """The call that does what `reducer` does, for all of these arrays at once."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Leave the job."""


def count_of(collective: str, size_bytes: int, ranks: int) -> int:
    """Return how many float32 elements a buffer of that size has.

    One that is divided has one per rank at least.
    """
    count = max(1, size_bytes // ITEM)
    if collective in ("allgather", "reducescatter", "alltoall"):
        count = max(1, round(count / ranks)) * ranks
    return count


def _fill(operation: Operation, collective: str, rank: int, size: int) -> None:
    operation.source[:] = rank + 1
    if collective == "alltoall":
        for to, chunk in enumerate(np.split(operation.source, size)):
            chunk[:] = rank * size + to


def _check(operation: Operation, collective: str, rank: int, size: int) -> None:
    """Every peer's result is looked at once before it is timed: a fast wrong answer is worth nothing."""
    result = operation.result()
    if collective in ("allreduce", "reducescatter"):
        expected: Any = np.float32(size * (size + 1) / 2)
    elif collective == "broadcast":
        expected = np.float32(1)
    else:
        each = np.arange(size, dtype=np.float32)
        values = each + 1 if collective == "allgather" else each * size + rank
        expected = np.repeat(values, result.size // size)
    if not np.array_equal(result, np.broadcast_to(expected, result.shape)):
        raise SystemExit(f"rank {rank}: wrong result of {collective} with {result.size} elements: {result}")


class Clock:
    """Times a call as often as the pace allows, with a barrier before each."""

    def __init__(self, adapter: Adapter, budget_s: float, least: int, most: int, warmup: int) -> None:
        self._adapter = adapter
        self._budget_s = budget_s
        self._least = least
        self._most = most
        self._warmup = warmup
        self._word = adapter.operation("broadcast", 1)

    def __call__(self, run: Run) -> List[int]:
        """Times in nanoseconds, without the warm-up."""
        warm = self._repeat(run, self._warmup)  # as often on every rank, or they would wait for each other
        # Twice, because the barrier takes its time too.
        return self._repeat(run, self._agreed(self._budget_s * 1e9 / (2 * median(warm))))

    def _agreed(self, wish: float) -> int:
        """Rank 0 decides for all how often."""
        self._word.source[:] = min(max(wish, self._least), self._most)
        self._word.run()
        return int(self._word.result()[0])

    def _repeat(self, run: Run, times: int) -> List[int]:
        barrier, clock, taken = self._adapter.barrier, perf_counter_ns, []
        gc.collect()
        gc.disable()
        for _ in range(times):
            barrier()
            started = clock()
            run()
            taken.append(clock() - started)
        gc.enable()
        return taken


def _time_collective(adapter: Adapter, clock: Clock, task: Dict[str, Any]) -> List[int]:
    collective = task["collective"]
    operation = adapter.operation(collective, count_of(collective, task["bytes"], adapter.size))
    _fill(operation, collective, adapter.rank, adapter.size)
    operation.run()
    _check(operation, collective, adapter.rank, adapter.size)
    operation.source.fill(0)  # so that nothing overflows, however often it is summed
    return clock(operation.run)


def _time_step(adapter: Adapter, clock: Clock, task: Dict[str, Any]) -> List[int]:
    from peers.steps import prepare

    run, gradients = prepare(adapter, task["mode"])
    for gradient in gradients:
        gradient.fill(adapter.rank + 1)
    run()
    for gradient in gradients:
        if not np.all(gradient == np.float32((adapter.size + 1) / 2)):
            raise SystemExit(f"rank {adapter.rank}: wrong average in mode {task['mode']}: {gradient}")
        gradient.fill(0)
    return clock(run)


KINDS = {"collective": _time_collective, "step": _time_step}


def bind(rank: int, ranks: int) -> None:
    """Keep all threads of this rank on a core of its own, if there are as many cores as ranks.

    Open MPI does so by itself. Without it a system may put both ranks on one core, to save the other.
    """
    cores = sorted(os.sched_getaffinity(0))
    if ranks <= len(cores):
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {cores[rank]})


def main(make: Callable[[], Adapter]) -> None:
    """Run as a rank: join, work through the plan, write the times, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    plan = json.loads(args.plan.read_text())
    adapter = make()
    if adapter.size != plan["np"]:
        raise SystemExit(f"this should be one of {plan['np']} ranks, but the peer says {adapter.size}")
    if plan.get("bind"):
        bind(adapter.rank, adapter.size)
    with (args.output / f"rank-{adapter.rank}.jsonl").open("w") as out:
        clock = Clock(adapter, **plan["pace"])
        for task in plan["tasks"]:
            print(json.dumps(KINDS[task["kind"]](adapter, clock, task)), file=out, flush=True)
    adapter.barrier()
    adapter.close()
    sys.stdout.flush()
