"""Leaving a job from another thread, and joining one of which a late step fails."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from ringcomm.config import Membership, Settings
from ringcomm.errors import ConfigError, NotInitializedError, PeerLostError
from ringcomm.job.context import Context
from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks
from tests.support.service import eventually, free_port

LIMIT_S = 30.0
SETTINGS = Settings(spin_us=0.0, timeout_s=20.0, start_timeout_s=20.0)


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
    problems = {}

    def start(rank):
        membership = Membership(2, (("127.0.0.1", port),), b"k" * 32, "test", rank=rank, host="localhost")
        try:
            with Context.start(membership, settings) as context:
                context.barrier()
        except (ConfigError, PeerLostError) as problem:
            problems[rank] = f"{type(problem).__name__}: {problem}"

    threads = [threading.Thread(target=start, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert "ConfigError: The timeline" in problems[0]
    assert problems[1].startswith("PeerLostError: rank 0") and "The timeline" in problems[1]
