"""Jobs of many ranks: their routes, and what the rendezvous has to do."""

from __future__ import annotations

import itertools

import pytest

from ringcomm.rendezvous.actions import Send
from ringcomm.rendezvous.epoch import Phase
from tests.unit.calls import calls_in
from tests.unit.rendezvous.elastic_job import ElasticJob
from tests.unit.rendezvous.large import LargeStart, address_of, started
from tests.unit.rendezvous.simulated import Job, seats_of

MORE = 1.15
"""Four times as many ranks may need 4.6 times as much: numbers get longer, and trees deeper."""


# ---- routes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hosts", [[2] * 20, [1] * 20, [5] * 6, [3, 1, 20], [20]], ids=str)
def test_one_end_of_each_pair_dials_the_other_at_its_address(hosts):
    check_routes(started(*hosts))


def check_routes(job):
    host = [seat.slot.host_index for seat in job.seats]
    routes = {rank: {item["peer"]: item for item in found} for rank, found in job.routes.items()}
    for one, other in itertools.combinations(range(len(host)), 2):
        assert routes[one][other]["dial"] != routes[other][one]["dial"]
        dialler, target = (one, other) if routes[one][other]["dial"] else (other, one)
        near = host[one] == host[other]
        address = f"@{target}" if near else address_of(host[target])
        assert routes[dialler][target]["addresses"][0]["address"] == address
        assert near or (host[dialler], host[target]) not in job.unreachable


def test_where_one_end_cannot_dial_the_other_does():
    """Host 3 can be dialled by none: a firewall. Then it dials those that were to dial it."""
    closed = [(host, 3) for host in range(20) if host != 3]
    job = started(*[1] * 20, unreachable=closed)
    check_routes(job)
    assert {item["dial"] for item in job.routes[3]} == {True}


def test_hosts_that_cannot_reach_each_other_are_named():
    job = LargeStart(*[1] * 20, unreachable=[(3, 8), (8, 3)])
    job.run()
    assert job.state.phase is Phase.ABORTED
    text = job.state.abort_message["text"]
    assert "host3 and host8 cannot reach each other" in text
    assert "host3 -> host8 at 10.0.0.8 (eth0): connection refused" in text
    assert "host8 -> host3 at 10.0.0.3 (eth0): connection refused" in text
    assert job.state.epoch.unreachable == (3, 8)


# ---- elastic jobs ----------------------------------------------------------------------------


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


# ---- after a loss ----------------------------------------------------------------------------


def test_reports_of_all_ranks_have_each_rank_asked_once():
    size = 40
    job = Job(size, seats_of(size))
    for rank in range(size):
        job.join_seat(rank, rank)
    job.link_all(range(size))
    pings = 0
    for rank in range(1, size):
        pings += sum(isinstance(item, Send) for item in job.lost(rank, 0))
    assert pings == size
    pong = {"type": "pong", "heard": [], "silent": []}
    job.state.handle(5, pong, job.now_s)
    assert [item.connection for item in job.lost(1, 0) if isinstance(item, Send)] == [5]
