"""When the members of an elastic job are asked to take in processes that wait."""

from __future__ import annotations

from ringcomm.rendezvous.joining import ADDED, TOGETHER_S
from tests.unit.rendezvous.elastic_job import ElasticJob

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


def test_a_view_that_begins_meanwhile_takes_what_is_ready():
    job = started(3)
    job.expect(3, 4, host="jetson1")
    job.join(3)
    job.exit(2)
    job.again(0, 1)
    assert job.members() == (0, 1, 3)


def test_a_process_asks_for_the_size_before_it_joins():
    for job, size in ((started(), 2), (ElasticJob(launched=True), 0)):
        job.take(job.state.handle(9, {"type": "count"}, job.now_s))
        assert job.last(9) == {"type": "counted", "size": size}
