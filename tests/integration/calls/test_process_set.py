"""The functions of a program over its default context: process sets, asynchronous and grouped collectives."""

from __future__ import annotations

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.calls.process_set import (
    ProcessSet,
    add_process_set,
    global_process_set,
    included_in,
    number_of,
    rank_in,
    remove_process_set,
    size_of,
)
from ringcomm.config import Settings
from ringcomm.engine.process_sets import UnknownProcessSetError
from ringcomm.errors import ConfigError, Misuse, NotInitializedError

SETTINGS = Settings(spin_us=0.0, timeout_s=20.0, start_timeout_s=20.0)


class TestProcessSet:
    def test_before_there_is_a_job(self):
        evens = ProcessSet([2, 0])
        assert evens.ranks == [0, 2]
        assert [evens.process_set_id, evens.size(), evens.rank(), evens.included()] == [None] * 4
        assert repr(evens) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
        for function in (size_of, included_in, rank_in, number_of):
            with pytest.raises(NotInitializedError if function is included_in else UnknownProcessSetError):
                function(evens)
        with pytest.raises(NotInitializedError):
            evens.register()
        assert evens.process_set_id is None
        assert remove_process_set(evens) is False
        assert global_process_set.ranks == [] and number_of(None) == number_of(global_process_set) == 0

    def test_members_and_others(self, ranks_of):
        def work(context):
            ends = add_process_set([2, 0])
            assert (ends.process_set_id, ends.size(), size_of(ends)) == (1, 2, 2)
            total = np.full(2, context.rank + 1.0)
            if context.rank == 1:
                assert not ends.included()
                for call in (ends.rank, lambda: rank_in(ends)):
                    with pytest.raises(UnknownProcessSetError, match="Rank 1 is not a member"):
                        call()
                with pytest.raises(UnknownProcessSetError, match="Rank 1 is not a member"):
                    rc.allreduce_async(total, process_set=ends)
            else:
                assert included_in(ends) and ends.rank() == context.rank // 2
                total = rc.allreduce_async(total, rc.Sum, process_set=ends).wait()
            with pytest.raises(ConfigError, match="Process set 1 has the ranks 0, 2 already"):
                add_process_set([0, 2])
            return total.tolist()

        assert ranks_of(3, work, settings=SETTINGS) == [[4.0, 4.0], [2.0, 2.0], [4.0, 4.0]]

    def test_a_number_belongs_to_one_job(self, ranks_of):
        kept = {}

        def work(context):
            kept[context.rank] = add_process_set([0, 2])
            same = ProcessSet([2, 0])
            assert same != kept[context.rank] and hash(same) == hash(kept[context.rank])
            same.process_set_id = 1  # as Horovod's scripts do
            assert same == kept[context.rank] and same != [0, 2]
            same.process_set_id = None
            return same.process_set_id

        assert ranks_of(3, work, settings=SETTINGS) == [None] * 3
        assert ranks_of(3, lambda context: kept[context.rank].process_set_id, settings=SETTINGS) == [None] * 3


class TestAsynchronous:
    def test_in_place(self, ranks_of):
        def work(context):
            array = np.full((2, 3), context.rank + 1.0).T
            handle = rc.allreduce_async_(array, rc.Sum, "a")
            assert rc.synchronize(handle) is array and rc.poll(handle)
            sent = np.full(4, float(context.rank))
            assert rc.broadcast_async_(sent, 1).wait() is sent
            for call in (rc.allreduce_async_, rc.broadcast_async_):
                with pytest.raises(Misuse, match="read-only"):
                    call(np.broadcast_to(np.ones(1), 3))
                with pytest.raises(Misuse, match="needs a numpy array"):
                    call([1.0])
            return array.tolist(), sent.tolist()

        assert ranks_of(2, work, settings=SETTINGS) == [([[3.0, 3.0]] * 3, [1.0] * 4)] * 2
