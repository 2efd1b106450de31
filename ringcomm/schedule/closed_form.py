"""The time of one all-reduce among any number of ranks, in closed form.

:func:`ringcomm.schedule.cost.predict` replays a schedule step by step, which takes a second for a ring of 64
ranks. Where ranks differ only by their hosts' interfaces, the same follows from a few sums: the bytes that
each interface sends and each processor adds, and how often one rank waits for another. That takes
microseconds for thousands of ranks; tests compare both.

Interfaces are full duplex, the switch has no limit, and streams that share an interface share it fairly. So a
transfer in which sending follows receiving by position takes as long as the busiest interface, or as the
busiest processor, whichever is longer.

The choice of a compression and the advice which machines to use take all times from here.
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Tuple

from .calibration import (
    LOCAL_BYTE_S,
    LOCAL_LATENCY_S,
    MESSAGE_S,
    REDUCE_BYTE_S,
    WIRE_BYTE_S,
    WIRE_LATENCY_S,
)
from .cost import CostModel
from .direct import MAX_RANKS
from .shares import interface_shares

CODEC_SHARE = {"float32": 1.0, "bf16": 0.5, "int8": 260 / 1024}
"""Encoded bytes per byte of float32."""


class Machine(NamedTuple):
    """Hosts on one switch, each with an interface that its ranks share."""

    wire_byte_s: Tuple[float, ...] = (WIRE_BYTE_S,)  # each way; of further hosts the last one
    wire_latency_s: float = WIRE_LATENCY_S  # from the first byte sent to the first byte received
    local_byte_s: float = LOCAL_BYTE_S
    local_latency_s: float = LOCAL_LATENCY_S
    reduce_byte_s: float = REDUCE_BYTE_S  # of an operand that is added
    message_s: float = MESSAGE_S  # processor time of a message at both ends
    segment_bytes: int = 262144  # collected before a rank adds or passes on

    def wires(self, hosts: int) -> Tuple[float, ...]:
        """Return the seconds per byte of the interfaces of this many hosts."""
        known = self.wire_byte_s[:hosts]
        return known + (self.wire_byte_s[-1],) * (hosts - len(known))


def machine_of(model: CostModel) -> Machine:
    """Return the machine of a measured model. A model of one host gets interfaces of 1 Gbit/s."""
    machine = Machine(
        local_byte_s=model.byte_s, local_latency_s=model.latency_s, reduce_byte_s=model.reduce_byte_s,
        message_s=model.message_s, segment_bytes=model.segment_bytes,
    )  # fmt: skip
    if not model.hosts:
        return machine
    return machine._replace(wire_byte_s=model.wire_byte_s, wire_latency_s=model.wire_latency_s)


def grid(ranks: int, slots: Sequence[int]) -> Tuple[int, ...]:
    """Return the number of ranks on each host; further hosts have as many as the last one.

    >>> grid(5, [2])
    (2, 2, 1)
    """
    found: List[int] = []
    while ranks > 0:
        here = min(ranks, slots[min(len(found), len(slots) - 1)])
        found.append(here)
        ranks -= here
    return tuple(found)


class _Load(NamedTuple):
    """The load of a method on hosts and ranks, for n bytes."""

    wire_bytes: Tuple[float, ...]  # per host, each way
    rank_bytes: float  # what the busiest rank sends and receives
    added_bytes: float  # what the busiest rank adds
    hops: int  # messages on the longest way of an element
    messages: int  # of the busiest rank


def allreduce_s(kind: str, sent: float, machine: Machine, ranks: Sequence[int]) -> float:
    """Return the seconds to reduce ``sent`` bytes (as they are sent) once, without the cost of encoding.
    ``kind``: ``ring``, ``direct`` or ``hierarchical``; ``ranks``: their number on each host.
    """
    size = sum(ranks)
    if size < 2 or sent <= 0:
        return 0.0
    if kind == "hierarchical" and len(ranks) == 1:
        kind = "direct"
    load = _LOADS[kind](sent, machine, ranks)
    if kind == "ring":
        wire_s = _slowest_hop_s(sent, machine, ranks)
    elif len(ranks) == 1:
        wire_s = load.rank_bytes / 2 * machine.local_byte_s
    else:
        wires = machine.wires(len(ranks))
        wire_s = max(nbytes * byte_s for nbytes, byte_s in zip(load.wire_bytes, wires))
    piece = min(machine.segment_bytes, sent / size)
    added_s = load.added_bytes * machine.reduce_byte_s
    return max(wire_s, added_s) + _latency_s(load, machine, ranks, piece)


def best_allreduce(
    nbytes: float, machine: Machine, ranks: Sequence[int], codec: str = "float32"
) -> Tuple[str, float]:
    """Return the algorithm that ringcomm chooses for a long vector of ``nbytes`` of float32, and its seconds
    without encoding. Blocks of the codec ``int8`` are never passed along a ring.
    """
    sent = nbytes * CODEC_SHARE[codec]
    is_grid = len(ranks) > 1 and len(set(ranks)) == 1 and ranks[0] > 1
    if codec == "int8":
        kinds = ["hierarchical" if is_grid else "direct"]
    else:
        usable = {"ring": True, "direct": sum(ranks) <= MAX_RANKS, "hierarchical": is_grid}
        kinds = [kind for kind, fits in usable.items() if fits]
    found = [(kind, allreduce_s(kind, sent, machine, ranks)) for kind in kinds]
    return min(found, key=lambda item: item[1])


def _ring(sent: float, machine: Machine, ranks: Sequence[int]) -> _Load:
    size, hosts = sum(ranks), len(ranks)
    each = 2 * (size - 1) / size * sent
    loads = (each if hosts > 1 else 0.0,) * hosts
    return _Load(loads, 2 * each, each / 2, 2 * (size - 1), 4 * (size - 1))


def _hierarchical(sent: float, machine: Machine, ranks: Sequence[int]) -> _Load:
    hosts, most = len(ranks), max(ranks)
    shares = _shares([1] * hosts, machine)
    across = tuple(sent * (1 + share * (hosts - 2)) for share in shares)
    each = 2 * (most - 1) / most * sent + max(across) / most
    added = (most - 1) / most * sent + (hosts - 1) * max(shares) / most * sent
    return _Load(across, 2 * each, added, 4, 4 * (hosts * (most - 1) + hosts - 1))


def _direct(sent: float, machine: Machine, ranks: Sequence[int]) -> _Load:
    size = sum(ranks)
    shares = _shares(ranks, machine)
    # With m ranks of p and the share F, a host carries n (m + F (p - 2 m)) each way.
    loads = tuple(sent * (m + share * (size - 2 * m)) for m, share in zip(ranks, shares))
    largest = max(share / m for m, share in zip(ranks, shares))
    each = sent * (1 + (size - 2) * largest)
    loads = loads if len(ranks) > 1 else (0.0,)
    return _Load(loads, 2 * each, (size - 1) * largest * sent, 2, 4 * (size - 1))


def _shares(ranks: Sequence[int], machine: Machine) -> List[float]:
    """Return the part of a vector that each host adds up, by the speeds of their interfaces."""
    wires = machine.wires(len(ranks))
    if len(set(wires)) > 1:
        return interface_shares(ranks, [1.0 / byte_s for byte_s in wires])
    return [count / sum(ranks) for count in ranks]


def _slowest_hop_s(sent: float, machine: Machine, ranks: Sequence[int]) -> float:
    """Return the time of a ring's slowest hop, which every chunk passes."""
    size = sum(ranks)
    hops = [machine.local_byte_s] if max(ranks) > 1 else []
    hops += list(machine.wires(len(ranks))) if len(ranks) > 1 else []
    return 2 * (size - 1) / size * sent * max(hops)


_LOADS = {"ring": _ring, "direct": _direct, "hierarchical": _hierarchical}


def _latency_s(load: _Load, machine: Machine, ranks: Sequence[int], piece: float) -> float:
    """Return the time that the longest chain of messages adds to that of the streams.

    A rank passes on a chunk after its first segment. While the rest of the chunk is on the wire the next hop
    works, so only the time by which a hop exceeds its chunk counts. With two hops interfaces are busy all the
    time: results of a sum are sent while further operands arrive.
    """
    alpha_s = machine.wire_latency_s if len(ranks) > 1 else machine.local_latency_s
    hop_s = alpha_s + machine.message_s + piece * machine.reduce_byte_s
    if load.hops > 4:
        byte_s = max(machine.wires(len(ranks))) if len(ranks) > 1 else machine.local_byte_s
        chunk_s = load.rank_bytes / 2 / load.hops * byte_s
        passed_s = alpha_s + 2 * machine.message_s + piece * (byte_s + machine.reduce_byte_s)
        return hop_s + load.hops * max(2 * machine.message_s, passed_s - chunk_s)
    return load.hops * hop_s + load.messages * machine.message_s
