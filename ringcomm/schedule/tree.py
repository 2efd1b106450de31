"""Collectives in about log2(p) rounds, and a chain.

**Broadcast**: one rank's vector to all. A tree for short ones, a chain for long ones.

Both are written relative to the root: position 0 is the root, position i the rank
``(root + i) % size``.

In the costs below a message takes alpha seconds plus beta seconds per element, p is the number of
ranks, n the number of elements, adding takes gamma seconds per element, and s is the number that a
rank collects before it passes them on (the executor's segment, at most n).

**Ranks that disagree.** A root receives nothing, and ranks that disagree about the root or the length
send along different trees. So for all arguments, each rank also receives a message from its parent in the
tree of rank 0, if only a header: a step without elements. As that tree connects all ranks, at least one rank
receives a header of a different call, in this very call. It costs no message where the root is
rank 0 and the vector short, because then these are the edges that the vector takes.

**Recursive doubling**: all-reduce of short vectors among many ranks, in about log2(p) rounds.

In round k each rank swaps its partial sum with the rank whose number differs in bit k, and both
add. Each partial sum then covers a block of ``2 ** (k + 1)`` ranks; after ``log2(p)`` rounds the
block is all ranks. Both partners put the block with the lower ranks on the left, so they compute
the same expression from the same operands in the same order: the bits agree, even the payload of
a NaN, of which processors keep that of the left operand.

If p is not a power of two, let q be the greatest power of two below it. In the first ``2 (p - q)``
ranks each even one hands its vector to the odd one above it, sits the rounds out, and is sent the
finished vector in the end. The q ranks that play are numbered from 0 in the order of their ranks,
so blocks are still unbroken runs of ranks, and every sum is in the order of the ranks.

Example with p = 6, q = 4: ranks 0 and 2 hand over to 1 and 3; the players are 1, 3, 4, 5::

    fold in      0 -> 1      2 -> 3
    round 0      1 <-> 3     4 <-> 5       (0+1) + (2+3)       4 + 5
    round 1      1 <-> 4     3 <-> 5       ((0+1) + (2+3)) + (4+5)
    fold out     1 -> 0      3 -> 2

Source: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of collective communication operations
in MPICH", Int. J. High Performance Computing Applications 19 (2005).
"""

from __future__ import annotations

from typing import List

from .registry import Algorithm, register
from .steps import SELF, Recv, Schedule, Send


def broadcast(rank: int, size: int, root: int, count: int) -> Schedule:
    """Binomial tree: in every round, each rank that has the vector sends it to one that has not.

    The parent of a position is the position with its lowest set bit cleared. The child with the largest
    subtree is served first. With 8 ranks::

        round 0    0 -> 4
        round 1    0 -> 2    4 -> 6
        round 2    0 -> 1    2 -> 3    4 -> 5    6 -> 7

    Cost: ``ceil(log2(p)) (alpha + n beta)``.

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


def all_reduce(rank: int, size: int, count: int) -> Schedule:
    """All ranks end with the sum of all vectors, bit for bit the same.

    Cost: ``log2(p) (alpha + n (beta + gamma))`` for powers of two; for others, with q the next
    lower power, at most ``2 (alpha + n beta) + n gamma`` more than for q.

    >>> for step in all_reduce(1, 3, 8): print(step)
    Recv(peers=(0,), start=0, stop=8, fold=(0, -1), final=False)
    Send(peer=2, start=0, stop=8, buffer=0)
    Recv(peers=(2,), start=0, stop=8, fold=(-1, 2), final=True)
    Send(peer=0, start=0, stop=8, buffer=0)
    """
    players = 1 << (size.bit_length() - 1)
    extras = size - players
    paired = rank < 2 * extras
    if paired and rank % 2 == 0:
        return [Send(rank + 1, 0, count), Recv((rank + 1,), 0, count)]

    steps: Schedule = []
    if paired:
        steps.append(Recv((rank - 1,), 0, count, fold=(rank - 1, SELF)))
    steps.extend(_rounds(rank // 2 if paired else rank - extras, players, extras, count))
    if paired:
        steps.append(Send(rank - 1, 0, count))
    return steps


def _rounds(player: int, players: int, extras: int, count: int) -> Schedule:
    """Return the swaps among the players, whose number is a power of two."""
    steps: Schedule = []
    distance = 1
    while distance < players:
        other = player ^ distance
        peer = _rank_of(other, extras)
        fold = (SELF, peer) if player < other else (peer, SELF)
        steps.append(Send(peer, 0, count))
        steps.append(Recv((peer,), 0, count, fold=fold, final=2 * distance == players))
        distance *= 2
    return steps


def _rank_of(player: int, extras: int) -> int:
    """Return the rank of a player: the odd one of a pair, or one beyond the pairs."""
    return 2 * player + 1 if player < extras else player + extras


register(Algorithm("broadcast", "tree", lambda p: broadcast(p.rank, p.size, p.root, p.count)))
register(
    Algorithm(
        "broadcast", "chain", lambda p: chain(p.rank, p.size, p.root, p.count), min_ranks=3, handicap=1.05
    )
)
register(
    Algorithm("allreduce", "doubling", lambda p: all_reduce(p.rank, p.size, p.count), handicap=1.25)
)
