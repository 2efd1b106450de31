"""The real rendezvous and real joiners over the loopback: start, refusals, leaks."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

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


# ---- peers that do not belong -----------------------------------------------------------------


# ---- again and again -------------------------------------------------------------------------


HALVES = (slice(0, 5), slice(5, 10))


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
