"""Ranks that make unequal numbers of local steps count by them, on ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm._adapter.local_sgd import LocalSGD
from ringcomm.testing.cluster import run_ranks
from tests.integration.adapter.test_local_sgd import gradient, start


def weighted(periods, rounds, last):
    """One process for ranks with unequal numbers of steps; ``last`` steps follow the rounds."""
    weights, done = start(np.float64), [0] * len(periods)
    statistics = np.zeros(2)
    for made in [periods] * rounds + [last]:
        ranks = [[item.copy() for item in weights] for _ in periods]
        for rank, steps in enumerate(made):
            for step in range(done[rank], done[rank] + steps):
                for place, weight in enumerate(ranks[rank]):
                    weight -= 0.1 * gradient(rank, step, place)
            done[rank] += steps
        weights = [np.array(np.average(items, axis=0, weights=made)) for items in zip(*ranks)]
        statistics = np.average([np.full(2, 1.0 * steps) for steps in done], axis=0, weights=made)
    return weights, statistics


@pytest.mark.parametrize("codec", [None, "int8"])
def test_ranks_with_unequal_numbers_of_steps_count_by_them(codec):
    """At the end they have made 3, 1 and no steps since the last exchange."""
    periods, rounds, last = [4, 2, 1], 3, [3, 1, 0]

    def work(context):
        weights, steps = start(np.float64), np.zeros(2)
        local = LocalSGD(
            weights, sync_every=periods, averaged=[steps], compression=codec, context=context,
            max_drift=np.inf,
        )  # fmt: skip
        total = rounds * periods[context.rank] + last[context.rank]
        for step in range(total):
            for place, weight in enumerate(weights):
                weight -= 0.1 * gradient(context.rank, step, place)
            steps[:] = step + 1
            local.step()
        steps[:] = total
        local.synchronize()
        return weights, steps

    expected, mean = weighted(periods, rounds, last)
    for weights, steps in run_ranks(3, work):
        for found, item in zip(weights, expected):
            np.testing.assert_allclose(found, item, atol=1e-8 if codec is None else 0.02)
        np.testing.assert_allclose(steps, mean, atol=1e-7)


def test_with_fragments_a_rank_counts_by_its_period():
    def work(context):
        weights = [np.zeros(4), np.zeros(4)]
        local = LocalSGD(weights, sync_every=[4, 2], fragments=2, context=context)
        for _ in range(4 if context.rank == 0 else 2):
            for weight in weights:
                weight -= 1.0 + context.rank
            local.step()
        return [float(weight[0]) for weight in weights]

    # The first half is exchanged after half of each rank's steps, the second one after all.
    first, second = run_ranks(2, work)
    assert first[1] == second[1] == pytest.approx(-(4 * 4 + 2 * 4) / 6)
