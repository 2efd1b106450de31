"""Copies between an array on a device and its block of host memory, as a part of a schedule.

A schedule works on host memory. For an array that a device holds, some elements must be copied to the host
before a step may use them (*loads*), and results must be copied back (*stores*). Which ones follows from the
schedule: an element is loaded if the first step that touches it reads it, and stored if it belongs to the
result and a step writes it.

Loads and stores depend on steps by position, as steps depend on each other: a step may proceed as far as the
load of its span has, and a store as far as the last receive that writes its span. :func:`with_devices`
expresses the same as ordinary schedules, in which the device of a rank is one more peer: it sends what the
rank loads, and receives what the rank stores. So the prover (``tests/support``) and the cost model need
no second language.
"""

from __future__ import annotations

from math import sqrt
from typing import Dict, List, NamedTuple, Sequence, Set, Tuple

from .steps import DATA, Recv, Send, Step
from .streams import Schedules

Span = Tuple[int, int]

MIN_PIECE_BYTES = 256 * 1024
MAX_PIECE_BYTES = 8 * 1024 * 1024
ALIGNED_BYTES = 64 * 1024
"""Pieces are multiples of this, so that every element type fits."""


class Copy(NamedTuple):
    """Elements ``[start, stop)`` of a buffer that are copied between the device and the host."""

    start: int
    stop: int
    buffer: int = DATA


class Copies(NamedTuple):
    """All copies of one rank's schedule.

    Attributes:
        loads: from the device to the host, in the order in which steps need them.
        stores: from the host to the device, in the order of the steps that finish them.
    """

    loads: Tuple[Copy, ...]
    stores: Tuple[Copy, ...]


def plan_copies(schedule: Sequence[Step], results: Sequence[Span]) -> Copies:
    """Return what a rank whose array is on a device must copy.

    Args:
        schedule: the rank's steps.
        results: the spans of ``DATA`` that the device is to hold in the end.

    >>> plan_copies([Send(1, 0, 4), Recv((1,), 4, 8)], [(0, 8)])
    Copies(loads=(Copy(start=0, stop=4, buffer=0),), stores=(Copy(start=4, stop=8, buffer=0),))
    """
    cuts: Dict[int, Set[int]] = {DATA: {point for span in results for point in span}}
    for step in schedule:
        cuts.setdefault(_buffer(step), set()).update((step.start, step.stop))
    loads: List[Tuple[int, Copy]] = []
    stores: List[Tuple[int, Copy]] = []
    for buffer, points in cuts.items():
        ordered = sorted(points)
        for start, stop in zip(ordered, ordered[1:]):
            touching = [
                index
                for index, step in enumerate(schedule)
                if _buffer(step) == buffer and step.start <= start and stop <= step.stop
            ]
            if touching and _reads(schedule[touching[0]]):
                _append(loads, touching[0], Copy(start, stop, buffer))
            writing = [index for index in touching if isinstance(schedule[index], Recv)]
            if writing and any(low <= start and stop <= high for low, high in results):
                _append(stores, writing[-1], Copy(start, stop))
    return Copies(_in_order(loads), _in_order(stores))


def _buffer(step: Step) -> int:
    return step.buffer if isinstance(step, Send) else DATA


def _reads(step: Step) -> bool:
    return isinstance(step, Send) or bool(step.fold)


def _append(copies: List[Tuple[int, Copy]], index: int, copy: Copy) -> None:
    """Add a copy for the step ``index``; neighbours of one step are one copy, which needs no other step."""
    if copies and copies[-1][0] == index and copies[-1][1].stop == copy.start:
        copy = copy._replace(start=copies.pop()[1].start)
    copies.append((index, copy))


def _in_order(copies: List[Tuple[int, Copy]]) -> Tuple[Copy, ...]:
    """The copies in the order of their steps."""
    return tuple(copy for _, copy in sorted(copies, key=lambda item: item[0]))


def with_devices(schedules: Schedules, copies: Sequence[Copies]) -> List[List[Step]]:
    """The schedules with loads and stores as steps: the device of rank r is rank ``size + r``.

    Only for copies of ``DATA``.

    Args:
        schedules: one per rank.
        copies: those of each rank; a rank whose array is in host memory has none.
    """
    size = len(schedules)
    hosts: List[List[Step]] = []
    devices: List[List[Step]] = []
    for rank, (schedule, (loads, stores)) in enumerate(zip(schedules, copies)):
        device = size + rank
        before: List[Step] = [Recv((device,), load.start, load.stop) for load in loads]
        after: List[Step] = [Send(device, store.start, store.stop) for store in stores]
        hosts.append([*before, *schedule, *after])
        sends: List[Step] = [Send(rank, load.start, load.stop) for load in loads]
        devices.append([*sends, *(Recv((rank,), store.start, store.stop) for store in stores)])
    return hosts + devices


def piece_bytes(nbytes: int, byte_s: float, overhead_s: float) -> int:
    """The size of the pieces in which an array is best copied each way, beside other work.

    With pieces of ``c`` bytes the first piece out and the last piece in overlap with nothing, and each piece
    has an overhead: ``2 * c * byte_s + nbytes / c * overhead_s`` is least at the root below.

    Args:
        nbytes: of the array.
        byte_s: seconds per copied byte, measured.
        overhead_s: seconds for each copy, whatever its length.

    >>> piece_bytes(64 << 20, 1 / 11.5e9, 30e-6)
    3407872
    """
    best = sqrt(nbytes * overhead_s / (2.0 * byte_s))
    whole = int(best) // ALIGNED_BYTES * ALIGNED_BYTES
    return max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, whole))
