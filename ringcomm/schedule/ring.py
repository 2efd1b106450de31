"""Ring all-reduce: the bandwidth-optimal classic, in two trips around a ring.

Put the ranks in a circle. Every rank only sends to the neighbour on the right (``rank + 1``)
and receives from the neighbour on the left (``rank - 1``). Cut the vector into as many chunks as
there are ranks. The example has four ranks a, b, c, d, each with chunks 0 to 3.

**First trip: reduce-scatter.** Chunk 0 sets out at rank 1, chunk 1 at rank 2, and so on: every
chunk starts one rank to the right of its namesake. At every hop the receiver adds its own
contribution to what arrives, and in the next round passes the sum on::

    round 0    a --3--> b    b --0--> c    c --1--> d    d --2--> a
    round 1    a --2--> b    b --3--> c    c --0--> d    d --1--> a
    round 2    a --1--> b    b --2--> c    c --3--> d    d --0--> a

Follow chunk 0: b sends its own part to c, c sends b+c to d, d sends b+c+d to a, and a adds its
part. After ``size - 1`` rounds chunk 0 is complete, at rank 0.
The same happens to all chunks at the same time, so every link is busy in every round.

**Second trip: all-gather.** Now each rank owns one finished chunk. The finished chunks go round
the same ring, and the receivers overwrite instead of adding::

    round 0    a --0--> b    b --1--> c    c --2--> d    d --3--> a
    round 1    a --3--> b    b --0--> c    c --1--> d    d --2--> a
    round 2    a --2--> b    b --3--> c    c --0--> d    d --1--> a

**Why it is good.** Each rank sends ``2 (p - 1) / p`` times the vector, whatever the number of
ranks p. No algorithm can send less, so for long vectors the time hardly depends on p. **Why it is
not always best:** a bit has to travel ``2 (p - 1)`` hops, one after the other, and that is what a
short message pays for.

**Why the bits are the same everywhere.** Each element is summed once, along one path, in one order
(chunk c in the order c+1, c+2, ..., c), and then copied.

The rounds above serve only as an explanation. There is no barrier between them: a rank sends
the first elements of a chunk on while the last ones are still coming in (see
:mod:`ringcomm.schedule.steps`).

In the costs below a message takes alpha seconds plus beta seconds per element, adding takes gamma
seconds per element, p is the number of ranks and n the number of elements.

Sources: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", J. Parallel and Distributed Computing 69 (2009). Brought to deep learning by
A. Gibiansky (Baidu, 2017) and A. Sergeev and M. Del Balso (Horovod, arXiv:1802.05799).
"""

from __future__ import annotations

from .registry import Algorithm, register
from .steps import SELF, Bounds, Recv, Schedule, Send


def reduce_scatter(rank: int, size: int, bounds: Bounds) -> Schedule:
    """The first trip: rank r ends with chunk r finished, all others hold partial sums.

    Cost: ``(p - 1) alpha + (p - 1)/p n (beta + gamma)`` for equal chunks.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    steps: Schedule = []
    for hop in range(size - 1):
        outgoing = (rank - 1 - hop) % size  # own part first, then what came in one hop ago
        incoming = (rank - 2 - hop) % size  # ends with incoming == rank
        last = hop == size - 2
        steps.append(Send(right, bounds[outgoing], bounds[outgoing + 1]))
        steps.append(Recv((left,), bounds[incoming], bounds[incoming + 1], fold=(left, SELF), final=last))
    return steps


def all_gather(rank: int, size: int, bounds: Bounds) -> Schedule:
    """The second trip: rank r starts with chunk r in its place, all ranks end with all chunks.

    Cost: ``(p - 1) alpha + (p - 1)/p n beta`` for equal chunks.
    """
    left, right = (rank - 1) % size, (rank + 1) % size
    steps: Schedule = []
    for hop in range(size - 1):
        outgoing = (rank - hop) % size  # own chunk first, then what came in one hop ago
        incoming = (rank - 1 - hop) % size
        steps.append(Send(right, bounds[outgoing], bounds[outgoing + 1]))
        steps.append(Recv((left,), bounds[incoming], bounds[incoming + 1]))
    return steps


def all_reduce(rank: int, size: int, bounds: Bounds) -> Schedule:
    """Both trips: all ranks end with the sum of all vectors. Chunks may be empty or uneven.

    Cost: ``2 (p - 1) alpha + 2 (p - 1)/p n beta + (p - 1)/p n gamma`` for equal chunks.

    >>> for step in all_reduce(0, 2, (0, 3, 6)): print(step)
    Send(peer=1, start=3, stop=6, buffer=0)
    Recv(peers=(1,), start=0, stop=3, fold=(1, -1), final=True)
    Send(peer=1, start=0, stop=3, buffer=0)
    Recv(peers=(1,), start=3, stop=6, fold=(), final=False)
    """
    return reduce_scatter(rank, size, bounds) + all_gather(rank, size, bounds)


for _algorithm in (
    Algorithm("allreduce", "ring", lambda p: all_reduce(p.rank, p.size, p.bounds)),
    Algorithm("reducescatter", "ring", lambda p: reduce_scatter(p.rank, p.size, p.bounds)),
    Algorithm("allgather", "ring", lambda p: all_gather(p.rank, p.size, p.bounds)),
):
    register(_algorithm._replace(handicap=1.25))
