"""Arrays in memory that device and host share: no copies, and whether that is worth it."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from ringcomm.arrays import mapped
from ringcomm.arrays.mapped import MappedMirror, slowdown, uses_mapped
from tests.support.fake_device import until_done
from tests.unit.arrays.copying import Copying, Engine


class Integrated(Engine):
    """An engine whose device shares memory with the host."""

    def __init__(self, found=1.0):
        super().__init__()
        self.found = found
        self.ready = Copying()

    def mapped_slowdown(self, nbytes, measure):
        return self.found

    def reached(self, mark):
        assert mark == "mark"
        return self.ready


def test_the_host_waits_for_the_program_and_copies_nothing():
    engine, array = Integrated(), np.arange(6.0)
    mirror = MappedMirror(engine, array)
    assert mirror.shared and mirror.host is array and mirror.nbytes == 48
    mirror.preload()
    load = mirror.load(8, 32)
    assert not load.poll()
    engine.ready.done = True
    mirror.fetch(until_done)
    assert load.poll()
    mirror.host *= 2
    mirror.store(0, 48)
    mirror.store_all()
    mirror.keep_source()
    mirror.finish()
    mirror.release()
    assert array.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert (engine.copies, engine.followed, engine.blocks) == ([], [], 0)


@pytest.mark.parametrize(
    "found, direct, words", [(1.0, True, "without a copy"), (2.0, True, "without"), (7.5, False, "copied")]
)
def test_a_measurement_decides_and_is_logged(found, direct, words, caplog):
    caplog.set_level(logging.INFO, "ringcomm")
    assert uses_mapped(Integrated(found), "GPU 0") is direct
    (record,) = caplog.records
    text = record.getMessage()
    assert f"memory of GPU 0 take {found} times as long" in text and words in text


def test_a_device_with_memory_of_its_own_is_not_measured(caplog):
    caplog.set_level(logging.INFO, "ringcomm")
    assert uses_mapped(Engine(), "GPU 0") is False
    assert caplog.records == []


def test_the_slowdown_is_that_against_ordinary_memory(monkeypatch):
    block, seconds = np.ones(64, np.uint8), {}
    assert slowdown(block) > 0.0 and not block.any()

    def add_s(memory):
        return seconds[memory is block]

    monkeypatch.setattr(mapped, "_add_s", add_s)
    seconds.update({True: 6e-6, False: 2e-6})
    assert slowdown(block) == pytest.approx(3.0)
    seconds.update({False: 0.0})
    assert slowdown(block) > 1000.0, "a clock that does not move is no division by zero"
