"""Several ranks on each of several hosts: add up inside the hosts first, so that the wire carries less.

All ranks of a host share its network interface. If every rank talked to every other, each host would
send as many copies as it has ranks. So a collective goes in up to three stages::

    inside the hosts    reduce-scatter: the ranks of a host share its partial sum, one column each
    between the hosts   all ranks with the same place on their host exchange what they hold, all columns
                        at the same time: every rank of a host uses the wire
    inside the hosts    all-gather: the columns of a host become whole

Here with 2 hosts of 2 ranks, chunks 0 to 3 and the ranks a, b on the one and c, d on the other host.
Column 0 is a and c with the chunks 0 and 2, column 1 is b and d with the chunks 1 and 3::

    inside     a <-1,3-- --0,2-> b        c <-1,3-- --0,2-> d      (each sends what the other will hold)
    between    a --2-> c,  c --0-> a      b --3-> d,  d --1-> b    (sums of a host; now each has its chunk)
    between    a --0-> c,  c --2-> a      b --1-> d,  d --3-> b    (finished chunks, back)
    inside     a <-1,3-- --0,2-> b        c <-1,3-- --0,2-> d      (finished chunks)

Each host's interface carries ``2 (h - 1) / h`` times the vector with h hosts, as if it ran one rank. A
chunk belongs to a host and a place on it, so unequal interfaces get unequal chunks. There is no barrier
between the stages either: a segment goes out to the wire while the next is still added up inside.

In the costs below, m is the number of ranks per host, h of hosts, n of elements; inside the host a message
takes a seconds plus b seconds per element, between hosts A and B; adding takes gamma seconds per element.

Sources: folklore of MPI libraries; NCCL and Horovod call it hierarchical or 2D all-reduce, and X. Jia et al.
describe it in "Highly scalable deep learning training system with mixed-precision", arXiv:1807.11205.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

from .direct import peers_ahead, peers_behind
from .registry import Algorithm, Problem, register
from .steps import SELF, Bounds, Recv, Schedule, Send

Hosts = Tuple[Tuple[int, ...], ...]
"""The ranks of each host, in the order of their places on it; the same number on every host."""

Span = Tuple[int, int]


def hosts_of(host_index: Sequence[int]) -> Optional[Hosts]:
    """Group ranks by host, if that makes a grid: several hosts, several ranks on each, and equally many.

    >>> hosts_of([0, 0, 1, 1])
    ((0, 1), (2, 3))
    >>> hosts_of([0, 0, 1]) is None
    True
    """
    found: Dict[int, List[int]] = {}
    for rank, host in enumerate(host_index):
        found.setdefault(host, []).append(rank)
    lengths = {len(ranks) for ranks in found.values()}
    if len(found) < 2 or len(lengths) != 1 or lengths == {1}:
        return None
    return tuple(tuple(found[host]) for host in sorted(found))


class _Place:
    """A rank's place in the grid of hosts, and the order in which it serves the others."""

    def __init__(self, rank: int, hosts: Hosts) -> None:
        self.host = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        self.local = hosts[self.host]
        self.place = self.local.index(rank)
        self.column = tuple(ranks[self.place] for ranks in hosts)
        # places on this host, and numbers of hosts
        self.local_ahead = peers_ahead(self.place, len(self.local))
        self.local_behind = peers_behind(self.place, len(self.local))
        self.hosts_ahead = peers_ahead(self.host, len(hosts))
        self.hosts_behind = peers_behind(self.host, len(hosts))

    def fold(self, ranks: Sequence[int]) -> Tuple[int, ...]:
        """Return the ranks in their order, this one as ``SELF``."""
        me = self.local[self.place]
        return tuple(SELF if rank == me else rank for rank in ranks)


def reduce_scatter(rank: int, hosts: Hosts, spans: Sequence[Span]) -> Schedule:
    """Rank r ends with span r finished; other spans may be overwritten by partial sums. The spans of all
    ranks, in elements, do not overlap.

    Cost: ``a + A + (m - 1)/m n (b + gamma) + (h - 1)/(h m) n (m B + gamma)`` for equal spans.
    """
    at = _Place(rank, hosts)
    steps: Schedule = []
    last = len(hosts) == 1
    # The next host's chunks first: they are the first that the wire needs, and no two hosts begin with
    # sending to the same third.
    for host in [*at.hosts_ahead, at.host]:
        steps.extend(Send(at.local[place], *spans[hosts[host][place]]) for place in at.local_ahead)
        peers = tuple(at.local[place] for place in at.local_behind)
        if peers:
            span = spans[hosts[host][at.place]]
            steps.append(Recv(peers, *span, fold=at.fold(at.local), final=last))
    steps.extend(Send(at.column[host], *spans[at.column[host]]) for host in at.hosts_ahead)
    peers = tuple(at.column[host] for host in at.hosts_behind)
    if peers:
        steps.append(Recv(peers, *spans[rank], fold=at.fold(at.column), final=True))
    return steps


def all_gather(rank: int, hosts: Hosts, spans: Sequence[Span]) -> Schedule:
    """Rank r starts with span r in its place; all ranks end with all spans, which do not overlap. A span
    reaches every other host once, and not once for each of its ranks.

    Cost: ``A + a + (h - 1)/h n B + (m - 1)/m n b`` for equal spans.
    """
    at = _Place(rank, hosts)
    steps: Schedule = [Send(at.column[host], *spans[rank]) for host in at.hosts_ahead]
    steps.extend(Recv((at.column[host],), *spans[at.column[host]]) for host in at.hosts_behind)
    # In the order in which they come: the own first, then those of the hosts behind.
    for host in [at.host, *at.hosts_behind]:
        steps.extend(Send(at.local[place], *spans[at.column[host]]) for place in at.local_ahead)
        for place in at.local_behind:
            steps.append(Recv((at.local[place],), *spans[hosts[host][place]]))
    return steps


def all_reduce(rank: int, hosts: Hosts, bounds: Bounds) -> Schedule:
    """Reduce-scatter, then all-gather: all ranks end with the sum of all vectors.

    Cost: ``2 (a + A) + (m - 1)/m n (2 b + gamma) + (h - 1)/(h m) n (2 m B + gamma)`` for equal chunks.
    """
    spans = list(zip(bounds, bounds[1:]))
    return reduce_scatter(rank, hosts, spans) + all_gather(rank, hosts, spans)


def _hosts(problem: Problem) -> Hosts:
    assert problem.hosts is not None, "Algorithm.needs_hosts"
    return problem.hosts


def _spans(problem: Problem) -> List[Span]:
    return list(zip(problem.bounds, problem.bounds[1:]))


for _algorithm in (
    Algorithm("allreduce", "hierarchical", lambda p: all_reduce(p.rank, _hosts(p), p.bounds)),
    Algorithm("reducescatter", "hierarchical", lambda p: reduce_scatter(p.rank, _hosts(p), _spans(p))),
    Algorithm("allgather", "hierarchical", lambda p: all_gather(p.rank, _hosts(p), _spans(p))),
):
    register(_algorithm._replace(needs_hosts=True, handicap=1.1, many_to_one=True))
