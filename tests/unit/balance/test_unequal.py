"""The line at the end of a job of unequal ranks."""

from __future__ import annotations

import pytest

from ringcomm.balance.unequal import Usage, job_line


def usages(*computed_s: float, exposed_s: float = 0.0, total_s: float = 0.0):
    total_s = total_s or max(computed_s) + exposed_s
    return [Usage(total_s, total_s - seconds) for seconds in computed_s]


def test_three_to_one():
    """Without one of the two slow ones each of the others has half as much more to do."""
    line = job_line(["localhost", "jetson1", "jetson2"], usages(33.0, 100.0, 100.0))
    assert line == (
        "localhost waited 67 % of the time for jetson1; balanced batches would take 0.60 of the time, "
        "without jetson1 1.50"
    )


def test_one_slow_rank_of_three():
    line = job_line(["localhost", "jetson1", "jetson2"], usages(38.0, 45.0, 100.0, exposed_s=5.0))
    assert line.endswith("balanced batches would take 0.54 of the time, without jetson2 0.69")


def test_alone_there_is_no_communication():
    line = job_line(["localhost", "jetson"], usages(20.0, 100.0, exposed_s=100.0))
    assert line.endswith("without jetson 0.20")


@pytest.mark.parametrize(
    "given_usages",
    [
        usages(95.0, 100.0, 100.0),
        usages(0.3, 1.0),
        [Usage(100.0, 60.0, True), Usage(100.0, 0.0, True)],
        usages(100.0),
        [],
    ],
    ids=["nearly equal", "too short", "balanced already", "one rank", "no rank"],
)
def test_nothing_worth_saying(given_usages):
    assert job_line([f"host{rank}" for rank in range(len(given_usages))], given_usages) == ""
