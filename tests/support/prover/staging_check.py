"""Proof that copies between devices and the host are complete and in time, for any schedule.

The replay of `verify`, with a device for each rank as one more peer (`with_devices`). In
the beginning the contributions are on the devices alone and the host's memory is undefined, so a step that
a load does not precede sends or folds what is undefined. In the end the devices are examined, so a result
that is not stored, or stored before its last receive, is found.
"""

from __future__ import annotations

from typing import Collection, Dict, Sequence

from ringcomm.schedule.staging import Copies, with_devices
from ringcomm.schedule.steps import DATA, Bounds
from ringcomm.schedule.streams import Schedules
from tests.support.prover.cuts import Domain
from tests.support.prover.replay import Replay


def check_staged_all_reduce(
    schedules: Schedules, count: int, copies: Sequence[Copies], on_host: Collection[int] = ()
) -> None:
    """Prove that all arrays end with the same finished fold of all contributions.

    Args:
        schedules: one per rank.
        count: number of elements.
        copies: those of each rank.
        on_host: the ranks whose arrays are in host memory; they have no copies.

    Raises:
        BrokenInvariantError: otherwise.
    """
    size = len(schedules)
    replay = _replay(schedules, (0, count), copies)
    places = [rank if rank in on_host else size + rank for rank in range(size)]
    for rank, place in enumerate(places):
        replay.fill([(rank, DATA, 0, count)], on=place)
    replay.run()
    for place in places:
        replay.expect_reduced(place, 0, count, False)
    replay.expect_same(0, count, places)


def check_staged_reduce_scatter(schedules: Schedules, bounds: Bounds, copies: Sequence[Copies]) -> None:
    """Prove that rank r's device ends with the finished fold of all contributions in chunk r.

    Args:
        schedules: one per rank.
        bounds: chunk boundaries in elements.
        copies: those of each rank.

    Raises:
        BrokenInvariantError: otherwise.
    """
    size = len(schedules)
    replay = _replay(schedules, bounds, copies)
    for rank in range(size):
        replay.fill([(rank, DATA, bounds[0], bounds[-1])], on=size + rank)
    replay.run()
    for rank in range(size):
        replay.expect_reduced(size + rank, bounds[rank], bounds[rank + 1], False)


def check_staged_all_gather(schedules: Schedules, bounds: Bounds, copies: Sequence[Copies]) -> None:
    """Prove that all devices end with chunk q as rank q's device had it.

    Args:
        schedules: one per rank.
        bounds: chunk boundaries in elements.
        copies: those of each rank.

    Raises:
        BrokenInvariantError: otherwise.
    """
    size = len(schedules)
    replay = _replay(schedules, bounds, copies)
    for rank in range(size):
        replay.fill([(rank, DATA, bounds[rank], bounds[rank + 1])], on=size + rank)
    replay.run()
    for rank in range(size):
        for owner in range(size):
            origin = (owner, DATA, bounds[owner])
            replay.expect_copy(size + rank, bounds[owner], bounds[owner + 1], origin)


def check_staged_broadcast(schedules: Schedules, root: int, count: int, copies: Sequence[Copies]) -> None:
    """Prove that all devices end with the elements of the root's.

    Args:
        schedules: one per rank.
        root: the rank whose device has them in the beginning.
        count: number of elements.
        copies: those of each rank.

    Raises:
        BrokenInvariantError: otherwise.
    """
    size = len(schedules)
    replay = _replay(schedules, (0, count), copies)
    replay.fill([(root, DATA, 0, count)], on=size + root)
    replay.run()
    for rank in range(size):
        replay.expect_copy(size + rank, 0, count, (root, DATA, 0))


def _replay(schedules: Schedules, bounds: Bounds, copies: Sequence[Copies]) -> Replay:
    size = len(schedules)
    marks: Dict[Domain, Bounds] = {(rank, DATA): bounds for rank in range(2 * size)}
    return Replay(with_devices(schedules, copies), marks, contributors=size)
