"""The real rendezvous and real joiners over the loopback: start, refusals, leaks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from ringcomm.config import Membership, Settings
from ringcomm.errors import StartTimeoutError, StartupError
from ringcomm.job.context import Context
from ringcomm.rendezvous import embedded
from ringcomm.rendezvous.client import join
from ringcomm.rendezvous.embedded import EmbeddedRendezvous, OwnRendezvous
from tests.support.service import eventually, free_port, opened, remains, sum_of_ranks, together


def refuses(port):
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


# ---- start -----------------------------------------------------------------------------------


def test_three_ranks_start_work_and_end(service, rank_ports):
    job = service(3)
    with ExitStack() as stack:
        contexts = job.start_all(stack)
        assert [(context.rank, context.size, context.host) for context in contexts] == [
            (0, 3, "here"), (1, 3, "here"), (2, 3, "here"),
        ]  # fmt: skip
        assert together(contexts, sum_of_ranks) == [3.0] * 3
        assert len(rank_ports) == 3
        assert all(refuses(port) for port in rank_ports), "a rank still listens after the start"
    assert eventually(lambda: job.texts("ended") != [])
    kinds = [notice.kind for notice in job.notices]
    assert kinds == ["joined"] * 3 + ["started"] + ["ended"]


# ---- again and again -------------------------------------------------------------------------


def test_a_failed_start_leaks_nothing(service):
    job = service(2, start_timeout_s=0.2)
    before = opened()
    for _ in range(11):  # the first waits; later ones get the same at once
        with pytest.raises(StartTimeoutError, match="Only 1 of 2 ranks"):
            job.start(0)
    assert eventually(lambda: not remains(before)), remains(before)


# ---- without a launcher ----------------------------------------------------------------------


def test_one_of_the_ranks_serves(no_leaks):
    where = ("127.0.0.1", free_port())
    membership = Membership(3, (where,), b"k" * 32)
    settings = Settings(start_timeout_s=20.0, spin_us=0.0)

    def work(_):
        with Context.start(membership, settings) as context:
            return context.rank, sum_of_ranks(context)

    for _ in range(2):  # the port is free again afterwards
        with ThreadPoolExecutor(3) as pool:
            assert sorted(pool.map(work, range(3))) == [(0, 3.0), (1, 3.0), (2, 3.0)]
        assert refuses(where[1])


# ---- a rendezvous that a rank serves: where, for which ranks, and how it ends --------------------


KEY = b"k" * 32
SETTINGS = Settings(start_timeout_s=60.0, spin_us=0.0)


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


# ---- the rendezvous of the job, at a rank ----------------------------------------------------


@pytest.fixture
def taken():
    """A port of this machine that another socket has."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        yield other


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


def test_a_rank_whose_port_stays_taken_joins_at_another_rank(no_leaks, taken, monkeypatch):
    monkeypatch.setattr(embedded, "LOOK_AGAIN_S", 0.01)
    with OwnRendezvous(member([taken.getsockname()]), SETTINGS) as own:
        assert own._thread is not None
    assert own.embedded is None and not own._thread.is_alive()
