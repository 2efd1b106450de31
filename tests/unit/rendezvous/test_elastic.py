"""Views of an elastic job, without sockets: which processes are in the next one, and when it is published."""

from __future__ import annotations

import pytest

from ringcomm.rendezvous.membership import ADDED, REMOVED
from ringcomm.rendezvous.state import TOGETHER_S
from tests.unit.calls import calls_in
from tests.unit.rendezvous.elastic_job import ElasticJob
from tests.unit.rendezvous.simulated import join_message


def test_the_first_view_waits_for_the_start_size():
    job = ElasticJob(min_np=1, start_np=3)
    job.join(0)
    job.join(1)
    assert job.state.view.epoch == -1
    job.join(2)
    assert job.members() == (0, 1, 2)
    job.link(0, 1, 2)
    (view,) = job.all("view")
    assert view.detail["epoch"] == 0 and view.detail["pause_s"] == 0.0
    assert [item["rank"] for item in view.detail["members"]] == [0, 1, 2]


def test_the_first_view_waits_for_all_that_the_launcher_has_announced():
    job = ElasticJob(launched=True, min_np=1)
    job.expect(0, 1, 2)
    job.join(0)
    job.join(1)
    assert job.state.view.epoch == -1
    job.exit(2, "exit code 1")
    assert job.members() == (0, 1)


def test_only_announced_processes_may_join():
    job = ElasticJob(launched=True)
    job.join(7)
    assert job.last(7)["type"] == "refused" and "launcher" in job.last(7)["reason"]
    assert 7 in job.dropped


def test_an_excluded_member_ends_quietly_at_the_next_boundary():
    job = ElasticJob(launched=True).start(3)
    job.take(job.state.exclude(1, "its host was removed", job.now_s))
    assert job.last(0) == {"type": "updated", "change": REMOVED}
    job.again(0, 1, 2)
    assert job.last(1) == {"type": "excluded", "reason": "its host was removed"}
    assert 1 in job.dropped
    assert job.members() == (0, 2)


def test_another_process_cannot_take_a_members_number():
    job = ElasticJob(launched=True).start(2)
    message = join_message(pid=999, member=1)
    job.take(job.state.handle(8, message, job.now_s))
    assert job.last(8)["type"] == "refused" and "is process 101" in job.last(8)["reason"]
    assert job.members() == (0, 1) and not job.all("lost")


def test_a_defect_of_the_program_ends_the_job():
    job = ElasticJob(launched=True).start(2)
    job.relay(0, {"type": "mismatch", "peer": 1, "text": "rank 0: allreduce(8)"})
    job.pass_time(1.0)
    (failed,) = job.all("failed")
    assert failed.detail["kind"] == "mismatch"
    job.join(0, 0)
    assert job.last(0)["kind"] == "mismatch"


def test_a_member_that_is_excluded_after_it_has_asked_is_not_in_the_next_view():
    job = ElasticJob(launched=True).start(2)
    job.again(0)
    job.take(job.state.exclude(0, "its host was removed", job.now_s))
    job.again(1)
    assert job.last(0)["type"] == "excluded" and job.members() == (1,)


def test_a_first_view_that_never_has_enough_says_what_is_missing():
    job = ElasticJob(launched=True, min_np=2, timeout_s=30.0)
    job.expect(0)
    job.expect(1, host="jetson1")
    job.join(0)
    job.state.note_refused("3 connections (mostly 10.0.0.9: no answer)")
    job.pass_time(31.0, answering=(0,))
    (failed,) = job.all("failed")
    assert failed.text == (
        "Not enough ranks within 30 s: 1 of at least 2 ranks are ready; missing: "
        "jetson1. The rendezvous turned away 3 connections (mostly 10.0.0.9: no answer)."
    )
    told = len(job.told[0])
    job.take(job.state.tick(job.now_s + 60.0))
    assert len(job.told[0]) == told, "nothing happens after that"


def test_hosts_that_cannot_reach_each_other_at_the_start_end_the_job():
    job = ElasticJob(min_np=2, start_np=2)
    job.join(0, hostname="desk")
    job.join(1, hostname="jetson1")
    for connection in (0, 1):
        job.relay(connection, {"type": "probed", "attempts": []})
    (failed,) = job.all("failed")
    assert failed.detail["kind"] == "no_route" and "desk and jetson1 cannot reach each other" in failed.text


# ---- when the members are asked to take in processes that wait ----------------------------------

ASKED = {"type": "updated", "change": ADDED}


def started(size=2):
    return ElasticJob(launched=True).start(size)


def test_processes_of_one_host_join_together():
    job = started()
    job.expect(2, 3, host="jetson1")
    job.join(2)
    job.pass_time(TOGETHER_S - 4.0, answering=(0, 1, 2))
    assert ASKED not in (job.last(0), job.last(1)), "the members go on"
    job.join(3)
    assert job.last(0) == ASKED == job.last(1)
    job.again(0, 1)
    assert job.members() == (0, 1, 2, 3) and job.state.view.epoch == 1


def test_a_process_waits_for_its_hosts_others_for_a_limited_time():
    job = started()
    job.expect(2, 3, host="jetson1")
    job.join(2)
    job.pass_time(TOGETHER_S + 1.0, answering=(0, 1, 2))
    assert ASKED in (job.last(0), job.last(1))
    job.again(0, 1)
    assert job.members() == (0, 1, 2)


MORE = 1.15
"""Four times as many ranks may need 4.6 times as much: numbers get longer."""


@pytest.mark.parametrize("launched", [True, False])
def test_joining_the_first_view_of_an_elastic_job_takes_work_that_grows_with_the_ranks_only(launched):
    """A view was considered anew, with all processes that had joined, whenever one more did."""
    needed = {}
    for size in (64, 256):
        job = ElasticJob(launched=launched, start_np=size)
        for number in range(size) if launched else ():
            job.expect(number)
        needed[size] = calls_in(lambda job=job, size=size: [job.join(number) for number in range(size - 1)])
        job.join(size - 1)
        job.link(*range(size))
        assert job.state.view.size == size
    assert needed[256] <= 4 * MORE * needed[64]
