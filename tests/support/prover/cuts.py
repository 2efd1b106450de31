"""Cuts the buffers of all ranks into pieces that every step touches whole or not at all."""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Set, Tuple

from ringcomm.schedule.cost import Pairing, Schedules, Streams
from ringcomm.schedule.steps import DATA, Bounds, Send
from tests.support.prover.streams import fail, name_of

Domain = Tuple[int, int]
"""A buffer of a rank: (rank, buffer)."""


def cut_buffers(
    schedules: Schedules, streams: Streams, marks: Dict[Domain, Bounds]
) -> Dict[Domain, List[int]]:
    """Return where to cut each buffer so that every step touches a piece whole or not at all.

    A cut of sent data is a cut of received data and vice versa, until no new cut appears. Each run of
    elements that all steps treat alike becomes two pieces, if it has two. `streams` are those of
    :func:`~ringcomm.schedule.cost.pair_steps`; `marks` are the limits of each buffer, and further cuts
    between them. BrokenInvariantError if a step leaves its buffer.
    """
    points: Dict[Domain, Set[int]] = {domain: set(bounds) for domain, bounds in marks.items()}
    for rank, steps in enumerate(schedules):
        for index, step in enumerate(steps):
            domain = (rank, step.buffer if isinstance(step, Send) else DATA)
            bounds = marks.get(domain, (0, 0))
            if domain not in marks or not bounds[0] <= step.start <= step.stop <= bounds[-1]:
                fail(f"{name_of(rank, index, step)} leaves the buffer [{bounds[0]}, {bounds[-1]})")
            cuts = points[domain]
            cuts.add(step.start)
            cuts.add(step.stop)
    pairs = [pair for stream in streams.values() for pair in stream]
    if all(pair.send.start == pair.recv.start for pair in pairs):
        points = dict.fromkeys(points, set().union(*points.values()))  # the usual case, at once
    else:
        _close(points, pairs)
    return {domain: _halved(sorted(cuts), marks[domain]) for domain, cuts in points.items()}


def _close(points: Dict[Domain, Set[int]], pairs: List[Pairing]) -> None:
    """Carry the cuts from senders to receivers and back until nothing new appears."""
    links = {
        ((p.source, p.send.buffer), p.send.start, (p.target, DATA), p.recv.start, p.send.stop - p.send.start)
        for p in pairs
        if p.send.stop - p.send.start > 1
    }
    grown = True
    while grown:
        grown = False
        for here, start, there, other, length in links:
            mine = _inside(points[here], start, length)
            theirs = _inside(points[there], other, length)
            if mine != theirs:
                points[here].update(start + cut for cut in theirs)
                points[there].update(other + cut for cut in mine)
                grown = True


def _inside(cuts: Set[int], start: int, length: int) -> FrozenSet[int]:
    return frozenset(cut - start for cut in cuts if start < cut < start + length)


def _halved(cuts: List[int], bounds: Bounds) -> List[int]:
    """Add the middle of every piece that has more than one element, and drop what lies outside."""
    cuts = [cut for cut in cuts if bounds[0] <= cut <= bounds[-1]]
    middles = [(low + high) // 2 for low, high in zip(cuts, cuts[1:]) if high - low > 1]
    return sorted(cuts + middles)
