"""The backend's collectives on real processes; see ``checks_*.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

FILES = ("checks_reductions.py", "checks_movement.py", "checks_order.py")
SIZES = [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(4, marks=pytest.mark.full)]
"""Three are tried on a device."""


@pytest.mark.parametrize("size", SIZES)
def test_checks(harness, size):
    outcome = harness.run_checks(" ".join(FILES), size)
    assert {name: problem for name, problem in outcome.items() if problem} == {}
    assert sorted(outcome) == sorted(name for file in FILES for name in harness.names_of(file))


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_checks_on_a_device(harness, size):
    """The same on tensors that are taken for those of a device; sparse ones it does not support."""
    outcome = harness.run_checks(" ".join(FILES), size, without="sparse", device="fake")
    assert {name: problem for name, problem in outcome.items() if problem} == {}
    assert len(outcome) > 20


def test_ways_to_start(harness):
    outcome = harness.run_checks("checks_start.py", 2)
    assert {name: problem for name, problem in outcome.items() if problem} == {}
    assert sorted(outcome) == sorted(harness.names_of("checks_start.py"))
