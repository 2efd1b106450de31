"""The cost of a collective: its schedules replayed on a model of machines and links.

The model is the usual alpha-beta-gamma one (latency, seconds per byte, seconds per added byte;
R. Hockney 1994; Thakur, Rabenseifner and Gropp 2005), with one port per direction and rank, as on
a switch: the messages of a rank to several peers go one after the other, and so do those that it receives,
both at the same time. Ranks of one host share the ports to the other hosts. Because steps follow each
other by position, a step is not one point in time but a line: when its first segment is done, and when
its last. The next step may start at the first, and cannot end before the last. With that, the
pipeline of a chain costs what a pipeline costs.

It is a model. It ranks algorithms; it does not predict a stopwatch.
"""

from __future__ import annotations

import heapq
from math import frexp, ldexp
from typing import Dict, FrozenSet, List, NamedTuple, Sequence, Tuple

from ..errors import BrokenInvariantError
from .steps import Dependencies, Recv, Send, Step

Schedules = Sequence[Sequence[Step]]
"""One schedule per rank."""

Streams = Dict[Tuple[int, int], List["Pairing"]]
"""Per (sender, receiver): the pairings between them, in order."""

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
    """Time of each message in the ports of both ranks, whatever its length."""

    segment_bytes: int = 262144
    """Bytes that a rank collects before it folds them or passes them on."""

    hosts: Tuple[int, ...] = ()
    """For each rank the number of its host, if there are several. Then ``latency_s`` and ``byte_s`` are
    those between ranks of one host, and the next two those between hosts."""

    wire_latency_s: float = 0.0
    """alpha between ranks of different hosts."""

    wire_byte_s: Tuple[float, ...] = ()
    """For each host: beta of its network interface, which its ranks share; each direction on its own."""

    relayed: FrozenSet[Tuple[int, int]] = frozenset()
    """Pairs of hosts, the lower number first, whose links go through one relay and share its interface."""

    @property
    def relay_byte_s(self) -> float:
        """beta of the relay's interface: a pair that swaps bytes has shown half of what it carries."""
        ends = [host for pair in self.relayed for host in pair]
        return min((self.wire_byte_s[host] for host in ends), default=0.0) / 2


class Pairing(NamedTuple):
    """A ``Send`` and the ``Recv`` that takes its elements; indices into the two ranks' lists."""

    source: int
    send_index: int
    send: Send
    target: int
    recv_index: int
    recv: Recv


def pair_steps(schedules: Schedules) -> Streams:
    """Match sends with receives: per (sender, receiver), in the order of the stream between them."""
    sends: Dict[Tuple[int, int], List[Tuple[int, Send]]] = {}
    recvs: Dict[Tuple[int, int], List[Tuple[int, Recv]]] = {}
    for rank, steps in enumerate(schedules):
        for index, step in enumerate(steps):
            if isinstance(step, Send):
                sends.setdefault((rank, step.peer), []).append((index, step))
            else:
                for peer in step.peers:
                    recvs.setdefault((peer, rank), []).append((index, step))
    return {
        (source, target): [
            Pairing(source, i, send, target, j, recv)
            for (i, send), (j, recv) in zip(sends[source, target], recvs[source, target])
        ]
        for source, target in sorted(sends)
    }


class _Line(NamedTuple):
    """The times when a step has done its first segment, and all of it."""

    first_s: float
    last_s: float


def predict(schedules: Schedules, item_bytes: int, model: CostModel) -> float:
    """Return the seconds from a common start until the last rank has finished its last step. Raises
    BrokenInvariantError if steps wait for each other.

    >>> from . import ring
    >>> schedules = [ring.all_reduce(rank, 2, (0, 500, 1000)) for rank in range(2)]
    >>> predict(schedules, 8, CostModel(latency_s=1.0, byte_s=0.001, reduce_byte_s=0.0))
    10.0
    """
    streams = pair_steps(schedules)
    before = [list(map(Dependencies(steps).of, range(len(steps)), steps)) for steps in schedules]
    clock = _Clock(schedules, streams, before, item_bytes, model)
    followers, blockers = _graph(streams, before)
    ready: List[Tuple[float, int, int]] = [(0.0, i, r) for (r, i), n in blockers.items() if n == 0]
    heapq.heapify(ready)
    while ready:
        asked_s, index, rank = heapq.heappop(ready)
        begin_s = clock.begin_s((rank, index))
        if begin_s > asked_s:
            # Its ports have been taken since: a step that can begin earlier goes first.
            heapq.heappush(ready, (begin_s, index, rank))
            continue
        clock.price((rank, index))
        for node in followers.get((rank, index), ()):
            blockers[node] -= 1
            if blockers[node] == 0:
                heapq.heappush(ready, (clock.begin_s(node), node[1], node[0]))
    if len(clock.lines) < len(blockers):
        waiting = len(blockers) - len(clock.lines)
        raise BrokenInvariantError(f"schedule is wrong: {waiting} steps wait for each other")
    return max((line.last_s for line in clock.lines.values()), default=0.0)


class _Clock:
    """The time so far: of each step, and until when ports and processors are busy."""

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
        self._alone = not model.hosts
        self._out_free: Dict[int, float] = {}
        self._in_free: Dict[int, float] = {}
        self._processor_free = [0.0] * size
        self.lines: Dict[_Node, _Line] = {}

    def begin_s(self, node: _Node) -> float:
        """Return when a step may begin, as far as its own rank and the ports are concerned, to 1 %.

        Steps are served in that order. Greater precision would be wrong: of chunks that differ by an element,
        those of one rank would all come first, and keep ports from those of the others.
        """
        begin_s = self._own_wait(node).first_s
        if isinstance(self._schedules[node[0]][node[1]], Send):
            source, target = node[0], self._target[node]
            latency_s = self.latency_s(source, target)
            for port, _, _ in self._ports(source, target):
                begin_s = max(begin_s, self._out_free.get(port, 0.0))
            for port, _, _ in self._ports(target, source):
                begin_s = max(begin_s, self._in_free.get(port, 0.0) - latency_s)
        mantissa, exponent = frexp(begin_s)
        return ldexp(round(mantissa * 128), exponent)

    def price(self, node: _Node) -> None:
        """Give a step its line; all steps that it waits for have one."""
        step = self._schedules[node[0]][node[1]]
        length_bytes = (step.stop - step.start) * self._item_bytes
        if isinstance(step, Send):
            self.lines[node] = self._sent(node, length_bytes)
        else:
            self.lines[node] = self._received(node, step, length_bytes)

    def _own_wait(self, node: _Node) -> _Line:
        """Return when the earlier steps of its rank have provided its first and its last element."""
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
        model, wait, latency_s = self._model, self._own_wait(node), self.latency_s(source, target)
        begin_s, end_s, pace_s = wait.first_s, 0.0, 0.0
        # Out through the sender's ports, in through the receiver's. Each serves messages in
        # that order; while a port is busy, the port at the other end can serve other ranks.
        for free, lag_s, ports in (
            (self._out_free, 0.0, self._ports(source, target)),
            (self._in_free, latency_s, self._ports(target, source)),
        ):
            for port, byte_s, message_s in ports:
                begin_s = max(begin_s, free.get(port, 0.0) - lag_s)
                busy_s = message_s + length_bytes * byte_s
                free[port] = begin_s + lag_s + busy_s
                end_s, pace_s = max(end_s, begin_s + busy_s), max(pace_s, byte_s)
        segment_s = min(length_bytes, model.segment_bytes) * pace_s
        return _Line(begin_s + model.message_s + segment_s, max(end_s, wait.last_s + segment_s))

    def _ports(self, rank: int, peer: int) -> Tuple[Tuple[int, float, float], ...]:
        """Return the ports that a message occupies at this rank, with seconds per byte and per message."""
        model = self._model
        if self._alone or model.hosts[rank] == model.hosts[peer]:
            return ((rank, model.byte_s, model.message_s),)
        host, other = model.hosts[rank], model.hosts[peer]
        ports = ((rank, 0.0, model.message_s), (-1 - host, model.wire_byte_s[host], 0.0))
        if (min(host, other), max(host, other)) in model.relayed:
            return (*ports, (-1 - len(model.wire_byte_s), model.relay_byte_s, 0.0))
        return ports

    def latency_s(self, source: int, target: int) -> float:
        """Return alpha between two ranks."""
        model = self._model
        if self._alone or model.hosts[source] == model.hosts[target]:
            return model.latency_s
        return model.wire_latency_s

    def _received(self, node: _Node, recv: Recv, length_bytes: int) -> _Line:
        model, rank = self._model, node[0]
        arrivals = [(self.lines[source], self.latency_s(source[0], rank)) for source in self._sources[node]]
        first_s = max(line.first_s + latency_s for line, latency_s in arrivals)
        last_s = max(line.last_s + latency_s for line, latency_s in arrivals)
        wait = self._own_wait(node)
        ready = _Line(max(first_s, wait.first_s), max(last_s, wait.last_s))
        if recv.fold:
            return self._worked(rank, ready, length_bytes, len(recv.peers) * model.reduce_byte_s)
        return ready

    def _worked(self, rank: int, ready: _Line, length_bytes: int, byte_s: float) -> _Line:
        """Return the line of work on elements that are ready on a line, after the rank's earlier work."""
        segment_s = min(length_bytes, self._model.segment_bytes) * byte_s
        begin_s = max(ready.first_s, self._processor_free[rank])
        self._processor_free[rank] = end_s = begin_s + length_bytes * byte_s
        return _Line(begin_s + segment_s, max(end_s, ready.last_s + segment_s))


def _graph(streams: Streams, before: _Before) -> Tuple[Dict[_Node, List[_Node]], Dict[_Node, int]]:
    """Return the order in which steps may be priced: followers of each, and how many each waits for."""
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
    """Return when a step has reached a position, on the line from its first to its last element."""
    share = (position - step.start) / (step.stop - step.start)
    return line.first_s + (line.last_s - line.first_s) * share
