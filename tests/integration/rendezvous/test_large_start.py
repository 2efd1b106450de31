"""Ranks that get the list of all ranks from each other, over real sockets; few count as many here."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import pytest

from ringcomm.errors import NoRouteError, RingcommError
from ringcomm.rendezvous import client, linking, links, member_list, probing, relay, relayed_start
from ringcomm.transport.kinds import WIRED
from ringcomm.transport.nics import Interface, local_socket
from tests.support.service import eventually, together

HOSTS = (2, 2, 2, 3)
SHARED, BOTH_ENDS, ONE_HOST = (3, HOSTS), (12, HOSTS), (12, (7,))


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch):
    """From four ranks on the list is passed on, to two others each; all "hosts" are reached over loopback."""
    monkeypatch.setattr(linking, "MAX_DIRECT", 3)
    monkeypatch.setattr(member_list, "FAN_OUT", 2)
    offered = [Interface("eth0", "127.0.0.1", WIRED, 0), local_socket()]
    monkeypatch.setattr(client.Joiner, "_interfaces", lambda joiner: [item for item in offered if item])


@pytest.fixture
def fetched(monkeypatch):
    """The ranks that the rendezvous has sent the list because they asked for it."""
    ranks = []
    fetch = linking.Linking.fetch

    def spy(state, member):
        ranks.append(member.rank)
        return fetch(state, member)

    monkeypatch.setattr(linking.Linking, "fetch", spy)
    return ranks


def job_of(service, monkeypatch, layout, **options):
    turns, hosts = layout
    monkeypatch.setattr(linking, "MAX_TURNS", turns)
    return service(sum(hosts), hosts=hosts, **options)


def sum_of_ranks(context):
    return float(context.allreduce(np.full(1000, float(context.rank)), op=1)[0])


def check_start(job):
    with ExitStack() as stack:
        contexts = job.start_all(stack)
        assert [context.host for context in contexts] == [f"host{slot.host_index}" for slot in job.places]
        assert together(contexts, sum_of_ranks) == [sum(range(job.size))] * job.size
        assert len(job.notices[-1].detail["links"]) == job.size * (job.size - 1) // 2
        together(contexts, lambda context: context.close())
    assert job.server.failure is None


@pytest.mark.parametrize("encrypt", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("layout", [SHARED, BOTH_ENDS, ONE_HOST], ids=["shared", "both ends", "one host"])
def test_they_start_and_work(service, monkeypatch, fetched, layout, encrypt):
    check_start(job_of(service, monkeypatch, layout, encrypt=encrypt))
    assert fetched == []


def test_where_the_rank_cannot_be_dialled_the_rendezvous_sends_the_list(service, monkeypatch, fetched):
    """Those of other hosts only: inside a host ranks need each other anyway."""
    to_dial = relay._to_dial
    monkeypatch.setattr(relay, "_to_dial", lambda item: [] if item["rank"] == 0 else to_dial(item))
    check_start(job_of(service, monkeypatch, (3, (1, 1, 2, 3))))
    assert sorted(fetched) == [1, 2]


@pytest.mark.full
def test_a_list_that_does_not_come_after_the_handshake_is_sent_by_the_rendezvous(
    service, monkeypatch, fetched
):
    """As where the network loses long messages only."""
    pass_on = relay.Relay.pass_on_list

    def lose(self, message, mates):
        if self._rank:
            pass_on(self, message, mates)

    monkeypatch.setattr(relay.Relay, "pass_on_list", lose)
    monkeypatch.setattr(relayed_start, "machine", lambda: "another")
    monkeypatch.setattr(relayed_start, "PROBE_AGAIN_S", 0.1)
    check_start(job_of(service, monkeypatch, (3, (1, 1, 1, 1))))
    assert {1, 2} <= set(fetched) and len(fetched) == len(set(fetched))


def test_a_rank_that_has_no_descriptors_left_says_so(service, monkeypatch):
    probe = links.LinkSetup.probe

    def fail(self, *arguments, **options):
        if self.rank == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return probe(self, *arguments, **options)

    monkeypatch.setattr(links.LinkSetup, "probe", fail)
    found = errors_of(job_of(service, monkeypatch, SHARED))
    assert "cannot connect to the others: [Errno 24] Too many open files" in str(found[2])
    for rank, error in enumerate(found):
        assert rank == 2 or "rank 2 (host1)" in str(error)


def test_a_rank_that_passes_nothing_on_inside_its_host_is_named(service, monkeypatch):
    monkeypatch.setattr(relay, "_to_dial", lambda item: [])
    job = job_of(service, monkeypatch, ONE_HOST)
    for error in errors_of(job):
        assert isinstance(error, NoRouteError)
        assert "(host0) could not connect to all ranks: rank" in str(error)
        assert "which passes on the list of ranks, did not: it offers no address that can" in str(error)


def test_a_rank_that_passes_another_list_on_is_named(service, monkeypatch):
    """Rank 2 leads the links to rank 0 elsewhere; ranks 6 and 7 get the list from rank 2, or from those."""
    pass_on = relay.Relay.pass_on_list

    def changed(self, message, mates):
        if self._rank == 2:
            members = [dict(item) for item in message["members"]]
            members[0]["addresses"] = members[5]["addresses"]
            message = {**message, "members": members}
        pass_on(self, message, mates)

    monkeypatch.setattr(relay.Relay, "pass_on_list", changed)
    job = job_of(service, monkeypatch, SHARED)
    for error in errors_of(job):
        assert isinstance(error, NoRouteError)
        words = "rank 2, which passes on the list of ranks, did not: the list of ranks is not the one"
        assert words in str(error)


def errors_of(job):
    """What the ranks raise when they start."""

    def start(rank):
        with pytest.raises(RingcommError) as raised:
            job.start(rank)
        return raised.value

    with ThreadPoolExecutor(job.size) as pool:
        return list(pool.map(start, range(job.size)))


@pytest.mark.parametrize("layout", [SHARED, ONE_HOST], ids=["shared", "one host"])
def test_a_rank_that_dies_before_it_has_passed_the_list_on_is_named(service, monkeypatch, layout):
    """It is the one that all others wait for; the launcher says how it ended."""
    job = job_of(service, monkeypatch, layout)
    pass_on = relay.Relay.pass_on_list

    def die(self, message, mates):
        if self._rank != 0:
            pass_on(self, message, mates)
            return
        job.server.process_exited(0, "killed by SIGKILL", False)
        raise SystemExit("the process ends here")

    monkeypatch.setattr(relay.Relay, "pass_on_list", die)
    with ThreadPoolExecutor(job.size) as pool:
        starts = [pool.submit(job.start, rank) for rank in range(job.size)]
        found = [start.exception(60.0) for start in starts]
    assert isinstance(found[0], SystemExit)
    for error in found[1:]:
        assert "rank 0 (host0) was lost" in str(error) and "killed by SIGKILL" in str(error)
    assert eventually(lambda: job.server.culprit == 0)


def test_where_several_networks_connect_two_hosts_the_one_whose_share_they_are_measures(
    service, monkeypatch, fetched
):
    networks = [Interface(f"eth{net}", f"127.0.0.{1 + net}", WIRED, 0) for net in range(2)]
    monkeypatch.setattr(client.Joiner, "_interfaces", lambda joiner: list(networks))
    monkeypatch.setattr(probing, "_GRACE_S", 60.0)  # a busy machine may answer late on one of the two
    measured, measure = [], links.LinkSetup.measure

    def spy(self, pairs, report=None):
        measured.extend((self.rank, pair["rank"], len(pair["wires"])) for pair in pairs)
        measure(self, pairs, report)

    monkeypatch.setattr(links.LinkSetup, "measure", spy)
    check_start(job_of(service, monkeypatch, (3, (1, 1, 1, 1))))
    assert {wires for *_, wires in measured} == {2}
    pairs = [(min(pair), max(pair)) for *pair, _ in measured]
    assert sorted(set(pairs)) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert fetched == []
