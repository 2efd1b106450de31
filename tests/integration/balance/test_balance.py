"""Balanced batches over real contexts: reports, changes at the same step, and other ranks in the next job."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from ringcomm.balance import pace
from ringcomm.balance.batches import Balanced
from ringcomm.balance.plan import NewShares
from ringcomm.errors import ConfigError
from ringcomm.ops import Average
from ringcomm.testing.cluster import run_ranks

COUNT, GLOBAL_BATCH = 1030, 40


def step(context, mine):
    """What a program does with its share; the result is right if the weights are those of the shares."""
    own = np.array([float(mine.sum()) / max(1, len(mine))])
    reduced = own.copy()
    context.engine.allreduce([reduced], Average, "gradient", weight=len(mine)).wait(20.0)
    return float(reduced[0])


class Imposed:
    """In place of measured speeds: shares change as the test says, with everything else as usual."""

    def __init__(self, replanner, changes):
        self.window, self._inner, self._changes = 5, replanner, list(changes)

    def decide(self, number, reports):
        assert all(report.samples >= 0 and report.waited_s >= 0.0 for report in reports)
        self._inner.decide(number, reports)
        shares = self._changes.pop(0) if self._changes else None
        return (
            None if shares is None else NewShares(max(item.ahead for item in reports) + 2, shares, "changed")
        )


def test_all_ranks_change_at_the_same_step():
    changes = [(30, 6, 4), None, (0, 40, 0), (13, 13, 14)]

    def work(context):
        data = Balanced(COUNT, GLOBAL_BATCH, 3, context=lambda: context)
        data.pace.replanner = Imposed(data.pace.replanner, changes)
        rows = []
        for epoch in range(2):
            for mine in data:
                rows.append((epoch, tuple(mine.tolist()), data.shares, step(context, mine)))
        return rows

    results = run_ranks(3, work)
    whole = Balanced(COUNT, GLOBAL_BATCH, 3, context=lambda: run_ranks(1, lambda context: context)[0])
    assert len({row[2] for row in results[0]}) == 4  # the first one, and three others
    for number, rows in enumerate(zip(*results)):
        epoch, place = divmod(number, 26)
        batch = whole.pace.division.batch(epoch, place)
        assert len({row[2] for row in rows}) == 1
        assert sum((row[1] for row in rows), ()) == tuple(batch.tolist())
        for row in rows:
            np.testing.assert_allclose(row[3], batch.mean(), rtol=1e-12)


@pytest.mark.parametrize("name", ["seed", "max_batch"])
def test_ranks_that_divide_different_data_end_with_an_error_on_all(name):
    def work(context):
        arguments = {"count": COUNT, "global_batch": GLOBAL_BATCH, "seed": 3, "max_batch": GLOBAL_BATCH}
        arguments[name] += context.rank
        with pytest.raises(ConfigError, match="Ranks divide different data") as found:
            for mine in Balanced(**arguments, context=lambda: context):
                step(context, mine)
        return str(found.value)

    assert len(set(run_ranks(2, work))) == 1


@pytest.mark.parametrize("change", ["set_step", "load_state_dict"])
def test_ranks_that_begin_at_different_places_end_with_an_error_on_all(change):
    def work(context):
        data = Balanced(COUNT, GLOBAL_BATCH, 3, context=lambda: context)
        if context.rank == 1:
            state = {**data.state_dict(), "epoch": 2, "step": 1}
            getattr(data, change)(state if change == "load_state_dict" else 2)
        with pytest.raises(ConfigError, match="Ranks are at different places in the data") as found:
            for mine in data:
                step(context, mine)
        return str(found.value)

    (text,) = set(run_ranks(2, work))
    there = {"set_step": (0, 6), "load_state_dict": (2, 5)}[change]
    assert f"rank 0 is in epoch 0 after 4 steps, rank 1 in epoch {there[0]} after {there[1]}" in text


def test_a_rank_that_slows_down_by_half_in_a_running_job(monkeypatch, slow_step=70):
    """Real ranks and reductions; only their seconds of computing come from clocks (hundreds per sample)."""
    clock = threading.local()
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))

    def work(context):
        clock.now_s = 0.0
        noise = np.random.default_rng(context.rank)
        data = Balanced(9600, 96, 3, context=lambda: context)
        rows = []
        for _ in range(2):
            for mine in data:
                speed = (3.0, 1.0, 1.0)[context.rank]
                if len(rows) >= slow_step and context.rank == 0:
                    speed /= 2.0
                seconds = 50.0 + 300.0 * len(mine) / speed
                clock.now_s += seconds * noise.normal(1.0, 0.02)
                rows.append((seconds, data.shares))
                step(context, mine)
                if len(rows) == slow_step + 60:
                    return rows
        raise AssertionError("two epochs are too short")

    results = run_ranks(3, work)
    shares = [row[1] for row in results[0]]
    assert all([row[1] for row in rows] == shares for rows in results)

    def spread(number):
        times = [rows[number][0] for rows in results]
        return (max(times) - min(times)) / max(times)

    assert spread(0) > 0.5 and spread(slow_step) > 0.25
    assert all(spread(number) <= 0.10 for number in range(20, slow_step))
    assert all(spread(number) <= 0.10 for number in range(slow_step + 50, slow_step + 60))
    assert sum(before != after for before, after in zip(shares, shares[1:])) <= 4
