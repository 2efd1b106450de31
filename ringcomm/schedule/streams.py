"""Pairs the sends of all ranks with the receives that they fill, and cuts buffers into pieces.

The checker and the cost model both work on the schedules of all ranks together. This module is what they
share.
"""

from __future__ import annotations

from typing import Dict, FrozenSet, List, NamedTuple, NoReturn, Sequence, Set, Tuple

from ..errors import BrokenInvariantError
from .steps import DATA, SELF, SOURCE, Bounds, Recv, Send, Step

Schedules = Sequence[Sequence[Step]]
"""One schedule per rank."""

Domain = Tuple[int, int]
"""A buffer of a rank: (rank, buffer)."""

Streams = Dict[Tuple[int, int], List["Pairing"]]
"""Per (sender, receiver): what goes from one to the other, in order."""


class Pairing(NamedTuple):
    """A ``Send`` and the ``Recv`` that takes its elements; indices into the two ranks' lists."""

    source: int
    send_index: int
    send: Send
    target: int
    recv_index: int
    recv: Recv


def pair_steps(schedules: Schedules) -> Streams:
    """Match sends with receives: per (sender, receiver), in the order of the stream between them.

    Raises:
        BrokenInvariantError: a step is malformed, or the two sides disagree about number or
            lengths.
    """
    sends: Dict[Tuple[int, int], List[Tuple[int, Send]]] = {}
    recvs: Dict[Tuple[int, int], List[Tuple[int, Recv]]] = {}
    for rank, steps in enumerate(schedules):
        for index, step in enumerate(steps):
            _check_step(rank, index, step, len(schedules))
            if isinstance(step, Send):
                sends.setdefault((rank, step.peer), []).append((index, step))
            else:
                for peer in step.peers:
                    recvs.setdefault((peer, rank), []).append((index, step))
    streams: Streams = {}
    for source, target in sorted(sends.keys() | recvs.keys()):
        outgoing, incoming = sends.get((source, target), []), recvs.get((source, target), [])
        if len(outgoing) != len(incoming):
            fail(
                f"rank {source} has {len(outgoing)} sends to rank {target}, "
                f"which has {len(incoming)} receives from it"
            )
        pairs = [
            Pairing(source, i, send, target, j, recv) for (i, send), (j, recv) in zip(outgoing, incoming)
        ]
        for pair in pairs:
            if pair.send.stop - pair.send.start != pair.recv.stop - pair.recv.start:
                fail(
                    f"{name_of(source, pair.send_index, pair.send)} and "
                    f"{name_of(target, pair.recv_index, pair.recv)} meet, but differ in length"
                )
        streams[source, target] = pairs
    return streams


def cut_buffers(
    schedules: Schedules, streams: Streams, marks: Dict[Domain, Bounds]
) -> Dict[Domain, List[int]]:
    """Where to cut each buffer so that every step touches a piece whole or not at all.

    A cut in what is sent is one in what is received and the other way round, until nothing new
    appears. Each run of elements that all steps treat alike becomes two pieces, if it has two.

    Args:
        schedules: one per rank.
        streams: what :func:`pair_steps` made of them.
        marks: the limits of each buffer, and between them further points to cut at.

    Raises:
        BrokenInvariantError: a step leaves its buffer.
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


def fail(message: str) -> NoReturn:
    """Raise what a wrong schedule deserves."""
    raise BrokenInvariantError(f"schedule is wrong: {message}")


def name_of(rank: int, index: int, step: Step) -> str:
    """A step, as messages call it."""
    return f"rank {rank} step {index} {step}"


def _check_step(rank: int, index: int, step: Step, size: int) -> None:
    """What can be said about a step alone."""
    wrong = ""
    peers = (step.peer,) if isinstance(step, Send) else step.peers
    if not 0 <= step.start <= step.stop:
        wrong = "not a span"
    elif not peers or len(set(peers)) < len(peers) or rank in peers or min(peers) < 0 or max(peers) >= size:
        wrong = f"peers must be different other ranks below {size}"
    elif isinstance(step, Send):
        if step.buffer not in (DATA, SOURCE):
            wrong = "no such buffer"
    elif step.fold:
        if sorted(step.fold) != sorted((SELF, *peers)):
            wrong = "the fold is no permutation of the peers and SELF"
    elif len(peers) != 1 or step.final:
        wrong = "only a fold can have several peers or be final"
    if wrong:
        fail(f"{name_of(rank, index, step)}: {wrong}")
