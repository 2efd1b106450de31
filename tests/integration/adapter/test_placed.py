"""Jobs whose processes another system keeps; here that system is this test, with processes of Python."""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pytest

import ringcomm as rc
from ringcomm._adapter.placed import (
    Host,
    PlacedJob,
    RankOutcome,
    Ticket,
    attempt,
    call,
    end,
    enter,
)
from ringcomm.calls.objects import unpack
from ringcomm.config import Membership, Settings
from ringcomm.errors import ConfigError, RemoteError
from ringcomm.job.context import Context

SETTINGS = Settings(start_timeout_s=100.0)
SPAWN = multiprocessing.get_context("spawn")


def describe() -> List[Any]:
    rc.init()
    total = rc.allreduce(np.full(2, rc.rank() + 1.0), op=rc.Sum)
    return [rc.rank(), rc.size(), rc.local_rank(), rc.local_size(), total.tolist()]


def work(pipe: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    pipe.send_bytes(attempt(lambda: function(*arguments)))


class Workers:
    """One process for each of some calls."""

    def __init__(self, calls: Sequence[Tuple[Callable[..., Any], Sequence[Any]]]) -> None:
        self.left: Dict[Connection, int] = {}
        self.processes = []
        for rank, (function, arguments) in enumerate(calls):
            here, there = SPAWN.Pipe(duplex=False)
            self.left[here] = rank
            process = SPAWN.Process(target=work, args=(there, function, arguments), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)

    def poll(self, timeout_s: float) -> List[Tuple[int, RankOutcome]]:
        """Outcomes that have arrived; this system never notices that a process has ended."""
        found = []
        for pipe in wait(list(self.left), timeout_s):
            rank = self.left.pop(pipe)  # type: ignore[call-overload]
            try:
                found.append((rank, RankOutcome(unpack(pipe.recv_bytes()))))  # type: ignore[union-attr]
            except EOFError:
                continue
        return found

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.kill()
            process.join()


def run(size: int, function: Callable[..., Any], hosts: Optional[Sequence[Host]] = None) -> List[Any]:
    job = PlacedJob("test", size, SETTINGS, hosts)
    workers = Workers([(call, (ticket, function, (), {})) for ticket in job.tickets])
    try:
        return job.collect(workers.poll)
    finally:
        workers.end()
        job.close()


@pytest.mark.smoke
def test_every_rank_has_its_place_and_its_result() -> None:
    assert run(1, describe) == [[0, 1, 0, 1, [1.0, 1.0]]]
    results = run(3, describe, [Host("a", "left"), Host("b", "right"), Host("b", "right")])
    assert results == [[0, 3, 0, 1, [6.0, 6.0]], [1, 3, 0, 2, [6.0, 6.0]], [2, 3, 1, 2, [6.0, 6.0]]]


def test_a_rank_that_does_not_return_after_a_failure_is_not_waited_for() -> None:
    job = PlacedJob("test", 2, SETTINGS)
    reports = [(1, RankOutcome(unpack(attempt(lambda: {}["sample"]))))]  # type: ignore[index]
    try:
        with pytest.raises(RemoteError, match="rank 1 on .*KeyError"):
            job.collect(lambda timeout_s: [reports.pop()] if reports else time.sleep(timeout_s) or [])
    finally:
        job.close()


def test_a_process_may_be_a_rank_again_after_its_end() -> None:
    ticket = Ticket("job", 0, 1, 0, {"RINGCOMM_SIZE": "1"})
    enter(ticket)
    with pytest.raises(ConfigError, match="it is rank 0 of job already"):
        enter(ticket)
    end()
    assert call(ticket, describe, (), {}) == [0, 1, 0, 1, [1.0, 1.0]]


def test_process_groups_that_the_function_has_left_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = ["the default one"]
    stands_in = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: bool(groups), destroy_process_group=groups.clear
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", stands_in)
    for expected in (["the default one"], []):
        assert groups == expected
        call(Ticket("job", 0, 1, 0, {"RINGCOMM_SIZE": "1"}), rc.rank, (), {})
    assert groups == []


def test_a_failure_is_reported_to_whatever_asks_before_or_after_it() -> None:
    job = PlacedJob("test", 2, SETTINGS, [Host("a", "left"), Host("b", "right")])
    before, after = threading.Event(), threading.Event()
    raised = []

    def join() -> None:
        try:
            Context.start(Membership.from_environment(job.tickets[0].variables), SETTINGS)
        except rc.RingcommError as error:
            raised.append(str(error))

    waiting = threading.Thread(target=join)
    try:
        job.when_failed(before.set)
        assert job.failure is None and not before.is_set()
        job.check({})
        waiting.start()
        job.ended(1, "OSError: no space")
        assert before.wait(60)
        waiting.join(60)
        assert len(raised) == 1 and "no space" in raised[0]
        job.when_failed(after.set)
        assert after.wait(60)
        assert job.culprit == 1
        with pytest.raises(RemoteError, match="no space") as caught:
            job.check({})
        assert caught.value.rank == 1 and str(caught.value.__cause__) == str(job.failure)
        arrived = RankOutcome(unpack(attempt(lambda: 5)))
        with pytest.raises(RemoteError, match="no space"):
            job.check({0: arrived})
    finally:
        job.close()
