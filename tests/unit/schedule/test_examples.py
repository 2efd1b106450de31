"""The examples in the docstrings of the schedules are true."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = "calibration cost direct doubling hierarchy registry ring select shares steps tree"


@pytest.mark.parametrize("module", MODULES.split())
def test_examples_in_docstrings(module):
    result = doctest.testmod(importlib.import_module(f"ringcomm.schedule.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
