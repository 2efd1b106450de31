"""The backend's collectives on real processes; see ``checks_*.py``."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

FILES = "checks_reductions.py checks_movement.py checks_order.py"
SIZES = [pytest.param(1, marks=pytest.mark.release), 2, pytest.param(4, marks=pytest.mark.release)]
"""Three are tried on a device."""


@pytest.mark.parametrize("size", SIZES)
def test_checks(harness, size):
    harness.check(FILES, size)


@pytest.mark.release
@pytest.mark.parametrize("size", [2, 3])
def test_checks_on_a_device(harness, size):
    """The same on tensors that are taken for those of a device; sparse ones it does not support."""
    harness.check(FILES, size, without="sparse", device="fake")


def test_ways_to_start(harness):
    harness.check("checks_start.py", 2)
