"""Ranks that wait for each other while other ranks make calls."""

from __future__ import annotations

import pytest

from ringcomm.engine.deadlocks import DEADLOCK_S
from tests.unit.engine.coordinated import Job, sig


def crossed(**options):
    """Ranks 0 and 2 have sent messages to each other, and neither has received one yet."""
    job = Job(stall_warning_s=60, stall_limit_s=0, **options)
    for rank, name in ((0, "a"), (2, "b")):
        job.ready(rank, sig(f"message {name}", process_set=1))
    return job


def go_on_alone(job):
    """Rank 1 makes a call by name that needs no other rank."""
    job.ready(1, sig("own", process_set=3))
    assert job.run() == [["own"]]


def blocked(job, *ranks, heard=0):
    for rank in ranks:
        job.send(rank, {"type": "blocked", "heard": heard, "for_good": True, "calls": 0, "call": []})


def test_some_ranks_wait_for_each_other_while_others_make_calls():
    job = crossed()
    go_on_alone(job)
    blocked(job, 0, 2)  # response 1 is on its way
    for heard in range(1, 5):
        assert job.responses() is None
        job.now_s += DEADLOCK_S / 4
        blocked(job, 0, 2, heard=heard)
        if heard < 4:
            go_on_alone(job)
    failures = dict(job.failures())
    assert set(failures) == {"message a", "message b"}
    assert "ranks 0 (desk) and 2 (jetson2) wait for each other" in failures["message a"]


def in_call(job, rank, calls, needs=-1):
    """A rank waits in its direct call of this number."""
    call = ["allreduce(8)", needs]
    job.send(rank, {"type": "blocked", "heard": 0, "for_good": True, "calls": calls, "call": call})


def by_name(job, rank, calls):
    """A rank waits for an operation of ranks 0 and 2 that only it has announced."""
    job.ready(rank, sig(f"of rank {rank}", process_set=1))
    job.send(rank, {"type": "blocked", "heard": 0, "for_good": True, "calls": calls, "call": []})


def found(job):
    """The description of the deadlock that is found now, if one is."""
    assert job.responses() is None
    job.now_s += DEADLOCK_S
    job.responses()
    return job.coordinator.deadlock


@pytest.mark.parametrize("first", [0, 2])
def test_a_direct_call_against_one_by_name(first):
    job = Job(stall_warning_s=60, stall_limit_s=0)
    for rank in (first, 2 - first):
        by_name(job, rank, 3) if rank == 2 else in_call(job, rank, 4)
    text = found(job)
    assert "ranks 0 (desk) and 2 (jetson2) wait for each other" in text
    assert "named 'of rank 2'" in text and "rank 0 (desk): allreduce(8), which" in text


def test_a_direct_call_that_all_have_entered_ends_by_itself():
    job = Job(stall_warning_s=60, stall_limit_s=0)
    in_call(job, 0, 4)
    by_name(job, 2, 4)
    assert found(job) == ""
    job.send(1, {"type": "blocked", "heard": 0, "for_good": True, "calls": 4, "call": []})
    assert found(job) == "", "rank 0 may have left its call, and compute"


@pytest.mark.parametrize(("root", "stuck"), [(2, True), (1, False), (0, False)])
def test_a_broadcast_needs_its_root(root, stuck):
    job = Job(stall_warning_s=60, stall_limit_s=0)
    in_call(job, 0, 4, root)
    by_name(job, 2, 3)
    assert bool(found(job)) == stuck


@pytest.mark.parametrize("rank", [0, 2])
def test_an_operation_that_ends_meanwhile_may_be_what_a_rank_waited_for(rank):
    """Another thread of the rank waits for it, and may then submit what is missing."""
    job = crossed(cycle_s=100 * DEADLOCK_S)
    job.ready(rank, sig("all"))
    blocked(job, 0, 2)
    for other in {0, 1, 2} - {rank}:
        job.ready(other, sig("all"))
    blocked(job, 0, 2)  # "all" is ready, and waits to be fused
    job.now_s += 10 * DEADLOCK_S
    assert job.responses() is None
    job.now_s += 90 * DEADLOCK_S
    assert job.run() == [["all"]]
    blocked(job, 2 - rank, heard=1)
    blocked(job, rank, heard=0)  # sent before it had received that
    job.now_s += 10 * DEADLOCK_S
    assert job.responses() is None
    blocked(job, rank, heard=1)
    job.now_s += DEADLOCK_S
    assert len(job.failures()) == 2
