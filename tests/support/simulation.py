"""A whole collective in one thread, its ranks advanced in a random but repeatable order.

The executor is the real one. Everything around it is simulated: which rank runs when, how
much a link moves at a time (:mod:`ringcomm.testing.faulty`), and which links break. A rank sleeps
exactly as it would in production: it runs again only once one of the links that it waits for can move.
So a rank that waits for the wrong link hangs the simulation, and a seed reproduces it.
"""

from __future__ import annotations

import random
from typing import Any, Callable, List, Optional, Sequence, Union

import numpy as np

from ringcomm.collective.coded import CodedPlans
from ringcomm.collective.execute import Part, SegmentPool
from ringcomm.collective.reduce import Kernel
from ringcomm.collective.short import make_execution
from ringcomm.dtypes import code_of
from ringcomm.errors import RingcommError
from ringcomm.ops import Collective, ReduceOp
from ringcomm.schedule.select import Selector
from ringcomm.schedule.steps import Step
from ringcomm.testing.faulty import Faults, FaultyFabric, Turns
from ringcomm.transport.memory import MemoryFabric, memory_fabrics
from ringcomm.wire.frames import NO_OP, NO_ROOT, Header


class Hang(AssertionError):
    """No rank can move any more, or one is woken again and again for nothing. The text has the seed."""


def simulate(
    schedules: Sequence[Sequence[Step]],
    data: Sequence[np.ndarray[Any, Any]],
    *,
    seed: int,
    kernel: Optional[Callable[[], Kernel]] = None,
    sources: Optional[Sequence[np.ndarray[Any, Any]]] = None,
    segment_bytes: Union[int, Sequence[int]] = 64,
    capacity_bytes: int = 1 << 20,
    faults: Optional[Faults] = None,
) -> List[Optional[RingcommError]]:
    """Run one schedule per rank to its end, in ``data`` (flat arrays); return the error of each rank, or
    None.

    A rank that has finished or failed closes its links like a process that ends. `seed` determines the order
    in which ranks run; `kernel` makes each rank's kernel, for schedules that fold; `sources` are inputs, for
    schedules that have one. Messages that fit in `segment_bytes` are short
    (:mod:`ringcomm.collective.short`); `capacity_bytes` is in flight on a link. Hang if the job never ends.
    """
    turns = Turns()
    fabrics: List[Union[MemoryFabric, FaultyFabric]] = [
        fabric if faults is None else FaultyFabric(fabric, faults, turns)
        for fabric in memory_fabrics(len(schedules), capacity_bytes)
    ]
    header = Header(0, 1, Collective.ALLREDUCE, NO_OP, code_of(data[0].dtype), NO_ROOT, 0, 0)
    sizes = [segment_bytes] * len(schedules) if isinstance(segment_bytes, int) else segment_bytes
    executions = [
        make_execution(
            schedules[rank],
            fabric,
            header,
            data[rank].dtype,
            SegmentPool(sizes[rank]),
            kernel() if kernel is not None else None,
        )
        for rank, fabric in enumerate(fabrics)
    ]
    for rank, execution in enumerate(executions):
        execution.arm(1, data[rank], sources[rank] if sources is not None else None)
    return _Simulation(executions, fabrics, turns, seed).run()


def simulate_coded(
    codec: int,
    data: Sequence[np.ndarray[Any, Any]],
    *,
    seed: int,
    op: ReduceOp = ReduceOp.SUM,
    residuals: Optional[Sequence[np.ndarray[Any, Any]]] = None,
    capacity_bytes: int = 1 << 20,
    faults: Optional[Faults] = None,
    host_index: Optional[Sequence[int]] = None,
) -> List[Optional[RingcommError]]:
    """Run an all-reduce with a codec (place in :data:`ringcomm.ops.CODECS`) to its end, in ``data``, flat
    float32 arrays; return as :func:`simulate` does. `residuals` are for error feedback; by default each rank
    has its own host.
    """
    size, count = len(data), data[0].size
    turns = Turns()
    fabrics: List[Union[MemoryFabric, FaultyFabric]] = [
        fabric if faults is None else FaultyFabric(fabric, faults, turns)
        for fabric in memory_fabrics(size, capacity_bytes)
    ]
    header = Header(0, 1, Collective.ALLREDUCE, op, code_of(data[0].dtype), NO_ROOT, count, 0, codec=codec)
    executions = []
    for rank, fabric in enumerate(fabrics):
        kernel = Kernel(op, data[rank].dtype, size)
        selector = Selector(rank, size, host_index=host_index)
        execution = CodedPlans(fabric, selector).execution(header, count, kernel)
        execution.arm(1, data[rank], residuals[rank] if residuals is not None else None)
        executions.append(execution)
    with np.errstate(all="ignore"):
        return _Simulation(executions, fabrics, turns, seed).run()


class _Simulation:
    """Ranks that run one at a time."""

    def __init__(
        self,
        executions: Sequence[Part],
        fabrics: Sequence[Union[MemoryFabric, FaultyFabric]],
        turns: Turns,
        seed: int,
    ) -> None:
        self._executions = executions
        self._fabrics = fabrics
        self._turns = turns
        self._seed = seed
        self._random = random.Random(seed)
        self._errors: List[Optional[RingcommError]] = [None] * len(executions)
        self._alive = set(range(len(executions)))
        self._started: set[int] = set()
        self._awake = set(self._alive)

    def run(self) -> List[Optional[RingcommError]]:
        """Until every rank has ended; their errors."""
        while self._alive:
            if not self._awake:
                raise Hang(f"seed {self._seed}: ranks {sorted(self._alive)} wait for ever. {self._state()}")
            rank = self._random.choice(sorted(self._awake))
            self._turns.now += 1
            if rank in self._started and not self._can_move(rank):
                self._awake.discard(rank)
            elif self._advance(rank):
                self._awake = set(self._alive)
        return self._errors

    def _advance(self, rank: int) -> bool:
        """Let one rank run; whether that may have changed anything for the others."""
        execution, fabric = self._executions[rank], self._fabrics[rank]
        woken = rank in self._started
        self._started.add(rank)
        before = execution.moved_bytes
        self._held_back(rank)  # forget what held it back before
        try:
            done = execution.advance()
        except RingcommError as error:
            self._errors[rank] = error
            done = True
        if done:
            self._alive.discard(rank)
            fabric.close()
            return True
        if execution.moved_bytes != before:
            return True
        # A rank that a fault holds back stays awake, and tries again.
        if woken and not self._held_back(rank):
            raise Hang(f"seed {self._seed}: rank {rank} was woken, but does nothing. {self._state()}")
        return False

    def _held_back(self, rank: int) -> bool:
        fabric = self._fabrics[rank]
        return isinstance(fabric, FaultyFabric) and fabric.take_held_back()

    def _can_move(self, rank: int) -> bool:
        """Return whether a link that the rank waits for can move: what ``poll`` would say."""
        reading, writing = self._executions[rank].waiting_for()
        return any(link.readable() for link in reading) or any(link.writable() for link in writing)  # type: ignore[attr-defined]

    def _state(self) -> str:
        lines = []
        for rank in sorted(self._alive):
            reading, writing = self._executions[rank].waiting_for()
            lines.append(
                f"rank {rank} moved {self._executions[rank].moved_bytes} bytes, reads from "
                f"{[link.peer for link in reading]}, writes to {[link.peer for link in writing]}"
            )
        return "; ".join(lines)
