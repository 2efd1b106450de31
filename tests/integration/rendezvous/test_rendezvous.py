"""The real rendezvous and real joiners over the loopback: start, refusals, leaks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import psutil
import pytest

from ringcomm.config import Membership, Settings
from ringcomm.errors import StartTimeoutError
from ringcomm.job.context import Context
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
            (0, 3, "here"),
            (1, 3, "here"),
            (2, 3, "here"),
        ]
        assert together(contexts, sum_of_ranks) == [3.0] * 3
        assert len(rank_ports) == 3
        assert all(refuses(port) for port in rank_ports), "a rank still listens after the start"
    assert eventually(lambda: job.texts("ended") != [])
    kinds = [notice.kind for notice in job.notices]
    assert kinds == ["joined"] * 3 + ["started"] + ["ended"]


def test_ranks_without_a_plan(service):
    job = service(3, planned=False)
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        contexts = list(pool.map(job.start, [None, 0, None]))
        for context in contexts:
            stack.callback(context.close)
        assert contexts[1].rank == 0
        assert sorted(context.rank for context in contexts) == [0, 1, 2]
        assert together(contexts, sum_of_ranks) == [3.0] * 3


# ---- peers that do not belong -----------------------------------------------------------------


def test_endless_timeouts_are_allowed(service):
    job = service(2)
    job.settings = Settings(start_timeout_s=float("inf"), timeout_s=float("inf"), spin_us=0.0)
    with ExitStack() as stack:
        assert together(job.start_all(stack), sum_of_ranks) == [1.0] * 2


# ---- again and again -------------------------------------------------------------------------


HALVES = (slice(0, 5), slice(5, 10))


@pytest.mark.release
@pytest.mark.full
def test_fifty_generations_of_two_ranks_leak_nothing(service):
    job = service(2)

    def generations(rank, count=50):
        grown = []
        for number in range(count):
            with job.start(rank) as context:
                assert context.generation == number
                assert context.allreduce(np.full(100_000, 1.0), op=1)[0] == 2.0
            if number % 5 == 4:
                grown.append((psutil.Process().num_fds(), psutil.Process().memory_info().rss))
        return grown

    with ThreadPoolExecutor(2) as pool:
        series = list(pool.map(generations, range(2)))
    for samples in series:
        descriptors = [count for count, _ in samples]
        # The other rank may be anywhere in its own start or end, in which it has up to 16; one leaked per
        # generation would be 25 here.
        assert min(descriptors[5:]) <= min(descriptors[:5]) + 16, descriptors
    # Of the process, which both are in. Rings of 16 MB come and go. One 800 kB array kept per generation and
    # rank would be 40 MB here.
    early, late = ([rss for samples in series for _, rss in samples[part]] for part in HALVES)
    assert min(late) - min(early) < 30e6, [rss // 1_000_000 for rss in early + late]


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
