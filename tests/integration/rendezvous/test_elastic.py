"""Elastic jobs whose processes are threads: what is hard to meet with real processes."""

from __future__ import annotations

import errno
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Iterator, List

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.config import Membership, Settings, Slot
from ringcomm.configuration.membership import Limits
from ringcomm.job import preparation
from ringcomm.job.context import Context
from ringcomm.rendezvous import client
from ringcomm.rendezvous.client import join
from ringcomm.rendezvous.membership import Notice
from ringcomm.rendezvous.server import RendezvousServer
from ringcomm.transport.reactor import encryption_of
from tests.integration.rendezvous.fake_rendezvous import FakeRendezvous

SETTINGS = Settings(spin_us=0.0, measure=False, start_timeout_s=20.0)


class Job:
    """A server, and what its processes need."""

    def __init__(self, certificate: str = "") -> None:
        self.notices: List[Notice] = []
        key = secrets.token_bytes(32)
        self.server = RendezvousServer(
            key=key, job="threads", addresses=["127.0.0.1"], start_timeout_s=20.0, notify=self.notices.append,
            limits=Limits(), launched=True, encryption=encryption_of(certificate),
        )  # fmt: skip
        self.membership = Membership(
            rendezvous=tuple(self.server.start()), key=key, job="threads", elastic=True,
            certificate=certificate,
        )  # fmt: skip

    def member(self, number: int) -> Membership:
        """The membership of a new process."""
        self.server.expect(number, Slot(0, number), "here")
        return replace(self.membership, member=number, slot=Slot(0, number), host="here")

    def start(self, size: int, settings: Settings = SETTINGS) -> List[Context]:
        """The first view."""
        members = [self.member(number) for number in range(size)]
        return together(lambda item: Context.start(item, settings), members)

    def kinds(self) -> List[str]:
        return [item.kind for item in self.notices]


def together(call: Any, arguments: Any) -> List[Any]:
    """Call a function for each argument, in a thread each."""
    with ThreadPoolExecutor(len(arguments)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(call, item) for item in arguments]]


def total(contexts: List[Context]) -> float:
    """The sum of ones over all ranks, which all must have."""
    sums = together(lambda item: float(item.allreduce(np.ones(3), rc.Sum)[0]), contexts)
    assert len(set(sums)) == 1
    return float(sums[0])


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.server.stop()


def test_ranks_that_go_on_do_not_measure_their_links_again(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do they compare their programs; with a new process all do both."""
    found: List[str] = []
    real = preparation.measure, preparation.compare_programs

    def measure(*args: Any) -> Any:
        found.append("measured")
        return real[0](*args)

    def compare(*args: Any) -> str:
        found.append("compared")
        return real[1](*args)

    monkeypatch.setattr(preparation, "own_cores", lambda: (0, 8))
    monkeypatch.setattr(preparation, "measure", measure)
    monkeypatch.setattr(preparation, "compare_programs", compare)
    settings = replace(SETTINGS, measure=True)
    contexts = job.start(3, settings)
    assert sorted(found) == ["compared"] * 3 + ["measured"] * 3
    models = [item.cost_model for item in contexts]
    contexts[0].close()
    contexts = together(lambda item: item.restart(1), contexts[1:])
    assert len(found) == 6 and [item.cost_model for item in contexts] == models[1:] and models[0]
    new: List[Context] = []
    thread = threading.Thread(target=lambda: new.append(Context.start(job.member(3), settings)))
    thread.start()
    pause = threading.Event()
    while not contexts[0].take_changes():
        pause.wait(0.01)
    contexts = together(lambda item: item.restart(2), contexts)
    thread.join(60)
    assert total([*contexts, *new]) == 3
    assert sorted(found[6:]) == ["compared"] * 3 + ["measured"] * 3
    together(lambda item: item.close(), [*contexts, *new])


def test_a_member_lost_after_the_last_link_costs_one_more_view(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = job.start(3)
    real, lock, failures = client.make_links, threading.Lock(), []

    def make_links(*arguments: Any) -> Any:
        with lock:
            first = not failures
            failures.append(1)
        if first:
            raise OSError(errno.ECONNRESET, "Connection reset by peer")
        return real(*arguments)

    monkeypatch.setattr(client, "make_links", make_links)
    again = together(lambda item: item.restart(1), contexts)
    assert len({item.generation for item in again}) == 1 and again[0].generation > 1
    assert total(again) == 3
    together(lambda item: item.close(), again)


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
    settings = replace(SETTINGS, dead_after_s=0.1)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(join, replace(fake.membership, member=4), settings)
        fake.accept()
        request = fake.read("join")
        assert (request["member"], request["epoch"], request["position"]) == (4, -1, 0)
        fake.send({"type": "waiting", "member": 4})
        with pytest.raises(rc.StartTimeoutError, match="The rendezvous has sent nothing for 0.2 s"):
            future.result(timeout=60)
