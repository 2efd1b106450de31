"""The graph of waits: from which ranks wait for which, to the ranks that hold up the others. Pure.

Rank 0 asks about blocked ranks while a job runs (:mod:`.deadlocks`), ``ringrun`` about the flight records of
a job that has failed (``ringrun.diagnosis.waiting``).
"""

from __future__ import annotations

from typing import Collection, Iterable, List, Mapping, Set, Tuple


def behind(waits: Mapping[int, Collection[int]]) -> List[int]:
    """Return the ranks that others wait for and that do not wait themselves; `waits` has, for each rank that
    waits, the ranks that it waits for.
    """
    return sorted({other for others in waits.values() for other in others}.difference(waits))


def waiting_for_each_other(
    blocked: Collection[int], operations: Iterable[Tuple[Collection[int], Collection[int]]]
) -> Set[int]:
    """Return the blocked ranks of which none can go on before another one of them does.

    `operations` are (ranks that have announced it, ranks that it lacks). Whatever one of the returned ranks
    has announced lacks another one of them, so no other rank can release them.
    """
    stuck = set(blocked)
    waits = [(stuck.intersection(announced), stuck.intersection(lacks)) for announced, lacks in operations]
    while True:
        waiting = {rank for announced, _ in waits for rank in announced}
        released = {rank for announced, lacks in waits if not lacks & stuck for rank in announced}
        left = (stuck & waiting) - released
        if left == stuck:
            return stuck
        stuck = left
