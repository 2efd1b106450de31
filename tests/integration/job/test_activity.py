"""`rc.stats()`: the numbers of a rank, and of which rank it says that it waited for."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from ringcomm.config import Settings
from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks

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


def test_a_rank_that_waits_names_the_other():
    inside, seen = threading.Event(), threading.Event()

    def work(context):
        if context.rank == 1:
            inside.wait(30)
            seen.wait(30)
            context.barrier()
            return {}
        thread = threading.Thread(target=context.barrier)
        thread.start()
        inside.set()
        numbers = context.activity.numbers()
        while not (numbers["inside"] and numbers["waits_for"]):
            numbers = context.activity.numbers()
        seen.set()
        thread.join()
        return numbers

    numbers, _ = run_ranks(2, work)
    assert numbers["waits_for"] == [1] and numbers["doing"] == "barrier()"


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
