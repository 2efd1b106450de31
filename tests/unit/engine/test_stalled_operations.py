"""Operations that some ranks have not announced: which are given up, and which are only warned about."""

from __future__ import annotations

import pytest

from ringcomm.engine.deadlocks import BUSY_FACTOR, DEADLOCK_S
from ringcomm.ops import Collective
from ringcomm.wire.frames import NO_OP
from tests.unit.engine.coordinated import Job, sig


def test_all_ranks_wait_for_something_else():
    job = Job()
    for rank, name in enumerate("abb"):
        job.ready(rank, sig(name))
        job.send(rank, {"type": "blocked", "heard": 0, "for_good": True, "calls": 0, "call": []})
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
        job.send(rank, {"type": "blocked", "heard": 0, "for_good": rank != 0, "calls": 0, "call": []})
    job.now_s += 60
    assert job.responses() is None and "'a'" in job.coordinator.reports.warnings[0]
    job.send(2, {"type": "stack", "text": "asked because of the warning"})  # says nothing new
    assert job.coordinator.next_alarm_s(job.now_s) == pytest.approx((BUSY_FACTOR - 1) * 60)
    job.now_s += (BUSY_FACTOR - 1) * 60
    failures = dict(job.failures())
    assert set(failures) == {"a", "b"}
    assert "threads of rank 0 (desk) could still call it" in failures["a"]
    assert "for 120 s, 20 % of RINGCOMM_LATE_AFTER" in failures["a"]


@pytest.mark.parametrize("options", [{"stall_warning_s": 0}, {"stall_warning_s": 60, "paused": 2}])
def test_where_a_thread_may_still_submit_it_is_not_given_up(options):
    job = Job(stall_warning_s=options["stall_warning_s"], stall_limit_s=0)
    for rank, name in enumerate("abb"):
        job.ready(rank, sig(name))
        job.send(rank, {"type": "blocked", "heard": 0, "for_good": rank != 0, "calls": 0, "call": []})
    if "paused" in options:
        job.send(options["paused"], {"type": "paused", "reason": "checkpoint"})
    job.now_s += 10_000
    assert job.responses() is None


@pytest.mark.parametrize("for_good", [True, False])
def test_some_ranks_are_given_up_only_if_none_of_their_threads_may_still_submit(for_good):
    """Rank 2 goes on, so it may be long before a thread of rank 1 has anything to do."""
    job = Job(stall_warning_s=60, stall_limit_s=0)
    for rank, name in enumerate("ab"):
        job.ready(rank, sig(name))
        blocked = {"type": "blocked", "heard": 0, "calls": 0, "call": []}
        job.send(rank, {**blocked, "for_good": for_good or rank == 0})
    job.now_s += 10_000
    responses = job.responses()
    assert (responses is not None) == for_good


def test_what_has_failed_may_be_what_a_rank_waited_for():
    job = Job(stall_warning_s=0, stall_limit_s=0)
    for rank in range(3):
        job.ready(rank, sig("a", shapes=((rank,),)), sig("abb"[rank] + "!"))
        job.send(rank, {"type": "blocked", "heard": 0, "for_good": True, "calls": 0, "call": []})
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


def test_a_second_warning_says_in_a_word_where_a_rank_was_at_the_first():
    job = Job(stall_warning_s=60, stall_limit_s=0)
    job.ready(0, sig("a"))
    job.now_s += 60
    job.responses()
    assert job.coordinator.reports.to_explain == [1, 2]
    stack = '  File "/x/train.py", line 7, in main\n    load()\n  File "/x/data.py", line 22, in load\n'
    job.send(1, {"type": "stack", "text": f"{stack}    sleep(9)\n"})
    job.send(2, {"type": "stack", "text": ""})
    job.coordinator.reports.warnings.clear()
    job.now_s += 60
    job.responses()
    [again] = job.coordinator.reports.warnings
    assert again.endswith(
        "(rank 1 has submitted nothing yet; its main thread was last seen at /x/data.py:22; "
        "rank 2 has submitted nothing yet)."
    )


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
