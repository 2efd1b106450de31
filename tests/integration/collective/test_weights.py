"""Weighted averages, matched by order and by name: numbers, bits, weight 0, and disagreements."""

from __future__ import annotations

import numpy as np
import pytest

from ringcomm.config import Settings
from ringcomm.dtypes import dtype_named
from ringcomm.errors import MismatchError, Misuse, RingcommError
from ringcomm.ops import Average
from ringcomm.testing.cluster import RankFailed, run_ranks

LIMIT_S = 30.0
SETTINGS = Settings(spin_us=0.0, timeout_s=20.0, start_timeout_s=20.0, late_after_s=10.0)


def values(rank: int, count: int, dtype: str = "float64"):
    numbers = np.random.default_rng((7, rank)).standard_normal(count)
    return numbers.astype(dtype_named(dtype))


def weights_of(size: int, seed: int):
    """Some of them 0, not all."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 60, size) * rng.integers(0, 2, size)
    weights[rng.integers(size)] = 1 + rng.integers(60)
    return weights.tolist()


def expected(weights, count, dtype="float64"):
    own = [values(rank, count, dtype).astype(np.float64) for rank in range(len(weights))]
    return sum(weight * array for weight, array in zip(weights, own)) / sum(weights)


def both(context, array, weight, name):
    """By order, and by name."""
    called = context.allreduce(array, weight=weight)
    flat = array.copy()
    context.engine.allreduce([flat], Average, name, weight=weight).wait(LIMIT_S)
    return called, flat


@pytest.mark.parametrize("count", [0, 3, (1 << 18) + 1])
def test_the_weighted_average(on_ranks, count):
    for size in (1, 2, 3):
        weights = weights_of(size, count)

        def work(context, weights=weights):
            rank = context.rank
            array = values(rank, count) if weights[rank] else np.full(count, np.nan)
            return both(context, array, weights[rank], "w")

        results = on_ranks(size, work)
        for called, named in results:
            np.testing.assert_allclose(called, expected(weights, count), rtol=1e-12, atol=1e-14)
            np.testing.assert_allclose(named, expected(weights, count), rtol=1e-12, atol=1e-14)
            assert called.tobytes() == results[0][0].tobytes()
            assert named.tobytes() == results[0][1].tobytes()


def test_several_operations_in_one_bucket():
    """Each has its own weights, and they are fused and short ones piggybacked."""

    def work(context):
        rank, engine = context.rank, context.engine
        handles = []
        arrays = [values(rank, 40 + index) for index in range(6)]
        for index, array in enumerate(arrays):
            weight = 1 + (rank + index) % 3
            handles.append(engine.allreduce([array], Average, f"n{index}", weight=weight))
        for handle in handles:
            handle.wait(LIMIT_S)
        loss = np.array([float(rank)])
        for _ in range(3):  # from the second time on the values are piggybacked
            loss[0] = rank
            engine.allreduce([loss], Average, "loss", weight=rank, urgent=True).wait(LIMIT_S)
        return arrays, loss[0]

    for arrays, loss in run_ranks(3, work):
        for index, array in enumerate(arrays):
            weights = [1 + (rank + index) % 3 for rank in range(3)]
            np.testing.assert_allclose(array, expected(weights, 40 + index), rtol=1e-12, atol=1e-14)
        assert loss == pytest.approx((1 * 1 + 2 * 2) / 3)


def test_a_rank_that_has_joined_has_weight_0():
    def work(context):
        if context.rank == 1:
            return context.engine.join().wait(LIMIT_S)
        array = np.full(9, 4.0 + context.rank)
        context.engine.allreduce([array], Average, "w", weight=2.0 - context.rank / 2).wait(LIMIT_S)
        context.engine.join().wait(LIMIT_S)
        return array

    first, _, third = run_ranks(3, work)
    np.testing.assert_allclose(first, (2.0 * 4.0 + 1.0 * 6.0) / 3.0)
    np.testing.assert_array_equal(first, third)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_weights_0_is_an_error_and_the_next_call_works(size):
    def work(context):
        with pytest.raises(Misuse, match="weights of all ranks are 0"):
            context.allreduce(np.full(3, np.nan), weight=0)
        with pytest.raises(RingcommError, match="weights of all ranks are 0"):
            context.engine.allreduce([np.ones(3)], Average, "w", weight=0).wait(LIMIT_S)
        return context.allreduce(np.ones(3), weight=1).tolist()

    assert run_ranks(size, work) == [[1.0] * 3] * size


def test_weights_on_some_ranks_only_by_name():
    def work(context):
        weight = 3.0 if context.rank else None
        with pytest.raises(MismatchError, match="some with and some without weights"):
            context.engine.allreduce([np.ones(3)], Average, "w", weight=weight).wait(LIMIT_S)
        array = np.ones(3)
        context.engine.allreduce([array], Average, "w").wait(LIMIT_S)
        return array.tolist()

    assert run_ranks(2, work, settings=SETTINGS) == [[1.0] * 3] * 2


@pytest.mark.parametrize("count", [3, 4])
def test_weights_on_some_ranks_only_by_order(count):
    """Also if the other rank sends as many elements as there are with the weight."""

    def work(context):
        if context.rank:
            context.allreduce(np.ones(3), weight=2.0)
        else:
            context.allreduce(np.ones(count))

    with pytest.raises(RankFailed) as failed:
        run_ranks(2, work, settings=SETTINGS)
    assert all(isinstance(error, MismatchError) for error in failed.value.errors)
    assert any("with a weight" in str(error) for error in failed.value.errors)
    words = "only one of the two gives a weight (no weight here, one there)", "(a weight here, none there)"
    assert any(text in str(error) for text in words for error in failed.value.errors)
    assert not any("number of elements" in str(error) for error in failed.value.errors)
