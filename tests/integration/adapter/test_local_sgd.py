"""Local steps with an outer step, on ranks that are threads."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm._adapter.local_sgd import LocalSGD
from ringcomm.errors import ConfigError
from ringcomm.testing.cluster import errors_of, run_ranks

SHAPES = [(70, 80), (9,), ()]


def start(dtype=np.float32):
    return [
        np.array(np.random.default_rng(place).standard_normal(shape), dtype)
        for place, shape in enumerate(SHAPES)
    ]


def gradient(rank, step, place):
    return np.random.default_rng((rank, step, place)).standard_normal(SHAPES[place])


def train(context, steps, lr=0.1, dtype=np.float32, make=LocalSGD.diloco, **options):
    weights = start(dtype)
    local = make(weights, context=context, **options)
    for step in range(steps):
        for place, weight in enumerate(weights):
            weight -= (lr * gradient(context.rank, step, place)).astype(dtype)
        local.step()
    return weights, local


@pytest.mark.parametrize("size", [1, 3])
def test_one_local_step_without_momentum_is_data_parallel_sgd(size):
    options = {"dtype": np.float64, "sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0}
    results = run_ranks(size, lambda context: train(context, 6, **options)[0])
    for place, expected in enumerate(start(np.float64)):
        for step in range(6):
            expected -= np.mean([0.1 * gradient(rank, step, place) for rank in range(size)], axis=0)
        np.testing.assert_allclose(results[0][place], expected, rtol=1e-12, atol=1e-13)
        assert len({result[place].tobytes() for result in results}) == 1


def streaming(size, steps, every, fragments, overlap, lr=0.1, outer=0.7, momentum=0.9):
    """One process that does the same in float64: the weights after the steps and a synchronization."""
    ranks = [start(np.float64) for _ in range(size)]
    anchors, velocities = start(np.float64), [np.zeros(shape) for shape in SHAPES]
    parts = {1: [[0, 1, 2]], 2: [[0], [1, 2]]}[fragments]
    begins = [every * (number + 1) // fragments for number in range(fragments)]
    running = {}

    def begin(number, step):
        started = [[item.copy() for item in weights] for weights in ranks]
        running[number] = (step + overlap, started)

    def end(number):
        _, started = running.pop(number)
        for place in parts[number]:
            delta = anchors[place] - np.mean([weights[place] for weights in started], axis=0)
            velocities[place] = momentum * velocities[place] + delta
            anchors[place] -= outer * (delta + momentum * velocities[place])
            for weights, old in zip(ranks, started):
                weights[place] = anchors[place] + (weights[place] - old[place])

    for step in range(1, steps + 1):
        for rank, weights in enumerate(ranks):
            for place, weight in enumerate(weights):
                weights[place] = weight - lr * gradient(rank, step - 1, place)
        for number in [key for key, (until, _) in running.items() if until <= step]:
            end(number)
        for number in range(fragments):
            if (step - 1) % every + 1 == begins[number]:
                begin(number, step)
                if not overlap:
                    end(number)
    for number in list(running):
        end(number)
    for number in range(fragments):
        begin(number, steps)
        end(number)
    return ranks[0]


@pytest.mark.parametrize(
    "fragments, overlap, codec", [(1, 0, None), (1, 2, None), (2, 0, None), (2, 1, "int8"), (2, 3, None)]
)
def test_fragments_whose_reductions_overlap_local_steps(fragments, overlap, codec):
    def work(context):
        weights, local = train(
            context, 11, sync_every=4, fragments=fragments, overlap=overlap, compression=codec
        )
        local.synchronize()
        return weights

    results = run_ranks(3, work)
    for place, expected in enumerate(streaming(3, 11, 4, fragments, overlap)):
        assert len({result[place].tobytes() for result in results}) == 1
        np.testing.assert_allclose(results[0][place], expected, atol=1e-5 if codec is None else 0.05)


def test_a_checkpoint_in_the_middle():
    def work(context):
        weights, local = train(context, 6, sync_every=4, compression="int8")
        saved, kept = local.state_dict(), [weight.copy() for weight in weights]
        ends = []
        for _ in range(2):
            for weight, old in zip(weights, kept):
                weight[...] = old
            again = LocalSGD.diloco(weights, sync_every=4, compression="int8", context=context)
            again.load_state_dict(saved)
            for step in (6, 7):
                for place, weight in enumerate(weights):
                    weight -= (0.1 * gradient(context.rank, step, place)).astype(np.float32)
                again.step()
            ends.append(weights[0].tobytes())
        whole = train(context, 8, sync_every=4, compression="int8")[0][0].tobytes()
        return ends + [whole]

    for ends in run_ranks(2, work):
        assert len(set(ends)) == 1


@pytest.mark.parametrize("options, words", [
    ({"sync_every": 0}, "sync_every=0"), ({"sync_every": [1, 2, 3]}, "one per rank"),
    ({"overlap": 16, "sync_every": 16}, "need sync_every=17 or more"),
    ({"sync_every": "daily"}, 'or "auto"'), ({"max_drift": -1.0}, "max_drift must be positive"),
    ({"outer_lr": 0.0}, "outer_lr must be > 0"), ({"fragments": 0}, "fragments must be >= 1"),
])  # fmt: skip
def test_wrong_arguments(options, words):
    for error in errors_of(2, lambda context: LocalSGD(start(), context=context, **options)):
        assert isinstance(error, ConfigError) and words in str(error)


def quadratic(context, steps, rate, **options):
    """Train towards targets of each rank's own; the lengths of the intervals, and the weights."""
    weights = [np.full((40, 30), 5.0), np.array(2.0)]
    local, lengths, since = LocalSGD(weights, context=context, **options), [], 0
    for step in range(steps):
        for place, weight in enumerate(weights):
            target = np.random.default_rng((context.rank, step, place)).standard_normal(weight.shape)
            weight -= rate(step) * (weight - 5.0 - target)
        since += 1
        if local.step():
            lengths.append(since)
            since = 0
    local.synchronize()
    return lengths, [weight.tobytes() for weight in weights], context.stats()


def test_intervals_grow_as_the_learning_rate_falls():
    results = run_ranks(3, lambda context: quadratic(
        context, 80, lambda step: 0.3 / (1 + step) ** 1.5, max_drift=0.002, sync_every="auto"))  # fmt: skip
    lengths, weights, stats = results[0]
    assert [item[:2] for item in results] == [(lengths, weights)] * 3, "all ranks decide the same"
    assert lengths[:2] == [1, 1] and max(lengths) > 4 and sorted(lengths) == lengths
    assert stats["ringcomm/local_steps"] >= max(lengths) / 2 and 0 < stats["ringcomm/local_drift"] < 0.01


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
