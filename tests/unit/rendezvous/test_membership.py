"""Which processes may take part, and which rank each becomes."""

from __future__ import annotations

import itertools
import random

import pytest

from ringcomm.config import Slot
from ringcomm.rendezvous.membership import Member, RankAssignment, Refusal
from tests.unit.rendezvous.simulated import VERSION, join_message, seats_of


def member(connection, **message):
    full = join_message(**message)
    slot = Slot(*message["slot"]) if message.get("slot") else None
    return Member(connection, full, slot, str(full.get("host") or full["hostname"]))


def ranks(assignment, members):
    """(rank, host_index, local_rank) by connection."""
    return {
        item.connection: (item.rank, item.host_index, item.local_rank)
        for item in assignment.assign(list(members))
    }


# ---- which processes may join ---------------------------------------------------------------


@pytest.mark.parametrize(
    "seats, message, place",
    [
        (seats_of(1, 2), {"slot": (1, 1), "hostname": "unknown"}, (Slot(1, 1), "host1")),
        ([], {"hostname": "pc"}, (None, "pc")),
        ([], {"hostname": "pc", "host": "jetson"}, (None, "jetson")),
        ([], {"hostname": "pc", "rank": 2}, (None, "pc")),
        ([], {"hostname": "pc", "slot": (4, 0)}, (Slot(4, 0), "pc")),
    ],
)
def test_place(seats, message, place):
    assert RankAssignment(3, seats, VERSION).place(join_message(**message)) == place


@pytest.mark.parametrize(
    "seats, message, words",
    [
        ([], {"version": "1.2.4"}, "host0 has ringcomm 1.2.4, but this job runs 1.2.3.*same folder or wheel"),
        ([], {"rank": 3}, "asks for rank 3; this job has ranks 0 to 2"),
        ([], {"rank": -1}, "asks for rank -1"),
        ([], {"rank": "0"}, "asks for rank '0'"),
        ([], {"rank": 0.0}, "asks for rank 0.0"),
        ([], {"rank": True}, "asks for rank True"),
        (seats_of(3), {"pid": 77}, r"host0 \(process 77\) was not started by this job's launcher"),
        (seats_of(3), {"slot": (1, 0)}, "asks for place 0 of host number 1, which was not planned"),
    ],
)
def test_refused(seats, message, words):
    with pytest.raises(Refusal, match=words):
        RankAssignment(3, seats, VERSION).place(join_message(**message))


@pytest.mark.parametrize("slot", [5, "ab", [], [0], ["x", 0], [None, 0], {}, [float("inf"), 0], [[0], 0]])
def test_a_place_that_is_none(slot):
    with pytest.raises(Refusal, match="names an invalid place"):
        RankAssignment(3, seats_of(3), VERSION).place({**join_message(), "slot": slot})


# ---- which rank each becomes -----------------------------------------------------------------


def test_seats_decide_whatever_the_order():
    assignment = RankAssignment(4, seats_of(2, 2), VERSION)
    seats = enumerate(assignment.seats)
    members = [member(n, slot=seat.slot, hostname="same", pid=9 - n) for n, seat in seats]
    for order in itertools.permutations(members):
        assert ranks(assignment, order) == {0: (0, 0, 0), 1: (1, 0, 1), 2: (2, 1, 0), 3: (3, 1, 1)}


def test_two_planned_hosts_with_one_hostname_are_two_hosts():
    assignment = RankAssignment(2, seats_of(1, 1), VERSION)
    members = [member(n, slot=seat.slot, hostname="localhost") for n, seat in enumerate(assignment.seats)]
    assert ranks(assignment, members) == {0: (0, 0, 0), 1: (1, 1, 0)}


def test_without_a_plan_hostname_and_process_decide():
    assignment = RankAssignment(4, [], VERSION)
    members = [
        member(0, hostname="b", pid=1),
        member(1, hostname="a", pid=20),
        member(2, hostname="a", pid=3),
        member(3, hostname="c", pid=2),
    ]
    for order in itertools.permutations(members):
        assert ranks(assignment, order) == {2: (0, 0, 0), 1: (1, 0, 1), 0: (2, 1, 0), 3: (3, 2, 0)}


def test_wanted_ranks_are_kept_and_the_rest_dealt_out():
    assignment = RankAssignment(4, [], VERSION)
    members = [
        member(0, hostname="z", rank=0),
        member(1, hostname="b"),
        member(2, hostname="a"),
        member(3, hostname="a", pid=5, rank=2),
    ]
    for order in itertools.permutations(members):
        found = ranks(assignment, order)
        assert {connection: place[0] for connection, place in found.items()} == {0: 0, 2: 1, 3: 2, 1: 3}
        assert found == {0: (0, 0, 0), 2: (1, 1, 0), 3: (2, 1, 1), 1: (3, 2, 0)}


def test_equal_hostnames_on_different_machines_are_different_hosts():
    assignment = RankAssignment(2, [], VERSION)
    members = [member(0, hostname="localhost", machine="A"), member(1, hostname="localhost", machine="B")]
    assert {place[1] for place in ranks(assignment, members).values()} == {0, 1}


def test_two_ask_for_the_same_rank():
    members = [member(0, hostname="a", rank=1), member(1, hostname="b", rank=1)]
    with pytest.raises(Refusal, match="two processes ask for rank 1: one on a and one on b"):
        RankAssignment(2, [], VERSION).assign(members)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_are_complete_and_reproducible(seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    size = rng.randrange(1, 10)
    assignment = RankAssignment(size, [], VERSION)
    wishes = rng.sample(range(size), rng.randrange(size + 1))
    members = [
        member(n, hostname=rng.choice("abc"), pid=n, rank=wishes[n] if n < len(wishes) else None)
        for n in range(size)
    ]
    first = ranks(assignment, members)
    assert sorted(place[0] for place in first.values()) == list(range(size))
    for _ in range(5):
        rng.shuffle(members)
        assert ranks(assignment, members) == first


# ---- missing ranks ---------------------------------------------------------------------------


def test_missing_seats_are_named():
    assignment = RankAssignment(3, seats_of(1, 2), VERSION)
    here = member(0, slot=(1, 0))
    assert [rank for rank, _ in assignment.missing([here.slot])] == [0, 2]
    assert assignment.describe_missing([here]) == "rank 0 (host0), rank 2 (host1)"


def test_many_missing_are_counted():
    assignment = RankAssignment(20, seats_of(20), VERSION)
    assert assignment.describe_missing([]).endswith("rank 7 (host0) and 12 more")
    assert "more" not in RankAssignment(8, seats_of(8), VERSION).describe_missing([])


def test_without_a_plan_those_present_are_named():
    assignment = RankAssignment(3, [], VERSION)
    text = assignment.describe_missing([member(0, hostname="pc", pid=7)])
    assert text == "2 more; these have joined: pc (process 7)"


def test_names():
    waiting = member(0, hostname="pc", host="jetson1")
    assert waiting.name() == "a rank on jetson1"
    waiting.rank = 2
    assert waiting.name() == "rank 2 (jetson1)"
    assert waiting.describe() == {
        "rank": 2,
        "host": "jetson1",
        "host_index": -1,
        "local_rank": -1,
        "pid": 100,
    }
