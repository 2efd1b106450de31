"""A context from its start to its end: what it says of the job, and what is left when it fails."""

from __future__ import annotations

import json
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest

from ringcomm.config import Membership, Settings
from ringcomm.errors import ConfigError, NotInitializedError, PeerLostError, StartTimeoutError, StartupError
from ringcomm.group import group as group_module
from ringcomm.job.context import Context
from ringcomm.ops import Sum
from ringcomm.rendezvous.client import join
from ringcomm.rendezvous.embedded import EmbeddedRendezvous
from ringcomm.testing.cluster import run_ranks
from tests.support.service import eventually, free_port, together

LIMIT_S = 60.0
SETTINGS = Settings(spin_us=0.0, timeout_s=20.0, start_timeout_s=20.0)


def test_where_ranks_are():
    def work(context):
        return context.local_size, context.cross_rank, context.cross_size, context.is_homogeneous

    assert run_ranks(4, work, ranks_per_host=2) == [(2, host, 2, True) for host in (0, 0, 1, 1)]
    # The second host has one rank only.
    assert run_ranks(3, work, ranks_per_host=2) == [(2, 0, 2, False), (2, 0, 1, False), (1, 1, 2, False)]


class TestAlone:
    def test_advice_that_was_not_given_is_pointed_out(self, caplog):
        with Context.start(Membership(), Settings(advise=True)):
            pass
        assert any(record.getMessage().startswith("No advice: ") for record in caplog.records)


@pytest.mark.parametrize("ok", [True, False])
def test_the_rank_that_serves_the_rendezvous_stops_it_at_its_end(ok, monkeypatch, no_leaks):
    key, stopped = secrets.token_bytes(32), []
    embedded, endpoints = EmbeddedRendezvous.serve(key, "", "job", 2, SETTINGS)
    stop = embedded.stop
    monkeypatch.setattr(embedded, "stop", lambda failed: stopped.append(failed) or stop(failed))

    def start(rank):
        membership = Membership(2, tuple(endpoints), key, "job", None, rank, "desk")
        joined = join(membership, SETTINGS)
        return Context._of(joined._replace(embedded=embedded if rank == 0 else None), SETTINGS)

    contexts = together([0, 1], start)
    together(contexts, lambda context: context.barrier())
    together(contexts, lambda context: context.close("its program ended", ok))
    assert stopped == [not ok]


class TestFailures:
    def test_one_that_cannot_be_made_leaves_the_job(self, service, monkeypatch):
        made = service(2)
        both = threading.Barrier(2)  # so that neither loses the other before

        def broken(*arguments):
            both.wait(LIMIT_S)
            raise MemoryError("no room for the flight recorder")

        monkeypatch.setattr(group_module, "FlightRecorder", broken)
        found = together([0, 1], lambda rank: error_of(lambda: made.start(rank)))
        assert [type(error) for error in found] == [StartupError] * 2
        assert all("memory is used up" in str(error) for error in found), found

    def test_ranks_that_do_not_come_leave_no_rendezvous_behind(self, no_leaks):
        """Rank 0 serves it, in its own process."""
        membership = Membership(2, (("127.0.0.1", 0),), secrets.token_bytes(32), "job", None, 0, "desk")
        with pytest.raises(StartTimeoutError):
            Context.start(membership, Settings(start_timeout_s=0.3))

def error_of(call):
    try:
        call().close()
    except BaseException as error:  # noqa: BLE001 - looked at by the test
        return error
    return None


def test_misspelt_settings_are_pointed_out(monkeypatch, caplog):
    monkeypatch.setenv("RINGCOMM_TRANSPROT", "tcp")
    monkeypatch.setenv("RINGCOMM_TRANSPORT", "tcp")
    with caplog.at_level(logging.WARNING, "ringcomm"), Context.start(Membership(), Settings()):
        pass
    (line,) = [item.getMessage() for item in caplog.records if "TRANSPROT" in item.getMessage()]
    assert "did you mean RINGCOMM_TRANSPORT?" in line
    assert not any(item.getMessage().startswith("RINGCOMM_TRANSPORT ") for item in caplog.records)


# ---- leaving a job from another thread, and joining one of which a late step fails ---------------


@pytest.mark.parametrize("transport, nbytes", [("tcp", 8), ("shm", 8_000_000)])
def test_a_call_of_another_thread_ends_and_says_why(transport, nbytes):
    """No rank is blamed for it, and the other ranks learn that this one has left."""
    left = threading.Event()

    def work(context):
        array = np.ones(nbytes // 8)
        context.barrier()
        if context.rank == 1:
            assert left.wait(LIMIT_S)
            with pytest.raises(PeerLostError, match="rank 0"):
                # A short one may be complete here: rank 0 had sent its part before it left.
                assert (context.allreduce(array, Sum) == 2.0).all()
                context.barrier()
            return True

        def leave():
            assert eventually(lambda: context._runner.progress().doing, LIMIT_S)
            context.close()
            left.set()

        with ThreadPoolExecutor(1) as pool:
            leaving = pool.submit(leave)
            with pytest.raises(NotInitializedError, match=r"left .* while it was in allreduce") as caught:
                context.allreduce(array, Sum)
            leaving.result(LIMIT_S)
        assert "rank 1" not in str(caught.value)
        return True

    assert run_ranks(2, work, transport, SETTINGS) == [True] * 2


def test_a_late_step_of_joining_that_fails_leaves_nothing_open(no_leaks, tmp_path):
    """Without ringrun: rank 0 serves the rendezvous, and cannot open its timeline."""
    log = str(tmp_path / "missing" / "log")
    settings = replace(SETTINGS, timeline=log, measure=False)
    port = free_port()

    def start(rank):
        membership = Membership(2, (("127.0.0.1", port),), b"k" * 32, "test", rank=rank, host="localhost")
        failed = pytest.raises((ConfigError, PeerLostError))
        with failed as caught, Context.start(membership, settings) as context:
            context.barrier()
        return f"{caught.type.__name__}: {caught.value}"

    first, other = together([0, 1], start)
    assert "ConfigError: The timeline" in first
    assert other.startswith("PeerLostError: rank 0") and "The timeline" in other


# ---- a fork of a rank's process: it shares the connections, so nothing that it does may reach them ----


def forked(work) -> str:
    """Return what ``work`` returns in a fork of this process, or the error that it raises, as text."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that this process has threads
        pid = os.fork()
    if pid == 0:
        signal.alarm(int(LIMIT_S))  # instead of a wait for ever
        try:
            text = repr(work())
        except Exception as problem:  # noqa: BLE001 - the parent looks at it
            text = f"{type(problem).__name__}: {problem}"
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return text


def test_it_may_not_wait_for_an_operation_of_its_parent():
    """It has no engine thread, and would read what is sent to its parent."""

    def work(context):
        if context.rank == 1:
            context.barrier()
            context.engine.allreduce([np.ones(1)], Sum, "x").wait()
            return None
        array = np.ones(1)
        handle = context.engine.allreduce([array], Sum, "x")
        texts = [forked(handle.wait), forked(lambda: handle.wait(5.0))]
        context.barrier()
        handle.wait()
        return [array[0], *texts]

    (total, *texts), _ = run_ranks(2, work)
    assert total == 2.0
    for text in texts:
        assert text.startswith("Misuse: This process is a fork of rank 0 and shares its connections")


@pytest.mark.parametrize("transport", ["tcp", "shm", "auto"])
def test_when_it_ends_its_parent_remains_in_the_job(service, transport):
    """At the end of a program the default context is closed, in a fork that calls sys.exit() too."""
    made = service(2, transport=transport)
    with ExitStack() as stack:
        contexts = made.start_all(stack)
        for ok in (True, False):
            assert forked(lambda ok=ok: contexts[1].close("its program ended", ok)) == "None"
        sums = together(contexts, lambda context: context.allreduce(np.ones(50_000), Sum)[-1])
        assert sums == [2.0, 2.0]
        named = together(contexts, lambda context: context.engine.barrier("named").wait())
        assert named == [None, None]
    assert not made.texts("abort")


# ---- ``init()`` in a process that a rank has started ---------------------------------------------


def test_a_child_of_a_rank_is_told_what_it_is() -> None:
    ask = "from ringcomm.config import Membership\n"
    child = f"{ask}Membership.from_environment()"
    code = (
        f"import subprocess, sys\n{ask}"
        "assert Membership.from_environment() == Membership.from_environment()\n"
        f"sys.exit(subprocess.call([sys.executable, '-c', {child!r}]))"
    )
    with tempfile.TemporaryFile() as key:
        key.write(b"ab" * 32)
        key.flush()
        env = {
            **os.environ, "RINGCOMM_SIZE": "2", "RINGCOMM_RANK": "1", "RINGCOMM_RENDEZVOUS": "127.0.0.1:1",
            "RINGCOMM_KEY_FD": str(key.fileno()),
        }  # fmt: skip
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=env, pass_fds=[key.fileno()], capture_output=True, text=True, timeout=100,
            check=False,
        )  # fmt: skip
    assert "is a child of a rank of the job (rank 1, process" in done.stderr, done.stderr
    assert '__name__ == "__main__"' in done.stderr


# ---- the numbers of a rank -----------------------------------------------------------------------


LATE_S = 0.2


def test_stats_are_flat_and_numbers(on_ranks):
    def work(context):
        for _ in range(4):
            context.allreduce(np.ones(1000, np.float32), Sum)
            context.activity.steps.add()
        context.barrier()
        return context.stats()

    for rank, found in enumerate(on_ranks(2, work)):
        assert all(isinstance(value, (int, float)) and value >= 0 for value in found.values())
        assert found["ringcomm/steps"] == 4 and found["ringcomm/allreduce/calls"] == 4
        assert found["ringcomm/calls"] == 5
        assert found["ringcomm/sent_bytes"] == found[f"ringcomm/rank_{1 - rank}/sent_bytes"] > 4000
        assert 0 < found["ringcomm/waited_s"] <= found["ringcomm/elapsed_s"]
        json.dumps(found)


@pytest.mark.parametrize("by_name", [False, True])
def test_the_late_rank_is_the_one_that_is_waited_for(by_name):
    contexts = {}

    def others_wait():
        if by_name:
            entries = list(contexts[0].engine.coordinator._entries.values()) if 0 in contexts else []
            return any(len(entry.signatures) == 2 for entry in entries)
        return all(rank in contexts and contexts[rank]._runner.progress().doing for rank in (0, 2))

    def work(context):
        contexts[context.rank] = context
        data = np.ones(64, np.float32)
        for _ in range(2):
            if context.rank == 1:
                while not others_wait():
                    time.sleep(0.001)
                time.sleep(LATE_S)
            if by_name:
                context.engine.allreduce([data], Sum, "gradient").wait()
            else:
                context.allreduce(data, Sum)
            context.barrier()
        return context.activity.numbers()

    numbers = run_ranks(3, work, settings=Settings(spin_us=0.0, timeout_s=30.0))
    assert numbers[0]["waited_s"] > 1.5 * LATE_S and numbers[2]["waited_s"] > 1.5 * LATE_S
    if by_name:
        assert numbers[0]["late"]["1"] > 1.5 * LATE_S
        assert numbers[1]["late"] == {} and numbers[0]["steps"] == 2
    else:
        assert numbers[0]["peers"]["1"][2] > 1.5 * LATE_S and numbers[2]["peers"]["1"][2] > 1.5 * LATE_S


def test_the_numbers_of_a_context_that_is_closed_stay():
    def work(context):
        context.allreduce(np.ones(100_000, np.float32), Sum)
        context.barrier()
        before = context.activity.numbers()
        context.close()
        return before, context.activity.numbers()

    for before, after in run_ranks(2, work, transport="tcp"):
        (peer,) = after["peers"].values()
        assert peer[3] > 100_000 and peer[:3] == next(iter(before["peers"].values()))[:3]
