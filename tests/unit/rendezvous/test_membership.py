"""Which processes may take part, and which rank each becomes."""

from __future__ import annotations

import itertools

import pytest

from ringcomm.config import Slot
from ringcomm.rendezvous.membership import (
    Assembly,
    Process,
    Refusal,
    Seat,
    Terms,
    named_twice,
    number_hosts,
    rank_order,
)
from tests.unit.rendezvous.simulated import VERSION, join_message, seats_of


def assembly(size, seats=()):
    return Assembly(Terms(VERSION, 60.0, size, tuple(seats)))


def process(number, **message):
    full = join_message(**message)
    slot = Slot(*message["slot"]) if message.get("slot") else None
    host = str(full.get("host") or full["hostname"])
    return Process(number, number, None if slot is None else Seat(slot, host), full)


def ranks(assignment, processes):
    """(rank, host_index, local_rank) by connection."""
    by_number = {item.number: item for item in processes}
    ordered = [by_number[number] for number in assignment._assign(list(processes))]
    number_hosts(ordered, bool(assignment.terms.seats))
    return {item.connection: (rank, item.host_index, item.local_rank) for rank, item in enumerate(ordered)}


@pytest.mark.parametrize(
    "seats, message, words",
    [
        ([], {"version": "1.2.4"}, "host0 has ringcomm 1.2.4, but this job runs 1.2.3.*same folder or wheel"),
        ([], {"rank": 3}, "asks for rank 3; this job has ranks 0 to 2"),
        ([], {"rank": "0"}, "asks for rank '0'"),
        ([], {"rank": True}, "asks for rank True"),
        (seats_of(3), {"pid": 77}, r"host0 \(process 77\) was not started by this job's launcher"),
        (seats_of(3), {"slot": (1, 0)}, r"asks for the place \[1, 0\], which was not planned"),
    ],
)
def test_refused(seats, message, words):
    with pytest.raises(Refusal, match=words):
        assembly(3, seats).admit(join_message(**message))


@pytest.mark.parametrize("slot", [5, "ab", [0], ["x", 0], {}, [float("inf"), 0]])
def test_a_place_that_is_none(slot):
    with pytest.raises(Refusal, match="names an invalid place"):
        assembly(3, seats_of(3)).admit({**join_message(), "slot": slot})


def test_two_planned_hosts_with_one_hostname_are_two_hosts():
    assignment = assembly(2, seats_of(1, 1))
    members = [process(n, slot=seat.slot, hostname="localhost") for n, seat in enumerate(seats_of(1, 1))]
    assert ranks(assignment, members) == {0: (0, 0, 0), 1: (1, 1, 0)}


def test_wanted_ranks_are_kept_and_the_rest_dealt_out():
    assignment = assembly(4, [])
    members = [
        process(0, hostname="z", rank=0), process(1, hostname="b"), process(2, hostname="a", machine="A"),
        process(3, hostname="a", machine="B", pid=5, rank=2),
    ]  # fmt: skip
    for order in itertools.permutations(members):
        assert ranks(assignment, order) == {0: (0, 0, 0), 2: (1, 1, 0), 3: (2, 2, 0), 1: (3, 3, 0)}


def test_one_machine_under_several_names_is_pointed_out():
    def planned(*places):
        found = [
            Process(
                number, number, Seat(Slot(number, 0), host), join_message(hostname=hostname, machine=machine)
            )
            for number, (host, hostname, machine) in enumerate(places)
        ]
        number_hosts(found, planned=True)
        return named_twice(found)

    twice = planned(("jetson1", "nano", "m1"), ("jetson2", "nx", "m2"), ("10.0.0.5", "nano", "m1"))
    assert twice.startswith("10.0.0.5 and jetson1 are names of one machine (nano), and count as 2 hosts: ")
    assert twice.endswith(" -H 10.0.0.5:2.")
    assert planned(("a", "a", "m1"), ("b", "b", "m1")) == ""  # containers
    assert planned(("a", "x", ""), ("b", "x", "")) == ""  # not known


def candidate(number, rank=-1, position=0, place=(0, 0)):
    found = process(number, slot=place, position=position)
    found.rank = rank
    return found


@pytest.mark.parametrize(
    "candidates, most, order",
    [
        # In the first view ranks follow the places.
        ([(0, -1, 0, (1, 0)), (1, -1, 0, (0, 1)), (2, -1, 0, (0, 0))], 8, (2, 1, 0)),
        # Survivors keep their order and come before new members.
        ([(7,), (3, 2), (1, 0), (2, 1)], 8, (1, 2, 3, 7)),
        # Rank 0 has the newest state, of several with the same state the first one.
        ([(1, 0, 4), (2, 1, 5), (3, 2, 5), (7,)], 8, (2, 1, 3, 7)),
        # The newest members are left out, wherever they are placed.
        ([(1, 0), (9, -1, 0, (0, 0)), (8, -1, 0, (2, 0)), (7, -1, 0, (1, 0))], 3, (1, 7, 8)),
        ([(1, 0), (9,)], 1, (1,)),
    ],
)
def test_the_order_of_ranks(candidates, most, order):
    assert rank_order([candidate(*facts) for facts in candidates], most) == order
