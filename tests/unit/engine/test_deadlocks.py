"""Operations that some ranks have not announced: ranks that wait for each other, warnings, and the end."""

from __future__ import annotations

import pytest

from ringcomm.engine.deadlocks import BUSY_FACTOR, DEADLOCK_S
from ringcomm.ops import Collective
from ringcomm.wire.frames import NO_OP
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


def blocked(job, *ranks, heard=0, for_good=True, calls=0, call=()):
    for rank in ranks:
        message = {"type": "blocked", "heard": heard, "for_good": for_good, "calls": calls}
        job.send(rank, {**message, "call": list(call)})


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
    blocked(job, rank, calls=calls, call=["allreduce(8)", needs])


def by_name(job, rank, calls):
    """A rank waits for an operation of ranks 0 and 2 that only it has announced."""
    job.ready(rank, sig(f"of rank {rank}", process_set=1))
    blocked(job, rank, calls=calls)


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
    blocked(job, 1, calls=4)
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


def test_all_ranks_wait_for_something_else():
    job = Job()
    for rank, name in enumerate("abb"):
        job.ready(rank, sig(name))
        blocked(job, rank)
    assert job.responses() is None
    assert job.coordinator.next_alarm_s(job.now_s) == pytest.approx(DEADLOCK_S)
    job.now_s += DEADLOCK_S
    failures = dict(job.failures())
    assert set(failures) == {"a", "b"}
    assert "rank 0 (desk): allreduce" in failures["a"] and "named 'b'" in failures["a"]
    assert job.responses() is None


def test_where_a_thread_may_still_submit_it_is_a_stall_that_is_reported_first():
    job = Job(stall_warning_s=60, stall_limit_s=0)
    for rank, name in enumerate("abb"):
        job.ready(rank, sig(name))
        blocked(job, rank, for_good=rank != 0)
    job.now_s += 60
    assert job.responses() is None and "'a'" in job.coordinator.reports.warnings[0]
    job.send(2, {"type": "stack", "text": "asked because of the warning"})  # says nothing new
    assert job.coordinator.next_alarm_s(job.now_s) == pytest.approx((BUSY_FACTOR - 1) * 60)
    job.now_s += (BUSY_FACTOR - 1) * 60
    failures = dict(job.failures())
    assert set(failures) == {"a", "b"}
    assert "threads of rank 0 (desk) could still call it" in failures["a"]
    assert "for 120 s, 20 % of RINGCOMM_LATE_AFTER" in failures["a"]


def test_what_has_failed_may_be_what_a_rank_waited_for():
    job = Job(stall_warning_s=0, stall_limit_s=0)
    for rank in range(3):
        job.ready(rank, sig("a", shapes=((rank,),)), sig("abb"[rank] + "!"))
        blocked(job, rank)
    assert [name for name, _ in job.failures()] == ["a"]
    job.now_s += 100 * DEADLOCK_S  # what had waited for "a" computes now
    assert job.responses() is None


def test_warns_and_gives_up():
    job = Job(stall_warning_s=60, stall_limit_s=150)
    job.ready(1, sig("early"))
    job.ready(2, sig("a"))
    job.ready(0, sig("a"))
    job.now_s += 60
    assert job.responses() is None
    early, warning = job.coordinator.reports.warnings
    assert "waited for 60 s on ranks 0 (desk) and 2 (jetson2) for rank 1 (jetson1)" in warning
    assert "rank 1 last submitted allreduce" in warning and "'early', 60 s ago" in warning
    assert "rank 0 last submitted" in early
    job.coordinator.reports.warnings.clear()
    job.now_s += 30
    assert job.responses() is None and not job.coordinator.reports.warnings
    job.now_s += 60
    responses = job.responses()
    assert responses is not None
    assert [(kind, missing) for _, kind, _, missing in responses["failed"]] == [
        ("stalled", [0, 2]),
        ("stalled", [1]),
    ]
    assert "given up" in responses["failed"][1][2]


def test_what_some_ranks_of_a_removed_set_have_submitted_fails():
    """It would be matched with operations of the next set that gets the number."""
    job = Job(stall_limit_s=0)
    job.ready(0, sig("of the set", process_set=1))
    job.ready(1, sig("of another", process_set=2))
    job.ready(1, sig("message", process_set=-2))
    for rank in range(3):
        assert job.responses() is None
        job.ready(rank, sig("remove ranks 0, 2", kind=int(Collective.PROCESS_SET), op=NO_OP))
    responses = job.responses()
    [[key, kind, text, _]] = responses["failed"]
    assert (key[:2], kind) == ([1, "of the set"], "mismatch") and len(responses["run"]) == 1
    assert "was not submitted by rank 2 (jetson2) before remove_process_set() was called" in text
    job.ready(2, sig("of another", process_set=2))
    job.ready(0, sig("message", process_set=-2))
    assert job.run() == [["of another"], ["message"]]
