"""Link rates, measured models, and the grid of ranks."""

from __future__ import annotations

import pytest

from ringcomm.errors import ConfigError
from ringcomm.schedule.cost import CostModel
from ringcomm.schedule.machine import Machine, Method, grid, link_byte_s, machine_of


@pytest.mark.parametrize(
    ("text", "mbit"),
    [("1gbit", 1000), ("100Mbit", 100), ("2.5gbit/s", 2500), ("25 gbit", 25000), ("512kbit", 0.512)],
)  # fmt: skip
def test_rates(text, mbit):
    assert 8e-6 / link_byte_s(text) == pytest.approx(0.957 * mbit)


@pytest.mark.parametrize(
    "text", ["", "fast", "0mbit", "-1gbit", "1tbit", "infgbit", "nangbit", "54", "1gbit 2"]
)
def test_what_is_no_rate(text):
    with pytest.raises(ConfigError, match="must be a rate"):
        link_byte_s(text)


def test_the_machine_of_a_measured_model():
    model = CostModel(
        1e-5, 2e-10, 1e-10, 3e-6, hosts=(0, 0, 1), wire_latency_s=1e-4, wire_byte_s=(1e-8, 2e-8)
    )
    machine = machine_of(model)
    assert machine.wires(4) == (1e-8, 2e-8, 2e-8, 2e-8)
    assert machine.wires(1) == (1e-8,)
    assert (machine.wire_latency_s, machine.local_byte_s) == (1e-4, 2e-10)
    alone = machine_of(CostModel(1e-5, 2e-10, 1e-10))
    assert alone.wire_byte_s == Machine().wire_byte_s


def test_labels():
    assert Method("servers", 1).label == "1 server"
    assert Method("servers", 4, dedicated=True).label == "4 extra servers"
    assert Method("direct", codec="int8", local_steps=8).label == "direct, int8, every 8 steps"


def test_ranks_fill_hosts_in_order():
    assert grid(8, None) == (1,) * 8
    assert grid(7, [4, 2]) == (4, 2, 1)
    assert grid(2, [4]) == (2,)
