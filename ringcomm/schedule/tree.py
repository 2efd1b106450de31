"""Broadcast: one rank's vector to all. A tree for short ones, a chain for long ones.

Both are written relative to the root: position 0 is the root, position i the rank
``(root + i) % size``.

In the costs below a message takes alpha seconds plus beta seconds per element, p is the number of
ranks, n the number of elements, and s the number that a rank collects before it passes them on
(the executor's segment, at most n).

**Ranks that disagree.** A root receives nothing, and ranks that disagree about the root or the length
send along different trees. So for all arguments, each rank also receives a message from its parent in the
tree of rank 0, if only a header: a step without elements. As that tree connects all ranks, at least one rank
receives a header of a different call, in this very call. It costs no message where the root is
rank 0 and the vector short, because then these are the edges that the vector takes.
"""

from __future__ import annotations

from typing import List

from .registry import Algorithm, register
from .steps import Recv, Schedule, Send


def broadcast(rank: int, size: int, root: int, count: int) -> Schedule:
    """Binomial tree: in every round, each rank that has the vector sends it to one that has not.

    The parent of a position is the position with its lowest set bit cleared. The child with the largest
    subtree is served first. With 8 ranks::

        round 0    0 -> 4
        round 1    0 -> 2    4 -> 6
        round 2    0 -> 1    2 -> 3    4 -> 5    6 -> 7

    Cost: ``ceil(log2(p)) (alpha + n beta)``.
    Source: Thakur, Rabenseifner and Gropp (2005), short messages.

    >>> broadcast(2, 4, root=0, count=5)
    [Recv(peers=(0,), start=0, stop=5, fold=(), final=False), Send(peer=3, start=0, stop=5, buffer=0)]
    """
    position = (rank - root) % size
    steps: Schedule = []
    if position > 0:
        steps.append(Recv(((_parent(position) + root) % size,), 0, count))
    steps.extend(Send((child + root) % size, 0, count) for child in _children(position, size))
    return steps + _headers(rank, size, steps)


def chain(rank: int, size: int, root: int, count: int) -> Schedule:
    """Pass it on: root, root+1, root+2, ... Each link carries the vector exactly once.

    It looks as if the last rank had to wait for ``p - 1`` whole vectors. But a ``Send`` follows the ``Recv``
    before it element by element, so the vector flows through all ranks at the same time.

    Cost: ``(p - 1) alpha + (n + (p - 2) s) beta``.
    Source: pipelined broadcast, for instance J. Pjesivac-Grbovic et al., "Performance analysis of
    MPI collective operations", Cluster Computing 10 (2007).
    """
    position = (rank - root) % size
    steps: Schedule = []
    if position > 0:
        steps.append(Recv(((rank - 1) % size,), 0, count))
    if position < size - 1:
        steps.append(Send((rank + 1) % size, 0, count))
    return _headers(rank, size, steps) + steps  # they need not wait until the long vector has gone


def _parent(position: int) -> int:
    return position & (position - 1)


def _children(position: int, size: int) -> List[int]:
    """Return the children of a position, the one with the largest subtree first."""
    reach = position & -position if position else 1 << (size - 1).bit_length()
    reaches = [1 << bit for bit in reversed(range(reach.bit_length() - 1))]
    return [position + reach for reach in reaches if position + reach < size]


def _headers(rank: int, size: int, steps: Schedule) -> Schedule:
    """Return empty steps along the tree of rank 0, where no other step goes the same way."""
    served = [step.peer for step in steps if isinstance(step, Send)]
    heard = [peer for step in steps if isinstance(step, Recv) for peer in step.peers]
    empty: Schedule = [Send(child, 0, 0) for child in _children(rank, size) if child not in served]
    if rank > 0 and _parent(rank) not in heard:
        empty.append(Recv((_parent(rank),), 0, 0))
    return empty


register(Algorithm("broadcast", "tree", lambda p: broadcast(p.rank, p.size, p.root, p.count)))
register(
    Algorithm(
        "broadcast", "chain", lambda p: chain(p.rank, p.size, p.root, p.count), min_ranks=3, handicap=1.05
    )
)
