"""The real rendezvous and real joiners over the loopback: start, refusals, leaks, elastic jobs."""

from __future__ import annotations

import errno
import secrets
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Iterator

import pytest

import ringcomm as rc
from ringcomm.config import Membership, Settings, Slot
from ringcomm.configuration.membership import Limits
from ringcomm.errors import StartTimeoutError, StartupError
from ringcomm.job.context import Context
from ringcomm.rendezvous import client, embedded
from ringcomm.rendezvous.client import join
from ringcomm.rendezvous.embedded import EmbeddedRendezvous, OwnRendezvous
from ringcomm.rendezvous.server import RendezvousServer
from tests.integration.rendezvous.fake_rendezvous import FakeRendezvous
from tests.support.service import eventually, opened, remains, sum_of_ranks, together


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


# ---- elastic jobs whose processes are threads ----------------------------------------------------


ELASTIC = Settings(spin_us=0.0, measure=False, start_timeout_s=20.0)


def test_a_member_lost_after_the_last_link_costs_one_more_view(monkeypatch: pytest.MonkeyPatch) -> None:
    key = secrets.token_bytes(32)
    server = RendezvousServer(
        key=key, job="threads", addresses=["127.0.0.1"], start_timeout_s=20.0, notify=[].append,
        limits=Limits(), launched=True,
    )  # fmt: skip
    member = Membership(rendezvous=tuple(server.start()), key=key, job="threads", elastic=True, host="here")
    slots = [Slot(0, number) for number in range(3)]
    for number, slot in enumerate(slots):
        server.expect(number, slot, "here")
    members = [replace(member, member=number, slot=slot) for number, slot in enumerate(slots)]
    contexts = together(members, lambda item: Context.start(item, ELASTIC))
    real, lock, failures = client.make_links, threading.Lock(), []

    def make_links(*arguments: Any) -> Any:
        with lock:
            first = not failures
            failures.append(1)
        if first:
            raise OSError(errno.ECONNRESET, "Connection reset by peer")
        return real(*arguments)

    monkeypatch.setattr(client, "make_links", make_links)
    again = together(contexts, lambda item: item.restart(1))
    assert len({item.generation for item in again}) == 1 and again[0].generation > 1
    assert together(again, sum_of_ranks) == [3.0] * 3
    together(again, lambda item: item.close())
    server.stop()


@pytest.fixture
def fake() -> Iterator[FakeRendezvous]:
    made = FakeRendezvous()
    made.membership = replace(made.membership, elastic=True)
    yield made
    made.close()


def test_a_rendezvous_that_falls_silent_is_given_up(
    fake: FakeRendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It pings processes that wait, so none of them waits for ever."""
    monkeypatch.setattr(client, "DIAL_S", 0.1)
    settings = replace(ELASTIC, dead_after_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(join, replace(fake.membership, member=4), settings)
        fake.accept()
        request = fake.read("join")
        assert (request["member"], request["epoch"], request["position"]) == (4, -1, 0)
        fake.send({"type": "waiting", "member": 4})
        with pytest.raises(rc.StartTimeoutError, match="The rendezvous has sent nothing for 0.2 s"):
            future.result(timeout=60)
