"""Gives tests the harness, which is also a program of its own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def harness():
    """The module ``harness.py``."""
    path = Path(__file__).with_name("harness.py")
    spec = importlib.util.spec_from_file_location("ddp_harness", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
