"""What a rank reports about itself, as the launcher reads it: valid, or left out."""

from __future__ import annotations

import json

import pytest

from ringrun.watch.numbers import KindNumbers, PeerNumbers, parse_sample
from tests.unit.ringrun.watch.samples import report


def test_a_report_is_read():
    sample = parse_sample(
        report(
            1, 12.5, steps=7, waited_s=3.0, peers={"0": [10, 20, 1.5, 9, 0.5]},
            kinds={"allreduce": [4, 2.0, 30]}, late={"0": 0.25}, doing="allreduce()", inside=True,
            waits_for=[0], gauges={"local_steps": 8, "local_drift": 0.0123, "unknown{} 1\n": 1.0},
        ),
        99.0,
    )  # fmt: skip
    assert sample is not None
    assert (sample.at_s, sample.rank, sample.elapsed_s, sample.steps) == (99.0, 1, 12.5, 7)
    assert sample.peers == {0: PeerNumbers(10, 20, 1.5, 9, 0.5)} and sample.late_s == {0: 0.25}
    assert sample.kinds == {"allreduce": KindNumbers(4, 2.0, 30)}
    assert (sample.calls, sample.sent_bytes, sample.received_bytes) == (4, 10, 20)
    assert sample.inside and sample.waits_for == (0,)
    assert sample.gauges == {"local_steps": 8.0, "local_drift": 0.0123}
    assert sample.local_steps.endswith("the ranks synchronize every 8 steps, their weights were 1.2 % apart")


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": -1}, {"rank": "x"}, {"steps": None}, {"elapsed_s": -1.0}, {"waited_s": "NaN"},
        {"peers": []}, {"peers": {"0": [1, 2]}}, {"peers": {"a": [1, 2, 0.0, 0, 0.0]}}, {"kinds": {"x": 3}},
        {"late": {"0": -1.0}}, {"waits_for": 3}, {"steps": 1 << 70},
        {"gauges": 3}, {"gauges": {"local_steps": -1}}, {"gauges": {"local_drift": "x"}},
    ],
)  # fmt: skip
def test_what_is_not_valid_is_left_out(changes):
    good = json.loads(report(0, 1.0))
    assert parse_sample(json.dumps({**good, **changes}).encode(), 0.0) is None


def test_infinity_and_nan_are_no_numbers():
    good = json.loads(report(0, 1.0))
    for name in ("elapsed_s", "step_s", "waited_s"):
        for value in (float("inf"), float("nan")):
            assert parse_sample(json.dumps({**good, name: value}).encode(), 0.0) is None
