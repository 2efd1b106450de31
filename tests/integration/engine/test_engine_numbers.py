"""The engine between real ranks: what operations give, in whatever order ranks and threads submit them."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from ringcomm.engine import coordinator, request
from ringcomm.errors import ShapeError
from ringcomm.ops import Adasum, Average, Sum
from ringcomm.testing.cluster import run_ranks
from tests.integration.engine.engines import LIMIT_S, plain


def test_more_rows_than_an_array_can_have_fail_that_operation_alone():
    """Also without elements: the engine goes on, and so do calls in order."""

    def work(context):
        many = np.empty((2**62, 0), np.int8)
        few, other = np.ones((2, 3)), np.ones((1, 2))
        handles = [
            context.engine.allgather([item.reshape(-1)], [item.shape], name)
            for item, name in ((few, "few"), (many, "many"), (other, "other"))
        ]
        with pytest.raises(ShapeError, match="9223372036854775808 rows together"):
            handles[1].wait(LIMIT_S)
        with pytest.raises(ShapeError, match="rows together"):
            context.allgather(many)
        return [handles[place].wait(LIMIT_S)[0].shape for place in (0, 2)], context.allgather(few).shape

    assert run_ranks(2, work) == [([(4, 3), (2, 2)], (4, 3))] * 2


def values(rank: int, seed: int, *shape: int, dtype=np.float64):
    return np.random.default_rng((rank, seed)).integers(-40, 40, shape).astype(dtype)


class TestNumbers:

    def test_small_ones_that_all_wait_for_need_no_collective(self, on_ranks, size):
        def work(context):
            engine, rank, runs = context.engine, context.rank, []
            run = engine.buckets.run
            engine.buckets.run = lambda bucket: runs.append(bucket) or run(bucket)
            results = []
            for step in range(4):
                mean, last = values(rank, step, 5), values(rank, step + 50, 3)
                engine.allreduce([mean], Average, "mean", urgent=True).wait(LIMIT_S)
                engine.broadcast([last], size - 1, "last", urgent=True).wait(LIMIT_S)
                engine.barrier("end").wait(LIMIT_S)
                results.append((mean, last))
            return results, len(runs)

        for results, runs in on_ranks(size, work):
            assert runs == (3 if size > 1 else 12)
            for step, (mean, last) in enumerate(results):
                np.testing.assert_allclose(mean, sum(values(r, step, 5) for r in range(size)) / size)
                np.testing.assert_array_equal(last, values(size - 1, step + 50, 3))


    @pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
    def test_adasum(self, size):
        def pairwise(vectors):
            """The definition, on all vectors at once."""
            power = 1 << (len(vectors).bit_length() - 1)
            vectors = list(vectors)
            for extra in range(power, len(vectors)):
                vectors[extra - power] = mixed(vectors[extra - power], vectors[extra])
            vectors = vectors[:power]
            while len(vectors) > 1:
                vectors = [mixed(a, b) for a, b in zip(vectors[::2], vectors[1::2])]
            return vectors[0]

        def mixed(a, b):
            return a * (1 - a @ b / (2 * (a @ a))) + b * (1 - a @ b / (2 * (b @ b)))

        def work(context):
            array = np.random.default_rng(context.rank).normal(size=50)
            context.engine.allreduce([array], Adasum, "g").wait(LIMIT_S)
            return array, context.allreduce(np.random.default_rng(context.rank).normal(size=50), Adasum)

        results = run_ranks(size, work)
        expected = pairwise([np.random.default_rng(rank).normal(size=50) for rank in range(size)])
        for by_name, in_order in results:
            np.testing.assert_allclose(by_name, expected)
            assert by_name.tobytes() == in_order.tobytes() == results[0][0].tobytes()


class TestOrder:
    def test_each_rank_has_an_order_of_its_own(self, on_ranks, monkeypatch):
        """Names hit and miss the cache, shapes change, sets and groups are mixed in."""
        rounds, names = 4, 40
        for module in (coordinator, request):
            monkeypatch.setattr(module, "MAX_NUMBERS", 25)

        def work(context):
            engine, rank, size = context.engine, context.rank, context.size
            chance = random.Random(rank)
            number = engine.add_process_set([0, 2])
            for turn in range(rounds):
                order = list(range(names))
                chance.shuffle(order)
                started = []
                for n in order:
                    members = (0, 2) if n % 5 == 0 else tuple(range(size))
                    if rank not in members:
                        continue
                    length = 3 + (n + turn * (n % 3)) % 7
                    array = np.full(length, rank + n, np.float64)
                    process_set = number if n % 5 == 0 else 0
                    handle = engine.allreduce([array], Sum, f"t{n}", process_set=process_set)
                    started.append((handle, array, length, sum(members) + n * len(members)))
                    if chance.random() < 0.1:
                        time.sleep(chance.random() * 0.003)
                chance.shuffle(started)
                for handle, array, length, expected in started:
                    handle.wait(LIMIT_S)
                    np.testing.assert_array_equal(array, np.full(length, expected))
            assert engine.remove_process_set(number)
            return engine.pending()

        assert on_ranks(3, work, settings=plain(fusion_bytes=100)) == [[], [], []]

    def test_from_many_threads(self, on_ranks):
        def work(context):
            wrong = []

            def many(thread):
                for n in range(20):
                    array = np.full(5, float(context.rank))
                    context.engine.allreduce([array], Sum, f"{thread}.{n}").wait(LIMIT_S)
                    if not (array == 3).all():
                        wrong.append(array)

            threads = [threading.Thread(target=many, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            # Meanwhile the other kind of collectives goes on.
            totals = [int(context.allreduce(np.array([context.rank]), Sum)[0]) for _ in range(30)]
            for thread in threads:
                thread.join()
            return wrong, set(totals)

        assert on_ranks(3, work) == [([], {3})] * 3

    def test_join_with_uneven_data(self, on_ranks, size):
        def work(context):
            sums = []
            for _ in range(context.rank * 2):
                array = np.ones(4)
                context.engine.allreduce([array], Average).wait(LIMIT_S)
                sums.append(float(array[0]))
            last = context.engine.join().wait(LIMIT_S)
            after = np.ones(2)
            context.engine.allreduce([after], Sum).wait(LIMIT_S)
            return sums, last, after.tolist()

        results = on_ranks(size, work)
        for rank, (sums, last, after) in enumerate(results):
            assert sums == [(size - 1 - turn // 2) / size for turn in range(rank * 2)]
            assert last == size - 1 and after == [size, size]
