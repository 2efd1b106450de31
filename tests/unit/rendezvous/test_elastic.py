"""Views of an elastic job, without sockets: which processes are in the next one, and when it is published."""

from __future__ import annotations

import pytest

from ringcomm.rendezvous.membership import ADDED, MAX_FAILED_VIEWS, REMOVED
from ringcomm.rendezvous.routing import ranges_of
from ringcomm.rendezvous.state import TOGETHER_S
from tests.unit.calls import calls_in
from tests.unit.rendezvous.simulated import ElasticJob, join_message


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

# ---- losses of an elastic job: which processes are left out, which go on, and when none can ------


def test_survivors_of_a_failure_form_the_next_view():
    job = ElasticJob(launched=True, min_np=2).start(4)
    job.exit(1)
    (lost,) = job.all("lost")
    assert "rank 1" in lost.text and "SIGKILL" in lost.text
    assert lost.detail["member"] == 1 and lost.detail["epoch"] == 0
    assert all(job.last(item)["type"] == "abort" and job.last(item)["epoch"] == 0 for item in (0, 2, 3))
    job.now_s += 0.5
    job.again(0, 2)
    assert job.state.view.epoch == 0, "rank 3 is still missing"
    job.again(3)
    assert job.state.view.epoch == 1 and job.members() == (0, 2, 3)
    job.link(0, 2, 3)
    view = job.all("view")[-1]
    assert view.detail["lost"] == [1] and view.detail["pause_s"] == 0.5
    assert view.text == "going on with 3 ranks after 0.5 s"


def test_rank_0_is_a_survivor_with_the_newest_state():
    job = ElasticJob(launched=True).start(4)
    job.exit(3)
    job.again(0, position=5)
    job.again(1, 2, position=6)
    assert job.members() == (1, 0, 2)


def test_a_member_that_was_left_behind_is_refused():
    job = ElasticJob(launched=True, min_np=1).start(3)
    report = {"type": "lost", "peer": 1, "doing": "allreduce", "why": "no heartbeat", "kind": "silent"}
    job.relay(0, report)
    job.pass_time(2.0, answering=(0, 2))
    assert job.all("lost")[0].detail["member"] == 1 and 1 in job.dropped
    job.again(0, 2)
    assert job.members() == (0, 2)
    job.join(9, member=1)
    assert "the job has gone on without this process" in job.last(9)["reason"]


def test_below_the_least_size_the_job_waits_and_then_ends():
    job = ElasticJob(launched=True, min_np=2, timeout_s=30.0).start(2)
    job.exit(1)
    job.again(0)
    (waiting,) = job.all("waiting")
    assert waiting.detail == {"size": 1, "min_size": 2, "timeout_s": 30.0}
    job.pass_time(29.0, answering=(0,))
    assert not job.all("failed")
    job.pass_time(2.0, answering=(0,))
    (failed,) = job.all("failed")
    assert failed.detail["kind"] == "timeout" and "within 30 s" in failed.text
    assert job.last(0)["type"] == "abort"


def test_without_a_survivor_the_state_is_lost():
    job = ElasticJob(launched=True).start(2)
    job.expect(2)
    job.join(2)
    job.exit(0)
    job.exit(1)
    (failed,) = job.all("failed")
    assert failed.detail["kind"] == "lost" and "rank 0 (pc): killed by SIGKILL" in failed.text
    assert job.last(2)["type"] == "abort"


def test_new_processes_alone_do_not_start_from_nothing():
    job = ElasticJob(launched=True).start(1)
    job.expect(1)
    job.join(1)
    job.again(0)
    assert job.members() == (0, 1)
    job.exit(0)
    job.again(1, position=0)
    assert job.all("failed")[0].text.startswith("No process that has a state is left")


def cut(job, first, second):
    job.relay(first, {"type": "lost", "peer": second, "doing": "", "why": "reset", "kind": "lost"})
    ranks = job.state.view.size
    for connection in (first, second):
        other = second if connection == first else first
        heard = [rank for rank in range(ranks) if rank not in (first, second)]
        pong = {"type": "pong", "heard": ranges_of(heard), "silent": ranges_of([other])}
        job.take(job.state.handle(connection, pong, job.now_s))
    job.pass_time(1.2, answering=())


def test_a_cut_that_comes_again_leaves_one_of_its_ends_out():
    job = ElasticJob(launched=True, min_np=1).start(3)
    cut(job, 1, 2)
    assert job.all("lost")[0].detail["kind"] == "cut" and not job.dropped
    job.again(0, 1, 2)
    job.link(0, 1, 2)
    assert job.members() == (0, 1, 2)
    cut(job, 1, 2)
    assert job.dropped == [2]
    job.again(0, 1)
    assert job.members() == (0, 1)


def test_views_that_fail_one_after_the_other_without_a_new_step_end_the_job():
    """For instance if rank 0 fails in every view: a launcher starts lost processes again, without end."""
    job = ElasticJob(start_np=3).start(3)
    for number in range(MAX_FAILED_VIEWS + 1):
        first, *others = [job.state._processes.get(member).connection for member in job.members()]
        assert job.state.abort_message is None
        job.join(100 + number, 100 + number, named=True)  # in the place of the last one
        job.leave(first, ok=False)
        job.again(*others, position=1)
        job.link(*(job.state._processes.get(member).connection for member in job.members()))
    (failed,) = job.all("failed")
    assert "10 views have failed, one after the other, before any commit or step" in failed.text
