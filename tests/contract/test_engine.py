"""The engine over every transport: right numbers in any order, errors on all ranks, nothing left behind."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from ringcomm import ops
from ringcomm.arrays.bridge import flat_copy
from ringcomm.config import Settings
from ringcomm.engine.process_sets import UnknownProcessSetError
from ringcomm.errors import (
    BrokenInvariantError,
    ConfigError,
    DuplicateNameError,
    MismatchError,
    Misuse,
    NotInitializedError,
    PeerLostError,
    PeerStalledError,
    UnsupportedDtypeError,
)
from ringcomm.ops import Adasum, Average, Max, Min, Product, Sum
from ringcomm.testing.cluster import RankFailed, run_ranks
from ringcomm.testing.reference import contributions

LIMIT_S = 30.0
IMPATIENT = Settings(spin_us=0.0, timeout_s=30.0, start_timeout_s=30.0, stall_warning_s=1.0)
"""Where the test runner has threads that might submit something, a deadlock is reported after twice that."""


def plain(**changes) -> Settings:
    return replace(Settings(spin_us=0.0, timeout_s=20.0, start_timeout_s=20.0), **changes)


def values(rank: int, seed: int, *shape: int, dtype=np.float64):
    return np.random.default_rng((rank, seed)).integers(-40, 40, shape).astype(dtype)


class TestNumbers:
    def test_every_collective(self, on_ranks, size):
        def work(context):
            engine, rank = context.engine, context.rank
            reduced = {}
            for op in (Average, Sum, Min, Max, Product):
                flat = values(rank, 1, 60)
                engine.allreduce([flat], op, f"r{op}").wait(LIMIT_S)
                reduced[op] = flat
            rows = values(rank, 2, (rank + 1) * 3)
            gathered = engine.allgather([rows], [(rank + 1, 3)], "g").wait(LIMIT_S)[0]
            sent = values(rank, 3, 8)
            engine.broadcast([sent], size - 1, "b").wait(LIMIT_S)
            part = engine.reducescatter([values(rank, 4, (size + 1) * 2)], [(size + 1, 2)], Sum, "s")
            splits = [to + 1 for to in range(size)]
            swapped = engine.alltoall(np.repeat(np.arange(size), splits) * 10 + rank, (sum(splits),), splits)
            engine.barrier().wait(LIMIT_S)
            return reduced, gathered, sent, part.wait(LIMIT_S)[0], swapped.wait(LIMIT_S)

        results = on_ranks(size, work)
        inputs = np.stack([values(rank, 1, 60) for rank in range(size)])
        expected = {
            Average: inputs.sum(0) / size, Sum: inputs.sum(0), Min: inputs.min(0), Max: inputs.max(0),
            Product: inputs.prod(0),
        }  # fmt: skip
        everything = np.concatenate([values(rank, 2, (rank + 1) * 3).reshape(-1, 3) for rank in range(size)])
        whole = np.stack([values(rank, 4, (size + 1) * 2) for rank in range(size)]).sum(0).reshape(-1, 2)
        pieces = np.array_split(whole, size)
        for rank, (reduced, gathered, sent, part, (rows, counts)) in enumerate(results):
            for op, array in expected.items():
                np.testing.assert_allclose(reduced[op], array)
            np.testing.assert_array_equal(gathered, everything)
            np.testing.assert_array_equal(sent, values(size - 1, 3, 8))
            np.testing.assert_array_equal(part, pieces[rank])
            np.testing.assert_array_equal(counts, [rank + 1] * size)
            np.testing.assert_array_equal(rows, np.repeat(rank * 10 + np.arange(size), rank + 1))

    def test_what_is_done_keeps_no_memory_in_use(self, on_ranks):
        """A thread that waited may count references to the memory before the engine drops its own."""
        submitted = threading.Event()

        def work(context):
            if context.rank == 0:
                assert submitted.wait(LIMIT_S)
            handle = context.engine.allreduce([np.ones(5000)], Sum, "x")
            waiting = context.engine.pending()
            submitted.set()
            handle.wait(LIMIT_S)
            return [request.arrays for request in waiting]

        assert on_ranks(2, work)[1] == [[]]

    def test_small_ones_that_all_wait_for_need_no_collective(self, on_ranks, size):
        def work(context):
            engine, rank, runs = context.engine, context.rank, []
            run = engine._bucket_runner.run
            engine._bucket_runner.run = lambda bucket: runs.append(bucket) or run(bucket)
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

    @pytest.mark.parametrize("seed", range(3))
    def test_some_wait_at_once_and_some_do_not(self, on_ranks, size, seed):
        def work(context):
            random_of_rank, results = random.Random(seed * 100 + context.rank), []
            for step in range(60):
                batch = [values(context.rank, step * 10 + n, 4) for n in range(3)]
                order = random_of_rank.sample(range(3), 3)
                handles = [
                    context.engine.allreduce([batch[n]], Sum, f"t{n}", urgent=random_of_rank.random() < 0.8)
                    for n in order
                ]
                for handle in handles:
                    handle.wait(LIMIT_S)
                results.append(batch)
            return results

        for results in on_ranks(size, work):
            for step, batch in enumerate(results):
                for n, array in enumerate(batch):
                    expected = sum(values(rank, step * 10 + n, 4) for rank in range(size))
                    np.testing.assert_array_equal(array, expected)

    def test_groups_of_mixed_types_and_sizes(self, on_ranks, size):
        kinds = [np.float32, np.float16, np.int64, np.float64]

        def group(rank):
            return [values(rank, n, 1 + n * 7, dtype=kinds[n % 4]) for n in range(12)]

        def work(context):
            arrays = group(context.rank)
            large = values(context.rank, 99, 200_000)
            handles = [
                context.engine.allreduce(arrays[:6], Sum, "first"),
                context.engine.allreduce([large], Sum),
            ]
            handles.append(context.engine.allreduce(arrays[6:], Sum, "second"))
            shapes = [(array.size,) for array in arrays]
            scattered = context.engine.reducescatter(group(context.rank), shapes, Sum, "third")
            gathered = context.engine.allgather(group(context.rank), shapes, "fourth")
            for handle in handles:
                handle.wait(LIMIT_S)
            return arrays, large, scattered.wait(LIMIT_S), gathered.wait(LIMIT_S)

        sums = [sum(group(rank)[n].astype(np.float64) for rank in range(size)) for n in range(12)]
        for rank, (arrays, large, scattered, gathered) in enumerate(on_ranks(size, work)):
            for n in range(12):
                assert arrays[n].dtype == kinds[n % 4]
                np.testing.assert_array_equal(arrays[n], sums[n])
                np.testing.assert_array_equal(scattered[n], np.array_split(sums[n], size)[rank])
                np.testing.assert_array_equal(gathered[n], np.concatenate([group(r)[n] for r in range(size)]))
            np.testing.assert_array_equal(large, sum(values(r, 99, 200_000) for r in range(size)))

    def test_neighbours_in_memory_are_reduced_in_place(self):
        def work(context):
            results = []
            for together in (True, False):
                # One rank's arrays are neighbours, the others' are not: they must still fit together.
                owner = values(context.rank, 5, 30)
                parts = [owner[:10], owner[10:14], owner[14:]]
                if context.rank or not together:
                    parts = [part.copy() for part in parts]
                context.engine.allreduce(parts, Sum).wait(LIMIT_S)
                results.append((np.concatenate(parts), owner))
            return results

        expected = sum(values(rank, 5, 30) for rank in range(3))
        results = run_ranks(3, work)
        for (parts, _), (apart, _) in results:
            np.testing.assert_array_equal(parts, expected)
            np.testing.assert_array_equal(apart, expected)
        np.testing.assert_array_equal(results[0][0][1], expected)

    @pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8])
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

    def test_adasum_is_scaled_before_and_after(self):
        def work(context):
            array = np.array([1.0, 2.0]) * (1 - 2 * context.rank)  # opposite, and so added up to nothing
            alike = np.array([1.0, 2.0])
            context.engine.allreduce([array], Adasum, "opposite", prescale=3.0).wait(LIMIT_S)
            context.engine.allreduce([alike], Adasum, "alike", prescale=3.0, postscale=2.0).wait(LIMIT_S)
            return array.tolist(), alike.tolist()

        assert run_ranks(2, work) == [([0.0, 0.0], [6.0, 12.0])] * 2

    def test_adasum_of_what_is_too_large_is_no_warning(self):
        """Warnings are errors in these tests, and one in the engine's thread would end the job."""

        def work(context):
            array = np.array([6e4, 1.0 - 2.0 * context.rank, np.inf], np.float16)
            context.engine.allreduce([array], Adasum, "a", prescale=2.0, postscale=2.0).wait(LIMIT_S)
            return array[0] == np.inf or np.isnan(array[0])

        assert run_ranks(2, work) == [True, True]

    def test_half_types_through_fusion(self, on_ranks):
        def work(context):
            arrays = [
                flat_copy(contributions(np.dtype(np.float16), 3, 20)[context.rank])[0] for _ in range(4)
            ]
            context.engine.allreduce(arrays, Average).wait(LIMIT_S)
            return [array.tobytes() for array in arrays]

        results = on_ranks(3, work)
        assert results[0] == results[1] == results[2] and len(set(results[0])) == 1


class TestOrder:
    @pytest.mark.parametrize("seed", range(3))
    def test_each_rank_has_an_order_of_its_own(self, on_ranks, seed):
        """Names hit and miss the cache, shapes change, sets and groups are mixed in."""
        rounds, names = 4, 40

        def work(context):
            engine, rank, size = context.engine, context.rank, context.size
            chance = random.Random(1000 * seed + rank)
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

        assert on_ranks(3, work, settings=plain(cache_capacity=25, fusion_bytes=100)) == [[], [], []]

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

    def test_join_ends_also_if_rank_0_is_the_last(self):
        def work(context):
            if context.rank == 0:  # the other has joined when this is over
                context.engine.allreduce([np.ones(4)], Sum).wait(LIMIT_S)
            return context.engine.join().wait(LIMIT_S)

        assert run_ranks(2, work) == [0, 0]

    @pytest.mark.parametrize("op, neutral", [(Min, 7), (Max, -7), (Product, 3)])
    def test_joined_ranks_change_nothing(self, op, neutral):
        def work(context):
            array = np.full(3, neutral, np.int32)
            if context.rank:
                context.engine.allreduce([array], op).wait(LIMIT_S)
            context.engine.join().wait(LIMIT_S)
            return int(array[0])

        assert run_ranks(2, work)[1] == neutral


class TestTrouble:
    def test_disagreement_is_an_error_on_all_and_the_next_one_works(self, on_ranks):
        def work(context):
            texts = []
            for n, length in enumerate((3, 3 + context.rank % 2)):
                array = np.ones(length)
                handle = context.engine.allreduce([array], Sum, "loss" if n else "")
                if n:
                    with pytest.raises(MismatchError) as caught:
                        handle.wait(LIMIT_S)
                    texts.append(str(caught.value))
                else:
                    handle.wait(LIMIT_S)
            again = np.ones(2)
            context.engine.allreduce([again], Sum, "loss").wait(LIMIT_S)
            return texts, again.tolist()

        results = on_ranks(3, work)
        assert len({text for (text,), _ in results}) == 1
        text = results[0][0][0]
        assert "Mismatched allreduce tensor shapes" in text and "test_engine.py" in text
        assert [again for _, again in results] == [[3.0, 3.0]] * 3

    def test_one_rank_calls_something_else(self, on_ranks):
        def work(context):
            array = np.ones(3)
            started = time.monotonic()
            with pytest.raises(MismatchError) as caught:
                if context.rank == 1:
                    context.engine.broadcast([array], 0, "weights").wait()
                else:
                    context.engine.allreduce([array], Sum, "loss").wait()
            assert time.monotonic() - started < LIMIT_S / 2  # not at the end of all limits
            context.engine.barrier().wait(LIMIT_S)
            return str(caught.value)

        for text in on_ranks(3, work, settings=IMPATIENT):
            assert "named 'weights'" in text and "named 'loss'" in text and "rank 1" in text

    def test_a_rank_that_waited_before_something_ran_waits_still(self):
        def work(context):
            engine = context.engine
            if context.rank == 0:
                both = [engine.allreduce([np.ones(1)], Sum, name) for name in "ab"]
                with pytest.raises(MismatchError) as caught:
                    both[1].wait()  # it has said that it is blocked long before "a" runs
            else:
                time.sleep(0.5)
                engine.allreduce([np.ones(1)], Sum, "a").wait(LIMIT_S)
                with pytest.raises(MismatchError) as caught:
                    engine.allreduce([np.ones(1)], Sum, "c").wait()
            engine.barrier().wait(LIMIT_S)
            return str(caught.value)

        for text in run_ranks(2, work, settings=IMPATIENT):
            assert "every rank waits" in text and "named 'b'" in text and "named 'c'" in text

    def test_a_thread_that_computes_is_not_blocked(self):
        def work(context):
            engine = context.engine
            if context.rank == 0:
                engine.allreduce([np.ones(1)], Sum, "warm").wait(LIMIT_S)
                time.sleep(1.0)  # every other rank waits meanwhile, and rightly
                engine.allreduce([np.ones(1)], Sum, "a").wait(LIMIT_S)
            else:
                engine.allreduce([np.ones(1)], Sum, "warm").wait(LIMIT_S)
                engine.allreduce([np.ones(1)], Sum, "a").wait(LIMIT_S)
            return True

        assert all(run_ranks(3, work))

    def test_what_makes_no_sense_is_refused_here(self):
        def work(context):
            engine = context.engine
            with pytest.raises(UnsupportedDtypeError):
                engine.allreduce([np.ones(2, bool)], Average)
            with pytest.raises(UnsupportedDtypeError):
                engine.allreduce([np.ones(2, int)], Adasum)
            with pytest.raises(UnsupportedDtypeError):
                engine.reducescatter([np.ones(2)], [(2,)], Adasum)
            with pytest.raises(UnsupportedDtypeError):
                engine.broadcast([np.array(["x"])], 0)
            with pytest.raises(Misuse, match="zero-dimensional"):
                engine.allgather([np.ones(1)], [()])
            with pytest.raises(ConfigError, match="root_rank=7: this job has the ranks 0, 1"):
                engine.broadcast([np.ones(1)], 7)
            with pytest.raises(Misuse, match="add up to the array's 3"):
                engine.alltoall(np.ones(3), (3,), [1, 1])
            with pytest.raises(UnknownProcessSetError, match="does not exist"):
                engine.allreduce([np.ones(1)], Sum, process_set=4)
            if context.rank == 0:
                hold = engine.allreduce([np.ones(1)], Sum, "x")
                with pytest.raises(DuplicateNameError, match="same name"):
                    engine.allreduce([np.ones(1)], Sum, "x")
                context.barrier()
                hold.wait(LIMIT_S)
            else:
                context.barrier()
                engine.allreduce([np.ones(1)], Sum, "x").wait(LIMIT_S)
            return True

        assert all(run_ranks(2, work))

    def test_given_up_when_a_rank_does_not_come(self):
        def work(context):
            if context.rank == 1:
                time.sleep(0.6)
                return "late"
            with pytest.raises(PeerStalledError, match="given up") as caught:
                context.engine.allreduce([np.ones(1)], Sum, "x").wait(LIMIT_S)
            assert caught.value.rank == 1
            return "told"

        assert run_ranks(2, work, settings=plain(late_after_s=0.3, stall_warning_s=0.0)) == ["told", "late"]

    def test_warns_of_missing_ranks(self, caplog):
        def work(context):
            if context.rank == 2:
                time.sleep(0.5)
            context.engine.allreduce([np.ones(1)], Sum, "grad").wait(LIMIT_S)

        run_ranks(3, work, settings=plain(stall_warning_s=0.2))
        (first, *_) = [
            record.getMessage() for record in caplog.records if "waited for" in record.getMessage()
        ]
        assert "'grad'" in first and "for rank 2" in first and "submitted nothing yet" in first

    @pytest.mark.parametrize("leaver", [0, 1, 2])
    def test_a_rank_that_leaves_while_others_wait_is_named(self, leaver):
        def work(context):
            context.engine.barrier().wait(LIMIT_S)
            if context.rank == leaver:
                return None
            for _ in range(2):
                with pytest.raises((PeerLostError, Misuse)) as caught:
                    context.engine.allreduce([np.ones(1)], Sum, "x").wait(LIMIT_S)
            assert f"rank {leaver}" in str(caught.value)
            return True

        with_rendezvous = run_ranks(3, work, "tcp")
        assert with_rendezvous == [None if rank == leaver else True for rank in range(3)]

    def test_a_failed_call_in_order_fails_what_is_under_way(self):
        """When a rank dies, every waiting rank raises, whatever it waits for."""

        def work(context):
            context.engine.barrier().wait(LIMIT_S)
            if context.rank == 1:
                raise SystemExit(3)
            context.engine.allreduce([np.ones(1)], Sum, "x").wait(LIMIT_S)

        with pytest.raises(RankFailed) as caught:
            run_ranks(2, work, "tcp")
        assert isinstance(caught.value.errors[0], PeerLostError)
        assert "rank 1" in str(caught.value.errors[0])

    def test_close_with_something_on_its_way(self, on_ranks):
        failed = threading.Event()

        def work(context):
            if context.rank:
                context.barrier()
                return failed.wait(LIMIT_S)  # it leaves later
            handle = context.engine.allreduce([np.ones(1)], Sum, "x")
            context.barrier()
            context.close()
            with pytest.raises(NotInitializedError, match="shut down"):
                handle.wait(LIMIT_S)
            with pytest.raises(NotInitializedError, match="shut down"):
                context.engine.allreduce([np.ones(1)], Sum, "y")
            failed.set()
            return True

        assert all(on_ranks(2, work))

    def test_autotuning_changes_buckets_and_no_numbers(self, tmp_path, caplog):
        log = tmp_path / "tuning.csv"

        def work(context):
            for turn in range(4000):
                arrays = [np.full(50, float(context.rank + n)) for n in range(3)]
                handles = [context.engine.allreduce([a], Sum, f"g{n}") for n, a in enumerate(arrays)]
                for n, (handle, array) in enumerate(zip(handles, arrays)):
                    handle.wait(LIMIT_S)
                    assert (array == 1 + 2 * n).all(), turn
            return context.engine.coordinator and context.engine.coordinator.tuning

        tuning, _ = run_ranks(2, work, settings=plain(autotune=True, autotune_log=str(log)))
        lines = log.read_text().splitlines()
        assert lines[0].startswith("cycle_time_ms") and len(lines) > 5
        tried = {tuple(line.split(",")[:2]) for line in lines[1:] if not line.startswith("#")}
        assert len(tried) > 3 and tuning is not None
        told = [record.getMessage() for record in caplog.records if "utotuning" in record.getMessage()]
        assert len(told) == 1 and "--fusion-threshold " in told[0] and "M --cycle-time " in told[0]


def test_the_thread_ends_with_the_context(no_leaks):
    for _ in range(5):
        assert run_ranks(3, lambda context: context.engine.allreduce([np.ones(1)], Sum).wait(LIMIT_S), "tcp")


def test_one_rank_needs_no_thread():
    before = threading.active_count()

    def work(context):
        assert threading.active_count() == before + 1  # the rank itself
        array = np.arange(3)
        handle = context.engine.allreduce([array], Average, postscale=2.0)
        assert handle.done()
        handle.wait()
        assert context.engine.join().wait() == 0
        return array.tolist()

    assert run_ranks(1, work) == [[0, 2, 4]]


def test_constants_are_the_reductions():
    assert [ops.Adasum, ops.Sum] == [2, 1]


class TestLate:
    """A rank that does not enter an operation is late: asked where it is, given up at last, or excused."""

    def test_its_stack_is_shown(self, caplog):
        def work(context):
            if context.rank == 1:
                time.sleep(0.7)
            context.engine.allreduce([np.ones(1)], Sum, "grad").wait(LIMIT_S)

        run_ranks(2, work, settings=plain(stall_warning_s=0.2))
        texts = [record.getMessage() for record in caplog.records]
        (stack,) = [
            text for text in texts if text.startswith("Rank 1 (host1), for which others wait, is here:")
        ][:1]
        assert "run_ranks" in stack  # the main thread of this process, in which ranks are threads

    def test_a_pause_is_waited_for(self, caplog):
        def work(context):
            if context.rank == 1:
                with context.engine.pause("saving checkpoint"):
                    time.sleep(0.8)
            context.engine.allreduce([np.ones(1)], Sum, "grad").wait(LIMIT_S)
            return True

        settings = plain(stall_warning_s=0.2, late_after_s=0.4)
        assert run_ranks(2, work, settings=settings) == [True, True]
        assert not [record for record in caplog.records if "waited for" in record.getMessage()]

    def test_an_idle_job_lives(self):
        """Nothing happens for longer than the limit, except heartbeats."""

        def work(context):
            engine = context.engine
            engine.allreduce([np.ones(300_000)], Sum, "large").wait(LIMIT_S)
            time.sleep(0.6)
            engine.barrier().wait(LIMIT_S)
            return True

        assert run_ranks(3, work, "tcp", settings=plain(dead_after_s=0.3)) == [True] * 3


def test_after_a_bug_in_the_engine_every_call_says_so():
    def work(context):
        context.engine.allreduce([np.ones(3)], Sum, "a").wait(LIMIT_S)
        context.engine._thread._state.broken = BrokenInvariantError("two positions in one place")
        with pytest.raises(Misuse, match="has failed before.*two positions in one place"):
            context.engine.allreduce([np.ones(3)], Sum, "a")

    run_ranks(2, work)


def test_a_wait_that_has_ended_does_not_count_for_a_deadlock():
    """Rank 1 waits for a while for what rank 0 submits last, and computes when rank 0 waits in its turn."""
    computes = threading.Event()

    def work(context):
        engine = context.engine
        if context.rank == 1:
            late = engine.allreduce([np.ones(3)], Sum, "late")
            with pytest.raises(TimeoutError):
                late.wait(1.0)
            computes.set()
            time.sleep(3.0)
            engine.allreduce([np.ones(3)], Sum, "early").wait(LIMIT_S)
        else:
            assert computes.wait(LIMIT_S)
            engine.allreduce([np.ones(3)], Sum, "early").wait()
            late = engine.allreduce([np.ones(3)], Sum, "late")
        late.wait(LIMIT_S)

    run_ranks(2, work, settings=plain(stall_warning_s=0.3))
