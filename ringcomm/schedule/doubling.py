"""Recursive doubling: all-reduce of short vectors among many ranks, in about log2(p) rounds.

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

from .registry import Algorithm, register
from .steps import SELF, Recv, Schedule, Send


def all_reduce(rank: int, size: int, count: int) -> Schedule:
    """All ranks end with the sum of all vectors, bit for bit the same.

    Cost: ``log2(p) (alpha + n (beta + gamma))`` for powers of two; for others, with q the next
    lower power, at most ``2 (alpha + n beta) + n gamma`` more than for q.
    Here a message takes alpha seconds plus beta seconds per element, and adding takes gamma
    seconds per element.
    Source: Thakur, Rabenseifner and Gropp (2005).

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


register(
    Algorithm("allreduce", "doubling", lambda p: all_reduce(p.rank, p.size, p.count), handicap=1.25)
)
