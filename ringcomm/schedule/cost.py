"""What a collective would cost: its schedules replayed on a model of machines and links.

The model is the usual alpha-beta-gamma one (latency, seconds per byte, seconds per added byte;
R. Hockney 1994; Thakur, Rabenseifner and Gropp 2005), with one port per direction and rank, as on
a switch: a rank sends to one peer at a time and receives from one at a time, and does both at the
same time. Because steps follow each other by position, a step is not one point in time but a line:
when its first segment is done, and when its last. What follows it may start at the first, and
cannot end before the last. With that, the pipeline of a chain costs what a pipeline costs.

It is a model. It ranks algorithms; it does not predict a stopwatch.
"""

from __future__ import annotations

import heapq
from typing import Dict, List, NamedTuple, Sequence, Tuple

from .steps import DATA, Recv, Send, Step
from .streams import Schedules, Streams, fail, pair_steps

_Node = Tuple[int, int]  # rank, index of the step
_Before = List[List[List[int]]]  # per rank and step: the earlier steps that it waits for


class CostModel(NamedTuple):
    """The machine, in seconds and bytes."""

    latency_s: float
    """alpha: from the first byte sent to the first byte received."""

    byte_s: float
    """beta: per byte through a rank's port, each direction on its own."""

    reduce_byte_s: float
    """gamma: per byte of an operand that is folded into another."""

    message_s: float = 0.0
    """What each message occupies the ports on both sides with, whatever its length."""

    segment_bytes: int = 262144
    """How much a rank collects before it folds or passes on."""


class _Line(NamedTuple):
    """When a step has done its first segment and when all of it."""

    first_s: float
    last_s: float


def predict(schedules: Schedules, item_bytes: int, model: CostModel) -> float:
    """Seconds from a common start until the last rank has finished its last step.

    Args:
        schedules: one per rank.
        item_bytes: bytes per element.
        model: the machine.

    Raises:
        BrokenInvariantError: the schedules do not fit together.

    >>> from . import ring
    >>> schedules = [ring.all_reduce(rank, 2, (0, 500, 1000)) for rank in range(2)]
    >>> predict(schedules, 8, CostModel(latency_s=1.0, byte_s=0.001, reduce_byte_s=0.0))
    10.0
    """
    streams = pair_steps(schedules)
    before = [[_waits_for(steps, index) for index in range(len(steps))] for steps in schedules]
    clock = _Clock(schedules, streams, before, item_bytes, model)
    followers, blockers = _graph(streams, before)
    ready: List[Tuple[float, int, int]] = [(0.0, i, r) for (r, i), n in blockers.items() if n == 0]
    heapq.heapify(ready)
    while ready:
        _, index, rank = heapq.heappop(ready)
        clock.price((rank, index))
        for node in followers.get((rank, index), ()):
            blockers[node] -= 1
            if blockers[node] == 0:
                heapq.heappush(ready, (clock.ready_s(node), node[1], node[0]))
    if len(clock.lines) < len(blockers):
        fail(f"deadlock: {len(blockers) - len(clock.lines)} steps wait for each other")
    return max((line.last_s for line in clock.lines.values()), default=0.0)


class _Clock:
    """The time so far: what each step took, and until when ports and processors are taken."""

    def __init__(
        self, schedules: Schedules, streams: Streams, before: _Before, item_bytes: int, model: CostModel
    ) -> None:
        size = len(schedules)
        self._schedules = schedules
        self._item_bytes = item_bytes
        self._model = model
        self._before = before
        self._target = {(p.source, p.send_index): p.target for pairs in streams.values() for p in pairs}
        self._sources: Dict[_Node, List[_Node]] = {}
        for pairs in streams.values():
            for pair in pairs:
                node = (pair.target, pair.recv_index)
                self._sources.setdefault(node, []).append((pair.source, pair.send_index))
        self._out_free = [0.0] * size
        self._in_free = [0.0] * size
        self._processor_free = [0.0] * size
        self.lines: Dict[_Node, _Line] = {}

    def ready_s(self, node: _Node) -> float:
        """When a step may begin, for all its rank cares."""
        return self._own_wait(node).first_s

    def price(self, node: _Node) -> None:
        """Give a step its line; all that it waits for has one."""
        step = self._schedules[node[0]][node[1]]
        length_bytes = (step.stop - step.start) * self._item_bytes
        if isinstance(step, Send):
            self.lines[node] = self._sent(node, length_bytes)
        else:
            self.lines[node] = self._received(node, step, length_bytes)

    def _own_wait(self, node: _Node) -> _Line:
        """When the steps before it in its own rank have done what it needs: first and last element."""
        rank, index = node
        step = self._schedules[rank][index]
        first_s = last_s = 0.0
        for before in self._before[rank][index]:
            line, other = self.lines[rank, before], self._schedules[rank][before]
            first_s = max(first_s, _when(line, other, max(step.start, other.start)))
            last_s = max(last_s, _when(line, other, min(step.stop, other.stop)))
        return _Line(first_s, last_s)

    def _sent(self, node: _Node, length_bytes: int) -> _Line:
        source, target = node[0], self._target[node]
        model, wait = self._model, self._own_wait(node)
        begin_s = max(wait.first_s, self._out_free[source], self._in_free[target] - model.latency_s)
        busy_s = model.message_s + length_bytes * model.byte_s
        segment_s = min(length_bytes, model.segment_bytes) * model.byte_s
        self._out_free[source] = begin_s + busy_s
        self._in_free[target] = begin_s + model.latency_s + busy_s
        return _Line(begin_s + model.message_s + segment_s, max(begin_s + busy_s, wait.last_s + segment_s))

    def _received(self, node: _Node, recv: Recv, length_bytes: int) -> _Line:
        model, rank = self._model, node[0]
        arrivals = [self.lines[source] for source in self._sources[node]]
        first_s = max(line.first_s for line in arrivals) + model.latency_s
        last_s = max(line.last_s for line in arrivals) + model.latency_s
        wait = self._own_wait(node)
        if not recv.fold:
            return _Line(max(first_s, wait.first_s), max(last_s, wait.last_s))
        work_s = len(recv.peers) * length_bytes * model.reduce_byte_s
        segment_s = len(recv.peers) * min(length_bytes, model.segment_bytes) * model.reduce_byte_s
        begin_s = max(first_s, wait.first_s, self._processor_free[rank])
        self._processor_free[rank] = begin_s + work_s
        return _Line(begin_s + segment_s, max(begin_s + work_s, max(last_s, wait.last_s) + segment_s))


def _waits_for(steps: Sequence[Step], index: int) -> List[int]:
    """The earlier steps of the same rank that a step has to follow, nearest first.

    Two sends of the same elements do not disturb each other, and what lies before a ``Recv`` of
    all its elements has been waited for by that.
    """
    step = steps[index]
    buffer = step.buffer if isinstance(step, Send) else DATA
    found: List[int] = []
    for before in range(index - 1, -1, -1):
        other = steps[before]
        writes = isinstance(other, Recv)
        if isinstance(other, Send) and (isinstance(step, Send) or other.buffer != buffer):
            continue
        if writes and buffer != DATA:
            continue
        if max(step.start, other.start) < min(step.stop, other.stop):
            found.append(before)
            if writes and other.start <= step.start and step.stop <= other.stop:
                break
    return found


def _graph(streams: Streams, before: _Before) -> Tuple[Dict[_Node, List[_Node]], Dict[_Node, int]]:
    """Which steps may be priced after which: followers of each, and how many each waits for."""
    followers: Dict[_Node, List[_Node]] = {}
    blockers = {(rank, i): 0 for rank, steps in enumerate(before) for i in range(len(steps))}

    def follow(earlier: _Node, later: _Node) -> None:
        followers.setdefault(earlier, []).append(later)
        blockers[later] += 1

    for rank, steps in enumerate(before):
        for index, earlier_ones in enumerate(steps):
            for earlier_one in earlier_ones:
                follow((rank, earlier_one), (rank, index))
    for pairs in streams.values():
        for pair in pairs:
            follow((pair.source, pair.send_index), (pair.target, pair.recv_index))
        for earlier, later in zip(pairs, pairs[1:]):
            follow((earlier.source, earlier.send_index), (later.source, later.send_index))
    return followers, blockers


def _when(line: _Line, step: Step, position: int) -> float:
    """When a step has reached a position, on the line from its first to its last element."""
    share = (position - step.start) / (step.stop - step.start)
    return line.first_s + (line.last_s - line.first_s) * share
