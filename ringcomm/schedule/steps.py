"""The steps of a collective: a schedule is data.

An algorithm is a pure function that returns, for one rank, the list of steps that this rank
takes. A step names a *span* of elements ``[start, stop)`` in a buffer, and a peer. Nothing here
depends on sockets. The same list is run by the executor over any fabric, replayed by the
symbolic checker (``tests/support/prover``), and priced by the cost model.

**Order.** Between two ranks the steps are one byte stream each way: what rank a sends to rank b,
in the order of a's list, is what b receives from a, in the order of b's list. Nothing else on the
wire distinguishes them, so the two lists must agree; the checker proves that they do.

**Dependence.** There are no rounds and no barriers. A step waits for exactly those earlier steps
of the same rank whose span in the same buffer overlaps its own, and it waits *by position*:
a ``Send`` may advance as far as an earlier ``Recv`` has finished, element by element, and a
``Recv`` may overwrite as far as an earlier ``Send`` has gone. This is what makes a ring one
continuous stream and a chain of broadcasts a pipeline, without segments in the schedule.

**Folding.** A ``Recv`` with a ``fold`` combines instead of overwriting. Its ``fold`` is the order
of the operands: peers' ranks, and ``SELF`` where this rank's own contribution stands. One ``Recv``
may wait for the same span from several peers and fold them all at once; then intermediate sums
need never be rounded. The order is part of the schedule, so timing cannot change a bit of the
result. ``final`` marks the fold whose outcome is the finished value, where averages are divided.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence, Set, Tuple, Union

SELF = -1
"""In a fold: this rank's own contribution, as it stands in the buffer."""

DATA = 0
"""The buffer in which the result grows (and, in place, in which the contribution stands)."""

SOURCE = 1
"""The caller's own input, which is only read. All-to-all sends from here."""


class Send(NamedTuple):
    """Send the elements ``[start, stop)`` of a buffer to ``peer``."""

    peer: int
    start: int
    stop: int
    buffer: int = DATA


class Recv(NamedTuple):
    """Receive the elements ``[start, stop)`` of ``DATA`` from each of ``peers``.

    With an empty ``fold`` there is one peer, whose elements overwrite the span. Otherwise ``fold``
    is a permutation of ``peers`` and ``SELF``: the operands from left to right.
    """

    peers: Tuple[int, ...]
    start: int
    stop: int
    fold: Tuple[int, ...] = ()
    final: bool = False


Step = Union[Send, Recv]
Schedule = List[Step]

Bounds = Sequence[int]
"""Chunk boundaries in elements: ``size + 1`` ascending numbers, of which chunk ``i`` is
``[bounds[i], bounds[i + 1])``. Chunks may be empty and need not be equal."""


def exchange_lengths(schedule: Sequence[Step]) -> Dict[int, Tuple[int, int]]:
    """Return, by peer, the number of elements that a rank sends to it and receives from it.

    >>> exchange_lengths([Send(1, 0, 3), Recv((1, 2), 3, 5)])
    {1: (3, 2), 2: (0, 2)}
    """
    lengths: Dict[int, Tuple[int, int]] = {}
    for step in schedule:
        count = step.stop - step.start
        for peer in (step.peer,) if isinstance(step, Send) else step.peers:
            sends, expects = lengths.get(peer, (0, 0))
            lengths[peer] = (sends + count, expects) if isinstance(step, Send) else (sends, expects + count)
    return lengths


def even_bounds(count: int, parts: int) -> Tuple[int, ...]:
    """Return boundaries that split ``count`` elements into ``parts`` chunks; the first ones get one more.

    >>> even_bounds(7, 3)
    (0, 3, 5, 7)
    """
    base, extra = divmod(count, parts)
    return tuple(i * base + min(i, extra) for i in range(parts + 1))


class Dependencies:
    """The earlier steps that each step of a schedule depends on: those that touch the same elements, unless
    both send. A ring of p ranks has 4 (p - 1) steps, and four of them touch one chunk: only those are looked
    at.
    """

    def __init__(self, schedule: Sequence[Step]) -> None:
        points: Dict[int, Set[int]] = {}
        for step in schedule:
            points.setdefault(_buffer(step), set()).update((step.start, step.stop))
        self._places = {
            buffer: {point: place for place, point in enumerate(sorted(found))}
            for buffer, found in points.items()
        }
        self._cells: Dict[int, List[Tuple[List[int], List[int]]]] = {
            buffer: [([], []) for _ in found] for buffer, found in points.items()
        }

    def of(self, index: int, step: Step) -> List[int]:
        """Return the numbers of the earlier steps that a step depends on. To be called for all, in order."""
        places = self._places[_buffer(step)]
        receives = isinstance(step, Recv)
        found: Set[int] = set()
        for sends, receipts in self._cells[_buffer(step)][places[step.start] : places[step.stop]]:
            found.update(receipts)
            if receives:
                found.update(sends)
            (receipts if receives else sends).append(index)
        return sorted(found)


def _buffer(step: Step) -> int:
    return DATA if isinstance(step, Recv) else step.buffer
