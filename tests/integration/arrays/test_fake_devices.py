"""Devices that exist only in tests: poison until a stream has come, and failures."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from ringcomm.arrays.kinds import kind_of
from ringcomm.arrays.mirrors import StagingPool
from ringcomm.errors import DeviceError
from tests.support import fake_device
from tests.support.fake_device import FakeArray, FakeDevice, FakeEvent, until_done

LIMIT_S = 60.0


@pytest.fixture
def gate():
    """What a stream waits for until the test opens it."""
    event = threading.Event()
    yield event
    event.set()


def poisoned(memory):
    return bool((np.asarray(memory).reshape(-1).view(np.uint8) == 0xFF).all())


class TestStreams:
    def test_an_array_is_poison_until_the_stream_has_come_there(self, gate):
        with FakeDevice() as device:
            device.main.put(lambda: gate.wait(LIMIT_S))
            array = device.array([1.0, 2.0])
            added = array.apply(lambda memory: np.add(memory, 1.0, out=memory))
            assert added is array and poisoned(array.memory)
            gate.set()
            assert array.numpy().tolist() == [2.0, 3.0]
            assert device.host_waits == 1
            assert poisoned(device.empty((3,), "int32").memory)

    def test_streams_do_not_wait_for_each_other_unless_they_are_told_to(self, gate):
        with FakeDevice() as device:
            first, other = device.main, device.stream()
            event = first.put(lambda: gate.wait(LIMIT_S))
            other.put().wait()
            other.wait_event(event)
            after = other.put()
            assert not event.poll() and not after.poll()
            gate.set()
            after.wait()
            assert event.poll()

    def test_each_thread_has_a_current_stream(self):
        with FakeDevice() as device, ThreadPoolExecutor(1) as pool:
            mine = device.stream()
            device.use(mine)
            assert device.current is mine
            assert pool.submit(lambda: device.current).result() is device.main

    def test_after_a_failure_nothing_more_is_done(self):
        done = []
        with FakeDevice() as device:
            stream = device.stream()
            stream.put(lambda: 1 / 0).wait()
            event = stream.put(lambda: done.append(1))
            event.wait()
            with pytest.raises(DeviceError, match="a copy has failed: division by zero"):
                event.poll()
            with pytest.raises(DeviceError, match="division by zero"):
                array = device.array([1.0])
                device.use(stream)
                array.numpy()
        assert done == []

    def test_what_is_queued_is_done_before_the_end_and_nothing_after_it(self):
        done = []
        with FakeDevice(seed=3, delay_s=0.001) as device:
            for number in range(9):
                device.main.put(lambda number=number: done.append(number))
        assert done == list(range(9))
        assert device.main.put(lambda: done.append(99)).poll() and len(done) == 9

    def test_a_wait_has_a_limit(self, monkeypatch):
        monkeypatch.setattr(fake_device, "_MAX_WAIT_S", 0.01)
        with pytest.raises(DeviceError, match="did not come here within 0.01 s"):
            FakeEvent().wait()


class TestArrays:
    def test_the_host_cannot_use_their_memory(self):
        with FakeDevice() as device:
            array = device.array(np.arange(6.0).reshape(2, 3))
            assert (array.shape, array.dtype) == ((2, 3), np.dtype(float))
            for use in (np.asarray, np.sum):
                with pytest.raises(TypeError, match="cannot use the memory"):
                    use(array)
            assert array[1].reshape((3, 1)).numpy().tolist() == [[3.0], [4.0], [5.0]]

    def test_those_that_are_not_in_c_order_are_copied_on_the_device(self):
        with FakeDevice() as device:
            array = device.array(np.arange(6.0).reshape(2, 3))
            kind, turned = kind_of(array), FakeArray(device, array.memory.T)
            flat, shares = kind.flat(turned)
            assert not shares and flat.numpy().tolist() == [0, 3, 1, 4, 2, 5]
            assert kind.flat(array)[1] and kind.on_device(array) and kind.mapped(flat) is None


class TestCopies:
    def mirror(self, device, count=1000):
        array = device.array(np.arange(float(count)))
        return array, StagingPool().mirror(kind_of(array), array.reshape((-1,)))

    def test_blocks_and_arrays_are_poison_while_a_copy_is_on_its_way(self, gate):
        with FakeDevice() as device:
            array, mirror = self.mirror(device)
            assert poisoned(mirror.host)
            mirror.fetch(until_done)
            device.main.put(lambda: gate.wait(LIMIT_S))
            again = StagingPool().mirror(kind_of(array), array)
            again.host[:] = 1.0
            load = again.load(0, 4000)
            assert poisoned(again.host[:500]) and (again.host[500:] == 1.0).all() and not load.poll()
            gate.set()
            load.wait()
            assert again.host[:3].tolist() == [0.0, 1.0, 2.0]
            assert (device.copies_out, device.bytes_out, device.blocks) == (2, 12000, 2)

    @pytest.mark.parametrize("fails", ["fail_out", "fail_in"])
    def test_one_can_be_made_to_fail(self, fails):
        with FakeDevice(**{fails: 2}) as device:
            for number in (1, 2):
                _, mirror = self.mirror(device)
                if fails == "fail_out":
                    copy = mirror.load(0, 80)
                else:
                    mirror.store(0, 80)
                    copy = mirror._last_store
                copy.wait()
                if number == 1:
                    assert copy.poll()
            with pytest.raises(DeviceError, match="this copy was to fail"):
                copy.poll()
            mirror.release()

    def test_its_memory_is_not_mapped_unless_it_says_so(self):
        with FakeDevice() as device:
            engine = kind_of(device.array([1])).engine(device.array([1]))
            mark = engine.mark()
            assert engine.mapped_slowdown(1, None) is None and engine.reached(mark) is mark
