"""Overlap of computation and communication, replayed gradient by gradient."""

from __future__ import annotations

import pytest

from ringcomm.scaling.step import Workload, time_step, workload


def per_byte(nbytes):
    return nbytes * 0.5


def test_without_overlap_both_times_add_up():
    work = workload(3.0, [2, 4], overlap=False)
    assert work.ready_s == (3.0, 3.0)
    assert time_step(work, per_byte) == (6.0, 3.0)


def test_what_the_computation_hides():
    work = Workload(10.0, (4, 4), (2.0, 10.0))
    timing = time_step(work, per_byte)
    assert timing.step_s == 12.0  # the first is reduced during the computation, the second after it
    assert timing.exposed_s == 2.0


def test_gradients_that_wait_for_the_channel_are_reduced_together():
    work = Workload(3.0, (2, 2, 2), (1.0, 1.5, 1.6))
    calls = []

    def reduce_s(nbytes):
        calls.append(nbytes)
        return 1.0

    assert time_step(work, reduce_s).step_s == 3.0
    assert calls == [2, 4]


@pytest.mark.parametrize(("limit", "count"), [(0, 6), (4, 6), (8, 3), (1000, 1)])
def test_buckets_are_no_larger_than_the_limit(limit, count):
    work = workload(1.0, [4] * 6, overlap=False)._replace(bucket_bytes=limit)
    lengths = []

    def reduce_s(nbytes):
        lengths.append(nbytes)
        return 0.25

    assert time_step(work, reduce_s).exposed_s == 0.25 * count
    assert max(lengths) <= max(4, limit)


def test_local_steps_share_one_reduction_that_nothing_hides():
    timing = time_step(workload(3.0, [4, 4]), per_byte, local_steps=4)
    assert timing == (4.0, 1.0)


def test_a_reduction_that_costs_nothing_changes_nothing():
    assert time_step(workload(3.0, [4, 4]), lambda nbytes: 0.0).step_s == 3.0
