"""Right numbers, and the same bits on every rank: all collectives but all-reduce, see test_allreduce.py."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ringcomm.ops import Sum
from ringcomm.schedule.steps import even_bounds
from tests.integration.collective.contributions import DTYPES, FLOATS, numbers, small
from tests.support.reference import assert_reduced, contributions, hard_bits, ops_for, same_bits


class TestReducescatter:
    def test_uneven_rows_of_every_type(self, on_ranks, size):
        cases = [(op, dtype, rows) for dtype in DTYPES for op in ops_for(dtype)[:3] for rows in (0, size + 2)]

        def inputs(rank, dtype, rows):
            return contributions(dtype, size, rows * 6)[rank].reshape(rows, 2, 3)

        def work(context):
            return [context.reducescatter(inputs(context.rank, dtype, rows), op) for op, dtype, rows in cases]

        results = on_ranks(size, work, settings=small())
        for index, (op, dtype, rows) in enumerate(cases):
            arrays = [inputs(rank, dtype, rows) for rank in range(size)]
            bounds = even_bounds(rows, size)
            for rank in range(size):
                own = slice(bounds[rank], bounds[rank + 1])
                assert_reduced(results[rank][index], [array[own] for array in arrays], op)

    def test_in_place(self, on_ranks, size):
        def work(context):
            array = numbers(context.rank, 2 * size + 1, 3)
            own = context.reducescatter_(array, Sum)
            assert np.shares_memory(own, array)
            whole = context.allgather_(array)
            assert whole is array
            fortran = np.asfortranarray(numbers(context.rank, 2 * size + 1, 3))
            np.testing.assert_array_equal(context.reducescatter_(fortran, Sum), own)
            return array

        for array in on_ranks(size, work):
            assert_reduced(array, [numbers(rank, 2 * size + 1, 3) for rank in range(size)], Sum)


class TestAllgather:
    def test_rows_that_differ_from_rank_to_rank(self, on_ranks, size):
        def own(rank, dtype, shape):
            return numbers(rank, (rank * 3 + 1) % 4, *shape, dtype=dtype)

        cases = [(dtype, shape) for dtype in DTYPES for shape in ((), (3,), (2, 2), (0,))]

        def work(context):
            return [context.allgather(own(context.rank, *case)) for case in cases]

        for case, arrays in zip(cases, zip(*on_ranks(size, work, settings=small()))):
            expected = np.concatenate([own(rank, *case) for rank in range(size)])
            np.testing.assert_array_equal(arrays[0], expected)
            assert arrays[0].dtype == case[0]
            assert same_bits(arrays)

    @pytest.mark.parametrize("rows", [(63, 64), (64, 64), (65, 0), (0, 64), (1, 1000)])
    def test_around_the_length_of_enclosed_rows(self, on_ranks, rows):
        """256 bytes of every rank travel with the numbers of rows; see ``collective.rows``."""

        def own(rank):
            return numbers(rank, rows[rank], dtype=np.dtype("float32"))

        def work(context):
            every = context.allgather(own(context.rank))
            sent = own(context.rank)
            part, counts = context.alltoall(sent, [len(sent) // 2, len(sent) - len(sent) // 2])
            return every, part, counts.tolist()

        found = on_ranks(2, work)
        for rank, (every, part, counts) in enumerate(found):
            np.testing.assert_array_equal(every, np.concatenate([own(0), own(1)]))
            halves = [(own(r)[: rows[r] // 2], own(r)[rows[r] // 2 :])[rank] for r in range(2)]
            np.testing.assert_array_equal(part, np.concatenate(halves))
            assert counts == [len(half) for half in halves]


class TestBroadcast:
    def test_from_every_root(self, on_ranks, size):
        counts = (0, 1, 5, 20_000)

        def work(context):
            results = []
            for root in range(size):
                for count in counts:
                    array = numbers(context.rank, count, dtype=np.int32)
                    results.append(context.broadcast(array, root))
                    assert (array == numbers(context.rank, count, dtype=np.int32)).all()
                    assert context.broadcast_(array, root) is array
                    results.append(array)
            return results

        expected = [numbers(root, n, dtype=np.int32) for root in range(size) for n in counts for _ in "ab"]
        for results in on_ranks(size, work):
            for actual, array in zip(results, expected):
                np.testing.assert_array_equal(actual, array)

    def test_every_type_and_nan_bits(self, on_ranks):
        def work(context):
            own = [hard_bits(d, 9, (1, context.rank)) if d in FLOATS else numbers(context.rank, 9, dtype=d)
                   for d in DTYPES]  # fmt: skip
            results = [context.broadcast(array, 1) for array in own]
            return [array.tobytes() for array in (own if context.rank == 1 else results)]

        results = on_ranks(3, work)
        assert results[0] == results[1] == results[2]


class TestAlltoall:
    def test_splits(self, on_ranks, size):
        def split(sender, receiver):
            return (sender * 2 + receiver * 3) % 4

        def block(sender, receiver, dtype):
            return numbers(10 * sender + receiver, split(sender, receiver), 2, dtype=dtype)

        def work(context):
            results = []
            for dtype in DTYPES:
                blocks = [block(context.rank, peer, dtype) for peer in range(size)]
                splits = [len(rows) for rows in blocks]
                results.append(context.alltoall(np.concatenate(blocks), splits))
            return results

        for rank, results in enumerate(on_ranks(size, work, settings=small())):
            for dtype, (array, received) in zip(DTYPES, results):
                assert array.dtype == dtype
                np.testing.assert_array_equal(
                    array, np.concatenate([block(peer, rank, dtype) for peer in range(size)])
                )
                assert received.dtype == np.int32
                assert received.tolist() == [split(peer, rank) for peer in range(size)]

    def test_even_and_in_place(self, on_ranks, size):
        def work(context):
            array = numbers(context.rank, 2 * size, 3)
            copy = context.alltoall(array)
            fortran = np.asfortranarray(array)
            assert context.alltoall_(fortran) is fortran
            assert context.alltoall_(array) is array
            assert same_bits([copy, array, np.ascontiguousarray(fortran)])
            return copy

        for rank, array in enumerate(on_ranks(size, work)):
            rows = slice(2 * rank, 2 * rank + 2)
            expected = np.concatenate([numbers(peer, 2 * size, 3)[rows] for peer in range(size)])
            np.testing.assert_array_equal(array, expected)


class TestObjects:
    def test_broadcast(self, on_ranks, size):
        thing = {"weights": [1, 2.5], "name": "größe", "nested": (None, {3})}

        def work(context):
            return [context.broadcast_object(thing if context.rank == root else "mine", root)
                    for root in range(size)]  # fmt: skip

        assert on_ranks(size, work) == [[thing] * size] * size

    def test_allgather(self, on_ranks, size):
        def work(context):
            return context.allgather_object(["x" * 1000 * context.rank, context.rank])

        assert on_ranks(size, work) == [[["x" * 1000 * rank, rank] for rank in range(size)]] * size


class TestBarrier:
    def test_no_rank_passes_before_all_have_come(self, on_ranks):
        size, arrived = 4, []

        def work(context):
            seen = []
            for _ in range(5):
                arrived.append(context.rank)
                context.barrier()
                seen.append(len(arrived))
                context.barrier()
            return seen

        assert on_ranks(size, work) == [[4, 8, 12, 16, 20]] * size


class TestThreads:
    """Several threads of one rank call at the same time; on all ranks all of them make the same call."""

    CALLS = {
        "allreduce": (lambda c: c.allreduce(np.ones(40), Sum), lambda size: np.full(40, float(size))),
        "allgather": (lambda c: c.allgather(np.full(3, c.rank)), lambda size: np.repeat(range(size), 3)),
        "alltoall": (lambda c: c.alltoall(np.full(size_of(c), c.rank)), lambda size: np.arange(size)),
        "broadcast_object": (lambda c: c.broadcast_object("x" * 50, 1), lambda size: "x" * 50),
        "allgather_object": (lambda c: c.allgather_object(c.rank), lambda size: list(range(size))),
    }

    @pytest.mark.parametrize("name", list(CALLS))
    def test_they_do_not_mix(self, on_ranks, name):
        call, expected = self.CALLS[name]

        def work(context):
            wrong = []

            def calls():
                for _ in range(10):
                    result = call(context)
                    if not np.array_equal(result, expected(context.size)):
                        wrong.append(result)

            threads = [threading.Thread(target=calls) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return wrong

        assert on_ranks(3, work, settings=small()) == [[], [], []]


def size_of(context):
    return context.size
