"""From measurements to a model that is the same everywhere and in every run."""

from __future__ import annotations

import pytest

from ringcomm.schedule.calibration import (
    LOCAL_LATENCY_S,
    Calibration,
    coarse,
    model_of,
    part_of,
)
from ringcomm.schedule.cost import CostModel


def test_rounding_goes_up_and_never_far():
    values = [coarse(1e-9 * 1.01**k) for k in range(500)]
    assert values == sorted(values)
    for k, value in enumerate(values):
        assert 0.75 <= value / (1e-9 * 1.01**k) <= 1.34
    assert len(set(values)) < 20


def test_one_host():
    calibrations = [Calibration(1e-10, 11e-6, 3e-10), Calibration(1.1e-10)]
    model = model_of(calibrations, [0, 0])
    assert model.hosts == ()
    assert model.latency_s == coarse(11e-6)
    assert model.byte_s == coarse(3e-10)


def test_several_hosts():
    """A rank that measured represents its host; what was not measured is assumed."""
    calibrations = [
        Calibration(1e-10, 0.0, 0.0, 60e-6, 8.5e-9),
        Calibration(1e-10),
        Calibration(1e-10, 0.0, 0.0, 50e-6, 85e-9),
        Calibration(1e-10, 0.0, 0.0, 70e-6, 8.3e-9),
    ]
    model = model_of(calibrations, [4, 4, 7, 9])
    assert model.hosts == (0, 0, 1, 2)
    assert model.latency_s == coarse(LOCAL_LATENCY_S)
    assert model.wire_latency_s == coarse(60e-6)
    fast, slow, also_fast = model.wire_byte_s
    assert fast == also_fast == pytest.approx(8.4e-9, rel=0.01)
    assert slow == pytest.approx(85e-9)


class TestPart:
    """The ranks that are left of five on three hosts."""

    WHOLE = CostModel(
        1e-5, 1e-9, 1e-10, hosts=(0, 0, 1, 2, 2), wire_latency_s=1e-4, wire_byte_s=(1.0, 2.0, 3.0)
    )

    @pytest.mark.parametrize(
        "ranks, host_index, hosts, wires",
        [
            ([0, 1, 2, 3, 4], [0, 0, 1, 2, 2], (0, 0, 1, 2, 2), (1.0, 2.0, 3.0)),
            ([1, 3, 4], [0, 2, 2], (0, 1, 1), (1.0, 3.0)),
            ([4, 2, 0], [5, 3, 9], (1, 0, 2), (2.0, 3.0, 1.0)),
        ],
        ids=["all", "one lost of two hosts", "another order"],
    )
    def test_hosts_keep_their_interfaces(self, ranks, host_index, hosts, wires):
        found = part_of(self.WHOLE, ranks, host_index)
        assert found == self.WHOLE._replace(hosts=hosts, wire_byte_s=wires)

    @pytest.mark.parametrize(
        "ranks, host_index",
        [([3, 4], [0, 0]), ([0, 1, 2], [0, 1, 1]), ([0, 1], [0, 1]), ([0, 2], [0, 0])],
        ids=["one host", "moved", "divided", "united"],
    )
    def test_others_are_measured(self, ranks, host_index):
        assert part_of(self.WHOLE, ranks, host_index) is None

    def test_ranks_of_one_host(self):
        one = CostModel(1e-5, 1e-9, 1e-10)
        assert part_of(one, [2, 0], [4, 4]) == one and part_of(one, [2, 0], [0, 1]) is None
