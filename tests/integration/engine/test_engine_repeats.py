"""Steps that repeat without a negotiation, over sockets and threads: deviations, late ranks, and the end."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import numpy as np
import pytest

from ringcomm.errors import MismatchError
from ringcomm.ops import Sum
from ringcomm.testing.cluster import errors_of, run_ranks
from tests.integration.engine.engines import PLAIN

DEVIATIONS = ["nothing", "nothing", "another", "early", "large", "set", "late", "direct", "async", "join"]


def repeated(context):
    return sum(item.total.runs for item in context.engine.buckets.repeated)


def start(context, name, step, size=3, **options):
    array = np.full(size, float(context.rank + step))
    return context.engine.allreduce([array], Sum, name, **options), array


def finish(context, pending, step, ranks=None):
    handle, array = pending
    ranks = range(context.size) if ranks is None else ranks
    handle.wait()
    assert set(array.tolist()) == {float(sum(rank + step for rank in ranks))}


def one_step(context, step, deviation, odd):
    """Three operations, in another order on the odd rank; and a deviation, which differs there, too."""
    mine = context.rank == odd
    if deviation == "late" and mine:
        time.sleep(0.15)
    if deviation == "early" and mine:
        extra = start(context, "extra", step)
    if deviation == "join":
        while context.rank != odd and context.rank % 2:
            finish(context, start(context, "while others have joined", step), step, range(1, context.size, 2))
            break
        assert context.engine.join().wait() >= 0
    pending = [start(context, name, step) for name in ("abc" if not mine else "cba")]
    if deviation == "async" and mine:
        time.sleep(0.02)  # the engine's thread announces them
    if deviation == "direct":
        if not mine:
            context.barrier()
        for item in pending:
            finish(context, item, step)
        if mine:
            context.barrier()
        return
    if deviation == "large":
        pending.append(start(context, "large", step, 100_000))
    if deviation == "set" and context.rank in (0, context.size - 1):
        finish(context, start(context, "in a set", step, process_set=1), step, (0, context.size - 1))
    if deviation == "another":
        pending.insert(0 if mine else 2, start(context, "another", step))
    for item in pending:
        finish(context, item, step)
    if deviation == "early":
        finish(context, extra if mine else start(context, "extra", step), step)


@pytest.mark.parametrize("size, transport", [(2, "auto"), (3, "tcp")])
def test_steps_from_a_seed_get_the_right_sums_whatever_deviates(size, transport):
    def work(context):
        plan = random.Random(size)
        if size > 2:
            assert context.engine.add_process_set([0, size - 1]) == 1
        for step in range(120):
            deviation, odd = plan.choice(DEVIATIONS), plan.randrange(size)
            if deviation == "direct" or (deviation == "set" and size == 2):
                deviation = "nothing"  # a call that all make before they have waited is a deadlock
            one_step(context, step, deviation if step % 8 == 7 else "nothing", odd)
        return repeated(context)

    [runs] = set(run_ranks(size, work, transport, PLAIN, timeout_s=100.0))
    assert runs > 30


def test_ranks_that_wait_for_different_operations_are_told():
    def work(context):
        for step in range(6):
            finish(context, start(context, "a", step), step)
            finish(context, start(context, "b", step), step)
        start(context, "ab"[context.rank % 2], 7)[0].wait()

    impatient = replace(PLAIN, late_after_s=10.0)
    errors = errors_of(3, work, transport="tcp", settings=impatient, timeout_s=60.0)
    assert any(isinstance(error, MismatchError) for error in errors)
    for error in errors:  # to the others, a rank that has ended with it first is lost because of it
        assert "MismatchError" in f"{type(error).__name__}: {error}"
        assert "'a'" in str(error) and "'b'" in str(error)
