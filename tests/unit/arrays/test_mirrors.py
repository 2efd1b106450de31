"""Blocks of host memory and mirrors, on an engine whose copies are done when the test says so."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ringcomm.arrays.mirrors import StagingPool, block_bytes
from ringcomm.errors import DeviceError
from tests.unit.arrays.copying import Kind


@pytest.fixture
def kind():
    return Kind()


@pytest.fixture
def pool():
    return StagingPool()


def test_size_classes_waste_a_quarter_at_most():
    for nbytes in (*range(1, 5000, 7), 12345, 999_999, 1 << 26, (1 << 26) + 1):
        size = block_bytes(nbytes)
        assert nbytes <= size <= max(4096, 1.25 * nbytes)
        assert block_bytes(size) == size


def test_a_block_is_used_again_when_its_copies_are_done(kind, pool):
    array = np.arange(1000.0)
    mirror = pool.mirror(kind, array)
    mirror.load(0, 800)
    mirror.store(0, 800)
    mirror.finish()
    pool.mirror(kind, array)
    assert kind.made.blocks == pool.allocations == 2, "its copies were on their way"
    kind.made.complete()
    gc.collect()
    pool.mirror(kind, array)
    assert kind.made.blocks == 2


def test_what_the_program_has_queued_comes_before_the_first_copy_of_each_direction(kind, pool):
    mirror = pool.mirror(kind, np.arange(1000.0))
    mirror.load(0, 800)
    mirror.store(0, 400)
    mirror.store(400, 800)
    ready = kind.made.ready
    assert [copy[3] for copy in kind.made.copies] == [ready, ready, None]


def test_a_part_of_the_array_is_stored_to_a_smaller_one(kind, pool):
    source, target = np.arange(10.0), np.zeros(3)
    mirror = pool.mirror(kind, source, target, 4)
    mirror.load(0, 80)
    mirror.store(32, 56)
    assert target.tolist() == [4.0, 5.0, 6.0]


def test_a_preloaded_mirror_copies_nothing_twice(kind, pool):
    mirror = pool.mirror(kind, np.arange(10.0))
    mirror.preload()
    assert len(kind.made.copies) == 1
    waited = []
    mirror.fetch(waited.append)
    assert len(kind.made.copies) == 1 and waited == [kind.made.copies[0][-1]]


def test_the_programs_stream_follows_the_result(kind, pool):
    mirror = pool.mirror(kind, np.zeros(10))
    mirror.store_all()
    mirror.finish()
    assert kind.made.followed == [kind.made.copies[-1][-1]]


def test_a_failed_copy_is_an_error_at_the_end_or_at_the_next_call(kind, pool):
    mirror = pool.mirror(kind, np.zeros(10))
    mirror.store_all()
    kind.made.copies[-1][-1].error = DeviceError("broken")
    with pytest.raises(DeviceError):
        mirror.finish()
    mirror.release()
    with pytest.raises(DeviceError):
        pool.mirror(kind, np.zeros(10))
    pool.mirror(kind, np.zeros(10))


def test_the_program_may_overwrite_a_source_once_it_is_loaded(kind, pool):
    mirror = pool.mirror(kind, np.zeros(10))
    mirror.keep_source()
    assert kind.made.followed == [], "nothing has been loaded"
    mirror.preload()
    mirror.keep_source()
    assert kind.made.followed == [kind.made.copies[-1][-1]]
