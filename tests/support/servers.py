"""All-reduce through parameter servers: workers send spans to the servers that add them up.

Each server owns a span of the vector. Workers send every server its span; the server adds the contributions
of all workers and sends the sum back. A server may be a worker, too, or a rank of its own that contributes
nothing. With every rank both worker and server this is :mod:`ringcomm.schedule.direct`.

A worker's interface sends n elements, that of a server with the share f of them w f n for w workers. So
one server limits the job, w servers on the workers' hosts send as much as a ring does, and with w servers
on further hosts each sends less: n instead of 2 (w - 1) / w n. It is not among the algorithms that are
chosen from; it serves to compare, in measurements and in predictions.

Sources: M. Li et al., "Scaling distributed machine learning with the parameter server", OSDI 2014; Y. Jiang
et al., "A unified architecture for accelerating distributed DNN training in heterogeneous GPU/CPU
clusters", OSDI 2020, for servers on further hosts.
"""

from __future__ import annotations

from typing import List, Sequence

from ringcomm.schedule.steps import SELF, Bounds, Recv, Schedule, Send


def all_reduce(rank: int, workers: Sequence[int], servers: Sequence[int], bounds: Bounds) -> Schedule:
    """All workers end with the sum of the workers' vectors.

    Args:
        rank: this rank; it is among the workers, the servers, or both.
        workers: the ranks that contribute.
        servers: the ranks that add up.
        bounds: one boundary in elements more than there are servers; span i belongs to ``servers[i]``.

    Returns:
        the sends to all servers, the fold of the own span, its return to all workers, and the receives of
        the other spans. ``DATA`` of a server that is no worker must be zero in its span, and holds nothing
        finished elsewhere.

    Cost: ``2 alpha + max(1, f w) n beta`` for servers of their own with the greatest share f and w workers.
    Source: Li et al. (2014).

    >>> for step in all_reduce(2, workers=[0, 1], servers=[2], bounds=(0, 4)): print(step)
    Recv(peers=(1, 0), start=0, stop=4, fold=(0, 1, -1), final=True)
    Send(peer=0, start=0, stop=4, buffer=0)
    Send(peer=1, start=0, stop=4, buffer=0)
    """
    steps: Schedule = []
    spans = dict(zip(servers, zip(bounds, bounds[1:])))
    others = _ahead(rank, [server for server in servers if server != rank])
    if rank in workers:
        steps.extend(Send(server, *spans[server]) for server in others)
    peers = _ahead(rank, [worker for worker in workers if worker != rank])
    if rank in spans and peers:
        fold = tuple(SELF if worker == rank else worker for worker in workers)
        fold = fold if rank in workers else (*fold, SELF)
        steps.append(Recv(tuple(reversed(peers)), *spans[rank], fold=fold, final=True))
        steps.extend(Send(worker, *spans[rank]) for worker in peers)
    if rank in workers:
        steps.extend(Recv((server,), *spans[server]) for server in reversed(others))
    return steps


def _ahead(rank: int, others: Sequence[int]) -> List[int]:
    """The next one first, so that not all begin with the same."""
    return [other for other in others if other > rank] + [other for other in others if other < rank]
