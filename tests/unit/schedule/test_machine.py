"""Measured models, and the grid of ranks."""

from __future__ import annotations

from ringcomm.schedule.cost import CostModel
from ringcomm.schedule.machine import Machine, grid, machine_of


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


def test_ranks_fill_hosts_in_order():
    assert grid(8, [1]) == (1,) * 8
    assert grid(7, [4, 2]) == (4, 2, 1)
    assert grid(2, [4]) == (2,)
