"""The checker must catch broken schedules: otherwise it proves nothing."""

from __future__ import annotations

import pytest

from ringcomm.errors import BrokenInvariantError
from ringcomm.schedule import direct, ring, tree
from ringcomm.schedule.steps import SELF, Recv, Send, even_bounds
from tests.support.prover.verify import check_all_reduce

SIZE, COUNT = 5, 12
BOUNDS = even_bounds(COUNT, SIZE)

ALL_REDUCES = {
    "ring": lambda rank: ring.all_reduce(rank, SIZE, BOUNDS),
    "direct": lambda rank: direct.all_reduce(rank, SIZE, BOUNDS),
    "one_shot": lambda rank: direct.one_shot(rank, SIZE, COUNT),
    "doubling": lambda rank: tree.all_reduce(rank, SIZE, COUNT),
}


@pytest.fixture(params=sorted(ALL_REDUCES))
def schedules(request):
    made = [ALL_REDUCES[request.param](rank) for rank in range(SIZE)]
    check_all_reduce(made, COUNT)
    return made


def refuse(schedules, match="schedule is wrong"):
    with pytest.raises(BrokenInvariantError, match=match):
        check_all_reduce(schedules, COUNT)


def test_any_dropped_step(schedules):
    for rank in range(SIZE):
        for index in range(len(schedules[rank])):
            broken = [list(steps) for steps in schedules]
            del broken[rank][index]
            refuse(broken, "sends to rank")


def test_any_span_moved_or_cut(schedules):
    for rank in range(SIZE):
        for index, step in enumerate(schedules[rank]):
            for change in ((0, -1), (1, 0), (1, 1), (-1, -1)):
                broken = [list(steps) for steps in schedules]
                moved = step._replace(start=step.start + change[0], stop=step.stop + change[1])
                broken[rank][index] = moved
                refuse(broken)


def test_a_contribution_that_comes_twice():
    twice = [
        [Send(1, 0, COUNT), Send(1, 0, COUNT), Recv((1,), 0, COUNT)],
        [Recv((0,), 0, COUNT, (0, SELF), True), Recv((0,), 0, COUNT, (0, SELF)), Send(0, 0, COUNT)],
    ]
    refuse(twice, "already final")
    twice[1][0] = twice[1][0]._replace(final=False)
    refuse(twice, "has all contributions, but is not final")
    three = [
        [Send(1, 0, COUNT), Send(1, 0, COUNT)],
        [Recv((0,), 0, COUNT, (0, SELF)), Recv((0,), 0, COUNT, (0, SELF))],
        [],
    ]
    refuse(three, r"ranks \[0\] twice")


def test_deadlocks():
    copies = [[Recv((1,), 0, 4), Send(1, 0, 4)], [Recv((0,), 0, 4), Send(0, 0, 4)]]
    untouched = r"deadlock(.|\n)*rank 0 -> rank 1, element 0: earlier steps of rank 0 have not touched it yet"
    with pytest.raises(BrokenInvariantError, match=untouched):
        check_all_reduce(copies, 4)
    folds = [
        [Recv((1,), 0, 4, (1, SELF), True), Send(1, 0, 4)],
        [Recv((0,), 0, 4, (0, SELF), True), Send(0, 0, 4)],
    ]
    with pytest.raises(BrokenInvariantError, match="deadlock"):
        check_all_reduce(folds, 4)


def test_single_fold_is_told_from_a_ladder():
    ladder = [ring.all_reduce(r, 3, (0, 1, 2, 3)) for r in range(3)]
    with pytest.raises(BrokenInvariantError, match="2 folds one upon the other"):
        check_all_reduce(ladder, 3, single_fold=True)


@pytest.mark.parametrize("size", range(1, 17))
def test_with_codecs_direct_encodes_every_element_twice_and_others_do_not(size):
    for count in (1, size, 3 * size + 1):
        bounds = even_bounds(count, size)
        made = [direct.all_reduce(rank, size, bounds) for rank in range(size)]
        check_all_reduce(made, count, single_fold=True, coded=True)
    if size > 2:
        made = [ring.all_reduce(rank, size, bounds) for rank in range(size)]
        with pytest.raises(BrokenInvariantError, match=f"was encoded {size} times"):
            check_all_reduce(made, count, coded=True)
        with pytest.raises(BrokenInvariantError):  # ranks that fold their own values end with other bits
            check_all_reduce([direct.one_shot(r, size, count) for r in range(size)], count, coded=True)
