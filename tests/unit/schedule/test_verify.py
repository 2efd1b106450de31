"""The checker must catch broken schedules: otherwise it proves nothing."""

from __future__ import annotations

import pytest

from ringcomm.errors import BrokenInvariantError
from ringcomm.schedule import direct, doubling, ring, tree
from ringcomm.schedule.steps import SELF, SOURCE, Recv, Send, even_bounds
from tests.support.prover.verify import (
    check_all_gather,
    check_all_reduce,
    check_all_to_all,
    check_broadcast,
    check_reduce_scatter,
)

SIZE, COUNT = 5, 12
BOUNDS = even_bounds(COUNT, SIZE)

ALL_REDUCES = {
    "ring": lambda rank: ring.all_reduce(rank, SIZE, BOUNDS),
    "direct": lambda rank: direct.all_reduce(rank, SIZE, BOUNDS),
    "one_shot": lambda rank: direct.one_shot(rank, SIZE, COUNT),
    "doubling": lambda rank: doubling.all_reduce(rank, SIZE, COUNT),
}


def swap_pair(a, b):
    """The shortest all-reduce of two, from the fold of each."""
    return [[Send(1, 0, 4), Recv((1,), 0, 4, a, True)], [Send(0, 0, 4), Recv((0,), 0, 4, b, True)]]


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


def test_any_flipped_final(schedules):
    for rank in range(SIZE):
        for index, step in enumerate(schedules[rank]):
            if isinstance(step, Recv) and step.fold:
                broken = [list(steps) for steps in schedules]
                broken[rank][index] = step._replace(final=not step.final)
                refuse(broken, "final")


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


def test_another_order_of_operands_on_one_rank():
    check_all_reduce(swap_pair((SELF, 1), (0, SELF)), 4)
    with pytest.raises(BrokenInvariantError, match="ranks 0 and 1 fold element 0 in different order"):
        check_all_reduce(swap_pair((1, SELF), (0, SELF)), 4)


def test_a_rank_that_forgets_to_send_the_result_on():
    made = [direct.reduce_scatter(r, SIZE, BOUNDS) for r in range(SIZE)]
    check_reduce_scatter(made, BOUNDS)
    refuse(made, "lacks the contributions")


def test_an_early_send_carries_the_wrong_value():
    """Each send in front of the fold that it should follow: streams agree, values do not."""
    made = [ALL_REDUCES["ring"](rank) for rank in range(SIZE)]
    refuse(
        [
            [s for s in steps if isinstance(s, Send)] + [s for s in steps if isinstance(s, Recv)]
            for steps in made
        ]
    )


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


@pytest.mark.parametrize(("length", "match"), [(1, "twice"), (2, "deadlock"), (100, "deadlock")])
def test_a_deadlock_that_only_a_second_element_shows(length, match):
    """Rank 0 folds [0, n) from 1 and 2; but 2 sends its part only after something that 1 sends it
    after all of [0, n). One element passes (and is wrong for another reason). Of two, rank 1 cannot
    send the second before the first is folded, which never happens."""
    n = length
    schedules = [
        [Recv((2,), n, 2 * n), Recv((1, 2), 0, n, (SELF, 1, 2), True)],
        [Send(0, 0, n), Send(2, 0, n), Send(2, n, 2 * n)],
        [Recv((1,), 0, n), Recv((1,), n, 2 * n), Send(0, n, 2 * n), Send(0, 0, n)],
    ]
    with pytest.raises(BrokenInvariantError, match=match):
        check_all_reduce(schedules, 2 * n)


def test_sending_what_is_not_defined():
    with pytest.raises(BrokenInvariantError, match="rank 1 sends element 0, which is undefined"):
        check_broadcast([[Recv((1,), 0, 3)], [Send(0, 0, 3)]], 0, 3)


@pytest.mark.parametrize(
    ("build", "check"),
    [
        (ring.all_gather, lambda s: check_all_gather(s, BOUNDS)),
        (direct.all_gather, lambda s: check_all_gather(s, BOUNDS)),
        (ring.reduce_scatter, lambda s: check_reduce_scatter(s, BOUNDS)),
        (direct.reduce_scatter, lambda s: check_reduce_scatter(s, BOUNDS)),
        (lambda r, p, _: tree.broadcast(r, p, 2, COUNT), lambda s: check_broadcast(s, 2, COUNT)),
        (lambda r, p, _: tree.chain(r, p, 2, COUNT), lambda s: check_broadcast(s, 2, COUNT)),
    ],
)
def test_other_collectives_with_a_step_dropped_or_moved(build, check):
    made = [list(build(r, SIZE, BOUNDS)) for r in range(SIZE)]
    check(made)
    for rank in range(SIZE):
        for index, step in enumerate(made[rank]):
            moved = [[step._replace(start=step.start + 1, stop=step.stop + 1)]]
            # An empty step, which carries only a header, may stand anywhere.
            for other in ([], *(moved if step.start < step.stop else ())):
                broken = [list(steps) for steps in made]
                broken[rank][index : index + 1] = other
                with pytest.raises(BrokenInvariantError):
                    check(broken)


def test_all_to_all_mutations():
    sends = recvs = [(0, 1, 3), (0, 2, 5)]
    good = [[Send(1, 1, 3, SOURCE), Recv((1,), 1, 3)], [Send(0, 0, 2, SOURCE), Recv((0,), 0, 2)]]
    check_all_to_all(good, sends, recvs)
    for schedules, match in (
        ([[Send(1, 0, 2, SOURCE), good[0][1]], good[1]], "rank 1 element 0 is not what rank 0 had"),
        ([good[0], [good[1][0], Recv((0,), 1, 3)]], "schedule is wrong"),
        ([[*good[0], Recv((1,), 0, 1)], [*good[1], Send(0, 2, 3, SOURCE)]], "should not have been touched"),
    ):
        with pytest.raises(BrokenInvariantError, match=match):
            check_all_to_all(schedules, sends, recvs)


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (Send(0, 0, 4), "different other ranks"),
        (Send(2, 0, 4), "different other ranks"),
        (Send(1, 3, 2), "not a span"),
        (Send(1, 0, 4, 7), "no such buffer"),
        (Send(1, 0, 4, SOURCE), "leaves the buffer"),
        (Send(1, 0, 5), "leaves the buffer"),
        (Recv((), 0, 4), "different other ranks"),
        (Recv((1, 1), 0, 4, (1, 1, SELF)), "different other ranks"),
        (Recv((1,), 0, 4, (1,)), "permutation"),
        (Recv((1,), 0, 4, (), True), "only a fold"),
    ],
)
def test_malformed_steps(step, match):
    mirror = Recv((0,), step.start, step.stop) if isinstance(step, Send) else Send(0, 0, 4)
    with pytest.raises(BrokenInvariantError, match=match):
        check_all_reduce([[step], [mirror]], 4)


def test_unequal_lengths_name_both_steps():
    with pytest.raises(
        BrokenInvariantError, match=r"rank 0 step 0 Send.*rank 1 step 0 Recv.*differ in length"
    ):
        check_broadcast([[Send(1, 0, 3)], [Recv((0,), 0, 4)]], 0, 4)


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
