from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.observe import Observation, observation_of


def asked(**changes: Any) -> Dict[str, Any]:
    return {"watch": False, "report": None, **changes}


@pytest.mark.parametrize(
    ("changes", "needs_numbers"),
    [({}, False), ({"watch": True}, True), ({"report": "run.html"}, True)],
)
def test_what_needs_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Dict[str, Any], needs_numbers: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    found = observation_of(**asked(**changes))
    assert isinstance(found, Observation) and found.needs_numbers is needs_numbers
    assert found.report == (tmp_path / "run.html" if "report" in changes else None)


@pytest.mark.parametrize("report", [".", "no/such/run.html"])
def test_a_report_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--report {report}: this is a directory"):
        observation_of(**asked(report=report))
