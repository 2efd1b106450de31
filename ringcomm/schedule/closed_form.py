"""How long one all-reduce takes among any number of ranks, in closed form.

:func:`ringcomm.schedule.cost.predict` replays a schedule step by step, which takes a second for a ring of 64
ranks. Where ranks differ only by their hosts' interfaces, the same follows from a few sums: what each
interface sends, how much each processor adds and moves, and how often one rank waits for another. That
takes microseconds for thousands of ranks; tests compare both.

Interfaces are full duplex, the switch has no limit, and streams that share an interface share it fairly. So a
transfer in which sending follows receiving by position takes as long as the busiest interface, or as the
busiest processor, whichever is longer.

The predictor of training steps, the choice of a compression and the advice which machines to use take all
times from here.
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Tuple

from ..errors import BrokenInvariantError
from .direct import MAX_RANKS
from .machine import Machine, Method
from .shares import interface_shares

CODEC_SHARE = {"float32": 1.0, "bf16": 0.5, "int8": 260 / 1024}
"""Bytes that are sent per byte of float32."""


class Cost(NamedTuple):
    """An all-reduce.

    Attributes:
        seconds: all of it.
        bound: what takes most of it: ``wire``, ``interface of a host``, ``local links`` (within one host),
            ``processor`` or ``latency``.
        wire_bytes: for each host, what its interface sends; it receives as much.
        seconds_of: by part (wire, processor, latency), its seconds.
    """

    seconds: float
    bound: str
    wire_bytes: Tuple[float, ...]
    seconds_of: Tuple[Tuple[str, float], ...] = ()


class _Load(NamedTuple):
    """What a method asks of hosts and ranks, for n bytes."""

    wire_bytes: Tuple[float, ...]  # per host, each way
    rank_bytes: float  # what the busiest rank sends and receives
    all_bytes: float  # what all ranks send and receive
    added_bytes: float  # what the busiest rank adds
    hops: int  # messages on the longest way of an element
    messages: int  # of the busiest rank


def reduce_cost(method: Method, nbytes: float, machine: Machine, ranks: Sequence[int]) -> Cost:
    """The cost of reducing so many bytes once.

    Args:
        method: how they are reduced.
        nbytes: bytes of float32, before they are encoded.
        machine: the model.
        ranks: number of ranks on each host.

    Raises:
        BrokenInvariantError: there is no such method.
    """
    size = sum(ranks)
    if size < 2 or nbytes <= 0:
        return Cost(0.0, "compute", (0.0,) * len(ranks))
    if method.kind == "hierarchical" and len(ranks) == 1:
        method = method._replace(kind="direct")
    sent = nbytes * method.sent
    load = _load(method, sent, machine, ranks)
    wires = machine.wires(len(load.wire_bytes))
    per_host = [loads * byte_s for loads, byte_s in zip(load.wire_bytes, wires)]
    wire_s = max(per_host)
    if method.kind == "ring":
        wire_s = _slowest_hop_s(load, sent, machine, ranks)
    elif len(ranks) == 1:
        wire_s = load.rank_bytes / 2 * machine.local_byte_s
    if _senders(method, ranks) > 2:
        wire_s *= machine.incast
    if not method.pipelined:
        wire_s *= 2
    coding_s = nbytes * method.coding_byte_s
    added_s = load.added_bytes * machine.reduce_byte_s
    processor_s = coding_s + added_s + load.rank_bytes * machine.moved_byte_s
    if machine.shared_cores:
        shared_s = load.all_bytes * machine.moved_byte_s / machine.shared_cores
        processor_s = max(processor_s, shared_s)
    piece = min(machine.segment_bytes, sent / size)
    latency_s = _latency_s(load, machine, ranks, piece)
    stream_s = max(wire_s, processor_s)
    wire = "wire" if len(load.wire_bytes) > 1 else "local links"
    parts = ((wire, wire_s), ("processor", processor_s), ("latency", latency_s))
    bound = max(parts, key=lambda part: part[1])[0]
    mean_s = sum(per_host) / len(per_host)
    if bound == "wire" and max(per_host) > 1.2 * mean_s:
        bound = "interface of a host"
    return Cost(stream_s + latency_s, bound, load.wire_bytes, parts)


def best_method(nbytes: float, machine: Machine, ranks: Sequence[int], codec: str = "float32") -> Method:
    """Return the method that ringcomm chooses for a long vector, without what encoding costs.

    Args:
        nbytes: bytes of float32, before they are encoded.
        machine: the model.
        ranks: number of ranks on each host.
        codec: ``float32``, ``bf16`` or ``int8``, whose blocks are never passed along a ring.
    """
    is_grid = len(ranks) > 1 and len(set(ranks)) == 1 and ranks[0] > 1
    if codec == "int8":
        return Method("hierarchical" if is_grid else "direct", codec=codec, sent=CODEC_SHARE[codec])
    usable = {"ring": True, "direct": sum(ranks) <= MAX_RANKS, "hierarchical": is_grid}
    methods = [Method(kind, codec=codec, sent=CODEC_SHARE[codec]) for kind, fits in usable.items() if fits]
    return min(methods, key=lambda method: reduce_cost(method, nbytes, machine, ranks).seconds)


def _senders(method: Method, ranks: Sequence[int]) -> int:
    """Return how many hosts send to one at the same time."""
    return 1 if method.kind == "ring" else len(ranks) - (not method.dedicated)


def _load(method: Method, sent: float, machine: Machine, ranks: Sequence[int]) -> _Load:
    size, hosts = sum(ranks), len(ranks)
    if method.kind == "ring":
        each = 2 * (size - 1) / size * sent
        loads = tuple(each if hosts > 1 else 0.0 for _ in ranks)
        return _Load(loads, 2 * each, 2 * each * size, each / 2, 2 * (size - 1), 4 * (size - 1))
    if method.kind == "direct":
        return _direct(sent, machine, ranks)
    if method.kind == "hierarchical":
        most = max(ranks)
        shares = _shares([1] * hosts, machine)
        across = tuple(sent * (1 + share * (hosts - 2)) for share in shares)
        inside = 2 * (most - 1) / most * sent
        each = inside + max(across) / most
        added = (most - 1) / most * sent + (hosts - 1) * max(shares) / most * sent
        messages = 2 * (hosts * (most - 1) + hosts - 1)
        return _Load(across, 2 * each, 2 * each * size, added, 4, 2 * messages)
    if method.kind == "servers":
        return _servers(method, sent, ranks)
    raise BrokenInvariantError(f"{method.kind!r} is no way to reduce gradients")


def _direct(sent: float, machine: Machine, ranks: Sequence[int]) -> _Load:
    size = sum(ranks)
    shares = _shares(ranks, machine)
    # With m ranks of p and the share F, a host carries n (m + F (p - 2 m)) each way.
    loads = tuple(sent * (m + share * (size - 2 * m)) for m, share in zip(ranks, shares))
    largest = max(share / m for m, share in zip(ranks, shares))
    each = sent * (1 + (size - 2) * largest)
    total = 2 * sent * 2 * (size - 1)
    loads = loads if len(ranks) > 1 else (0.0,)
    return _Load(loads, 2 * each, total, (size - 1) * largest * sent, 2, 4 * (size - 1))


def _shares(ranks: Sequence[int], machine: Machine) -> List[float]:
    """Return which part of a vector each host adds up, by the speeds of their interfaces."""
    wires = machine.wires(len(ranks))
    if len(set(wires)) > 1:
        return interface_shares(ranks, [1.0 / byte_s for byte_s in wires])
    return [count / sum(ranks) for count in ranks]


def _servers(method: Method, sent: float, ranks: Sequence[int]) -> _Load:
    size, count = sum(ranks), method.servers
    share = 1.0 / count
    total = 2 * sent * 2 * (size if method.dedicated else size - 1)
    if method.dedicated:
        # Every server is a host of its own: it receives its span from all workers, and sends the sum back.
        workers = tuple(sent * m for m in ranks)
        loads = workers + (sent * share * size,) * count
        return _Load(loads, 2 * max(sent, sent * share * size), total, sent * share * size, 2, 2 * size)
    # A worker that is a server keeps its own span: it receives p - 1 of it, and sends what others own.
    per_host: List[float] = []
    left = count
    for m in ranks:
        here = min(m, left)
        left -= here
        per_host.append(sent * (m + share * here * (size - 2 * m)))
    each = sent * (1 + share * (size - 2))
    loads = tuple(per_host) if len(ranks) > 1 else (0.0,)
    return _Load(loads, 2 * each, total, (size - 1) * share * sent, 2, 2 * (size - 1) + 2 * count)


def _slowest_hop_s(load: _Load, sent: float, machine: Machine, ranks: Sequence[int]) -> float:
    """A ring is as quick as its slowest hop, which every chunk passes."""
    size = sum(ranks)
    hops = [machine.local_byte_s] if max(ranks) > 1 else []
    hops += list(machine.wires(len(ranks))) if len(ranks) > 1 else []
    return 2 * (size - 1) / size * sent * max(hops)


def _latency_s(load: _Load, machine: Machine, ranks: Sequence[int], piece: float) -> float:
    """Return what the longest chain of messages adds to the time of the streams.

    A rank passes on a chunk after its first segment. While the rest of the chunk is on the wire the next hop
    works, so only what a hop takes longer than its chunk counts. With two hops interfaces are busy all the
    time: what comes out of a sum is sent while further operands arrive.
    """
    alpha_s = machine.wire_latency_s if len(ranks) > 1 else machine.local_latency_s
    hop_s = alpha_s + machine.message_s + piece * machine.reduce_byte_s
    if load.hops > 4:
        byte_s = max(machine.wires(len(ranks))) if len(ranks) > 1 else machine.local_byte_s
        chunk_s = load.rank_bytes / 2 / load.hops * byte_s
        passed_s = alpha_s + 2 * machine.message_s + piece * (byte_s + machine.reduce_byte_s)
        return hop_s + load.hops * max(2 * machine.message_s, passed_s - chunk_s)
    return load.hops * hop_s + load.messages * machine.message_s
