"""The engine for a while: every rank in an order of its own, joins, sets and shapes mixed in; no leaks."""

from __future__ import annotations

import gc
import random
import threading
import time

import numpy as np
import psutil
import pytest

from ringcomm.config import Settings
from ringcomm.ops import Average, Max, Sum
from ringcomm.testing.cluster import run_ranks

pytestmark = pytest.mark.release
LIMIT_S = 60.0
TENSORS = 200


def one_round(context, chance, plan, number):
    """Submit the round's tensors in this rank's order, wait for them in another, check every number."""
    engine, rank, size = context.engine, context.rank, context.size
    order = list(range(TENSORS))
    chance.shuffle(order)
    started = []
    lengths = [plan.randrange(1, 60) if plan.random() < 0.2 else n % 50 + 1 for n in range(TENSORS)]
    for n in order:
        length, members = lengths[n], range(size)
        array = np.full(length, float(rank + n))
        if n % 7 == 0:
            members = (0, size - 1)
            if rank not in members:
                continue
            handle = engine.allreduce([array], Sum, f"t{n}", process_set=number)
            expected = np.full(length, float(sum(members) + 2 * n))
        elif n % 11 == 0:
            handle = engine.allgather([np.repeat(array, rank + 1)], [((rank + 1) * length,)], f"t{n}")
            expected = np.concatenate([np.full((r + 1) * length, float(r + n)) for r in members])
        elif n % 13 == 0:
            handle = engine.broadcast([array], n % size, f"t{n}")
            expected = np.full(length, float(n % size + n))
        elif n % 5 == 0:
            handle = engine.allreduce([array], Max, f"t{n}")
            expected = np.full(length, float(size - 1 + n))
        else:
            handle = engine.allreduce([array], Average, f"t{n}")
            expected = np.full(length, sum(members) / size + n)
        started.append((handle, array, expected))
        if chance.random() < 0.02:
            time.sleep(chance.random() * 0.002)
    chance.shuffle(started)
    for handle, array, expected in started:
        result = handle.wait(LIMIT_S)
        np.testing.assert_allclose(array if result is None else result[0], expected, rtol=1e-12)


def uneven_end(context, turn):
    """Ranks run out of data at different times."""
    for n in range((context.rank * 3 + turn) % 5):
        context.engine.allreduce([np.ones(n + 1)], Sum).wait(LIMIT_S)
    assert 0 <= context.engine.join().wait(LIMIT_S) < context.size


@pytest.mark.parametrize("transport, seed", [("memory", 1), ("tcp", 2), ("auto", 3)])
def test_order_chaos(transport, seed):
    rounds = [0] * 4
    until = time.monotonic() + 20.0

    def work(context):
        number = context.engine.add_process_set([0, context.size - 1])
        plan, chance = random.Random(seed), random.Random(seed * 100 + context.rank)
        turn, going = 0, True
        while going:
            one_round(context, chance, plan, number)
            if turn % 3 == 2:
                uneven_end(context, turn)
            turn += 1
            rounds[context.rank] = turn
            vote = np.array([time.monotonic() < until])
            going = bool(context.allreduce(vote, Max)[0])
        return context.engine.pending()

    settings = Settings(spin_us=0.0, timeout_s=LIMIT_S, fusion_bytes=4096)
    assert run_ranks(4, work, transport, settings, timeout_s=150.0) == [[]] * 4
    assert min(rounds) == max(rounds) >= 3


def opened():
    process = psutil.Process()
    return process.num_fds(), threading.active_count()


@pytest.mark.timeout(300)
def test_a_hundred_thousand_small_operations_leak_nothing():
    steady = {}

    def work(context):
        array = np.ones(2)
        for n in range(50_000):
            context.engine.allreduce([array], Max, "same" if n % 2 else "").wait(LIMIT_S)
            if n == 5_000 and context.rank == 0:
                gc.collect()
                steady["before"] = (psutil.Process().memory_info().rss, *opened())
        if context.rank == 0:
            gc.collect()
            steady["after"] = (psutil.Process().memory_info().rss, *opened())
        context.barrier()

    run_ranks(2, work, "memory", timeout_s=280.0)
    before, after = steady["before"], steady["after"]
    assert after[1:] == before[1:]
    assert after[0] - before[0] < 3_000_000
