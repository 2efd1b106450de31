from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, List

import pytest

from ringrun.job.agents import failed_start, not_ready_text
from ringrun.job.launch import prepare
from ringrun.plan.job import HostJob
from ringrun.plan.options import Options
from ringrun.reach.base import RETRIES

NO_PYTHON = "sh: /p/python: not found"
DROPPED = "kex_exchange_identification: Connection closed by remote host"


@pytest.fixture
def host() -> HostJob:
    return prepare(Options(hosts="far", python=("/p/python",)), ["train.py"], {}).hosts[0]


def link(host: HostJob, **facts: Any) -> Any:
    return SimpleNamespace(**{"argv": host.argv, "stderr_text": "", "noise": "", "attempt": 1, **facts})


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"answered": False}, "ssh had not answered: a login that waits, or a host that is slow"),
        ({"outgoing_bytes": 1_200_000}, "1.2 MB were still to be sent to it: the network is slow"),
        ({}, "was still preparing the job"),
    ],
)
def test_a_host_that_is_not_ready_in_time(host: HostJob, facts: Any, text: str) -> None:
    facts = {"answered": True, "outgoing_bytes": 0, **facts}
    found = not_ready_text(host, link(host, stderr_text="waiting\n", noise="Welcome", **facts), 30.0)
    assert found.startswith("far: not ready within 30 s (--start-timeout): ") and text in found
    assert found.endswith(". It printed: 'waiting; Welcome'.")
    found = not_ready_text(host, link(host, **facts), 30.0)
    assert "printed" not in found and "nothing" not in found


def test_without_the_interpreter_another_is_tried_once(host: HostJob) -> None:
    host = replace(host, fallback=["ssh", "far", "python3 -c ..."])
    notes: List[str] = []
    tried = link(host, stderr_text=NO_PYTHON)
    assert failed_start(host, tried, 127, notes.append) is None
    assert notes == ["far has no /p/python: using python3 there"] and tried.argv == host.fallback
    text = failed_start(host, tried, 127, notes.append)
    assert text is not None and "no Python at /p/python or python3" in text and len(notes) == 1


def test_a_dropped_login_is_tried_again_some_times(host: HostJob) -> None:
    again = [
        failed_start(host, link(host, stderr_text=DROPPED, attempt=attempt), 255, lambda text: None) is None
        for attempt in range(1, RETRIES + 2)
    ]
    assert again == [True] * RETRIES + [False]


def test_a_host_that_is_still_starting_is_tried_until_the_start_timeout(host: HostJob) -> None:
    may_appear = replace(host, reach=type(host.reach)(host.reach._options, may_appear=True))  # type: ignore[attr-defined]
    refused = link(may_appear, stderr_text="connect to host far port 22: Connection refused", attempt=99)
    assert failed_start(may_appear, refused, 255, lambda text: None) is None
    assert failed_start(host, refused, 255, lambda text: None) is not None
