"""An engine whose copies are done when the test says so, and a kind of arrays for it."""

from __future__ import annotations

import numpy as np

from ringcomm.arrays.kinds import CopyEngine, DeviceKind, Done


class Copying(Done):
    def __init__(self):
        self.done = False
        self.error = None

    def poll(self):
        if self.error is not None:
            raise self.error
        return self.done


class Engine(CopyEngine):
    def __init__(self):
        self.copies, self.followed, self.blocks = [], [], 0
        self.ready = Copying()  # the program's own work

    def locked(self, nbytes):
        self.blocks += 1
        return np.zeros(nbytes, np.uint8)

    def mark(self):
        return self.ready

    def _start(self, *what):
        self.copies.append((*what, Copying()))
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
        flat = np.ascontiguousarray(value).reshape(-1)
        return flat, np.shares_memory(flat, value)

    def empty(self, like, shape):
        return np.empty(shape, like.dtype)

    def assign(self, target, source):
        target[...] = source
