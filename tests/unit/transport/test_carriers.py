"""From what the ways take at each size to up to where each is used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringcomm.transport import carriers
from ringcomm.transport.carriers import crossing
from ringcomm.transport.process_memory import RING_MOST_BYTES, PeerMemory
from ringcomm.transport.ring import Ring


@pytest.mark.parametrize(
    ("gains", "octaves"),
    [
        ([0.5, 0.3, 0.1, -0.1], 2.5),
        ([0.1, -0.1, -0.3], 0.5),
        ([0.3, 0.2, 0.1], 3.0),  # it goes on falling, and is zero one octave beyond
        ([0.9, 0.8, 0.7], 3.0),  # nothing is known of what is far beyond
        ([-0.5, -0.7, -0.9], -1.0),
        ([0.1, 0.2, 0.3], 3.0),
        ([-0.1, -0.1, -0.1], -1.0),
    ],
)
def test_the_first_way_is_taken_up_to_where_it_loses(gains, octaves):
    assert crossing(gains) == pytest.approx(octaves)


@pytest.mark.parametrize("odd", range(6))
def test_one_time_that_is_off_moves_it_by_less_than_an_octave(odd):
    """Seen on one machine: the same 2 MiB gained 0.06, 0.49 and 0.44 in three processes."""
    gains = [0.65, 0.5, 0.35, 0.2, 0.05, -0.1]
    gains[odd] -= 0.4
    assert abs(crossing(gains) - 13 / 3) < 1.0


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

        def once(size):
            if made:
                refuse()
            made.append(make(size))
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
    assert 64 * 1024 // 2 <= found <= 4 * 64 * 1024
