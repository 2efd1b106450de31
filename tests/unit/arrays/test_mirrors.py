"""Blocks of host memory and mirrors, on an engine whose copies are done when the test says so."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ringcomm.arrays.kinds import CopyEngine, DeviceKind, device_kind, kind_of, register_kind
from ringcomm.arrays.mirrors import StagingPool, block_bytes
from ringcomm.collective.staged import Done
from ringcomm.errors import DeviceError


class Copying(Done):
    def __init__(self, elapsed_s=None):
        self.done = False
        self.error = None
        self._elapsed_s = elapsed_s

    def poll(self):
        if self.error is not None:
            raise self.error
        return self.done

    def elapsed_s(self):
        return self._elapsed_s


class Engine(CopyEngine):
    def __init__(self):
        self.copies = []
        self.followed = []
        self.blocks = 0

    def block(self, nbytes):
        self.blocks += 1
        return np.zeros(nbytes, np.uint8)

    def mark(self):
        return "mark"

    def _start(self, *what):
        self.copies.append((*what, Copying(elapsed_s=1e-3)))
        return self.copies[-1][-1]

    def to_host(self, array, start, stop, block, after):
        block[start:stop] = array.view(np.uint8)[start:stop]
        return self._start("out", start, stop, after)

    def to_device(self, block, array, start, stop, after):
        array.view(np.uint8)[start:stop] = block[start:stop]
        return self._start("in", start, stop, after)

    def follow(self, done):
        self.followed.append(done)

    def complete(self):
        for *_, done in self.copies:
            done.done = True


class Kind(DeviceKind):
    name = "test"

    def __init__(self):
        self.made = Engine()

    def on_device(self, value):
        return True

    def device(self, value):
        return 0

    def engine(self, value):
        return self.made

    def describe(self, value):
        return value.shape, value.dtype

    def flat(self, value):
        return value.reshape(-1), True

    def empty(self, like, shape):
        return np.empty(shape, like.dtype)

    def assign(self, target, source):
        target[...] = source


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
    mirror.load(0, 400)
    mirror.store(0, 400)
    mirror.load(400, 800)
    mirror.store(400, 800)
    assert [copy[3] for copy in kind.made.copies] == ["mark", "mark", None, None]


def test_a_part_of_the_array_is_stored_to_a_smaller_one(kind, pool):
    source, target = np.arange(10.0), np.zeros(3)
    mirror = pool.mirror(kind, source, target, 4)
    mirror.load(0, 80)
    mirror.store(32, 56)
    assert target.tolist() == [4.0, 5.0, 6.0]


def test_a_preloaded_mirror_copies_nothing_twice(kind, pool):
    array = np.zeros(1_000_000)
    mirror = pool.mirror(kind, array)
    mirror.preload()
    pieces = len(kind.made.copies)
    assert pieces > 3
    part = mirror.load(mirror.piece_bytes // 2, 2 * mirror.piece_bytes)
    assert len(kind.made.copies) == pieces
    for *_, done in kind.made.copies[:1]:
        done.done = True
    assert not part.poll(), "the second piece is not there"
    kind.made.copies[1][-1].done = True
    assert part.poll()
    kind.made.complete()
    assert mirror.fetch() is mirror.host


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


def test_measured_rates_change_the_pieces(kind, pool):
    array = np.zeros(8 << 20)
    before = pool.mirror(kind, array)
    before.load(0, 4 << 20)
    kind.made.complete()
    piece = before.piece_bytes
    before.release()
    after = pool.mirror(kind, array)  # 4 MiB in 1 ms: slower than what was assumed
    assert pool.byte_s(kind.made) == pytest.approx(1e-3 / (4 << 20))
    assert after.piece_bytes < piece


def test_kinds_are_found_by_type(kind):
    class Array:
        pass

    class Below(Array):
        pass

    register_kind(Array, kind)
    assert kind_of(Array()) is kind and device_kind(Below()) is kind
    for value in (np.zeros(1), np.ma.zeros(1), [1.0], 2.0, "text", None):
        assert device_kind(value) is None
