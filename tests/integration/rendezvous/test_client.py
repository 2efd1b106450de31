"""A rank that joins: what it says of itself, what it takes from a rendezvous, and when it gives up."""

from __future__ import annotations

import errno
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from ringcomm.config import Membership, Settings, Slot
from ringcomm.errors import AuthenticationError, RefusedError, StartTimeoutError, StartupError
from ringcomm.rendezvous import client, connect_server
from ringcomm.rendezvous.client import join
from ringcomm.rendezvous.connect_server import Moved, Watched
from tests.integration.rendezvous.fake_rendezvous import GO, LINK, PROBE, FakeRendezvous

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


# ---- what it takes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages",
    [
        [{"type": "measure", "pairs": []}],
        [LINK],
        [GO],
        [PROBE, {"type": "link", "routes": [{"peer": 1, "dial": False, "addresses": [], "iface": ""}]}, GO],
    ],
    ids=["measure", "link", "go", "go before the links"],
)
def test_a_rendezvous_that_sends_something_too_early(fake, joining, messages):
    _, future = joining()
    fake.send(*messages)
    with pytest.raises(StartupError, match=f"the rendezvous sent '{messages[-1]['type']}' too early"):
        future.result(60.0)


# ---- a rendezvous that ends, or does not answer ----------------------------------------------


def test_without_a_launcher_a_rank_whose_rendezvous_ends_too_early_joins_again(fake, joining):
    """The rank that serves has ended the last generation, and not begun the next one."""
    request, future = joining(slot=None)
    fake.accept()  # closes the first connection
    assert fake.read("join") == request
    refuse(fake, future)


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
