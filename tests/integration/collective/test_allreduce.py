"""Right numbers, and the same bits on every rank: all-reduces of every type, shape and layout."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ringcomm.engine import bucket_runner
from ringcomm.errors import Misuse, UnsupportedDtypeError
from ringcomm.ops import Adasum, Min, Sum
from tests.integration.collective.contributions import DTYPES, FLOATS, numbers, small
from tests.support.reference import assert_reduced, contributions, hard_bits, ops_for, same_bits
from tests.unit.schedule.building import names


class TestAllreduce:
    def test_every_op_and_type(self, on_ranks, size):
        cases = [(op, dtype) for dtype in DTYPES for op in ops_for(dtype)]
        inputs = list(zip(*(contributions(dtype, size, 7 * size + 3) for _, dtype in cases)))

        def work(context):
            return [context.allreduce(array, op) for (op, _), array in zip(cases, inputs[context.rank])]

        for index, results in enumerate(zip(*on_ranks(size, work, settings=small()))):
            assert_reduced(results[0], [row[index] for row in inputs], cases[index][0])
            assert same_bits(results)

    @pytest.mark.parametrize("algorithm", names("allreduce"))
    def test_every_count(self, on_ranks, size, algorithm):
        counts = sorted({0, 1, size - 1, size, size + 1, 16 * size - 1, 16 * size, 16 * size + 1, 333})

        def work(context):
            return [context.allreduce(numbers(context.rank, count), Sum) for count in counts]

        results = on_ranks(size, work, settings=small(algorithm=algorithm))
        for count, arrays in zip(counts, zip(*results)):
            assert_reduced(arrays[0], [numbers(rank, count) for rank in range(size)], Sum)
            assert same_bits(arrays)

    @pytest.mark.parametrize("algorithm", ["", *names("allreduce")])
    def test_special_numbers_have_the_same_bits_everywhere(self, on_ranks, size, algorithm):
        cases = [(op, dtype, count) for dtype in FLOATS for op in ops_for(dtype) for count in (1, 6, 67)]

        def work(context):
            results = []
            for op, dtype, count in cases:
                # Alignment must not matter, so it differs from rank to rank.
                array = np.empty(count + context.rank, dtype)[context.rank :]
                array[...] = hard_bits(dtype, count, (count, context.rank))
                results.append(context.allreduce_(array, op))
            return results

        for case, arrays in zip(cases, zip(*on_ranks(size, work, settings=small(algorithm=algorithm)))):
            assert same_bits(arrays), case

    def test_every_layout(self, on_ranks):
        def work(context):
            base = numbers(context.rank, 4, 6, dtype=np.float64)
            fortran, swapped = np.asfortranarray(base), base.astype(">f8")
            strided, backwards = np.repeat(base, 2, axis=1)[:, ::2], base[::-1, ::-1].copy()[::-1, ::-1]
            frozen = base.copy()
            frozen.flags.writeable = False
            layouts = [base, fortran, swapped, strided, backwards, frozen, base.tolist()]
            # No two ranks have the same layout in the same call.
            layouts = layouts[context.rank :] + layouts[: context.rank]
            outputs = [context.allreduce(array, Sum) for array in layouts]
            assert (np.asarray(layouts[0]) == base).all()
            writable = [base.copy(), fortran, swapped, strided, backwards]
            writable = writable[context.rank :] + writable[: context.rank]
            for array in writable:
                assert context.allreduce_(array, Sum) is array
            return outputs + [np.ascontiguousarray(array, np.float64) for array in writable]

        expected = sum(numbers(rank, 4, 6, dtype=np.float64) for rank in range(3))
        for results in on_ranks(3, work, settings=small()):
            for array in results:
                assert array.flags.c_contiguous
                np.testing.assert_array_equal(array, expected)

    def test_what_makes_no_sense_is_refused_before_anything_is_sent(self, on_ranks):
        def work(context):
            for op in (6, "total", 9):
                with pytest.raises(Misuse, match="there are Average, Sum, Adasum, Min, Max, Product"):
                    context.allreduce(np.ones(2), op)
            with pytest.raises(UnsupportedDtypeError, match="booleans"):
                context.allreduce(np.ones(2, bool))
            with pytest.raises(UnsupportedDtypeError, match="Sum and Average"):
                context.allreduce(np.ones(2, complex), Min)
            with pytest.raises(UnsupportedDtypeError, match="broadcast_object"):
                context.allreduce(["a"])
            with pytest.raises(Misuse, match="read-only"):
                context.allreduce_(np.broadcast_to(1.0, (2,)))
            return context.allreduce(np.ones(2), Sum).tolist()

        assert on_ranks(2, work) == [[2.0, 2.0]] * 2


class TestAdasum:
    @pytest.mark.parametrize("odd_one", [0, 1, 2])
    def test_the_same_bits_although_dot_products_differ(self, on_ranks, size, odd_one, monkeypatch):
        """As BLAS does on a rank with another processor, or another number of threads."""
        here = threading.local()
        plain = bucket_runner.dot
        odd = lambda a, b: plain(a, b) * (1 + 2e-7 * getattr(here, "is_odd", 0))  # noqa: E731
        monkeypatch.setattr(bucket_runner, "dot", odd)

        def work(context):
            here.is_odd = context.rank == odd_one
            rng = np.random.default_rng(context.rank)
            return [
                context.allreduce(rng.standard_normal(count).astype(dtype), Adasum)
                for dtype in (np.float32, np.float64)
                for count in (1, 1000)
            ]

        first, *others = on_ranks(size, work)
        for other in others:
            assert [array.tobytes() for array in other] == [array.tobytes() for array in first]
