"""Jobs of many ranks: no process has more than O(p) to send, to receive or to do until they have started."""

from __future__ import annotations

import itertools

import pytest

from ringcomm.errors import ProtocolError
from ringcomm.rendezvous import linking
from ringcomm.rendezvous.actions import Send
from ringcomm.rendezvous.epoch import Phase
from ringcomm.rendezvous.member_list import (
    FAN_OUT,
    MAX_DIRECT,
    Share,
    decides,
    digest_of,
    leaders_of,
    list_of,
    members_of,
    sources_of,
)
from tests.unit.calls import calls_in
from tests.unit.rendezvous.elastic_job import ElasticJob
from tests.unit.rendezvous.large import LargeStart, address_of, started
from tests.unit.rendezvous.simulated import Job, attempt, offer, seats_of

LAYOUTS = {
    "four on each host": lambda size: [4] * (size // 4),
    "one on each host": lambda size: [1] * size,
    "all on one host": lambda size: [size],
    "eight hosts": lambda size: [size // 8] * 8,
}
MORE = 1.15
"""Four times as many ranks may need 4.6 times as much: numbers get longer, and trees deeper."""


# ---- how much it is --------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_bytes_messages_and_calls_grow_with_the_ranks_only(layout):
    small, large = (started(*LAYOUTS[layout](size), counts_calls=True) for size in (64, 256))
    assert large.messages <= 4 * MORE * small.messages
    assert large.bytes <= 4 * MORE * small.bytes
    assert large.calls <= 4 * MORE * small.calls
    assert max(large.passed_on.values()) <= 4 * MORE * max(small.passed_on.values())


def test_few_ranks_are_told_everything_by_the_rendezvous():
    """A list that comes from another rank takes one more round trip."""
    few, many = started(*[4] * (MAX_DIRECT // 4)), started(*[1] * (MAX_DIRECT + 1))
    assert not few.passed_on and not few.sent["members"]
    assert many.passed_on and many.sent["members"] and not many.sent["link"]


def test_a_list_of_many_ranks_is_sent_once():
    job = started(*[4] * 16)
    assert job.sent["members"] < 2 * job.passed_on[0] / FAN_OUT
    assert len(job.passed_on) < len(job.seats) / 2


# ---- from where ranks get the list --------------------------------------------------------------


@pytest.mark.parametrize("hosts", [[17], [1] * 300, [4] * 30, [1, 40, 3], [100] * 3], ids=str)
def test_the_list_reaches_every_rank_along_short_paths_of_few_branches(hosts):
    members = planned(*hosts)
    sources = sources_of(members)
    assert sorted(sources) == list(range(len(members)))
    assert [rank for rank, source in sources.items() if source is None] == [0]
    branches = [source.rank for source in sources.values() if source is not None]
    assert max(branches.count(rank) for rank in set(branches)) <= 2 * FAN_OUT
    for member in members:
        length, at = 0, member
        while sources[at.rank] is not None:
            source = sources[at.rank]
            assert source.host_index == at.host_index or at.local_rank == source.local_rank == 0
            length, at = length + 1, source
        assert length <= 5


def planned(*hosts):
    """The members of a job with so many ranks on its hosts."""
    job = Job(sum(hosts), seats_of(*hosts))
    for rank, seat in enumerate(job.seats):
        address = offer(address_of(seat.slot.host_index), port=5000 + rank)
        job.join_seat(rank, rank, addresses=[address])
    return list(job.state.epoch.members.values())


def test_a_list_that_was_changed_on_the_way_is_noticed():
    members = planned(*[2] * 10)
    listing = list_of(members)
    digest = digest_of(listing)
    assert [item.rank for item in members_of(listing, digest)] == list(range(20))
    listing["members"][7]["addresses"] = [offer("10.9.9.9")]
    with pytest.raises(ProtocolError, match="not the one that the rendezvous has sent"):
        members_of(listing, digest)


def test_a_list_in_another_order_is_refused():
    listing = list_of(planned(*[2] * 10))
    listing["members"].reverse()
    with pytest.raises(ProtocolError, match="order"):
        members_of(listing, digest_of(listing))


def test_a_rank_that_does_not_get_the_list_may_ask_once():
    job = Job(20, seats_of(*[2] * 10))
    for rank in range(20):
        job.join_seat(rank, rank, addresses=[offer(f"10.0.0.{rank // 2}")])
    assert job.kinds(6) == ["assign"]
    fetch = {"type": "fetch", "reason": "rank 0 does not answer"}
    job.take(job.state.handle(6, fetch, job.now_s))
    assert job.told[6][-1] == job.told[0][1]
    assert job.notice("note").text == "rank 6 (host3): rank 0 does not answer"
    with pytest.raises(ProtocolError, match=r"rank 6 \(host3\) asks for the list of ranks again"):
        job.state.handle(6, fetch, job.now_s)
    assert job.state.handle(99, fetch, job.now_s) == []


def test_few_ranks_may_not_ask_for_a_list():
    job = Job(2, seats_of(1, 1))
    for rank in range(2):
        job.join_seat(rank, rank)
    with pytest.raises(ProtocolError, match="again"):
        job.state.handle(1, {"type": "fetch", "reason": ""}, job.now_s)


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


def test_each_pair_of_hosts_is_the_share_of_one_and_shares_are_even():
    leaders = leaders_of(planned(*[2] * 21))
    for one, other in itertools.combinations(leaders, 2):
        assert decides(one, other) != decides(other, one)
    shares = [sum(decides(one, other) for other in leaders if other is not one) for one in leaders]
    assert set(shares) == {10}


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


def test_a_share_measures_where_there_is_a_choice():
    leaders = leaders_of(planned(*[2] * 21))
    own, target = leaders[0], leaders[1]
    wires = [
        attempt(own.rank, target.rank, f"10.{net}.0.1", local_iface=f"eth{net}", remote_iface=f"eth{net}")
        for net in range(2)
    ]
    share = Share(own, [target], wires)
    for _ in range(2):
        (wanted,) = share.wanted()
        assert wanted["rank"] == target.rank
        speeds = zip(wanted["wires"], (2.5, 110.0))
        share.measured(
            [
                {"rank": target.rank, "address": wire["address"], "iface": wire["iface"], "mb_per_s": speed}
                for wire, speed in speeds
            ]
        )
    assert share.wanted() == []
    assert share.report() == {"type": "decided", "attempts": [], "unreached": []}
    (way,) = share.ways()
    assert (way["host"], way["dial"], way["address"], way["own_iface"]) == (1, True, "10.1.0.1", "eth1")
    assert way["measured"] == {"eth0": 2.5, "eth1": 110.0}


def test_a_host_without_an_address_that_can_be_dialled_is_reported_all_the_same():
    leaders = leaders_of(planned(*[2] * 21))
    share = Share(leaders[0], [leaders[1]], [])
    assert share.report() == {"type": "decided", "attempts": [], "unreached": [leaders[1].rank]}
    assert share.ways() == []


def test_the_report_of_a_host_that_reaches_none_is_not_too_long():
    leaders = leaders_of(planned(*[1] * 401))
    others = [item for item in leaders[1:] if decides(leaders[0], item)]
    failed = [attempt(0, item.rank, "10.0.0.1", why="no route to host") for item in others]
    report = Share(leaders[0], others, failed).report()
    assert len(report["unreached"]) == 200
    assert len(report["attempts"]) == 100


def test_reports_about_ranks_that_are_no_first_ones_do_not_count():
    job = Job(20, seats_of(*[1] * 20))
    for rank in range(20):
        job.join_seat(rank, rank, addresses=[offer(f"10.0.0.{rank}")])
    for rank in range(20):
        report = {"type": "decided", "attempts": [], "unreached": [rank, 99, -5]}
        job.take(job.state.handle(rank, report, job.now_s))
    assert job.state.phase is Phase.LINKING
    assert all(job.kinds(rank)[-1] == "ways" for rank in range(20))


# ---- elastic jobs ----------------------------------------------------------------------------


@pytest.mark.parametrize("launched", [True, False])
def test_the_first_views_of_an_elastic_job_take_work_that_grows_with_the_ranks_only(launched):
    """A view was considered anew, with all processes that had joined, whenever one more did."""
    needed = {}
    for size in (64, 256):
        job = ElasticJob(launched=launched, start_np=size)
        for number in range(size) if launched else ():
            job.expect(number)
        needed[size] = calls_in(lambda job=job, size=size: two_views(job, size))
        assert job.state.view.epoch == 1 and job.state.view.size == size
    assert needed[256] <= 4 * MORE * needed[64]


def two_views(job, size):
    for connection in range(size):
        job.join(connection)
    job.link(*range(size))
    job.again(*range(size))


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


def test_where_the_rendezvous_told_all_ranks_itself_it_was_more(monkeypatch):
    """What the other tests here would see."""
    monkeypatch.setattr(linking, "MAX_DIRECT", 1000)
    small, large = (started(*[4] * (size // 4)) for size in (64, 128))
    assert large.bytes > 3.5 * small.bytes
