"""What ``ringrun --advise`` measures, and what it makes of it: on simulated ranks, without clocks."""

from __future__ import annotations

import pytest

from ringcomm.balance.advise import Probe
from ringcomm.balance.plan import ComputeTime, ShareLimits, compute_s, proportional_shares
from ringcomm.balance.replan import RankTimes
from ringcomm.collective.measure import Rates
from ringcomm.schedule.closed_form import CODEC_SHARE
from ringcomm.schedule.cost import CostModel

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


@pytest.mark.parametrize("hidden_s", [0.0, 0.04])
def test_communication_is_what_it_is_when_all_ranks_arrive_at_once(hidden_s):
    advice, shares = advised(SPEEDS, 0.05, hidden_s)
    row = next(row for row in advice.rows if len(row.hosts) == 3 and row.codec == "float32")
    assert row.step_s == pytest.approx(compute_s(SPEEDS, shares[-1]) + 0.05)
