"""Members, views, and the ranks that members get in the next view."""

from __future__ import annotations

from ringcomm.group.view import Candidate, View, ViewMember, rank_order

A, B, C = ViewMember(0, "desk", 11), ViewMember(1, "desk", 12), ViewMember(4, "jetson", 11)


def survivor(number, rank, position=0):
    return Candidate(number, rank, position, (0, rank))


def new(number, host, slot):
    return Candidate(number, -1, 0, (host, slot))


def test_a_member_is_known_by_its_number_alone():
    """A process that was started in place of another one has a number of its own, wherever it runs."""
    again = ViewMember(5, A.host, A.pid)
    before, after = View(1, (A, B)), View(2, (B, again))
    assert (after.joined(before), after.lost(before)) == ((again,), (A,))


def test_in_the_first_view_ranks_follow_the_places():
    assert rank_order([new(0, 1, 0), new(1, 0, 1), new(2, 0, 0)], 8) == (2, 1, 0)


def test_survivors_keep_their_order_and_come_before_new_members():
    candidates = [new(7, 0, 0), survivor(3, 2), survivor(1, 0), survivor(2, 1)]
    assert rank_order(candidates, 8) == (1, 2, 3, 7)


def test_rank_0_has_the_newest_state():
    candidates = [survivor(1, 0, 4), survivor(2, 1, 5), survivor(3, 2, 5), new(7, 0, 0)]
    assert rank_order(candidates, 8) == (2, 1, 3, 7), "of several with the same state the first one"


def test_the_newest_members_are_left_out_wherever_they_are_placed():
    candidates = [survivor(1, 0), new(9, 0, 0), new(8, 2, 0), new(7, 1, 0)]
    assert rank_order(candidates, 3) == (1, 7, 8)
    assert rank_order(candidates, 1) == (1,)
