"""A rank that joins: what it says of itself, what it takes from a rendezvous, and when it gives up."""

from __future__ import annotations

import errno
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ringcomm.clock import Deadline
from ringcomm.config import Membership, Settings, Slot
from ringcomm.errors import AuthenticationError, PeerLostError, RefusedError, StartTimeoutError, StartupError
from ringcomm.rendezvous import client, connect_server
from ringcomm.rendezvous.client import Joiner, join
from ringcomm.rendezvous.connect_server import Moved, Watched
from ringcomm.transport.nics import LOCAL, LOOPBACK
from ringcomm.version import __version__
from tests.integration.rendezvous.fake_rendezvous import ABORT, GO, LINK, PROBE, FakeRendezvous

SETTINGS = Settings(start_timeout_s=60.0, spin_us=0.0)
REFUSED = {"type": "refused", "reason": "it came too late"}


@pytest.fixture
def fake(no_leaks):
    fake = FakeRendezvous()
    yield fake
    fake.close()


@pytest.fixture
def joining(fake):
    """`joining(settings, **change)`: a rank joins at the fake rendezvous, in a thread; its request, and the
    future of its end."""
    with ThreadPoolExecutor(1) as pool:

        def begin(settings=SETTINGS, **change):
            future = pool.submit(join, replace(fake.membership, **change), settings)
            fake.accept()
            return fake.read("join"), future

        yield begin
        fake.close()


def refuse(fake, future):
    fake.send(REFUSED)
    with pytest.raises(RefusedError, match="The rendezvous refused this process: it came too late"):
        future.result(60.0)


# ---- what a rank says of itself --------------------------------------------------------------


def test_a_rank_of_a_launcher_names_its_place(fake, joining):
    request, future = joining()
    assert (request["version"], request["slot"]) == (__version__, [0, 0])
    assert "rank" not in request and "host" not in request
    assert request["dead_after"] == SETTINGS.dead_after_s
    refuse(fake, future)


def test_a_rank_that_comes_on_its_own_names_the_rank_that_it_asks_for(fake, joining):
    request, future = joining(slot=None, rank=1, host="desk")
    assert (request["rank"], request["host"]) == (1, "desk") and "slot" not in request
    refuse(fake, future)


@pytest.mark.parametrize("transport, kinds", [("tcp", {LOOPBACK}), ("auto", {LOOPBACK, LOCAL})])
def test_where_only_this_machine_reaches_the_rendezvous_no_network_is_offered(
    fake, joining, transport, kinds
):
    (_, port), *_ = fake.membership.rendezvous
    settings = replace(SETTINGS, transport=transport)
    request, future = joining(settings, rendezvous=(("localhost", port),))
    found = {item["kind"] for item in request["addresses"]}
    assert LOOPBACK in found and found <= kinds
    refuse(fake, future)


# ---- what it takes ---------------------------------------------------------------------------


def test_a_rank_dials_again_and_measures_when_it_is_asked_to(fake, joining):
    _, future = joining()
    fake.send(PROBE, {"type": "probe_again", "targets": []})
    assert fake.read("probed") == {"type": "probed", "attempts": []}
    fake.send({"type": "measure", "pairs": []})
    assert fake.read("measured") == {"type": "measured", "speeds": []}
    fake.send(ABORT)
    with pytest.raises(PeerLostError, match="rank 1 died young"):
        future.result(60.0)


def test_a_start_from_the_request_to_the_go(fake, joining):
    """Of the only rank that a rendezvous has: it has no links to build."""
    _, future = joining()
    fake.send({**PROBE, "generation": 5}, LINK)
    assert fake.read("linked") == {"type": "linked", "links": []}
    fake.send({"type": "go", "table": "the table of links"})
    joined = future.result(60.0)
    assert (joined.rank, joined.generation, joined.table) == (0, 5, "the table of links")
    assert [peer.host for peer in joined.peers] == ["here"]
    fake.close()  # so that its goodbye is not waited for
    joined.control.leave("the test is over", True)
    joined.channels.close()


@pytest.mark.parametrize(
    "messages",
    [
        [{"type": "probe_again", "targets": []}],
        [{"type": "measure", "pairs": []}],
        [LINK],
        [GO],
        [PROBE, {"type": "link", "routes": [{"peer": 1, "dial": False, "addresses": [], "iface": ""}]}, GO],
    ],
    ids=["probe_again", "measure", "link", "go", "go before the links"],
)
def test_a_rendezvous_that_sends_something_too_early(fake, joining, messages):
    _, future = joining()
    fake.send(*messages)
    with pytest.raises(StartupError, match=f"the rendezvous sent '{messages[-1]['type']}' too early"):
        future.result(60.0)


def test_the_connections_that_were_turned_away_are_part_of_the_error(fake, joining):
    """They may be why the start has failed."""
    request, future = joining()
    where = next(item for item in request["addresses"] if item["kind"] == LOOPBACK)
    with socket.create_connection((where["address"], where["port"]), 30.0) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        try:
            while peer.recv(1000):
                pass
        except ConnectionResetError:
            pass  # closed with bytes unread
    fake.send(ABORT)
    with pytest.raises(PeerLostError, match="died young This process turned away 1 connection"):
        future.result(60.0)


# ---- a rendezvous that ends, or does not answer ----------------------------------------------


def test_without_a_launcher_a_rank_whose_rendezvous_ends_too_early_joins_again(fake, joining):
    """The rank that serves has ended the last generation, and not begun the next one."""
    request, future = joining(slot=None)
    fake.accept()  # closes the first connection
    assert fake.read("join") == request
    refuse(fake, future)


def test_once_it_has_a_rank_the_end_of_the_rendezvous_is_an_error(fake, joining):
    _, future = joining(slot=None)
    fake.send(PROBE)
    fake.sock.shutdown(socket.SHUT_WR)
    with pytest.raises(StartupError, match="ended while the job was starting: it closed the connection"):
        future.result(60.0)


def test_a_rendezvous_that_never_answers(fake, joining, monkeypatch):
    introduce = Joiner._introduce

    def hurry(joiner, interfaces):
        introduce(joiner, interfaces)
        joiner._deadline = Deadline(0.2)

    monkeypatch.setattr(Joiner, "_introduce", hurry)
    _, future = joining()
    with pytest.raises(StartTimeoutError, match="2 ranks did not start within 0.2 s, and the rendezvous has"):
        future.result(60.0)


# ---- an address that may change --------------------------------------------------------------


@pytest.fixture
def nowhere(refusing):
    """Where no connection is accepted."""
    return refusing["address"], refusing["port"]


def membership_at(where, key=b"k" * 32, **more):
    return Membership(2, (where,), key, "job", **more)


def test_a_rank_learns_that_the_rendezvous_is_somewhere_else_now(no_leaks, nowhere):
    watched = Watched(lambda: True, 60.0)
    with pytest.raises(Moved, match="another address now"):
        join(membership_at(nowhere), SETTINGS, watched=watched)


def test_an_address_that_does_not_change_is_given_up_after_a_while(no_leaks, nowhere):
    looked = []
    watched = Watched(lambda: bool(looked.append(1)), 1.0, hint=" Is the store an old one?")
    settings = replace(SETTINGS, iface="lo")
    with pytest.raises(StartTimeoutError, match="No answer from the rendezvous") as caught:
        join(membership_at(nowhere, slot=Slot(0, 0)), settings, watched=watched)
    assert "connection refused" in str(caught.value) and "--iface lo (RINGCOMM_IFACE)" in str(caught.value)
    assert str(caught.value).endswith(" Is the store an old one?")
    assert len(looked) > 1, "it has tried again"


def test_a_launcher_serves_before_it_starts_ranks_so_a_refusal_is_not_waited_out(
    no_leaks, nowhere, monkeypatch
):
    monkeypatch.setattr(connect_server, "REFUSED_S", 0.0)
    with pytest.raises(StartTimeoutError, match="(?s)No answer from the rendezvous.*connection refused"):
        join(membership_at(nowhere, slot=Slot(0, 0)), SETTINGS)


def test_a_rendezvous_of_another_job_may_be_about_to_be_replaced(service):
    """Its address is left from an earlier start; only after a while that is an error."""
    job, looked = service(2), []
    watched = Watched(lambda: bool(looked.append(1)), 1.0)
    with pytest.raises(AuthenticationError, match="Every process of a job needs the same key and job name"):
        join(membership_at(job.endpoints[0]), SETTINGS, watched=watched)
    assert len(looked) > 1


def short(*_):
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize("lacks", ["check_descriptors", "LinkSetup"])
def test_a_rank_that_lacks_something_has_all_told(fake, monkeypatch, lacks):
    """Before it joins, and after it has reached the rendezvous."""
    monkeypatch.setattr(client, lacks, short)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(join, replace(fake.membership, host="desk"), SETTINGS)
        fake.accept()
        text = fake.read("short")["text"]
        fake.close()
        with pytest.raises(StartupError) as caught:
            future.result(60.0)
    assert str(caught.value) == text and "A rank on desk cannot connect to the others: " in text
    assert "`ulimit -n`" in text
