"""A rendezvous that talks nonsense or leaves while a job starts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from ringcomm.config import Settings
from ringcomm.errors import PeerLostError
from ringcomm.job.context import Context
from ringcomm.transport.connect import listen
from tests.integration.rendezvous.fake_rendezvous import ABORT, GO, LINK, PROBE, FakeRendezvous
from tests.support.service import eventually

# ---- a rendezvous that misbehaves ------------------------------------------------------------


@pytest.fixture
def fake(no_leaks):
    fake = FakeRendezvous()
    yield fake
    fake.close()


def start_with(fake, pool):
    start = pool.submit(Context.start, fake.membership, Settings(start_timeout_s=5.0))
    fake.accept()
    fake.read("join")
    return start


def test_an_abort_right_behind_the_go_is_not_lost(fake):
    with ThreadPoolExecutor(1) as pool:
        start = start_with(fake, pool)
        fake.send(PROBE, LINK, GO, ABORT)
        with pytest.raises(PeerLostError, match="rank 1 died young") as caught:
            start.result()
    assert (caught.value.rank, caught.value.host) == (1, "there")


def test_an_abort_in_the_middle_of_linking_leaves_nothing_behind(fake):
    """A peer that accepts but never answers is being dialled when the job ends."""
    silent = listen("127.0.0.1")
    offer = {"address": "127.0.0.1", "port": silent.getsockname()[1], "iface": "lo", "kind": "loopback"}
    with ThreadPoolExecutor(1) as pool:
        start = start_with(fake, pool)
        route = {"peer": 1, "dial": True, "addresses": [offer], "iface": "lo"}
        fake.send(PROBE, {"type": "link", "routes": [route]})
        assert eventually(lambda: _connects(silent))
        fake.send(ABORT)
        with pytest.raises(PeerLostError):
            start.result()
    silent.close()


def _connects(listener):
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True
