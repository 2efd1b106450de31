"""How long a waiting call polls: by the cores that this process may use."""

from __future__ import annotations

import os

import pytest

from ringcomm import polling
from ringcomm.config import Settings
from ringcomm.polling import polling_s, usable_cores


@pytest.mark.parametrize("local_size, expected_s", [(1, 50e-6), (2, 50e-6), (3, 250e-6), (9, 250e-6)])
def test_where_ranks_outnumber_cores_they_poll_longer(local_size, expected_s, monkeypatch):
    monkeypatch.setattr(polling, "usable_cores", lambda: 2)
    assert polling_s(Settings(spin_us=50.0), local_size) == pytest.approx(expected_s)
    assert polling_s(Settings(spin_us=0.0), local_size) == 0.0


def test_the_cores_are_those_that_the_system_grants(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    assert usable_cores() == 3


@pytest.mark.parametrize("count, expected", [(8, 8), (None, 1)])
def test_elsewhere_they_are_those_of_the_machine(count, expected, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_cores() == expected
