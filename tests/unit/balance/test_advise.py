"""The advisor: pure numbers in, a recommendation out."""

from __future__ import annotations

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.balance.advise import Probe, compare
from ringcomm.balance.plan import ComputeTime, RankTimes, ShareLimits, compute_s, proportional_shares
from ringcomm.collective.measure import Rates
from ringcomm.errors import ConfigError
from ringcomm.schedule.cost import CODEC_SHARE, CostModel

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


HOSTS = ["desk", "jetson1", "jetson2"]
SPEEDS = [ComputeTime(0.01, 0.001), ComputeTime(0.0, 0.003), ComputeTime(0.02, 0.003)]
MODEL = CostModel(1e-5, 1e-9, 1e-10, hosts=(0, 1, 2), wire_latency_s=1e-4, wire_byte_s=(1e-8,) * 3)

RATES = [{"bf16": Rates(1e-9, 1e-9), "int8": Rates(1e-9 * factor, 1e-9)} for factor in (1, 1, 20)]


def advised(speeds, exposed_s, hidden_s=0.0):
    """The advice about ranks whose reductions take so long; before balanced shares a part of it is hidden."""
    shares, step, lines = proportional_shares([1] * 3, 96), 0, []
    probe = Probe(shares, 96, ShareLimits())
    while not probe.finished:
        step += probe.window
        longest_s = compute_s(speeds, shares)
        times = [speed.compute_s(share) for speed, share in zip(speeds, shares)]
        waited = [longest_s - own_s + exposed_s - (hidden_s if len(lines) < 2 else 0.0) for own_s in times]
        rows = zip(shares, times, waited)
        change = probe.decide(step, [RankTimes(n, s, w if n else 0.0, 1) for n, s, w in rows])
        if change is not None:
            shares = change.shares
            lines.append(shares)
    return probe.advice(HOSTS, MODEL, 4_000_000, RATES), lines


def test_ranks_are_measured_with_two_shares_and_then_balanced():
    advice, shares = advised(SPEEDS, 0.05)
    assert len(shares) == 2
    assert all(len({32, *(item[rank] for item in shares)}) == 3 for rank in range(3))
    times = [speed.compute_s(share) for speed, share in zip(SPEEDS, shares[-1])]
    assert max(times) - min(times) < 0.005
    assert len(advice.rows) == 7 * len(CODEC_SHARE)
