"""Direct exchange: every rank exchanges messages with every other, so a result takes two rounds at most.

A ring moves the fewest bytes but needs ``2 (p - 1)`` hops. Where a switch connects all ranks, each
chunk can go straight to the rank that sums it, and straight from there to all ranks: the same
number of bytes in two rounds. The sum of a chunk is made by one fold over all contributions, in
the order of the ranks. So nothing is rounded or wrapped between hops, which element types with
few bits need, and the result does not depend on which rank owns which chunk.

The price is ``p - 1`` links that are busy at the same time. So that not all ranks send to rank 0
first, each rank serves its peers in the order rank+1, rank+2, ...: in every round each rank
receives from exactly one other.

In the costs below a message takes alpha seconds plus beta seconds per element, adding takes gamma
seconds per element, p is the number of ranks and n the number of elements.

Sources: the reduce-scatter is the pairwise exchange of R. Thakur, R. Rabenseifner, W. Gropp,
"Optimization of collective communication operations in MPICH", Int. J. High Performance Computing
Applications 19 (2005), with its rounds run at the same time; so is the all-to-all.
"""

from __future__ import annotations

from typing import List

from .registry import Algorithm, register
from .steps import SELF, SOURCE, Bounds, Recv, Schedule, Send

MAX_RANKS = 16
"""Up to here every rank may talk to every other at once. Beyond, that many simultaneous senders overflow the
buffers of small switches, and each rank's share of a message gets too small to be worth one."""

ONE_SHOT_MAX_BYTES = 512 * 1024
"""Less than this. Beyond, the fold overwrites bytes that are still to be sent, so both wait for each other:
measured between two ranks of one host, 256 KiB took 0.79 (TCP) and 0.87 (shared memory) of the time of
``direct``, 512 KiB 0.90 and 0.94, and 1 MiB 1.02 and 1.2."""


def peers_ahead(rank: int, size: int) -> List[int]:
    """Return all other ranks, the next one first: the order in which to send."""
    return [(rank + distance) % size for distance in range(1, size)]


def peers_behind(rank: int, size: int) -> List[int]:
    """Return all other ranks, the previous one first: the order in which their messages come."""
    return [(rank - distance) % size for distance in range(1, size)]


def _fold_all(rank: int, size: int, start: int, stop: int) -> Schedule:
    """Return one fold of all ranks' ``[start, stop)`` in the order of the ranks; nothing for one rank."""
    if size == 1:
        return []
    fold = tuple(SELF if other == rank else other for other in range(size))
    return [Recv(tuple(peers_behind(rank, size)), start, stop, fold=fold, final=True)]


def reduce_scatter(rank: int, size: int, bounds: Bounds) -> Schedule:
    """Send every chunk to the rank that owns it; fold the own one. The other chunks stay as they were.

    Cost: ``alpha + (p - 1)/p n (beta + gamma)`` for equal chunks.
    """
    steps: Schedule = [Send(peer, bounds[peer], bounds[peer + 1]) for peer in peers_ahead(rank, size)]
    return steps + _fold_all(rank, size, bounds[rank], bounds[rank + 1])


def all_gather(rank: int, size: int, bounds: Bounds) -> Schedule:
    """Send the own chunk to all others. Rank r starts with chunk r in its place.

    Cost: ``alpha + (p - 1)/p n beta`` for equal chunks.
    """
    steps: Schedule = [Send(peer, bounds[rank], bounds[rank + 1]) for peer in peers_ahead(rank, size)]
    steps.extend(Recv((peer,), bounds[peer], bounds[peer + 1]) for peer in peers_behind(rank, size))
    return steps


def all_reduce(rank: int, size: int, bounds: Bounds) -> Schedule:
    """Reduce-scatter, then all-gather: two rounds, and the bytes of a ring.

    Cost: ``2 alpha + 2 (p - 1)/p n beta + (p - 1)/p n gamma`` for equal chunks.
    """
    return reduce_scatter(rank, size, bounds) + all_gather(rank, size, bounds)


def one_shot(rank: int, size: int, count: int) -> Schedule:
    """All-reduce in one round: every rank sends its vector to every other, and every rank folds all of them.

    For tiny messages, where only the number of rounds counts. All ranks evaluate the same expression,
    contributions in the order of the ranks, so they end with the same bits.

    Cost: ``alpha + (p - 1) n (beta + gamma)``.
    Source: folklore; NCCL and vLLM call it one-shot, MPI texts all-to-all broadcast and reduce.

    >>> for step in one_shot(1, 3, 4): print(step)
    Send(peer=2, start=0, stop=4, buffer=0)
    Send(peer=0, start=0, stop=4, buffer=0)
    Recv(peers=(0, 2), start=0, stop=4, fold=(0, -1, 2), final=True)
    """
    steps: Schedule = [Send(peer, 0, count) for peer in peers_ahead(rank, size)]
    return steps + _fold_all(rank, size, 0, count)


def all_to_all(rank: int, size: int, send_bounds: Bounds, recv_bounds: Bounds) -> Schedule:
    """Give each peer its own span of ``SOURCE``, and get one from each into ``DATA``. The length of chunk q
    in ``recv_bounds`` must be that of this rank's chunk in rank q's ``send_bounds``. The caller copies the
    span from this rank to itself.

    Cost: ``alpha + (p - 1)/p n beta`` for equal chunks, n being the elements that one rank sends.
    """
    steps: Schedule = [
        Send(peer, send_bounds[peer], send_bounds[peer + 1], SOURCE) for peer in peers_ahead(rank, size)
    ]
    steps.extend(
        Recv((peer,), recv_bounds[peer], recv_bounds[peer + 1]) for peer in peers_behind(rank, size)
    )
    return steps


register(
    Algorithm(
        "allreduce", "one_shot", lambda p: one_shot(p.rank, p.size, p.count),
        single_fold=True, max_ranks=MAX_RANKS, max_bytes=ONE_SHOT_MAX_BYTES,
    )
)  # fmt: skip
register(
    Algorithm(
        "allreduce", "direct", lambda p: all_reduce(p.rank, p.size, p.bounds),
        single_fold=True, max_ranks=MAX_RANKS, many_to_one=True,
    )
)  # fmt: skip
register(
    Algorithm(
        "reducescatter", "direct", lambda p: reduce_scatter(p.rank, p.size, p.bounds),
        single_fold=True, max_ranks=MAX_RANKS, many_to_one=True,
    )
)  # fmt: skip
register(
    Algorithm(
        "allgather", "direct", lambda p: all_gather(p.rank, p.size, p.bounds),
        max_ranks=MAX_RANKS, many_to_one=True,
    )
)  # fmt: skip
