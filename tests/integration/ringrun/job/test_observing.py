"""The question to all ranks for their flight records: when it is asked, answered, shown and written."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List

import pytest

from ringrun.diagnosis.first_failure import Complaint, FirstFailure
from ringrun.job.event_loop import Loop
from ringrun.job.launch import prepare
from ringrun.job.observing import ANSWER_S, Inquiry
from ringrun.plan.options import Options
from ringrun.plan.setting_sources import from_values

LOST = "rank 1 was lost"


def record(reason: str = "asked", **more: Any) -> bytes:
    row = {
        "op": 1, "kind": "allreduce", "name": "", "what": "allreduce", "site": "a.py:1", "state": "running",
        "at": 1.0,
    }  # fmt: skip
    channels = [{"name": "calls", "ordered": True, "members": [0, 1], "operations": [row]}]
    content: Dict[str, Any] = {"type": "record", "format": 1, "reason": reason, "lanes": channels}
    return json.dumps({**content, "generation": 0, "threads": [], **more}).encode()


class Started:
    """An inquiry for a job of two ranks on one host; commands to the agent and texts are kept."""

    def __init__(self, folder: Path) -> None:
        self.asked: List[Dict[str, str]] = []
        self.shown: List[str] = []
        self.failure = FirstFailure()
        self.exits = self.failure.exits
        self.now_s = 100.0
        self.folder = folder
        self.link = SimpleNamespace(answered=True, alive=True, send=self.asked.append)
        values = {"diagnose_dir": str(folder)}
        job = prepare(Options(np=2, setting_values=from_values(values)), ["true"])
        self.loop = Loop(lambda: self.now_s)
        links: Any = [self.link]
        self.inquiry = Inquiry(job, links, self.loop, self.shown.append, self.failure)

    def be_late(self) -> None:
        """The time for answers is over."""
        self.now_s += ANSWER_S
        self.loop.run_once(0.0)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    made = Started(tmp_path / "records")
    yield made
    made.loop.close()


def test_the_ranks_of_the_last_view_of_an_elastic_job_are_explained(started: Started) -> None:
    started.inquiry.members = [1]
    started.inquiry.take(0, record("failure", error="PeerLostError: x"))
    started.inquiry.take(1, record("failure", error="uncaught ValueError: x"))
    told = started.inquiry.conclude("", False)
    assert told.startswith("In the last view rank 0 is process 1.\nRank 0 (localhost) "), told
    (path,) = started.folder.iterdir()
    kept = json.loads(path.read_text())
    assert (path.name, kept["rank"], kept["size"]) == ("flight.0.json", 0, 1)


def test_the_answers_are_shown_and_written_when_all_have_come(started: Started) -> None:
    started.inquiry.for_the_user()
    started.inquiry.for_the_user()
    assert started.asked == [{"do": "diagnose"}], "the ranks are being asked already"
    assert started.inquiry.take(0, record()) == "asked" and started.shown == []
    assert started.inquiry.take(1, record()) == "asked"
    (text,) = started.shown
    assert f"Their last operations and stacks: ringrun diagnose {started.folder}" in text
    assert sorted(path.name for path in started.folder.iterdir()) == ["flight.0.json", "flight.1.json"]
    assert not started.loop.is_set("inquiry")
    started.inquiry.for_the_user()
    assert len(started.asked) == 2, "the user may ask again"


def test_after_a_while_what_has_come_is_shown(started: Started) -> None:
    started.inquiry.for_the_user()
    started.inquiry.take(0, record())
    started.be_late()
    assert len(started.shown) == 1 and "rank 1" in started.shown[0].lower()


@pytest.mark.parametrize("state", [{"answered": False}, {"alive": False}])
def test_a_host_that_cannot_answer_is_not_asked(started: Started, state: Dict[str, bool]) -> None:
    vars(started.link).update(state)
    started.inquiry.for_the_user()
    assert started.asked == []
    started.be_late()
    assert len(started.shown) == 1


def test_after_a_failure_the_ranks_are_asked_once(started: Started) -> None:
    started.inquiry.take(1, record("failure", culprit=None, error="uncaught ValueError: x"))
    started.inquiry.take(0, record("asked", pid=1))
    for _ in range(2):
        started.inquiry.after_failure()
    started.inquiry.for_the_user()
    assert started.asked == [{"do": "diagnose"}] and started.shown == []
    started.inquiry.take(0, record("failure", culprit=1, because=LOST, error=f"PeerLostError: {LOST}"))
    assert started.inquiry.records.is_victim(0) and not started.inquiry.records.is_victim(1)
    assert started.inquiry.records.explanations({0: [f"PeerLostError: {LOST}"]}) == [Complaint(0, 1, LOST)]
    last = started.inquiry.conclude("", False)
    assert f"ringrun diagnose {started.folder}" in last and (started.folder / "flight.1.json").exists()


def test_without_operations_there_is_nothing_to_conclude(started: Started) -> None:
    started.inquiry.after_failure()
    assert started.inquiry.conclude("", False) == ""
    assert not started.folder.exists()


def test_records_that_cannot_be_written_where_they_should_be(started: Started, tmp_path: Path) -> None:
    started.folder.touch()
    started.inquiry.for_the_user()
    started.inquiry.take(0, record())
    started.inquiry.take(1, record())
    assert f"({started.folder} cannot be written: " in started.shown[0]


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (OSError(28, "No space left on device", "/tmp/x"), "/tmp/x: No space left on device"),
        (OSError("not a number"), "not a number"),
    ],
)
def test_records_that_cannot_be_written_at_all(
    started: Started, monkeypatch: pytest.MonkeyPatch, problem: OSError, text: str
) -> None:
    def fail(*_: object) -> None:
        raise problem

    monkeypatch.setattr("ringrun.job.observing.keep_records", fail)
    started.inquiry.for_the_user()
    started.be_late()
    expected = f"The flight records could not be written: {text}. Name a folder with --diagnose-dir."
    assert started.shown[0].endswith(expected)
