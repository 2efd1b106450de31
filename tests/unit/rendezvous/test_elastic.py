"""Views of an elastic job, without sockets: which processes are in the next one, and when it is published."""

from __future__ import annotations

import pytest

from ringcomm.rendezvous.actions import ADDED, REMOVED
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


def test_the_first_view_begins_with_fewer_after_the_start_timeout():
    job = ElasticJob(min_np=1, start_np=3, start_timeout_s=60.0)
    job.join(0)
    job.join(1)
    job.pass_time(59.0, answering=(0, 1))
    assert job.state.view.epoch == -1
    job.pass_time(2.0, answering=(0, 1))
    assert job.members() == (0, 1)


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


def test_a_new_process_joins_at_the_next_boundary():
    job = ElasticJob(launched=True).start(2)
    job.expect(2)
    assert job.last(0) == {"type": "announced"} == job.last(1)
    job.join(2)
    assert job.last(0) == {"type": "updated", "change": ADDED} == job.last(1)
    assert job.state.view.epoch == 0
    job.again(0, 1)
    assert job.members() == (0, 1, 2) and job.state.view.epoch == 1
    assert job.last(2)["type"] == "link"


def test_above_the_largest_size_new_processes_wait_as_spares():
    job = ElasticJob(launched=True, max_np=2).start(2)
    job.expect(2)
    job.join(2)
    assert "updated" not in job.kinds(0)
    job.exit(0)
    job.again(1)
    assert job.members() == (1, 2)


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


def test_the_job_ends_when_all_have_finished():
    job = ElasticJob(launched=True).start(2)
    job.expect(2)
    job.join(2)
    job.leave(0)
    job.leave(1)
    assert [item.kind for item in job.notices][-1] == "ended"
    assert job.last(2)["type"] == "excluded"
    job.join(3, member=3)
    assert job.last(3)["type"] == "excluded"


def test_a_defect_of_the_program_ends_the_job():
    job = ElasticJob(launched=True).start(2)
    job.relay(0, {"type": "mismatch", "peer": 1, "text": "rank 0: allreduce(8)"})
    job.pass_time(1.0)
    (failed,) = job.all("failed")
    assert failed.detail["kind"] == "mismatch"
    job.join(0, 0)
    assert job.last(0)["kind"] == "mismatch"


def test_a_process_with_another_version_is_refused():
    job = ElasticJob()
    job.join(0, version="9.9.9")
    assert "host0 has ringcomm 9.9.9, but this job runs 1.2.3" in job.last(0)["reason"]
    assert job.last(0)["type"] == "refused" and 0 in job.dropped


@pytest.mark.parametrize("end", ["hang_up", "leave"])
def test_a_process_that_ends_before_it_was_in_a_view_is_forgotten(end):
    job = ElasticJob(min_np=2, start_np=2)
    job.join(0)
    getattr(job, end)(0)
    job.join(1)
    assert job.state.view.epoch == -1
    job.join(2)
    assert job.members() == (1, 2)


def test_the_others_learn_of_a_member_that_leaves_because_of_an_error():
    job = ElasticJob(launched=True).start(3)
    job.leave(1, ok=False)
    assert [job.last(other)["type"] for other in (0, 2)] == ["abort", "abort"]
    assert job.last(0)["rank"] == 1


def test_a_new_process_that_is_excluded_ends_at_once():
    job = ElasticJob(launched=True).start(1)
    job.expect(1)
    job.join(1)
    job.take(job.state.exclude(1, "its host was removed", job.now_s))
    assert job.last(1) == {"type": "excluded", "reason": "its host was removed"} and 1 in job.dropped
    job.again(0)
    assert job.members() == (0,)


def test_a_member_that_is_excluded_after_it_has_asked_is_not_in_the_next_view():
    job = ElasticJob(launched=True).start(2)
    job.again(0)
    job.take(job.state.exclude(0, "its host was removed", job.now_s))
    job.again(1)
    assert job.last(0)["type"] == "excluded" and job.members() == (1,)


def test_a_member_may_ask_on_a_connection_of_its_own():
    """Its old one is dropped: it is the same process."""
    job = ElasticJob(launched=True).start(2)
    job.join(5, member=0, position=1)
    assert job.dropped == [0]
    job.hang_up(0)
    job.again(1)
    assert job.members() == (0, 1) and job.state.view.epoch == 1 and not job.all("lost")
    assert job.last(5)["type"] == "link"


def test_a_first_view_that_never_has_enough_says_what_is_missing():
    job = ElasticJob(launched=True, min_np=2, timeout_s=30.0)
    job.expect(0)
    job.expect(1, host="jetson1")
    job.join(0)
    job.state.refused_connections = "3 connections (mostly 10.0.0.9: no answer)"
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


def test_a_process_does_not_wait_for_those_of_other_hosts():
    job = started()
    job.expect(2, host="jetson1")
    job.expect(3, host="jetson2")
    job.join(2)
    assert job.last(0) == ASKED


def test_a_process_waits_for_its_hosts_others_for_a_limited_time():
    job = started()
    job.expect(2, 3, host="jetson1")
    job.join(2)
    job.pass_time(TOGETHER_S + 1.0, answering=(0, 1, 2))
    assert ASKED in (job.last(0), job.last(1))
    job.again(0, 1)
    assert job.members() == (0, 1, 2)


def test_a_process_that_ends_is_not_waited_for():
    job = started()
    job.expect(2, 3, host="jetson1")
    job.join(2)
    assert job.last(0) != ASKED
    job.exit(3)
    assert job.last(0) == ASKED


def test_a_process_asks_for_the_size_before_it_joins():
    for job, size in ((started(), 2), (ElasticJob(launched=True), 0)):
        job.take(job.state.handle(9, {"type": "count"}, job.now_s))
        assert job.last(9) == {"type": "counted", "size": size}


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
