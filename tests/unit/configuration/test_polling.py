"""How long a waiting call polls, which depends on the processor cores that it may use."""

from __future__ import annotations

import os

import pytest

from ringcomm.config import Settings
from ringcomm.configuration import polling


@pytest.mark.parametrize("ranks, times", [(1, 1), (4, 1), (5, 5)])
def test_where_ranks_outnumber_cores_they_poll_for_longer(
    monkeypatch: pytest.MonkeyPatch, ranks: int, times: int
) -> None:
    monkeypatch.setattr(polling, "usable_cores", lambda: 4)
    assert polling.polling_s(Settings(spin_us=20.0), ranks) == pytest.approx(times * 20e-6)


def test_a_setting_of_zero_polls_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "usable_cores", lambda: 1)
    assert polling.polling_s(Settings(spin_us=0.0), 8) == 0.0


def test_only_the_cores_of_this_process_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 5, 6}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert polling.usable_cores() == 3


@pytest.mark.parametrize("count, cores", [(8, 8), (None, 1)])
def test_where_processes_have_no_affinity_all_cores_count(
    monkeypatch: pytest.MonkeyPatch, count: int, cores: int
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert polling.usable_cores() == cores
