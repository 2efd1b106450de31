"""Ranks that wait for each other while other ranks make calls."""

from __future__ import annotations

import pytest

from ringcomm.engine.coordinator import Tuning
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
        job.send(rank, {"type": "blocked", "heard": heard, "for_good": True})


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


def test_the_last_of_them_must_have_waited_long_enough():
    job = crossed()
    blocked(job, 0)
    job.now_s += DEADLOCK_S * 3 / 4
    blocked(job, 2)
    job.now_s += DEADLOCK_S / 2
    go_on_alone(job)
    assert job.coordinator.next_alarm_s(job.now_s) == pytest.approx(DEADLOCK_S / 2)
    job.now_s += DEADLOCK_S * 5 / 8
    assert len(job.failures()) == 2


@pytest.mark.parametrize("rank", [0, 2])
def test_an_operation_that_ends_meanwhile_may_be_what_a_rank_waited_for(rank):
    """Another thread of the rank waits for it, and may then submit what is missing."""
    job = crossed(tuning=Tuning(1 << 20, 100 * DEADLOCK_S))
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


def test_what_is_left_for_later_responses_may_be_what_a_rank_waits_for():
    job = crossed()
    job.coordinator.needed = {"large": 0, "later": 1}
    for name in ("large", "later"):
        for rank in range(3):
            job.ready(rank, sig(name, shapes=((2 << 20,),)))
    assert job.run() == [["large"]]
    blocked(job, 0, 2, heard=1)
    job.now_s += 10 * DEADLOCK_S
    assert job.run() == [["later"]]
    blocked(job, 0, 2, heard=2)
    job.now_s += DEADLOCK_S
    assert len(job.failures()) == 2


@pytest.mark.parametrize("change", ["unblocked", "ready", "not for good"])
def test_one_of_some_ranks_may_still_come(change):
    job = crossed()
    blocked(job, 0, 2)
    job.now_s += DEADLOCK_S / 2
    if change == "unblocked":
        job.send(2, {"type": "unblocked"})
    elif change == "ready":
        job.ready(2, sig("more"))
    else:
        job.send(2, {"type": "blocked", "heard": 0, "for_good": False})
    for _ in range(5):
        job.now_s += DEADLOCK_S
        go_on_alone(job)
    blocked(job, 2, heard=5)
    job.now_s += DEADLOCK_S / 2
    assert job.responses() is None, "it has to wait anew"
    job.now_s += DEADLOCK_S / 2
    assert len(job.failures()) == 2 + (change == "ready")
