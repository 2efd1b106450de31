"""Link calibration: derives the cost model from the measurements of all ranks.

Every rank measures its links (in :mod:`ringcomm.collective.measure`), all ranks gather all numbers, and
each derives the same model from them: with additions, multiplications and divisions of doubles only, which
give the same bits on every processor. Numbers that only serve to compare algorithms are rounded to a few
steps per power of two, so that the next run of the same job on the same machines makes the same choice. The
speeds of interfaces, which decide how unequal chunks are, are only made equal when they are almost equal.
"""

from __future__ import annotations

from math import frexp, ldexp
from typing import Collection, Dict, NamedTuple, Optional, Sequence, Tuple

from .cost import CostModel
from .shares import even_classes

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
    """Return the cost model of some of a model's ranks, in another order; None if they must be measured: they
    are not part of the others, or only one of several hosts is left. ``ranks``: their ranks in that model.
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


def coarse_model(model: CostModel) -> CostModel:
    """Return the same machine with rounded wires, to compare algorithms by."""
    return model._replace(wire_byte_s=tuple(coarse(byte_s) for byte_s in model.wire_byte_s))


def _median(values: Sequence[float], default: float) -> float:
    """Return the median of the measured values, or the default."""
    measured = sorted(value for value in values if value > 0)
    return measured[len(measured) // 2] if measured else default
