"""Elastic jobs whose processes are threads: what is hard to meet with real processes."""

from __future__ import annotations

import errno
import itertools
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Iterator, List

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.config import Membership, Settings, Slot
from ringcomm.context import Context
from ringcomm.preparation import Preparation
from ringcomm.rendezvous import channels, client
from ringcomm.rendezvous.actions import Notice
from ringcomm.rendezvous.elastic_client import ElasticJoiner
from ringcomm.rendezvous.elastic_control import Resume
from ringcomm.rendezvous.elastic_server import ElasticServer

SETTINGS = Settings(spin_us=0.0, measure=False, start_timeout_s=20.0)


class Job:
    """A server, and what its processes need."""

    def __init__(self) -> None:
        self.notices: List[Notice] = []
        key = secrets.token_bytes(32)
        self.server = ElasticServer(
            key=key, job="threads", addresses=["127.0.0.1"], start_timeout_s=20.0, notify=self.notices.append,
            min_size=1, launched=True,
        )  # fmt: skip
        self.membership = Membership(
            rendezvous=tuple(self.server.start()), key=key, job="threads", elastic=True
        )

    def member(self, number: int) -> Membership:
        """The membership of a new process."""
        self.server.expect(number, Slot(0, number), "here")
        return replace(self.membership, member=number, slot=Slot(0, number), host="here")

    def start(self, size: int) -> List[Context]:
        """The first view."""
        members = [self.member(number) for number in range(size)]
        return together(lambda item: Context.start(item, SETTINGS), members)

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


def test_a_boundary_without_a_change_gives_the_same_members_a_new_epoch(job: Job) -> None:
    contexts = job.start(3)
    assert total(contexts) == 3
    ranks = [item.rank for item in contexts]
    again = together(lambda item: item.restart(1), contexts)
    assert [item.rank for item in again] == ranks
    assert [item.generation for item in again] == [1, 1, 1]
    assert total(again) == 3
    with pytest.raises(rc.NotInitializedError):
        contexts[0].allreduce(np.ones(3))
    together(lambda item: item.close(), again)
    assert "lost" not in job.kinds()


def test_a_new_process_is_reported_while_the_others_compute(job: Job) -> None:
    contexts = job.start(2)
    new: List[Context] = []
    thread = threading.Thread(target=lambda: new.append(Context.start(job.member(2), SETTINGS)))
    thread.start()
    deadline = threading.Event()
    changes = [0, 0]
    while not all(changes) and not deadline.wait(0.01):
        changes = [before | item.take_changes() for before, item in zip(changes, contexts)]
    assert changes == [2, 2]
    assert total(contexts) == 2, "nothing is interrupted"
    again = together(lambda item: item.restart(1), contexts)
    thread.join(60)
    assert total([*again, *new]) == 3
    together(lambda item: item.close(), [*again, *new])


def test_one_rank_alone_learns_of_a_new_process(job: Job) -> None:
    (alone,) = job.start(1)
    assert alone.size == 1 and alone.allreduce(np.ones(2), rc.Sum)[0] == 1
    thread_result: List[Context] = []
    thread = threading.Thread(target=lambda: thread_result.append(Context.start(job.member(1), SETTINGS)))
    thread.start()
    pause = threading.Event()
    while not alone.take_changes():
        pause.wait(0.01)
    both = [alone.restart(1)]
    thread.join(60)
    both += thread_result
    assert total(both) == 2
    together(lambda item: item.close(), both)


def test_a_member_lost_after_the_last_link_costs_one_more_view(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = job.start(3)
    real, lock, failures = channels.make_links, threading.Lock(), []

    def make_links(*arguments: Any) -> Any:
        with lock:
            first = not failures
            failures.append(1)
        if first:
            raise OSError(errno.ECONNRESET, "Connection reset by peer")
        return real(*arguments)

    monkeypatch.setattr(channels, "make_links", make_links)
    again = together(lambda item: item.restart(1), contexts)
    assert len({item.generation for item in again}) == 1 and again[0].generation > 1
    assert total(again) == 3
    together(lambda item: item.close(), again)


def test_an_epoch_that_fails_before_its_first_call_costs_one_more_view(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls, both = Preparation.compare_programs, itertools.count(), threading.Barrier(2)

    def compare(preparation: Preparation) -> None:
        if next(calls) < 2:  # both ranks of the first epoch
            both.wait(60)
            raise rc.PeerLostError("a rank was lost")
        real(preparation)

    monkeypatch.setattr(Preparation, "compare_programs", compare)
    contexts = job.start(2)
    assert total(contexts) == 2 and next(calls) == 4
    together(lambda item: item.close(), contexts)


def test_an_error_of_the_program_before_the_first_call_ends_the_process(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2)

    def compare(preparation: Preparation) -> None:
        both.wait(60)
        raise ZeroDivisionError("before the first call")

    monkeypatch.setattr(Preparation, "compare_programs", compare)
    with pytest.raises(ZeroDivisionError, match="before the first call"):
        job.start(2)


def test_links_that_can_never_be_used_are_an_error(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_links(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(channels, "make_links", make_links)
    with pytest.raises(rc.StartupError, match="Too many open files"):
        job.start(1)


def test_a_report_about_the_last_view_does_not_interrupt_the_next(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was on its way when a member asked for the next view is about processes that are in it."""
    joiner = ElasticJoiner(job.member(0), SETTINGS, Resume())
    monkeypatch.setattr(client.Joiner, "_handle", lambda *_: None)
    joiner._handle({"type": "updated", "change": 2})
    joiner._handle({"type": "probe", "generation": 1})
    assert joiner._changes == 0
    joiner._handle({"type": "updated", "change": 2})
    assert joiner._changes == 2, "another process has come since"
    joiner.reactor.close()
