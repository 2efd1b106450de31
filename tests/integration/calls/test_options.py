"""Forms x options: the table in docs/collectives.md is true for the core, and gives the right numbers."""

from __future__ import annotations

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.engine.process_sets import UnknownProcessSetError
from ringcomm.errors import MismatchError, Misuse
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
