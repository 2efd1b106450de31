"""``rc.predict``: rows, efficiency, costs, and what bounds a step."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.scaling.prediction import predictions
from ringcomm.scaling.step import Workload
from ringcomm.schedule.machine import Machine

RESNET_BYTES = 4 * 25_557_032


def row_of(found, ranks, method):
    return next(row for row in found.rows if (row.ranks, row.method) == (ranks, method))


def test_the_name_is_the_function_although_modules_are_imported_later():
    assert callable(rc.predict)


def test_efficiency_is_the_rate_over_that_of_ranks_alone():
    found = rc.predict(0.5, RESNET_BYTES, ranks=[1, 4], link="1gbit", batch=32, overlap=False)
    alone, ring = row_of(found, 1, "ring"), row_of(found, 4, "ring")
    assert (alone.step_s, alone.efficiency, alone.bound) == (0.5, 1.0, "compute")
    assert ring.samples_per_s == pytest.approx(4 * alone.samples_per_s * ring.efficiency)
    wire_s = 1.5 * RESNET_BYTES / (0.957 * 125e6)
    assert ring.step_s == pytest.approx(0.5 + wire_s, rel=0.01)
    assert ring.bound == "wire"
    assert ring.wire_bytes == pytest.approx(1.5 * RESNET_BYTES)


def test_one_server_is_bound_by_its_interface_and_extra_machines_cost():
    found = rc.predict(0.3, RESNET_BYTES, ranks=[8], batch=32, price=3.6)
    assert row_of(found, 8, "1 server").bound == "interface of a host"
    ring, extra = row_of(found, 8, "ring"), row_of(found, 8, "8 extra servers")
    assert extra.samples_per_s > ring.samples_per_s  # as many servers as workers: faster ...
    assert extra.machines == 16
    assert extra.samples_per_s / 16 < ring.samples_per_s / 8  # ... but not per machine,
    assert extra.cost > ring.cost  # nor per price.
    assert ring.cost == pytest.approx(1e6 * 8 * 3.6 / 3600 / ring.samples_per_s)


def test_a_quick_link_leaves_computation_as_the_bound():
    found = rc.predict(0.3, RESNET_BYTES, ranks=[8], link="100gbit")
    assert row_of(found, 8, "ring").bound == "compute"


def test_one_slow_rank_bounds_the_step():
    work = Workload(2.0, (1000,), (2.0,), usual_s=1.0)
    row = predictions(work, Machine(), [4], [1]).rows[0]
    assert (row.bound, round(row.efficiency, 2)) == ("slow rank", 0.5)


def test_several_ranks_per_host_use_the_hierarchy():
    found = rc.predict(0.3, RESNET_BYTES, ranks=[16], slots=4)
    first = found.rows[0]
    assert (first.method, first.machines) == ("hierarchical", 4)
    assert first.wire_bytes == pytest.approx(1.5 * RESNET_BYTES)
    int8 = row_of(found, 16, "hierarchical, int8")
    assert int8.wire_bytes == pytest.approx(first.wire_bytes * 260 / 1024)


def test_codecs_and_local_steps_send_less():
    found = rc.predict(0.3, RESNET_BYTES, ranks=[4], local_steps=10)
    plain = row_of(found, 4, "ring")
    assert row_of(found, 4, "ring, bf16").wire_bytes == plain.wire_bytes / 2
    assert row_of(found, 4, "ring, every 10 steps").wire_bytes == plain.wire_bytes / 10
    assert row_of(found, 4, "direct, int8").step_s < row_of(found, 4, "ring, bf16").step_s < plain.step_s


def test_the_table_has_all_rows_and_the_figure_is_well_formed():
    found = rc.predict(0.3, [4_000_000] * 10, ranks=[2, 4096], batch=8, price=1)
    assert len(found.table().splitlines()) == 1 + len(found.rows)
    assert "cost/1M" in found.table()
    assert "cost" not in rc.predict(0.3, 1000).table()
    assert "simulated" in "".join(ElementTree.fromstring(found.svg()).itertext())


def test_a_line_of_the_figure_has_one_point_for_a_number_of_ranks():
    found = rc.predict(0.36, 100_000_000, ranks=[1, 2, 3, 8, 32])
    points = [(row.line, row.ranks) for row in found.rows]
    assert len(set(points)) == len(points)
    assert [ranks for line, ranks in points if line == "as many extra servers"] == [2, 3, 8, 32]
    assert [ranks for line, ranks in points if line == "half as many extra servers"] == [8, 32]
    assert [ranks for line, ranks in points if line == "ringcomm, int8"] == [2, 3, 8, 32]


@pytest.mark.parametrize("slots", [1, 4])
def test_the_table_fits_into_80_columns_and_its_columns_are_apart(slots):
    found = rc.predict(0.3, [4_000_000] * 10, ranks=[2, 8, 64, 4096], slots=slots, batch=256, link="1gbit")
    head, *lines = found.table().splitlines()
    assert max(map(len, [head, *lines])) <= 80
    assert head.split() == ["ranks", "hosts", "gradients", "by", "step", "samples/s", "eff.", "bound", "by"]
    for line, row in zip(lines, found.rows):
        assert f" {row.machines} {row.method.replace(' steps', '')} " in line
        assert f" {row.step_s:.4f}s " in line and f" {row.samples_per_s:.1f} " in line
        assert line.endswith(f" % {row.bound}")


@pytest.mark.parametrize("price", [0.9, 3000])
def test_with_a_price_the_table_has_the_cost_in_place_of_the_rate(price):
    found = rc.predict(
        0.36, 4 * 25_557_032, ranks=[2, 8, 64, 4096], slots=4, batch=32, link="100mbit", price=price
    )
    head, *lines = found.table().splitlines()
    assert max(map(len, [head, *lines])) <= 80
    assert head.split() == ["ranks", "hosts", "gradients", "by", "step", "cost/1M", "eff.", "bound", "by"]
    for line, row in zip(lines, found.rows):
        assert f"s {row.cost:.{2 if row.cost < 1000 else 0}f} " in " ".join(line.split())
    assert f"≤ {found.rows[0].step_s:.4f}s ≤ " in " ".join(found._replace(bound="at most").table().split())


@pytest.mark.parametrize(
    "arguments",
    [
        {"compute_s": 0}, {"gradients": []}, {"gradients": [0]}, {"ranks": []}, {"ranks": [0]}, {"slots": 0},
        {"link": "fast"}, {"price": 0}, {"batch": -1}, {"ready_s": [1.0, 2.0]}, {"local_steps": 1},
        {"gradients": [4, 4], "ready_s": [2.0, 1.0]}, {"compute_s": float("inf")}, {"compute_s": "a"},
        {"compute_s": [0.3, 0.4]}, {"gradients": float("nan")}, {"gradients": "a"}, {"gradients": [[1]]},
        {"gradients": None}, {"ranks": 8}, {"ranks": [2.5]}, {"ranks": "2,4"}, {"ranks": [10**7]},
        {"link": None}, {"link": 1000}, {"batch": float("nan")}, {"batch": 2.5}, {"price": "a", "batch": 8},
        {"price": 1}, {"latency_s": float("nan")}, {"latency_s": -1}, {"latency_s": "a"}, {"ready_s": 3},
        {"ready_s": [float("nan")]}, {"ready_s": [-1.0]}, {"ready_s": [1.5]},
        {"ready_s": [0.5], "overlap": False}, {"local_steps": 2.5}, {"local_steps": "a"},
        {"compute_s": np.array([1.0, 2.0])}, {"gradients": np.ones((2, 2))}, {"ready_s": np.ones((1, 2))},
        {"ranks": np.array([[2, 4]])}, {"price": np.array([1.0, 2.0]), "batch": 8},
    ],
)  # fmt: skip
def test_arguments_out_of_range(arguments):
    with pytest.raises(rc.ConfigError):
        rc.predict(**{"compute_s": 1.0, "gradients": 1000, **arguments})


def test_times_of_gradients_decide_what_is_hidden():
    early = rc.predict(1.0, [12_000_000], ranks=[2], ready_s=[0.2]).rows[0]
    late = rc.predict(1.0, [12_000_000], ranks=[2], ready_s=[1.0]).rows[0]
    assert early.step_s == 1.0
    assert late.step_s > 1.05


def test_bytes_of_gradients_may_be_numbers_of_any_type():
    expected = rc.predict(1.0, 10**8)
    assert rc.predict(1.0, 1e8) == rc.predict(1.0, np.int64(10**8)) == expected
    assert rc.predict(1.0, np.array([10**8])) == expected
