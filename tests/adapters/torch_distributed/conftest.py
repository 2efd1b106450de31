"""Gives tests the harness."""

from __future__ import annotations

import pytest

from tests.adapters.torch_distributed import harness as _harness


@pytest.fixture(scope="session")
def harness():
    """The module ``harness.py``."""
    return _harness
