from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest

from ringcomm.errors import ConfigError
from ringrun.plan.observe import Observation, observation_of, ranks_shown


def asked(**changes: Any) -> Dict[str, Any]:
    return {"watch": False, "report": None, "flight_recorder": 200, **changes}


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


@pytest.mark.parametrize("changes", [{"watch": True}, {"report": "run.html"}])
def test_numbers_come_through_the_flight_recorder(changes: Dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Leave out --flight-recorder 0"):
        observation_of(**asked(**changes, flight_recorder=0))
    assert not observation_of(**asked(flight_recorder=0)).needs_numbers


@pytest.mark.parametrize("report", [".", "no/such/run.html"])
def test_a_report_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"--report {report}: this is a directory"):
        observation_of(**asked(report=report))


@pytest.mark.parametrize(("text", "size", "ranks"), [(None, 2, None), ("0", 1, {0}), ("0, 3", None, {0, 3})])
def test_the_ranks_that_are_shown(text: Any, size: Any, ranks: Any) -> None:
    assert ranks_shown(text, size) == ranks


@pytest.mark.parametrize("text", ["", "a", "0,", "-1", "1.5", "0-2"])
def test_ranks_that_cannot_be_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="write the numbers of ranks"):
        ranks_shown(text, 4)
    with pytest.raises(ConfigError, match="there is no rank 4; the last one is 3"):
        ranks_shown("4", 4)
