"""Losses of an elastic job: which processes are left out, which go on, and when none can."""

from __future__ import annotations

from ringcomm.rendezvous.routing import ranges_of
from ringcomm.rendezvous.terms import MAX_FAILED_VIEWS
from tests.unit.rendezvous.elastic_job import ElasticJob


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


def test_the_speeds_of_wires_are_kept_unless_the_network_may_have_changed():
    job = ElasticJob(launched=True).start(4)
    known = job.state.epoch.known = {frozenset(): []}
    job.exit(1)
    job.again(0, 2, 3)
    assert job.state.epoch.known == known
    job.link(0, 2, 3)
    job.relay(0, {"type": "lost", "peer": 1, "doing": "", "why": "no heartbeats", "kind": "silent"})
    job.pass_time(5.0, answering=(0, 3))
    assert "is silent" in job.all("lost")[-1].text
    job.again(0, 3)
    assert job.members() == (0, 3) and job.state.epoch.known == {}


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


def test_a_process_that_stops_while_it_waits_is_left_out():
    job = ElasticJob(launched=True, min_np=1).start(2)
    job.expect(2)
    job.join(2)
    job.pass_time(7.0, answering=(0, 1))
    assert 2 in job.dropped
    job.again(0, 1)
    assert job.members() == (0, 1)


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


def test_a_new_process_without_a_link_is_left_out():
    job = ElasticJob(launched=True, min_np=1).start(2)
    job.expect(2)
    job.join(2)
    job.again(0, 1)
    assert job.members() == (0, 1, 2)
    job.take(job.state.handle(0, {"type": "unlinked", "peer": 2, "reason": "no answer"}, job.now_s))
    job.pass_time(1.5)
    assert job.dropped == [2], job.notices
    job.again(0, 1)
    assert job.members() == (0, 1) and job.state.view.epoch == 2


def test_a_member_that_stops_while_links_are_built_is_left_out():
    job = ElasticJob(launched=True, min_np=1)
    job.expect(0, 1)
    job.join(0)
    job.join(1)
    assert job.members() == (0, 1)
    job.pass_time(8.0, answering=(0,))
    (lost,) = job.all("lost")
    assert lost.detail["kind"] == "stalled" and lost.detail["member"] == 1 and job.dropped == [1]
    job.again(0)
    assert job.members() == (0,)


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


def test_new_steps_between_failures_keep_the_job_alive():
    job = ElasticJob(start_np=3).start(3)
    for number in range(2 * MAX_FAILED_VIEWS):
        connections = [job.state._processes.get(member).connection for member in job.members()]
        job.join(100 + number, 100 + number, named=True)
        job.leave(connections[-1], ok=False)
        job.again(*connections[:-1], position=1 + number)
        job.link(*(job.state._processes.get(member).connection for member in job.members()))
    assert job.state.abort_message is None
