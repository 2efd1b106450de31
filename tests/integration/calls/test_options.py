"""Forms x options: the table in docs/collectives.md is true for the core; and process sets."""

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
from ringcomm.errors import ConfigError, MismatchError, Misuse, NotInitializedError
from tests.adapters.signatures import differences_of_options, functions_of
from tests.support.options import compare_forms, sets_of


def test_every_function_takes_the_options_of_the_table():
    assert differences_of_options(rc, "ringcomm") == []


@pytest.mark.parametrize("size", [2, 3])
def test_every_form_with_every_option(ranks_of, size):
    names = functions_of("ringcomm")

    def work(context):
        sets = [rc.add_process_set(ranks) for ranks in sets_of(size)]
        calls = compare_forms(rc, names, range(size), context.rank, None, np.array, np.asarray)
        for each in (rc.global_process_set, *sets):
            members = each.ranks if each is not rc.global_process_set else range(size)
            if context.rank in members:
                compare_forms(rc, names, list(members), context.rank, each, np.array, np.asarray)
        rc.barrier()
        return calls

    assert min(ranks_of(size, work)) > 100


def test_a_call_in_a_set_is_not_in_the_order_of_all_ranks(ranks_of):
    """Its members may make other calls of all ranks, and of other sets, before and after it."""

    def work(context):
        ends, odd = rc.add_process_set([0, 2]), rc.add_process_set([1, 2])
        found = [rc.allreduce(np.ones(2), rc.Sum)[0]]
        if context.rank != 1:
            found.append(rc.allreduce(np.ones(2), rc.Sum, process_set=ends)[0])
        if context.rank != 0:
            found.append(rc.allgather([context.rank], process_set=odd).tolist())
        rc.barrier()
        return found

    assert ranks_of(3, work) == [[3.0, 2.0], [3.0, [1, 2]], [3.0, 2.0, [1, 2]]]


def test_what_is_no_member_or_differs_is_an_error(ranks_of):
    def work(context):
        ends = rc.add_process_set([0, 2])
        if context.rank == 1:
            for call in (rc.allreduce, rc.allgather, rc.allgather_, rc.reducescatter_, rc.alltoall_):
                with pytest.raises(UnknownProcessSetError):
                    call(np.ones((2, 2)), process_set=ends)
        else:
            with pytest.raises(MismatchError, match="tensor shapes"):
                rc.allreduce(np.ones(context.rank + 1), name="x", process_set=ends)
            for call in (rc.allgather_, rc.reducescatter_, rc.alltoall_):
                locked = np.ones((2, 2))
                locked.flags.writeable = False
                with pytest.raises(Misuse, match="read-only"):
                    call(locked, process_set=ends)
        return rc.allreduce(np.ones(1), rc.Sum).tolist()

    assert ranks_of(3, work) == [[3.0]] * 3


# ---- process sets --------------------------------------------------------------------------------


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
