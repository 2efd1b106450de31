"""A rendezvous that a rank serves: where, for which ranks, and how it ends."""

from __future__ import annotations

import logging
import os
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from ringcomm.clock import Deadline
from ringcomm.config import Membership, Settings, Slot
from ringcomm.errors import RefusedError, StartupError
from ringcomm.rendezvous import client, embedded
from ringcomm.rendezvous.actions import Seat
from ringcomm.rendezvous.client import join
from ringcomm.rendezvous.embedded import EmbeddedRendezvous, OwnRendezvous, _resolved
from ringcomm.transport.nics import own_addresses
from tests.support.service import eventually

KEY = b"k" * 32
SETTINGS = Settings(start_timeout_s=60.0, spin_us=0.0)
SEATS = [Seat(Slot(0, 0), "desk"), Seat(Slot(0, 1), "desk")]


@pytest.fixture
def serve(no_leaks):
    """`serve(**options)`: a rendezvous of two ranks, and where it is; it is stopped afterwards."""
    made = []

    def make(**options):
        made.append(EmbeddedRendezvous.serve(KEY, "", "job", 2, SETTINGS, **options))
        return made[-1]

    yield make
    for served, _ in made:
        served.stop(failed=True)


def member(endpoints, **more):
    return Membership(2, tuple(endpoints), KEY, "job", **more)


def leave(joined):
    joined.control.leave("the test is over", True)
    joined.channels.close()


# ---- a job of its own ------------------------------------------------------------------------


def test_it_is_served_where_ranks_can_reach_it(serve):
    def own():
        return {item.address for item in own_addresses() if not item.scope}

    # Tests that run at the same time make and remove interfaces.
    before = own()
    _, everywhere = serve()
    assert everywhere[0][0] == "127.0.0.1", "the loopback comes first"
    assert {address for address, _ in everywhere} <= before | own()
    _, preferred = serve(preferred=["127.0.0.1", "192.0.2.7"])
    assert [address for address, _ in preferred] == ["127.0.0.1"]
    _, unknown = serve(preferred=["192.0.2.7"])
    lasting = {address for address, _ in everywhere} & own()
    assert lasting and lasting <= {address for address, _ in unknown}


def test_how_a_process_ended_is_the_error_of_all(serve):
    notices = []
    served, endpoints = serve(seats=SEATS, notify=notices.append)
    assert served.failure is None and served.culprit == -1
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(join, member(endpoints, slot=Slot(0, 0)), SETTINGS)
        assert eventually(lambda: any(item.kind == "joined" for item in notices))
        served.process_exited(1, "exit code 3", False)
        with pytest.raises(StartupError, match=r"rank 1 \(desk\) ended \(exit code 3\)"):
            start.result(60.0)
    assert isinstance(served.failure, StartupError) and "exit code 3" in str(served.failure)
    assert served.culprit == 1


def test_its_end_waits_for_the_others_but_not_for_ever(serve, monkeypatch, caplog):
    monkeypatch.setattr(embedded, "_LEAVE_S", 0.05)
    monkeypatch.setattr(embedded, "_FAILED_LEAVE_S", 0.01)
    for failed in (True, False):
        served, endpoints = serve()
        with ThreadPoolExecutor(2) as pool:
            both = list(pool.map(lambda _, at=endpoints: join(member(at), SETTINGS), range(2)))
        served.stop(failed)
        said = "ends now, although others have not left after 0.05 s" in caplog.text
        assert said is not failed, "after a failure a rank may be frozen, and is not waited for"
        for joined in both:
            leave(joined)


def test_without_a_launcher_notices_go_to_the_log(serve, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "ringcomm.rendezvous")
    served, endpoints = serve()
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: join(member(endpoints), SETTINGS), range(2)))
    monkeypatch.setattr(client, "__version__", "0.0.1")
    with pytest.raises(RefusedError):
        join(member(endpoints), SETTINGS)
    for joined in both:
        leave(joined)
    assert served is not None
    levels = {item.levelno for item in caplog.records if "refused a process" in item.getMessage()}
    assert levels == {logging.WARNING}
    assert any(item.levelno == logging.INFO and "link" in item.getMessage() for item in caplog.records)


# ---- the rendezvous of the job, at a rank ----------------------------------------------------


@pytest.fixture
def taken():
    """A port of this machine that another socket has."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        yield other


@pytest.mark.parametrize(
    "change",
    [
        {"slot": Slot(0, 0)},
        {"rank": 1},
        {"rendezvous": (("127.0.0.1", 5000), ("127.0.0.2", 5000))},
        {"rendezvous": (("192.0.2.1", 5000),)},
        {"rendezvous": (("desk..local", 5000),)},
    ],
    ids=["a launcher serves", "rank 0 serves", "it has several addresses", "another host serves", "no name"],
)
def test_a_rank_that_does_not_serve(no_leaks, change):
    membership = Membership(2, **{"rendezvous": (("127.0.0.1", 5000),), "key": KEY, "job": "job", **change})
    with OwnRendezvous(membership, SETTINGS) as own:
        assert own.embedded is None


def serve_once_it_is_free(taken, fails):
    """Serve as soon as the port is free, and let joining fail then or not; what is served, and where."""
    membership, found = member([taken.getsockname()]), []
    try:
        with OwnRendezvous(membership, SETTINGS) as own:
            assert own.embedded is None
            taken.close()
            assert eventually(lambda: own.embedded is not None)
            found.append(own.embedded)
            if fails:
                raise StartupError("it could not join")
    except StartupError:
        assert fails
    return found[0], membership.rendezvous[0]


def test_a_rank_serves_as_soon_as_its_port_is_free(no_leaks, taken, monkeypatch):
    monkeypatch.setattr(embedded, "LOOK_AGAIN_S", 0.01)
    served, where = serve_once_it_is_free(taken, fails=False)
    with socket.create_connection(where, 30.0):
        pass
    served.stop(failed=True)


def test_a_rank_that_cannot_join_serves_no_longer(no_leaks, taken, monkeypatch):
    monkeypatch.setattr(embedded, "LOOK_AGAIN_S", 0.01)
    _, where = serve_once_it_is_free(taken, fails=True)
    with socket.socket() as sock:
        assert sock.connect_ex(where) != 0


def test_a_rank_whose_port_stays_taken_joins_at_another_rank(no_leaks, taken, monkeypatch):
    monkeypatch.setattr(embedded, "LOOK_AGAIN_S", 0.01)
    with OwnRendezvous(member([taken.getsockname()]), SETTINGS) as own:
        assert own._thread is not None
    assert own.embedded is None and not own._thread.is_alive()


def test_the_name_of_a_host_may_be_known_only_after_a_while(monkeypatch):
    """As in a cluster, where the name of a container appears some time after it has started."""
    monkeypatch.setattr(embedded, "LOOK_AGAIN_S", 0.001)
    asked, usual = [], socket.getaddrinfo

    def look_up(host, *arguments, **options):
        asked.append(host)
        if len(asked) < 3:
            raise socket.gaierror(socket.EAI_NONAME, os.strerror(2))
        return usual("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(embedded.socket, "getaddrinfo", look_up)
    assert _resolved("desk", 5000, Deadline(60.0)) == {"127.0.0.1"}
    assert asked == ["desk"] * 3
