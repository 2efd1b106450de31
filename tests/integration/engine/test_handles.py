"""Operations by name in programs with threads: waits, conversions, names, and what belongs to the caller."""

from __future__ import annotations

import threading
import time

import numpy as np

import ringcomm as rc
from ringcomm.engine.deadlocks import DEADLOCK_S
from ringcomm.ops import Sum
from ringcomm.testing.cluster import run_ranks
from tests.integration.engine.engines import LIMIT_S, PLAIN


def reduced(context, name):
    return context.engine.allreduce([np.ones(1)], Sum, name, convert=lambda _: name)


class TestThreads:
    def test_a_rank_that_computes_before_its_first_operation_is_waited_for(self):
        """Two threads per rank with operations of their own, which they start in opposite order."""

        def work(context):
            results = []

            def submit(name, after_s):
                time.sleep(after_s)
                results.append(reduced(context, name).wait())

            names = "ab" if context.rank == 0 else "ba"
            other = threading.Thread(target=submit, args=(names[1], 3 * DEADLOCK_S))
            other.start()
            submit(names[0], 0.0)
            other.join()
            return sorted(results)

        assert run_ranks(2, work, settings=PLAIN) == [["a", "b"]] * 2

    def test_two_threads_wait_for_one_handle(self):
        """The second one waits until the first one has converted the result."""

        def work(context):
            converting, go_on = threading.Event(), threading.Event()

            def convert(_):
                converting.set()
                assert go_on.wait(LIMIT_S)
                return "converted"

            handle = context.engine.allreduce([np.ones(3)], Sum, "x", convert=convert)
            results = []
            threads = [threading.Thread(target=lambda: results.append(handle.wait())) for _ in range(2)]
            threads[0].start()
            assert converting.wait(LIMIT_S)
            threads[1].start()
            threads[1].join(0.2)  # time enough to return, if it did not wait
            go_on.set()
            for thread in threads:
                thread.join(LIMIT_S)
            return results

        assert run_ranks(2, work, settings=PLAIN) == [["converted"] * 2] * 2


class TestArraysOfTheCaller:
    def test_what_has_no_underscore_copies_its_input(self, ranks_of):
        """The caller changes the input as soon as the call has returned, before any other rank has come."""

        def work(context):
            size, rank = context.size, context.rank

            def started(start):
                array = np.full((size, 2), rank + 1.0)
                if rank == 1:
                    context.barrier()
                handle = start(array)
                array[:] = -100.0
                if rank == 0:
                    context.barrier()
                result = handle.wait()
                while isinstance(result, (tuple, list)):
                    result = result[0]
                return float(result.min())

            return [
                started(lambda array: rc.allreduce_async(array, rc.Min, "a")),
                started(lambda array: rc.grouped_allreduce_async([array], rc.Min, "g")),
                started(lambda array: rc.reducescatter_async(array, rc.Min, "s")),
                started(lambda array: rc.broadcast_async(array, 0, "b")),
                started(lambda array: rc.allgather_async(array, "c")),
                started(lambda array: rc.alltoall_async(array, name="d")),
            ]

        assert ranks_of(2, work, settings=PLAIN) == [[1.0] * 6] * 2
