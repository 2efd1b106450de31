"""The cost of a collective on a model of machines and links, and how unequal links share the work.

The model is the usual alpha-beta-gamma one (latency, seconds per byte, seconds per added byte;
R. Hockney 1994; Thakur, Rabenseifner and Gropp 2005). It ranks algorithms; it does not predict a stopwatch.

**Calibration** (:func:`model_of`). Every rank measures its links (:mod:`ringcomm.collective.measure`), all
ranks gather all numbers, and each derives the same model from them: with additions, multiplications and
divisions of doubles only, which give the same bits on every processor. Numbers that only serve to compare
algorithms are rounded to a few steps per power of two, so that the next run of the same job on the same
machines makes the same choice. The speeds of interfaces, which decide how unequal chunks are, are only made
equal when they are almost equal.

**Replay** (:func:`predict`). Schedules are replayed with one port per direction and rank, as on a switch: the
messages of a rank to several peers go one after the other, and so do those that it receives, both at the same
time. Ranks of one host share the ports to the other hosts. Because steps follow each other by position, a
step is not one point in time but a line: when its first segment is done, and when its last. The next step may
start at the first, and cannot end before the last. With that, the pipeline of a chain costs what a pipeline
costs.

**Closed form** (:func:`best_allreduce`). A replay takes a second for a ring of 64 ranks. Where ranks differ
only by their hosts' interfaces, the time of an all-reduce follows from a few sums: the bytes that each
interface sends and each processor adds, and how often one rank waits for another. Tests compare both.
Interfaces are full duplex, the switch has no limit, and streams that share an interface share it fairly. The
choice of a compression and the advice which machines to use take all times from here.

**Shares** (:func:`interface_shares`). In a direct (or hierarchical) all-reduce, the rank that owns the share
f of n elements receives and sends ``n (1 + (p - 2) f)`` of them: its own part of all other ranks' shares out
and the results back in, or the other way round, and p - 1 times its own share. So a rank with a slow link
should own little. The least time is reached by water-filling: every rank gets as much as its link can carry
in the same time T, ranks whose links are busy without a share get none, and T is the smallest for which the
shares add up to one::

    f_i = max(0, (T B_i / n - 1) / (p - 2))        sum f_i = 1        T >= n / min B

With several ranks per host, those that share an interface count together: with m of them and the share F
it carries ``n (m + F (p - 2 m))`` elements each way.

Everything is plain additions, multiplications and divisions of doubles, so all ranks compute the same.

Sources: the load model is that of hivemind's averager (M. Ryabinin et al., arXiv:2103.03239), which solves
it as a linear program; the bound ``max(n / min B, 2 (p - 1) n / sum B)`` follows from adding up all links.
"""

from __future__ import annotations

import heapq
from math import frexp, ldexp
from typing import Collection, Dict, FrozenSet, List, NamedTuple, Optional, Sequence, Tuple

from ..errors import BrokenInvariantError
from .direct import MAX_RANKS
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


# -- calibration --------------------------------------------------------------------------------------

MESSAGE_S = 4e-6
"""Processor time of a message at both ends: two system calls and the executor's bookkeeping."""
LOCAL_LATENCY_S, LOCAL_BYTE_S, REDUCE_BYTE_S = 15e-6, 0.25e-9, 0.08e-9
"""Between ranks of one host, for hosts without a measurement: with one rank, or with too many."""
WIRE_LATENCY_S, WIRE_BYTE_S = 50e-6, 8e-9
QUICK_BYTE_S = 1.6e-9
"""Interfaces of 5 Gbit/s and more count as equal: there the processors and their load are the limit."""


class Calibration(NamedTuple):
    """The measurements of one rank, in seconds and seconds per byte; 0: not measured."""

    reduce_byte_s: float = 0.0
    local_latency_s: float = 0.0
    local_byte_s: float = 0.0
    wire_latency_s: float = 0.0
    wire_byte_s: float = 0.0
    """Of its host's interface, each way: the best that was measured with any other host."""


def leaders(host_index: Sequence[int]) -> Tuple[int, ...]:
    """Return the first rank of every host, which measures for it, in the order of the hosts' numbers.

    >>> leaders([0, 0, 1, 1])
    (0, 2)
    """
    first: Dict[int, int] = {}
    for rank, host in enumerate(host_index):
        first.setdefault(host, rank)
    return tuple(first[host] for host in sorted(first))


def model_of(
    calibrations: Sequence[Calibration], host_index: Sequence[int], relayed: Collection[Tuple[int, int]] = ()
) -> CostModel:
    """Return the cost model of a job from the calibrations and host numbers of its ranks, in rank order.
    ``relayed``: pairs of hosts whose links share the wire of the relay.
    """
    numbers = {host: number for number, host in enumerate(sorted(set(host_index)))}
    hosts = tuple(numbers[host] for host in host_index)
    local_latency_s = coarse(_median([item.local_latency_s for item in calibrations], LOCAL_LATENCY_S))
    local_byte_s = coarse(_median([item.local_byte_s for item in calibrations], LOCAL_BYTE_S))
    reduce_byte_s = coarse(_median([item.reduce_byte_s for item in calibrations], REDUCE_BYTE_S))
    if len(numbers) == 1:
        return CostModel(local_latency_s, local_byte_s, reduce_byte_s, MESSAGE_S)
    wires = [calibrations[rank].wire_byte_s or WIRE_BYTE_S for rank in leaders(host_index)]
    speeds = even_classes([1.0 / max(byte_s, QUICK_BYTE_S) for byte_s in wires])
    return CostModel(
        local_latency_s,
        local_byte_s,
        reduce_byte_s,
        MESSAGE_S,
        hosts=hosts,
        wire_latency_s=coarse(_median([item.wire_latency_s for item in calibrations], WIRE_LATENCY_S)),
        wire_byte_s=tuple(1.0 / speed for speed in speeds),
        relayed=frozenset((numbers[low], numbers[high]) for low, high in relayed),
    )


def part_of(model: CostModel, ranks: Sequence[int], host_index: Sequence[int]) -> Optional[CostModel]:
    """Return the cost model of some ``ranks`` of a model, in another order; None if they must be measured:
    new ones, or one host of several.
    """
    if not model.hosts:
        return model if len(set(host_index)) == 1 else None
    before = [model.hosts[rank] for rank in ranks]
    pairs = set(zip(host_index, before))
    if not 1 < len(set(host_index)) == len(set(before)) == len(pairs):
        return None
    order = sorted(pairs)
    numbers = {host: number for number, (host, _) in enumerate(order)}
    return model._replace(
        hosts=tuple(numbers[host] for host in host_index),
        wire_byte_s=tuple(model.wire_byte_s[number] for _, number in order),
    )


def coarse(value: float) -> float:
    """Return the nearest of 1, 1.5, 2, 3, 4, 6, 8, ... (times a power of two).

    >>> [coarse(value) for value in (1.1, 1.4, 2.4, 3.3, 100.0)]
    [1.0, 1.5, 2.0, 3.0, 96.0]
    """
    mantissa, exponent = frexp(value)  # 0.5 <= mantissa < 1
    step = 0.5 if mantissa < 0.625 else 0.75 if mantissa < 0.875 else 1.0
    return ldexp(step, exponent)


def _median(values: Sequence[float], default: float) -> float:
    """Return the median of the measured values, or the default."""
    measured = sorted(value for value in values if value > 0)
    return measured[len(measured) // 2] if measured else default


# -- replay -------------------------------------------------------------------------------------------


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
        """Return when a step may begin, as far as its own rank and the ports are concerned, to 1 %: with
        greater precision, of chunks that differ by an element those of one rank would all come first.
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


# -- closed form --------------------------------------------------------------------------------------

CODEC_SHARE = {"float32": 1.0, "bf16": 0.5, "int8": 260 / 1024}
"""Encoded bytes per byte of float32."""


def grid(ranks: int, most: int) -> Tuple[int, ...]:
    """Return the number of ranks on each host, at most ``most``.

    >>> grid(5, 2)
    (2, 2, 1)
    """
    hosts, rest = divmod(ranks, most)
    return (most,) * hosts + ((rest,) if rest else ())


class _Load(NamedTuple):
    """The load of a method on hosts and ranks, for n bytes."""

    wire_bytes: Tuple[float, ...]  # per host, each way
    rank_bytes: float  # what the busiest rank sends and receives
    added_bytes: float  # what the busiest rank adds
    hops: int  # messages on the longest way of an element
    messages: int  # of the busiest rank


def allreduce_s(kind: str, sent: float, model: CostModel, ranks: Sequence[int]) -> float:
    """Return the seconds to reduce ``sent`` bytes by one algorithm; ``ranks``: their number per host."""
    size = sum(ranks)
    if size < 2 or sent <= 0:
        return 0.0
    load = _LOADS[kind](sent, model, ranks)
    wire_s = max(nbytes * byte_s for nbytes, byte_s in zip(load.wire_bytes, model.wire_byte_s or (0.0,)))
    if len(ranks) == 1 or (kind == "ring" and max(ranks) > 1):  # a ring is as slow as its slowest hop
        wire_s = max(wire_s, load.rank_bytes / 2 * model.byte_s)
    piece = min(model.segment_bytes, sent / size)
    added_s = load.added_bytes * model.reduce_byte_s
    return max(wire_s, added_s) + _latency_s(load, model, ranks, piece)


def best_allreduce(
    nbytes: float, model: CostModel, ranks: Sequence[int], codec: str = "float32"
) -> Tuple[str, float]:
    """Return the algorithm for a long vector (a ring never takes int8), and its seconds without encoding."""
    sent = nbytes * CODEC_SHARE[codec]
    is_grid = len(ranks) > 1 and len(set(ranks)) == 1 and ranks[0] > 1
    if codec == "int8":
        kinds = ["hierarchical" if is_grid else "direct"]
    else:
        usable = {"ring": True, "direct": sum(ranks) <= MAX_RANKS, "hierarchical": is_grid}
        kinds = [kind for kind, fits in usable.items() if fits]
    found = [(kind, allreduce_s(kind, sent, model, ranks)) for kind in kinds]
    return min(found, key=lambda item: item[1])


def _ring(sent: float, model: CostModel, ranks: Sequence[int]) -> _Load:
    size = sum(ranks)
    each = 2 * (size - 1) / size * sent
    wires = (each,) * len(ranks) if len(ranks) > 1 else (0.0,)
    return _Load(wires, 2 * each, each / 2, 2 * (size - 1), 4 * (size - 1))


def _hierarchical(sent: float, model: CostModel, ranks: Sequence[int]) -> _Load:
    hosts, most = len(ranks), max(ranks)
    shares = _shares([1] * hosts, model)
    across = tuple(sent * (1 + share * (hosts - 2)) for share in shares)
    each = 2 * (most - 1) / most * sent + max(across) / most
    added = (most - 1) / most * sent + (hosts - 1) * max(shares) / most * sent
    return _Load(across, 2 * each, added, 4, 4 * (hosts * (most - 1) + hosts - 1))


def _direct(sent: float, model: CostModel, ranks: Sequence[int]) -> _Load:
    size = sum(ranks)
    shares = _shares(ranks, model)
    # With m ranks of p and the share F, a host carries n (m + F (p - 2 m)) each way.
    loads = tuple(sent * (m + share * (size - 2 * m)) for m, share in zip(ranks, shares))
    largest = max(share / m for m, share in zip(ranks, shares))
    each = sent * (1 + (size - 2) * largest)
    return _Load(loads, 2 * each, (size - 1) * largest * sent, 2, 4 * (size - 1))


def _shares(ranks: Sequence[int], model: CostModel) -> List[float]:
    """Return the part of a vector that each host adds up, by the speeds of their interfaces."""
    wires = model.wire_byte_s
    if len(set(wires)) > 1:
        return interface_shares(ranks, [1.0 / byte_s for byte_s in wires])
    return [count / sum(ranks) for count in ranks]


_LOADS = {"ring": _ring, "direct": _direct, "hierarchical": _hierarchical}


def _latency_s(load: _Load, model: CostModel, ranks: Sequence[int], piece: float) -> float:
    """Return the time that the longest chain of messages adds to that of the streams. A rank passes on a
    chunk after its first segment, so only the time by which a hop exceeds its chunk counts.
    """
    alpha_s = model.wire_latency_s if len(ranks) > 1 else model.latency_s
    hop_s = alpha_s + model.message_s + piece * model.reduce_byte_s
    if load.hops > 4:
        byte_s = max(model.wire_byte_s) if len(ranks) > 1 else model.byte_s
        chunk_s = load.rank_bytes / 2 / load.hops * byte_s
        passed_s = alpha_s + 2 * model.message_s + piece * (byte_s + model.reduce_byte_s)
        return hop_s + load.hops * max(2 * model.message_s, passed_s - chunk_s)
    return load.hops * hop_s + load.messages * model.message_s


# -- shares of unequal links --------------------------------------------------------------------------

_HALVINGS = 60  # more than a double's mantissa has bits


def interface_shares(ranks: Sequence[int], speeds: Sequence[float]) -> List[float]:
    """Return the share of a vector for each interface that finishes a direct all-reduce the soonest; of
    several solutions the one nearest to equal shares for all ranks. ``ranks``: users of each interface;
    ``speeds``: each way, in any unit.

    >>> [round(share, 3) for share in interface_shares([1, 1, 1, 1], [1.0, 10.0, 10.0, 10.0])]
    [0.0, 0.333, 0.333, 0.333]
    >>> interface_shares([2, 2], [1.0, 10.0])
    [0.5, 0.5]
    """
    total = sum(ranks)
    # T starts where every interface can carry its load even without a share (or with all shares).
    slow, fast = 0.0, 2.0 * total / min(speeds)
    for _ in range(_HALVINGS):
        middle = (slow + fast) / 2
        if _possible(_limits(ranks, speeds, total, middle)):
            fast = middle
        else:
            slow = middle
    return _fill(ranks, total, _limits(ranks, speeds, total, fast))


Limits = List[Tuple[float, float]]


def _limits(ranks: Sequence[int], speeds: Sequence[float], total: int, time: float) -> Limits:
    """Return the least and the greatest share of each interface within a time; nothing fits if low > high."""
    limits: Limits = []
    for count, speed in zip(ranks, speeds):
        spare, per_share = time * speed - count, total - 2 * count
        if per_share > 0:
            limits.append((0.0, min(1.0, spare / per_share)))
        elif per_share == 0:
            limits.append((0.0, 1.0 if spare >= 0 else -1.0))
        else:
            # More than half of all ranks are here: the more they own, the less has to travel.
            limits.append((max(0.0, spare / per_share), 1.0))
    return limits


def _possible(limits: Limits) -> bool:
    return (
        all(low <= high for low, high in limits)
        and sum(low for low, _ in limits) <= 1.0
        and sum(high for _, high in limits) >= 1.0
    )


def _fill(ranks: Sequence[int], total: int, limits: Limits) -> List[float]:
    """Return shares within the limits, as nearly proportional to the ranks as they allow."""
    level, above = 0.0, float(total)

    def shares(level: float) -> List[float]:
        return [min(high, max(low, level * n / total)) for n, (low, high) in zip(ranks, limits)]

    for _ in range(_HALVINGS):
        middle = (level + above) / 2
        if sum(shares(middle)) > 1.0:
            above = middle
        else:
            level = middle
    found = shares(above)
    whole = sum(found)
    return [share / whole for share in found]


def share_bounds(count: int, shares: Sequence[float]) -> Tuple[int, ...]:
    """Return chunk boundaries in elements for the ranks' shares of a vector, which add up to one.

    >>> share_bounds(10, [0.0, 0.5, 0.5])
    (0, 0, 5, 10)
    """
    bounds, reached = [0], 0.0
    for share in shares:
        reached += share
        bounds.append(min(count, max(bounds[-1], int(count * reached + 0.5))))
    bounds[-1] = count
    return tuple(bounds)


def even_classes(speeds: Sequence[float], tolerance: float = 1.8) -> Tuple[float, ...]:
    """Give each group of speeds within the tolerance of its fastest that group's mean. Measuring a wire for
    some ten milliseconds may be off by half; wires that really differ are of different kinds.

    >>> even_classes([100.0, 95.0, 11.0, 12.0])
    (97.5, 97.5, 11.5, 11.5)
    """
    order = sorted(range(len(speeds)), key=lambda index: (-speeds[index], index))
    result = list(speeds)
    while order:
        group = [index for index in order if speeds[index] * tolerance >= speeds[order[0]]]
        mean = sum(speeds[index] for index in group) / len(group)
        for index in group:
            result[index] = mean
        order = order[len(group) :]
    return tuple(result)
