"""From what the ways take at each size to up to where each is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringcomm.transport import carriers
from ringcomm.transport.carriers import best_cut
from ringcomm.transport.process_memory import RING_MOST_BYTES, PeerMemory
from ringcomm.transport.ring import Ring


@pytest.mark.parametrize(
    ("gains", "cut"),
    [
        ([0.5, 0.2, -0.1, -0.7], 2),
        ([-0.5, -0.2], 0),
        ([0.1, 0.1, 0.1], 3),
        ([0.5, -0.1, 0.6, -0.9], 3),  # one time that is a little wrong changes nothing
        ([0.5, 0.4, -3.0, 0.4], 2),
        ([], 0),
    ],
)
def test_the_first_way_is_taken_up_to_where_it_loses(gains, cut):
    assert best_cut(gains) == cut


def refuse(*arguments, **options):
    raise PermissionError(1, "Operation not permitted")


def opened() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class TestWhereNothingCanBeCompared:
    @pytest.fixture(autouse=True)
    def leaves_nothing_open(self):
        before = opened()
        yield
        assert opened() == before

    def test_no_shared_memory(self, monkeypatch):
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        assert carriers._measure() == RING_MOST_BYTES

    def test_no_memory_for_the_second_ring(self, monkeypatch):
        make, made = Ring.make, []

        def once():
            if made:
                refuse()
            made.append(make())
            return made[-1]

        monkeypatch.setattr(Ring, "make", once)
        assert carriers._measure() == RING_MOST_BYTES
        assert len(made) == 1

    def test_memory_of_others_may_not_be_read(self, monkeypatch):
        """The link ends in the middle of the measurement."""
        monkeypatch.setattr(PeerMemory, "read", refuse)
        assert carriers._measure() == RING_MOST_BYTES


def test_a_measurement_takes_each_size_both_ways(monkeypatch):
    monkeypatch.setattr(carriers, "LENGTHS", (64 * 1024, 256 * 1024))
    found = carriers._measure()
    assert found in (64 * 1024 // 2, int(64 * 1024 * 1.4), int(256 * 1024 * 1.4))
