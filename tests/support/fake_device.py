"""A device that exists only in tests: its streams are threads, and what is not done yet is poison.

A real device is fast, which hides missing waits. This one has seeded delays, its streams overtake each other,
a block or an array holds NaN (bytes of ones) while a copy to it is on its way, and copies can be made to
fail. Its arrays are known to ringcomm as any kind of arrays is (:mod:`ringcomm.arrays.kinds`)::

    with FakeDevice(seed=1) as device:
        array = device.array(np.arange(5.0))
        rc.allreduce_(array)
        assert array.numpy()[0] == 0.0
"""

from __future__ import annotations

import random
import threading
import time
from queue import SimpleQueue
from typing import Any, Callable, Hashable, List, Optional, Sequence, Tuple

import numpy as np

from ringcomm.arrays.kinds import CopyEngine, DeviceKind, Done, register_kind
from ringcomm.errors import DeviceError

_POISON = 0xFF
_MAX_WAIT_S = 60.0
Operation = Callable[[], None]


def until_done(copy: Done) -> None:
    """Wait for a copy, however long the device takes."""
    while not copy.poll():
        time.sleep(50e-6)


class FakeEvent(Done):
    """The end of everything that was queued in a stream before it."""

    def __init__(self) -> None:
        self._set = threading.Event()
        self._error: Optional[BaseException] = None

    def poll(self) -> bool:
        if not self._set.is_set():
            return False
        if self._error is not None:
            raise DeviceError(f"a copy has failed: {self._error}")
        return True

    def wait(self) -> None:
        """Block the calling thread."""
        if not self._set.wait(_MAX_WAIT_S):
            raise DeviceError(f"a fake stream did not come here within {_MAX_WAIT_S:g} s")

    def complete(self, error: Optional[BaseException]) -> None:
        """The stream has come here."""
        self._error = error
        self._set.set()


class FakeStream:
    """Operations that are done one after another, in a thread, each after a random delay of at most
    `delay_s`. After a failure no further operation runs.
    """

    def __init__(self, name: str, seed: int, delay_s: float) -> None:
        self._random = random.Random(seed)
        self._delay_s = delay_s
        self._queue: SimpleQueue[Optional[Tuple[Optional[Operation], FakeEvent]]] = SimpleQueue()
        self._error: Optional[BaseException] = None
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, operation: Optional[Operation] = None) -> FakeEvent:
        """Queue an operation (None: nothing), and return what is complete after it; at once when closed."""
        event = FakeEvent()
        if self._closed:
            event.complete(self._error)
        else:
            self._queue.put((operation, event))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        """Do what is queued from now on after the event only."""
        self.put(event.wait)

    def close(self) -> None:
        """End the thread when all is done."""
        self._closed = True
        self._queue.put(None)
        self._thread.join(60.0)

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            operation, event = item
            if operation is not None and self._error is None:
                if self._delay_s:
                    time.sleep(self._random.uniform(0.0, self._delay_s))
                try:
                    operation()
                except Exception as problem:  # noqa: BLE001 - reported by the event
                    self._error = problem
            event.complete(self._error)


class FakeDevice:
    """A device with a stream for the program and one for copies in each direction. The seed determines the
    delays, and so the order of events. The copy to the host number `fail_out` (from 1; 0: none) fails,
    likewise `fail_in` to the device. `mapped`: the host uses its memory as well.
    """

    def __init__(
        self,
        seed: int = 0,
        delay_s: float = 0.0,
        fail_out: int = 0,
        fail_in: int = 0,
        mapped: bool = False,
    ) -> None:
        self.mapped = mapped
        # Numbers of copies, bytes copied to the host, host blocks, waits of the program for the device.
        self.copies_out = self.copies_in = self.bytes_out = self.blocks = self.host_waits = 0
        self.fail_out = fail_out
        self.fail_in = fail_in
        self._streams: List[FakeStream] = []
        self._seed = seed
        self._delay_s = delay_s
        self.main = self.stream()

    def __enter__(self) -> FakeDevice:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all streams when what is queued is done."""
        for stream in self._streams:
            stream.close()

    def stream(self) -> FakeStream:
        """A new stream."""
        number = len(self._streams)
        stream = FakeStream(f"fake-stream-{number}", self._seed * 101 + number, self._delay_s)
        self._streams.append(stream)
        return stream

    def array(self, values: Any) -> FakeArray:
        """A new array with these elements, which it has when the stream has come here."""
        copied = np.array(values)
        made = self.empty(copied.shape, copied.dtype)
        memory = made.memory
        self.main.put(lambda: np.copyto(memory, copied))
        return made

    def empty(self, shape: Sequence[int], dtype: Any) -> FakeArray:
        """A new array; its elements are poison."""
        memory = np.empty(tuple(shape), dtype)
        memory.reshape(-1).view(np.uint8)[:] = _POISON
        return FakeArray(self, memory)


class FakeArray:
    """An array in a fake device's memory, which the host must not use: see :meth:`numpy`. `memory` is for
    operations in the device's streams.
    """

    def __init__(self, device: FakeDevice, memory: np.ndarray[Any, Any]) -> None:
        self.device = device
        self.memory = memory

    @property
    def shape(self) -> Tuple[int, ...]:
        """The shape."""
        return tuple(self.memory.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        dtype: np.dtype[Any] = self.memory.dtype
        return dtype

    def __array__(self, *options: Any, **more: Any) -> Any:
        raise TypeError("the host cannot use the memory of this device; use numpy()")

    def __getitem__(self, index: Any) -> FakeArray:
        return FakeArray(self.device, self.memory[index])

    def reshape(self, shape: Sequence[int]) -> FakeArray:
        """The same memory in another shape."""
        return FakeArray(self.device, self.memory.reshape(shape))

    def apply(self, kernel: Callable[[np.ndarray[Any, Any]], Any], takes_s: float = 0.0) -> FakeArray:
        """Queue a function of the memory in the stream of the program: a kernel."""
        memory = self.memory

        def run() -> None:
            time.sleep(takes_s)
            kernel(memory)

        self.device.main.put(run)
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        """A copy of the elements, when the stream has come here; the thread waits for that."""
        out = np.empty_like(self.memory)
        memory = self.memory
        self.device.host_waits += 1
        event = self.device.main.put(lambda: np.copyto(out, memory))
        event.wait()
        event.poll()
        return out


class FakeEngine(CopyEngine):
    """The copies of a fake device."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self._out, self._in = device.stream(), device.stream()

    def locked(self, nbytes: int) -> np.ndarray[Any, Any]:
        self._device.blocks += 1
        return np.full(nbytes, _POISON, np.uint8)

    def mark(self) -> Done:
        return self._device.main.put()

    def to_host(
        self, array: Any, start: int, stop: int, block: np.ndarray[Any, Any], after: Optional[Done]
    ) -> Done:
        self._device.copies_out += 1
        self._device.bytes_out += stop - start
        fails = self._device.copies_out == self._device.fail_out
        block[start:stop] = _POISON
        return self._copy(self._out, block[start:stop], _bytes(array)[start:stop], after, fails)

    def to_device(
        self, block: np.ndarray[Any, Any], array: Any, start: int, stop: int, after: Optional[Done]
    ) -> Done:
        self._device.copies_in += 1
        fails = self._device.copies_in == self._device.fail_in
        return self._copy(self._in, _bytes(array)[start:stop], block[start:stop], after, fails)

    def _copy(
        self,
        stream: FakeStream,
        target: np.ndarray[Any, Any],
        source: np.ndarray[Any, Any],
        after: Optional[Done],
        fails: bool,
    ) -> FakeEvent:
        if after is not None:
            assert isinstance(after, FakeEvent)
            stream.wait_event(after)

        def run() -> None:
            target[:] = _POISON
            if fails:
                raise OSError("this copy was to fail")
            target[:] = source

        return stream.put(run)

    def follow(self, done: Done) -> None:
        assert isinstance(done, FakeEvent)
        self._device.main.wait_event(done)


def _bytes(array: FakeArray) -> np.ndarray[Any, Any]:
    return array.memory.view(np.uint8)


class FakeKind(DeviceKind):
    """The kind of :class:`FakeArray`."""

    name = "FakeDevice"

    def on_device(self, value: Any) -> bool:
        return True

    def device(self, value: Any) -> Hashable:
        return id(value.device)

    def engine(self, value: Any) -> CopyEngine:
        return FakeEngine(value.device)

    def describe(self, value: Any) -> Tuple[Tuple[int, ...], np.dtype[Any]]:
        return value.shape, value.dtype

    def flat(self, value: Any) -> Tuple[Any, bool]:
        if value.memory.flags.c_contiguous:
            return value.reshape((-1,)), True
        copy = value.device.empty(value.shape, value.dtype)
        self.assign(copy, value)
        return copy.reshape((-1,)), False

    def empty(self, like: Any, shape: Sequence[int]) -> Any:
        return like.device.empty(shape, like.dtype)

    def mapped(self, flat: Any) -> Optional[np.ndarray[Any, Any]]:
        memory: np.ndarray[Any, Any] = flat.memory
        return memory if flat.device.mapped else None

    def assign(self, target: Any, source: Any) -> None:
        into, elements = target.memory, source.memory
        target.device.main.put(lambda: np.copyto(into, elements))


register_kind(FakeArray, FakeKind())
