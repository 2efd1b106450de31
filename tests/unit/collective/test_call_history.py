"""What the flight recorder keeps of a runner's calls, and what that costs: nothing that stays alive."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType

import numpy as np
import pytest

from ringcomm.collective import call_sites
from ringcomm.collective.call_history import CallHistory
from ringcomm.collective.call_sites import find_site
from ringcomm.collective.runner import Runner
from ringcomm.config import Settings
from ringcomm.errors import PeerStalledError
from ringcomm.ops import Sum
from ringcomm.transport.memory import memory_fabrics


class Call:
    """Stands for what a runner remembers of a call."""

    verb, name = "allreduce", "x"

    def describe(self):
        return "allreduce(x)"


def begin(history, number):
    history.begin(number, Call(), find_site(1, [0, None]))


def test_the_last_ones_are_kept_in_order():
    history = CallHistory(3)
    assert history.rows() == []
    for number in range(1, 6):
        begin(history, number)
    assert [row["op"] for row in history.rows()] == [3, 4, 5]
    assert {row["state"] for row in history.rows()} == {"done"}


def test_one_that_runs_says_how_far_it_is():
    history = CallHistory(3)
    begin(history, 1)
    begin(history, 2)
    first, second = history.rows(moved_bytes=5)
    assert (first["state"], second["state"]) == ("done", "running")
    assert second["moved"] == 5 and "moved" not in first


def test_a_failed_call_has_its_error_and_is_reported():
    history, told = CallHistory(3), []
    history.on_failure = told.append
    begin(history, 1)
    error = ValueError("no")
    history.fail(error, 7)
    (row,) = history.rows()
    assert (row["state"], row["error"], row["moved"]) == ("failed", "ValueError: no", 7)
    assert told == [error]


def test_what_a_runner_writes_down():
    fabric, _ = memory_fabrics(2)
    runner = Runner(fabric, Settings(timeout_s=0.001))
    runner.history = CallHistory(10)
    with pytest.raises(PeerStalledError):
        runner.all_reduce(np.ones(4, np.float32), Sum, "conv")
    (row,) = runner.rows()
    assert (row["op"], row["kind"], row["name"], row["state"]) == (1, "allreduce", "conv", "failed")
    assert "float32" in row["what"] and row["error"].startswith("PeerStalledError: ")
    assert row["site"].startswith(__file__)


def test_packages_that_call_for_the_user_are_looked_through(tmp_path, monkeypatch):
    monkeypatch.setattr(call_sites, "_packages", list(call_sites._packages))
    monkeypatch.setattr(call_sites, "_ours", {})
    package = ModuleType("frame")
    package.__file__ = str(tmp_path / "frame" / "__init__.py")
    assert not call_sites.is_ours(str(tmp_path / "frame" / "call.py"))
    call_sites.look_through(package)
    call_sites.look_through(package)
    assert call_sites.is_ours(str(tmp_path / "frame" / "call.py"))
    assert not call_sites.is_ours(str(tmp_path / "framework" / "train.py"))
    assert not call_sites.is_ours(str(tmp_path / "frame.py"))


def test_the_callers_variables_are_not_kept_alive():
    history = CallHistory(10)

    def program():
        array = np.ones(4, np.float32)
        begin(history, 1)
        return weakref.ref(array)

    array = program()
    gc.collect()
    assert array() is None
    assert len(history.rows()) == 1
