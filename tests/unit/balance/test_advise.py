"""The advisor: pure numbers in, a recommendation out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ringcomm as rc
from ringcomm.balance.advise import compare, reduce_s
from ringcomm.balance.plan import ComputeTime
from ringcomm.errors import ConfigError
from ringcomm.schedule.cost import CostModel

RESNET_BYTES = 102_000_000


def test_one_machine_alone_is_fastest_where_the_network_costs_more_than_others_compute():
    advice = rc.advise([0, 0], [0.01, 0.03], RESNET_BYTES, [12, 12], 32, ["desk", "jetson1"])
    assert advice.best.hosts == ("desk",) and advice.best.step_s == pytest.approx(0.32)
    assert advice.text.startswith("one machine alone is fastest: desk; jetson1 would make it slower: ")


def test_a_board_that_slows_the_others_down_is_left_out():
    """Its own batch would be computed in time, but its network is too slow."""
    hosts = ["desk", "jetson1", "jetson2"]
    advice = rc.advise([0, 0, 0], [0.02, 0.02, 0.2], 10_000_000, [1000, 1000, 10], 96, hosts)
    assert advice.best.hosts == ("desk", "jetson1")
    assert "use desk and jetson1; jetson2 would make it slower: " in advice.text
    assert "jetson2" in advice.table()


def test_less_bytes_can_make_another_machine_pay():
    arguments = ([0, 0], [0.01, 0.01], RESNET_BYTES, [118, 118], 96, ["a", "b"])
    assert rc.advise(*arguments).best.hosts == ("a",)
    advice = rc.advise(*arguments, codecs={"float32": 1.0, "bf16": 0.5, "int8": 0.254})
    assert advice.best.hosts == ("a", "b") and advice.best.codec == "int8"
    assert len(advice.rows) == 9


def test_a_batch_that_is_far_from_what_was_measured_is_rough():
    """One machine alone has the whole batch, of which it has computed a part so far."""
    model = CostModel(1e-5, 1e-9, 1e-10, hosts=(0, 1), wire_latency_s=1e-4, wire_byte_s=(1e-8,) * 2)
    speeds = [ComputeTime(0.0, 0.01)] * 2
    advice = compare(["a", "b"], speeds, model, 1000, 96, {"float32": 1.0}, measured=[48, 80])
    rough = {row.hosts: row.is_bound for row in advice.rows}
    assert rough == {("a",): True, ("b",): False, ("a", "b"): False}
    lines = advice.table().splitlines()
    assert [line[0] for line in lines[1:]].count("~") == 2
    assert lines[-1].startswith("~ rough: a batch is up to 2.0 times as large as those that were measured")
    assert "~" not in compare(["a", "b"], speeds, model, 1000, 96, {"float32": 1.0}).table()


def test_measured_communication_scales_the_prediction():
    model = CostModel(1e-5, 1e-9, 1e-10, hosts=(0, 1, 2), wire_latency_s=1e-4, wire_byte_s=(1e-8,) * 3)
    speeds = [ComputeTime(0.0, 0.01)] * 3
    rows = compare(["a", "b", "c"], speeds, model, 10_000_000, 96, {"float32": 1.0}, measured_s=0.5).rows
    three = next(row for row in rows if len(row.hosts) == 3)
    two = next(row for row in rows if len(row.hosts) == 2)
    assert three.step_s == pytest.approx(0.32 + 0.5)
    ratio = reduce_s(model, [0, 1], 10_000_000) / reduce_s(model, [0, 1, 2], 10_000_000)
    assert two.step_s == pytest.approx(0.48 + 0.5 * ratio)


@given(
    st.lists(st.tuples(st.floats(0, 0.1), st.floats(0.001, 0.1)), min_size=1, max_size=3), st.integers(3, 64)
)
@settings(max_examples=20, deadline=None)
def test_never_worse_than_any_machine_alone(machines, global_batch):
    fixed_s, sample_s = zip(*machines)
    advice = rc.advise(fixed_s, sample_s, 1_000_000, [118] * len(machines), global_batch)
    alone = min(fixed + sample * global_batch for fixed, sample in machines)
    assert advice.best.step_s <= alone / 0.95 + 1e-9
    assert advice.rows[0].step_s <= alone + 1e-9


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "arguments",
    [
        {"fixed_s": [0.1, NAN]}, {"sample_s": [0.1, INF]}, {"mb_per_s": [100, NAN]}, {"mb_per_s": 100},
        {"mb_per_s": ["1gbit", "1gbit"]}, {"fixed_s": "ab"}, {"fixed_s": None}, {"gradient_bytes": NAN},
        {"global_batch": 1.5}, {"overlap": 2}, {"overlap": NAN}, {"latency_s": -1}, {"codecs": {"x": -1}},
        {"global_batch": NAN}, {"global_batch": INF}, {"global_batch": "96"}, {"gradient_bytes": "1000"},
        {"latency_s": None}, {"overlap": "all"},
        {"codecs": {"x": NAN}}, {"fixed_s": [], "sample_s": [], "mb_per_s": []}, {"hosts": ["a"]},
        {"codecs": {"x": "a"}}, {"codecs": 5}, {"hosts": 5}, {"gradient_bytes": np.array([1, 2])},
        {"overlap": np.array([0.1, 0.2])}, {"fixed_s": np.ones((2, 2))},
    ],
)  # fmt: skip
def test_arguments_that_are_no_numbers_of_their_kind_are_refused(arguments):
    usual = {"fixed_s": [0.1, 0.1], "sample_s": [0.01, 0.01], "gradient_bytes": 1000, "mb_per_s": [100, 100]}
    with pytest.raises(ConfigError, match="^advise: "):
        rc.advise(**{**usual, **arguments})
