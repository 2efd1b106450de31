"""Proof that a set of schedules computes what it should, by a replay of all ranks in symbols.

Each function here says what one collective must do: what is defined in the beginning, and what every rank
must have at the end. `replay` moves the elements, and finds deadlocks and double contributions.
"""

from __future__ import annotations

from typing import Dict, Sequence

from ringcomm.schedule.cost import Schedules
from ringcomm.schedule.steps import DATA, SOURCE, Bounds
from tests.support.prover.cuts import Domain
from tests.support.prover.replay import Replay


def check_all_reduce(
    schedules: Schedules, count: int, *, single_fold: bool = False, coded: bool = False
) -> None:
    """Prove that all ranks end with the same finished fold of all contributions; with `single_fold`, that
    each element is made by one fold of all; with `coded`, for a schedule that is run with a codec, that no
    element is encoded more than twice, and that the rank that finishes it keeps what its own codes mean.
    """
    size = len(schedules)
    replay = Replay(schedules, {(rank, DATA): (0, count) for rank in range(size)}, coded)
    replay.fill((rank, DATA, 0, count) for rank in range(size))
    replay.run()
    for rank in range(size):
        replay.expect_reduced(rank, 0, count, single_fold)
        if coded and size > 1:
            replay.expect_coded(rank, 0, count)
    replay.expect_same(0, count)


def check_reduce_scatter(schedules: Schedules, bounds: Bounds, *, single_fold: bool = False) -> None:
    """Prove that rank r ends with the finished fold of all in chunk r; see `check_all_reduce`."""
    size = len(schedules)
    replay = Replay(schedules, {(rank, DATA): bounds for rank in range(size)})
    replay.fill((rank, DATA, bounds[0], bounds[-1]) for rank in range(size))
    replay.run()
    for rank in range(size):
        replay.expect_reduced(rank, bounds[rank], bounds[rank + 1], single_fold)


def check_all_gather(schedules: Schedules, bounds: Bounds) -> None:
    """Prove that all ranks end with chunk q as rank q had it, of which nothing else was defined."""
    size = len(schedules)
    replay = Replay(schedules, {(rank, DATA): bounds for rank in range(size)})
    replay.fill((rank, DATA, bounds[rank], bounds[rank + 1]) for rank in range(size))
    replay.run()
    for rank in range(size):
        for owner in range(size):
            replay.expect_copy(rank, bounds[owner], bounds[owner + 1], (owner, DATA, bounds[owner]))


def check_broadcast(schedules: Schedules, root: int, count: int) -> None:
    """Prove that all ranks end with the root's elements."""
    size = len(schedules)
    replay = Replay(schedules, {(rank, DATA): (0, count) for rank in range(size)})
    replay.fill([(root, DATA, 0, count)])
    replay.run()
    for rank in range(size):
        replay.expect_copy(rank, 0, count, (root, DATA, 0))


def check_all_to_all(
    schedules: Schedules, send_bounds: Sequence[Bounds], recv_bounds: Sequence[Bounds]
) -> None:
    """Prove that rank r ends with chunk q as rank q meant it for r, and its own span untouched."""
    size = len(schedules)
    marks: Dict[Domain, Bounds] = {(rank, DATA): recv_bounds[rank] for rank in range(size)}
    marks.update({(rank, SOURCE): send_bounds[rank] for rank in range(size)})
    replay = Replay(schedules, marks)
    replay.fill((rank, SOURCE, send_bounds[rank][0], send_bounds[rank][-1]) for rank in range(size))
    replay.run()
    for rank in range(size):
        for owner in range(size):
            start, stop = recv_bounds[rank][owner : owner + 2]
            if owner == rank:
                replay.expect_undefined(rank, start, stop)
            else:
                replay.expect_copy(rank, start, stop, (owner, SOURCE, send_bounds[owner][rank]))
