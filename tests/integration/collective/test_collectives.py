"""Right numbers, and the same bits on every rank: each collective with every type, shape, layout, codec."""

from __future__ import annotations

import threading

import numpy as np
import psutil
import pytest

from ringcomm.collective.measure import measure
from ringcomm.config import Settings
from ringcomm.engine import bucket_runner
from ringcomm.errors import Misuse, UnsupportedDtypeError
from ringcomm.ops import Adasum, Average, Max, Min, Sum
from ringcomm.schedule.steps import even_bounds
from ringcomm.testing.cluster import errors_of, run_ranks
from tests.integration.collective.contributions import DTYPES, FLOATS, numbers, small
from tests.support.reference import assert_reduced, contributions, hard_bits, ops_for, same_bits
from tests.unit.schedule.building import names


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
        "alltoall": (lambda c: c.alltoall(np.full(c.size, c.rank)), lambda size: np.arange(size)),
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


# ---- all-reduce: every type, shape and layout ----------------------------------------------------


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


# ---- more elements than 32 bits can count --------------------------------------------------------


NEEDED_BYTES = 12 << 30
COUNT = 2**31 + 4321


@pytest.mark.release
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    psutil.virtual_memory().available < NEEDED_BYTES,
    reason=f"needs {NEEDED_BYTES >> 30} GiB of free memory",
)
def test_more_than_2_to_the_31_elements():
    marks = {0: 1, 1: 2, COUNT // 2: 3, 2**31 - 1: 4, 2**31: 5, 2**31 + 1: 6, COUNT - 1: 7}

    def work(context):
        array = np.zeros(COUNT, np.int8)
        for index, value in marks.items():
            array[index] = value * (context.rank + 1)
        assert context.allreduce_(array, Sum) is array
        found = {index: int(array[index]) for index in marks}
        return found, sum(np.count_nonzero(block) for block in np.array_split(array, 64))

    results = run_ranks(2, work, transport="tcp", settings=Settings(timeout_s=60.0), timeout_s=280.0)
    assert results == [({index: 3 * value for index, value in marks.items()}, len(marks))] * 2


# ---- measured links: the same model on all ranks, and right collectives --------------------------


FLOAT32 = np.dtype(np.float32)


def measured(context):
    hosts = [peer.host_index for peer in context.peers]
    return measure(context._runner.with_settings(context.settings), hosts)


@pytest.mark.parametrize(("size", "ranks_per_host"), [(2, 1), (5, 2), (6, 2), (9, 1), (4, 4)])
def test_all_ranks_have_the_same_model(size, ranks_per_host):
    first, *others = run_ranks(size, measured, ranks_per_host=ranks_per_host)
    assert all(model == first for model in others)
    hosts = tuple(rank // ranks_per_host for rank in range(size))
    assert first.hosts == (hosts if hosts[-1] else ())
    assert len(first.wire_byte_s) == (hosts[-1] + 1 if hosts[-1] else 0)
    for value in (first.latency_s, first.byte_s, first.reduce_byte_s, *first.wire_byte_s):
        assert 1e-12 < value < 0.1


@pytest.mark.parametrize(
    ("size", "ranks_per_host", "algorithm"),
    [(3, 1, ""), (6, 2, ""), (6, 3, "hierarchical"), (5, 2, "hierarchical")],
)
def test_collectives_after_that(size, ranks_per_host, algorithm):
    inputs = contributions(FLOAT32, size, 5000)

    def work(context):
        context._tune()
        own = inputs[context.rank]
        scattered = context.reducescatter(own, Sum)
        return [
            context.allreduce(own, Sum),
            context.allreduce(own[:3], Sum),
            context.allgather(scattered),
            context.broadcast(own, size - 1),
            context.allreduce(own.astype(np.float16), Sum),
        ]

    settings = Settings(spin_us=0.0, timeout_s=30.0, segment_bytes=256, algorithm=algorithm)
    results = run_ranks(size, work, settings=settings, ranks_per_host=ranks_per_host)
    for column in zip(*results):
        assert same_bits(column)
    assert_reduced(results[0][0], inputs, Sum)
    assert_reduced(results[0][1], [array[:3] for array in inputs], Sum)
    assert_reduced(results[0][2], inputs, Sum)
    np.testing.assert_array_equal(results[0][3], inputs[-1])


# ---- `compression=` through the public calls -----------------------------------------------------


def normal(rank, *shape):
    return np.random.default_rng(rank).standard_normal(shape).astype(np.float32)


def test_in_place_and_other_types():
    def work(context):
        mine, doubles, whole = (
            normal(context.rank, 500),
            normal(context.rank, 500).astype(float),
            np.arange(9),
        )
        context.allreduce_(mine, Sum, compression="int8")
        return (
            mine, context.allreduce(doubles, Sum, compression="int8"),
            context.allreduce(whole, Sum, compression="int8"),
            context.allreduce(normal(context.rank, 50), Max, compression="int8"),
        )  # fmt: skip

    (mine, doubles, whole, greatest), other = run_ranks(2, work)
    exact = normal(0, 500) + normal(1, 500)
    assert np.abs(mine - exact).max() < 0.1 and doubles.dtype == np.float64
    assert doubles.astype(np.float32).tobytes() == mine.tobytes()
    assert whole.tolist() == (2 * np.arange(9)).tolist()
    assert greatest.tobytes() == np.maximum(normal(0, 50), normal(1, 50)).tobytes()
    assert [array.tobytes() for array in other] == [
        array.tobytes() for array in (mine, doubles, whole, greatest)
    ]


@pytest.mark.parametrize("other", [None, "bf16"])
def test_ranks_that_disagree_are_told_what_about(other):
    def work(context):
        context.allreduce(normal(0, 4096), compression="int8" if context.rank else other)

    for error in errors_of(2, work):
        assert "they disagree about the compression" in str(error)
        assert "compression='int8'" in str(error)


class TestByName:
    """The asynchronous calls, which the engine fuses."""

    @pytest.mark.parametrize("size", [1, 2, 3])
    def test_fused_tensors_of_different_magnitudes(self, size):
        def work(context):
            engine = context.engine
            arrays = [normal(context.rank, 700) * 10.0**place for place in range(-3, 3)]
            arrays = [array.astype(np.float32) for array in arrays]
            handles = [
                engine.allreduce([array], Average, f"t{place}", compression="int8")
                for place, array in enumerate(arrays)
            ]
            plain = engine.allreduce([np.ones(3, np.float32)], Sum, "plain")
            for handle in handles:
                handle.wait()
            plain.wait()
            return arrays

        results = run_ranks(size, work)
        for place in range(6):
            exact = np.mean([normal(rank, 700) * 10.0 ** (place - 3) for rank in range(size)], axis=0)
            assert len({result[place].tobytes() for result in results}) == 1
            # A block of another tensor would make this one coarse.
            assert np.abs(results[0][place] - exact).max() < 0.03 * 10.0 ** (place - 3)

    @pytest.mark.parametrize("count", [1, 3])
    def test_residuals(self, count):
        steps, length = 10, 900

        def gradient(rank, step, place):
            return np.random.default_rng((rank, step, place)).standard_normal(length).astype(np.float32)

        def work(context):
            residuals = [np.zeros(length, np.float32) for _ in range(count)]
            delivered = np.zeros((count, length))
            for step in range(steps):
                arrays = [gradient(context.rank, step, place) for place in range(count)]
                context.engine.allreduce(arrays, Sum, "g", compression="int4", residuals=residuals).wait()
                delivered += arrays
            return delivered, residuals

        results = run_ranks(3, work)
        true = np.sum(
            [
                [gradient(rank, step, place) for place in range(count)]
                for rank in range(3) for step in range(steps)
            ],
            axis=0, dtype=np.float64,
        )  # fmt: skip
        left = np.sum([residuals for _, residuals in results], axis=0, dtype=np.float64)
        assert np.abs(left).max() > 0.01
        assert np.abs(results[0][0] + left - true).max() < 1e-4
